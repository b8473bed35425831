"""CachedDriver: the response cache before a model's driver; a request whose answer is kept never reaches a scheduler.

It stands in the driver's place for models that have the cache switched on, so that others pay nothing for it. It decides
which requests may be answered from the cache, and counts them; what a key and an entry are is response_cache.py's work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from headrace.clock import Clock
from headrace.instances.regions import deliver
from headrace.instances.signature import ModelSignature, PreparedRequest
from headrace.observability.statistics import ModelStatistics
from headrace.observability.trace import QUEUE_START
from headrace.observability.tracing import trace_end
from headrace.response_cache import DamagedEntryError, ResponseCache, decode_entry, encode_entry, request_key
from headrace.scheduling.batch_driver import Outcome
from headrace.scheduling.driver import Driver
from headrace.scheduling.handing_over import hand_over
from headrace.scheduling.ordering import OrderedRelease
from headrace.scheduling.scheduler import QueuedRequest
from headrace.types import InferenceResponse, OutputTensor, Parameter
from headrace_protocol.datatype import BYTES, check_bytes, element_count
from headrace_protocol.errors import ErrorCode, FailureReason, InferError

_log = logging.getLogger("headrace.cache")

HASHED_AT_ONCE: Final = 256 << 10
"""Bytes of inputs whose key is made on the loop, in about 0.2 ms; that of larger ones is made by a thread."""


class CachedRequest:
    """A request between `submit` and its answer."""

    __slots__ = ("done", "inner", "item", "key", "looking", "lookup_ns", "outcome", "prepared", "task")

    def __init__(self, prepared: PreparedRequest, done: Callable[[Outcome], None]) -> None:
        self.prepared = prepared
        self.done: Callable[[Outcome], None] | None = done
        """Who waits for the outcome; None once it was told, or nobody waits any more."""
        self.inner: Any = None
        """What the driver behind gave for it; None while it is not there."""
        self.looking = False
        """Whether it is neither answered nor given to the driver behind."""
        self.task: asyncio.Task[None] | None = None
        self.key: bytes | None = None
        """Under which its answer is to be kept; None = it is not kept."""
        self.lookup_ns = 0
        self.item: QueuedRequest | None = None
        """Its place in the order of answers, where that is preserved."""
        self.outcome: Outcome | None = None
        """Held back by that order."""


class CachedDriver:
    """A Driver around another, which keeps no order of answers itself. `identity` names the model's content."""

    def __init__(
        self,
        driver: Driver,
        cache: ResponseCache,
        identity: Callable[[], bytes],
        signature: ModelSignature,
        statistics: ModelStatistics,
        clock: Clock,
        ordering: OrderedRelease | None = None,
    ) -> None:
        self._driver = driver
        self._cache = cache
        self._identity = identity
        self._signature = signature
        self._statistics = statistics
        self._now_ns = clock.now_ns
        self._wall_ns = clock.wall_ns
        self._ordering = ordering
        self._loop = asyncio.get_running_loop()
        self._looking: set[CachedRequest] = set()

    @property
    def waiting(self) -> int:
        """How many requests wait for an instance, or for the cache."""
        return self._driver.waiting + len(self._looking)

    def submit(self, prepared: PreparedRequest, done: Callable[[Outcome], None]) -> CachedRequest:
        """Begin a request; see SchedulerDriver.submit."""
        request = CachedRequest(prepared, done)
        regions = prepared.regions
        if regions is not None and (regions.may_change or regions.fills_cuda):
            # What its client can change after the key was made must not become somebody else's answer.
            self._pass_on(request)
        elif self._cache.immediate and _input_bytes(prepared) <= HASHED_AT_ONCE:
            started = self._now_ns()
            key = request_key(self._identity(), prepared)
            self._looked_up(request, key, self._cache.get(key), started)
        else:
            self._look(request)
            request.task = self._loop.create_task(self._look_up(request), name="response cache")
        if self._ordering is not None:
            request.item = QueuedRequest(request, prepared.rows, None)
            self._ordering.admit(request.item)
        return request

    def cancel(self, pending: CachedRequest) -> None:
        """Nobody waits for this request any more."""
        if pending.done is None:
            return
        pending.done = None
        if pending.inner is not None:
            self._driver.cancel(pending.inner)
        elif pending.outcome is not None:
            return  # it is done and waits for its turn, when it is let go
        elif pending.looking:
            self._end_lookup(pending)
            self._fail(pending, InferError(ErrorCode.CANCELLED, "the request was cancelled", FailureReason.CANCELED))
            return
        self._finish(pending, None)

    def flow(self, pending: CachedRequest, *, paused: bool) -> None:
        """See SchedulerDriver.flow."""
        if pending.inner is not None:
            self._driver.flow(pending.inner, paused=paused)

    def kick(self) -> None:
        """See SchedulerDriver.kick."""
        self._driver.kick()

    def fail_waiting(self, error: InferError) -> None:
        """Answer every waiting request with `error`."""
        for request in list(self._looking):
            self._end_lookup(request)
            self._fail(request, error)
        self._driver.fail_waiting(error)

    # --- the lookup -----------------------------------------------------------------------------------------------

    def _look(self, request: CachedRequest) -> None:
        request.looking = True
        self._looking.add(request)
        self._statistics.pending += 1

    def _end_lookup(self, request: CachedRequest) -> None:
        request.looking = False
        self._looking.discard(request)
        self._statistics.pending -= 1
        if request.task is not None:
            request.task.cancel()
            request.task = None

    async def _look_up(self, request: CachedRequest) -> None:
        started = self._now_ns()
        key: bytes | None = None
        block: bytes | None = None
        try:
            if _input_bytes(request.prepared) > HASHED_AT_ONCE:
                key = await asyncio.to_thread(request_key, self._identity(), request.prepared)
            else:
                key = request_key(self._identity(), request.prepared)
            block = await self._cache.fetch(key)
        except Exception:  # the cache is a help: a request does not fail over it
            _log.exception("model %s: the response cache failed", self._signature.name)
        if not request.looking:
            return
        request.task = None
        self._end_lookup(request)
        try:
            self._looked_up(request, key, block, started)
        except InferError as error:
            if request.prepared.regions is not None:
                request.prepared.regions.drop()
            self._finish(request, error)

    def _looked_up(self, request: CachedRequest, key: bytes | None, block: bytes | None, started_ns: int) -> None:
        """Go on with what was found. Raises as the driver behind does, where nothing was."""
        found = self._decoded(block) if block is not None else None
        request.lookup_ns = self._now_ns() - started_ns
        self._cache.counts.looked_up(request.lookup_ns, hit=found is not None)
        if found is not None:
            self._look(request)
            self._loop.call_soon(self._answer, request, *found)
            return
        regions = request.prepared.regions
        if regions is None or not regions.outputs:
            request.key = key
        self._statistics.record_cache_miss(request.lookup_ns)
        self._pass_on(request)

    def _decoded(self, block: bytes) -> tuple[list[OutputTensor], dict[str, Parameter] | None] | None:
        try:
            outputs, parameters = decode_entry(block)
            if self._cache.shared:
                for output in outputs:
                    self._signature.check_output(output)
                    if output.datatype is BYTES:
                        check_bytes(output.data, element_count(output.shape))
        except (DamagedEntryError, InferError) as error:
            _log.warning("model %s: an entry of the response cache is damaged: %s", self._signature.name, error)
            return None
        return outputs, parameters

    def _answer(
        self, request: CachedRequest, outputs: list[OutputTensor], parameters: dict[str, Parameter] | None
    ) -> None:
        """Give a request its answer from the cache."""
        if not request.looking:
            return
        self._end_lookup(request)
        prepared = request.prepared
        original = prepared.request
        if prepared.regions is not None:
            try:
                deliver(prepared.regions, outputs)
            except InferError as error:
                self._fail(request, error)
                return
            prepared.regions.drop()
        response = InferenceResponse(self._signature.name, self._signature.version, outputs, parameters)
        response.id = original.id
        if original.trace is not None:
            original.trace.mark(QUEUE_START)
            trace_end(original.trace, response)
        self._statistics.record_cache_hit(
            self._now_ns() - original.received_ns, request.lookup_ns, self._wall_ns() // 1_000_000
        )
        self._finish(request, response)

    # --- the driver behind ----------------------------------------------------------------------------------------

    def _pass_on(self, request: CachedRequest) -> None:
        request.inner = self._driver.submit(request.prepared, partial(self._ended, request))

    def _ended(self, request: CachedRequest, outcome: Outcome) -> None:
        request.inner = None
        if request.key is not None and isinstance(outcome, InferenceResponse):
            self._keep(request, request.key, outcome)
        self._finish(request, outcome)

    def _keep(self, request: CachedRequest, key: bytes, response: InferenceResponse) -> None:
        if sum([len(output.data) for output in response.outputs]) > self._cache.largest:
            self._cache.counts.skipped += 1
            return
        started = self._now_ns()
        self._cache.put(key, encode_entry(response.outputs, response.parameters))
        spent = self._now_ns() - started
        if self._cache.immediate:
            self._cache.counts.insertion_ns += spent
        self._statistics.record_cache_insertion(request.lookup_ns, spent)

    # --- the answer -----------------------------------------------------------------------------------------------

    def _fail(self, request: CachedRequest, error: InferError) -> None:
        """End a request that is not with the driver behind."""
        original = request.prepared.request
        if request.prepared.regions is not None:
            request.prepared.regions.drop()
        if original.trace is not None:
            trace_end(original.trace, error if request.done is not None else None)
        self._statistics.record_failure(error.reason, self._now_ns() - original.received_ns)
        self._finish(request, error)

    def _finish(self, request: CachedRequest, outcome: Outcome | None) -> None:
        """Tell the outcome, when it is its turn; None where nobody waits for it."""
        if self._ordering is None or request.item is None:
            self._hand_over(request, outcome)
            return
        request.outcome = outcome
        item, request.item = request.item, None
        for released in self._ordering.complete(item):
            self._hand_over(released.owner, released.owner.outcome)

    def _hand_over(self, request: CachedRequest, outcome: Outcome | None) -> None:
        done, request.done = request.done, None
        request.outcome = None
        if done is None or outcome is None:
            if isinstance(outcome, InferenceResponse):
                outcome.release()
            return
        hand_over(done, outcome)


def _input_bytes(prepared: PreparedRequest) -> int:
    return sum([len(tensor.data) for tensor in prepared.inputs if tensor is not None])
