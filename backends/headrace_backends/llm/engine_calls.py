"""Which requests of the core belong to which call, and what a step's outputs tell of each call. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace_backends.llm.admission import Refusal, RefusalReason
from headrace_backends.llm.core import EngineCore
from headrace_backends.llm.engine import EngineCall, Told
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason, GenerationRequest, child_id
from headrace_protocol.errors import ErrorCode, ErrorDetail, InferError, internal

_DETAILS = {
    RefusalReason.INVALID: (ErrorCode.INVALID_ARG, None),
    RefusalReason.TOO_LONG: (ErrorCode.INVALID_ARG, ErrorDetail.CONTEXT_LENGTH),
    RefusalReason.BUSY: (ErrorCode.UNAVAILABLE, ErrorDetail.QUEUE_FULL),
}


def refused(refusal: Refusal) -> InferError:
    """Return a refusal as the caller is told it."""
    code, detail = _DETAILS[refusal.reason]
    return InferError(code, refusal.message, detail=detail)


@dataclass(slots=True)
class _Open:
    """A call under way. Its requests are the core's."""

    requests: list[GenerationRequest]
    left: int
    embed: bool
    vectors: dict[int, NDArray[np.float32]] = field(default_factory=dict)


class CallBook:
    """The calls under way. The id of a request says whose it is: `12.0/3` is choice 3 of prompt 0 of call 12."""

    def __init__(self) -> None:
        self._calls: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, number: int) -> bool:
        return number in self._calls

    @property
    def numbers(self) -> list[int]:
        return list(self._calls)

    def open(self, call: EngineCall, requests: Sequence[GenerationRequest], core: EngineCore) -> None:
        """Take note of a call whose requests the core has just taken, all their choices too."""
        ids = (child_id(request.id, at) for request in requests for at in range(request.params.n))
        choices = [request for name in ids if (request := core.get(name)) is not None]
        self._calls[call.number] = _Open(choices, len(choices), call.embed)

    def close(self, number: int) -> list[str]:
        """Forget a call; return the ids of its requests that have not ended."""
        call = self._calls.pop(number, None)
        return [] if call is None else [request.id for request in call.requests if not request.finished]

    def told(self, outputs: Iterable[GenerationOutput]) -> list[Told]:
        """Return what outputs tell, by call. A call whose last choice ended is forgotten."""
        by_call: dict[int, list[GenerationOutput]] = {}
        for output in outputs:
            by_call.setdefault(call_of(output.request_id), []).append(output)
        news = []
        for number, its in by_call.items():
            call = self._calls.get(number)
            if call is not None and (told := self._told(number, call, its)) is not None:
                news.append(told)
        return news

    def _told(self, number: int, call: _Open, outputs: list[GenerationOutput]) -> Told | None:
        call.left -= sum(output.finished for output in outputs)
        if call.embed:
            return self._embedded(number, call, outputs)
        if call.left:
            return Told(number, outputs)
        del self._calls[number]
        return _last(number, call, outputs=outputs)

    def _embedded(self, number: int, call: _Open, outputs: list[GenerationOutput]) -> Told | None:
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                return Told(number, error=internal(output.error or "the model failed"))
            if output.pooled is not None:
                call.vectors[output.index] = output.pooled
        if call.left:
            return None
        del self._calls[number]
        return _last(number, call, outputs=outputs, vectors=np.stack([call.vectors[at] for at in sorted(call.vectors)]))


def call_of(request_id: str) -> int:
    """Return the number of the call that a request belongs to."""
    return int(request_id.partition(".")[0])


def _last(
    number: int, call: _Open, *, outputs: Sequence[GenerationOutput], vectors: NDArray[np.float32] | None = None
) -> Told:
    scheduled = [request.scheduled_ns for request in call.requests if request.scheduled_ns is not None]
    first = [request.first_token_ns for request in call.requests if request.first_token_ns is not None]
    return Told(
        number,
        () if vectors is not None else outputs,
        vectors,
        scheduled_ns=min(scheduled, default=None),
        first_token_ns=min(first, default=None),
        num_preemptions=sum(request.num_preemptions for request in call.requests),
    )
