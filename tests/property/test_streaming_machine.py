"""Whatever a backend does with the requests of a decoupled model, each has one end, and nothing after it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace_backends.api import Batch, BatchRequest, StreamResponse, send_many
from headrace_backends.conformance import Case, LoadedModel
from headrace_backends.identity.backend import IdentityBackend
from headrace_backends.streaming import StreamingBatch
from headrace_protocol.errors import ErrorCode, InferError, invalid

OUTPUTS = {"OUTPUT0": np.ones((1, 1), np.float32)}
TENSOR = {"data_type": "TYPE_FP32", "dims": [-1]}
CONFIG = {
    "name": "m",
    "max_batch_size": 8,
    "input": [{"name": "INPUT0", **TENSOR}],
    "output": [{"name": "OUTPUT0", **TENSOR}],
    "model_transaction_policy": {"decoupled": True},
}


class Deferring(IdentityBackend):
    """Leaves the requests open that the test names, and raises where it says so."""

    deferred: tuple[int, ...] = ()
    error: InferError | None = None

    def execute(self, batch: Batch) -> None:
        for request in batch.requests:
            if request.index in self.deferred:
                request.defer()
        if self.error is not None:
            raise self.error


@dataclass
class Expected:
    """What the test knows of a request."""

    request: BatchRequest
    batch: Batch
    responses: int = 0
    open: bool = True
    cancelled: bool = False
    paused: bool = False


class StreamingMachine(RuleBasedStateMachine):
    """Acts as the author's threads, the server and the runner, one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LoadedModel(
            Deferring, Case(Path(tempfile.gettempdir()), CONFIG, {"INPUT0": np.ones((1, 1), np.float32)})
        )
        self.requests: list[Expected] = []
        self.closed: list[int] = []
        self.model.streams.closed = self.note_closed  # type: ignore[method-assign]

    def note_closed(self, batch: StreamingBatch) -> None:
        self.closed.append(batch.number)

    def act(self, which: int, call: Callable[[Expected], None], *, final: bool, needs_client: bool) -> None:
        """Do it, and compare whether it is refused with what is known."""
        if not self.requests:
            return
        expected = self.requests[which % len(self.requests)]
        if needs_client and expected.paused and not expected.cancelled:
            return  # it would wait
        try:
            call(expected)
        except InferError as error:
            refused = not expected.open or (needs_client and expected.cancelled)
            assert refused, error.message
            assert error.code is (ErrorCode.CANCELLED if expected.open else ErrorCode.INTERNAL)
            return
        assert expected.open
        assert not (needs_client and expected.cancelled)
        expected.responses += 1
        expected.open = not final

    @rule(count=st.integers(1, 4), deferred=st.sets(st.integers(0, 3)), fails=st.booleans(), early=st.booleans())
    def execute(self, count: int, deferred: set[int], fails: bool, early: bool) -> None:
        backend = self.model.backend
        assert isinstance(backend, Deferring)
        backend.deferred = tuple(deferred)
        backend.error = invalid("on purpose") if fails else None
        batch = self.model.batch([self.model.case.inputs] * count)
        if early:
            batch.cancel(0)
        self.model.execute(batch)
        for request in batch.requests:
            stays = request.index in deferred and backend.error is None
            expected = Expected(request, batch, int(not stays), stays, cancelled=early and not request.index)
            self.requests.append(expected)

    @rule(which=st.integers(0), final=st.booleans())
    def send(self, which: int, final: bool) -> None:
        self.act(which, lambda e: e.request.send(OUTPUTS, final=final), final=final, needs_client=True)

    @rule(which=st.integers(0))
    def respond(self, which: int) -> None:
        self.act(which, lambda e: e.request.respond(OUTPUTS), final=True, needs_client=True)

    @rule(which=st.integers(0))
    def complete(self, which: int) -> None:
        self.act(which, lambda e: e.request.complete(), final=True, needs_client=False)

    @rule(which=st.integers(0))
    def fail(self, which: int) -> None:
        self.act(which, lambda e: e.request.fail(invalid("no")), final=True, needs_client=False)

    @rule(which=st.integers(0))
    def cancel(self, which: int) -> None:
        if self.requests:
            expected = self.requests[which % len(self.requests)]
            expected.batch.cancel(expected.request.index)
            expected.cancelled = True

    @rule(which=st.integers(0), paused=st.booleans())
    def flow(self, which: int, paused: bool) -> None:
        if self.requests:
            expected = self.requests[which % len(self.requests)]
            expected.batch.flow(expected.request.index, paused=paused)
            expected.paused = paused

    @rule(finals=st.lists(st.booleans(), max_size=6))
    def step(self, finals: list[bool]) -> None:
        ready = [expected for expected in self.requests if expected.open][: len(finals)]
        parts = list(zip(ready, finals, strict=False))
        send_many([StreamResponse(expected.request, OUTPUTS, final=final) for expected, final in parts])
        for expected, final in parts:
            expected.responses += final or not expected.cancelled
            expected.open = not final

    @invariant()
    def each_request_has_had_what_was_sent_and_one_end(self) -> None:
        for expected in self.requests:
            got = self.model.streams.so_far(expected.batch)[expected.request.index]
            assert len(got) == expected.responses
            assert [answer.final for answer in got] == [False] * (len(got) - 1) + [not expected.open] * bool(got)
            assert expected.request.answered is not expected.open

    @invariant()
    def a_batch_is_open_while_one_of_its_requests_is(self) -> None:
        for expected in self.requests:
            siblings = [other.open for other in self.requests if other.batch is expected.batch]
            assert expected.batch.open is any(siblings)
            assert self.closed.count(expected.batch.number) <= 1

    def teardown(self) -> None:
        self.model.close()


TestStreaming = StreamingMachine.TestCase
