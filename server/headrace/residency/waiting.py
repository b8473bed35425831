"""The requests that wait for their models to be loaded: bounded, in order, each with its own deadline. Pure."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from headrace_protocol.errors import ErrorCode, ErrorDetail, FailureReason, InferError, unavailable

_log = logging.getLogger("headrace.residency")

MOST_REQUESTS: Final = 2048
MOST_BYTES: Final = 512 << 20
"""Of tensors in requests that wait."""


class Waiter:
    """One that waits: `on_there` is called once the model takes requests, or `on_error` once that comes to nothing.

    Neither is called after it has left.
    """

    __slots__ = ("expires_ns", "model", "nbytes", "on_error", "on_there")

    def __init__(
        self,
        model: str,
        expires_ns: int,
        nbytes: int,
        on_there: Callable[[], None],
        on_error: Callable[[InferError], None],
    ) -> None:
        self.model = model
        self.expires_ns = expires_ns
        self.nbytes = nbytes
        self.on_there = on_there
        self.on_error = on_error


class WaitingRoom:
    """All of them, by model. Owns no request."""

    def __init__(self, most_requests: int = MOST_REQUESTS, most_bytes: int = MOST_BYTES) -> None:
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self._queues: dict[str, deque[Waiter]] = {}
        self.count = 0
        self.nbytes = 0

    def join(self, waiter: Waiter) -> None:
        """Let one wait. Raises UNAVAILABLE where too many do."""
        if self.count >= self._most_requests or (self.count and self.nbytes + waiter.nbytes > self._most_bytes):
            raise InferError(
                ErrorCode.UNAVAILABLE,
                f"model {waiter.model!r} is not in memory, and {self.count} requests wait for models already",
                FailureReason.REJECTED,
                detail=ErrorDetail.QUEUE_FULL,
            )
        self._queues.setdefault(waiter.model, deque()).append(waiter)
        self.count += 1
        self.nbytes += waiter.nbytes

    def leave(self, waiter: Waiter) -> bool:
        """Let one go that waits no more; return whether it did wait."""
        queue = self._queues.get(waiter.model)
        if queue is None or waiter not in queue:
            return False
        queue.remove(waiter)
        self._gone(waiter)
        return True

    def waits(self, model: str) -> bool:
        """Return whether anybody waits for a model."""
        return model in self._queues

    def models(self) -> list[str]:
        """Return the models that somebody waits for."""
        return list(self._queues)

    def let_in(self, model: str) -> None:
        """Tell all who wait for a model that it is there, in the order in which they came."""
        for waiter in self._take(model):
            _tell(waiter.on_there)

    def fail(self, model: str, error: InferError) -> None:
        """Tell all who wait for a model that they do so in vain: each gets an error of its own."""
        for waiter in self._take(model):
            _tell(waiter.on_error, InferError(error.code, error.message, error.reason))

    def expire(self, now_ns: int, late: Callable[[str], str]) -> set[str]:
        """Tell those whose time is over, in the words of `late` for their model; return their models."""
        over = [waiter for queue in self._queues.values() for waiter in queue if waiter.expires_ns <= now_ns]
        for waiter in over:
            self.leave(waiter)
        for waiter in over:
            _tell(waiter.on_error, unavailable(late(waiter.model), FailureReason.REJECTED))
        return {waiter.model for waiter in over}

    def _take(self, model: str) -> list[Waiter]:
        taken = list(self._queues.get(model, ()))
        for waiter in taken:
            self._gone_of(waiter)
        self._queues.pop(model, None)
        return taken

    def _gone_of(self, waiter: Waiter) -> None:
        self.count -= 1
        self.nbytes -= waiter.nbytes

    def _gone(self, waiter: Waiter) -> None:
        self._gone_of(waiter)
        if not self._queues[waiter.model]:
            del self._queues[waiter.model]


def no_room(model: str, budget: int) -> str:
    """Return why nothing leaves for a model."""
    return (
        f"there is no room for model {model!r} in the {budget} bytes of memory for models: "
        "what is in memory is pinned, or has requests in it"
    )


def _tell(call: Callable[..., None], *values: object) -> None:
    try:
        call(*values)
    except Exception:  # one that cannot take its answer must not cost others theirs
        _log.exception("a request that waited for its model could not be told")
