"""The books of one stream: which requests are under way, whose answer may be written next, whether more may be read.

Pure: no sockets, no tasks, no time. The answers of ordinary requests leave in the order of their requests; those of
decoupled models leave as they come.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from headrace.planes import Cancellable, Outcome
from headrace.types import InferenceResponse

MAX_REQUESTS: Final = 256
"""Requests of one stream that may be under way; the client's next ones wait in the transport."""
MAX_BYTES: Final = 256 << 20
"""Bytes of their messages; one request alone may be larger."""


class StreamRequest:
    """One request of a stream, from its message until its last answer is written. The ledger alone changes it."""

    __slots__ = ("empty_final", "held", "id", "inference", "model", "nbytes", "ordered", "version")

    def __init__(self, request_id: str = "", model: str = "", version: str = "") -> None:
        self.id = request_id
        self.model = model
        self.version = version
        """As the client wrote it."""
        self.empty_final = False
        self.ordered = True
        self.nbytes = 0
        self.held: list[Answer] = []
        """Answers that came before their turn."""
        self.inference: Cancellable | None = None
        """None where it was refused at once."""


class Answer(NamedTuple):
    """One outcome of one request."""

    request: StreamRequest
    outcome: Outcome
    last: bool

    def release(self) -> None:
        """Give the memory of a response back."""
        if isinstance(self.outcome, InferenceResponse):
            self.outcome.release()


class StreamLedger:
    """Events in (`begin`, `put`, `half_close`, `written`), decisions out (`may_read`, `take`, `finished`)."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._bytes = 0
        self._open: dict[StreamRequest, None] = {}
        self._order: deque[StreamRequest] = deque()
        """Ordinary requests whose last answer may not be written yet; the first one's turn it is."""
        self._ready: deque[Answer] = deque()
        self._half_closed = False

    @property
    def under_way(self) -> int:
        """Requests begun whose last answer is not written."""
        return len(self._open)

    @property
    def finished(self) -> bool:
        """Whether the client has sent its last request and every answer is written."""
        return self._half_closed and not self._open

    def may_read(self) -> bool:
        """Return whether another request may be read now."""
        return not self._open or (len(self._open) < self._max_requests and self._bytes < self._max_bytes)

    def half_close(self) -> None:
        """Note that no request will come any more."""
        self._half_closed = True

    def begin(self, request: StreamRequest, nbytes: int, *, ordered: bool) -> None:
        """Enter a request that came in a message of `nbytes`."""
        request.ordered = ordered
        request.nbytes = nbytes
        self._bytes += nbytes
        self._open[request] = None
        if ordered:
            self._order.append(request)

    def put(self, answer: Answer) -> bool:
        """Enter an answer; return False where nobody waits for it any more."""
        request = answer.request
        if request not in self._open:
            return False
        if not request.ordered:
            self._ready.append(answer)
        elif request is not self._order[0]:
            request.held.append(answer)
        else:
            self._ready.append(answer)
            if answer.last:
                self._next_turn()
        return True

    def _next_turn(self) -> None:
        """Let go what those behind the first request in order hold: it has given its last answer."""
        order = self._order
        order.popleft()
        while order and order[0].held:
            held, order[0].held = order[0].held, []
            self._ready.extend(held)
            if not held[-1].last:
                return
            order.popleft()

    def take(self) -> Answer | None:
        """Return the answer to be written now, None where there is none."""
        return self._ready.popleft() if self._ready else None

    def written(self, answer: Answer) -> None:
        """Note that an answer was written, or needed no writing."""
        if answer.last and answer.request in self._open:
            self._close(answer.request)

    def cut(self, request: StreamRequest) -> list[Answer]:
        """End a request because the answer taken last cannot be written; return its others, to be released."""
        others = [answer for answer in self._ready if answer.request is request] + request.held
        self._ready = deque(answer for answer in self._ready if answer.request is not request)
        request.held = []
        if self._order and request is self._order[0]:
            self._next_turn()
        self._close(request)
        return others

    def _close(self, request: StreamRequest) -> None:
        del self._open[request]
        self._bytes -= request.nbytes
        request.inference = None  # which knows the request: only the garbage collector would find the two

    def abandon(self) -> tuple[list[StreamRequest], list[Answer]]:
        """Forget everything; return what is to be cancelled and what is to be released."""
        requests = list(self._open)
        answers = list(self._ready)
        for request in requests:
            answers += request.held
            request.held = []
        self._open.clear()
        self._order.clear()
        self._ready.clear()
        self._bytes = 0
        return requests, answers

    def check_integrity(self) -> None:
        """Raise AssertionError where the books contradict themselves."""
        assert self._bytes == sum(request.nbytes for request in self._open)
        assert all(request in self._open and request.ordered for request in self._order)
        assert not self._order or not self._order[0].held, "the first one's answers need not wait"
        assert all(answer.request in self._open for answer in self._ready)
        assert all(request in self._order for request in self._open if request.held)
        closing = {answer.request for answer in self._ready if answer.last}
        assert not closing.intersection(self._order), "a request whose last answer is ready has had its turn"
