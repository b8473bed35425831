"""A request that the cache answers never reaches the driver behind; every request has one end, in order where asked."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import numpy as np
import pytest

from configs import model, tensor
from headrace.clock import SystemClock
from headrace.instances.regions import Region, RequestRegions, Slice
from headrace.instances.signature import ModelSignature
from headrace.observability.statistics import ModelStatistics
from headrace.response_cache import CacheCounts, LocalCache
from headrace.scheduling.cached_driver import HASHED_AT_ONCE, CachedDriver
from headrace.scheduling.ordering import OrderedRelease
from headrace.types import InferenceRequest, InferenceResponse, InputTensor, OutputTensor, RegionRef
from headrace_protocol.datatype import FP32
from headrace_protocol.errors import ErrorCode, FailureReason, InferError, internal, unavailable

SIGNATURE = ModelSignature(model([tensor("A", "FP32", -1)], [tensor("B", "FP32", -1)]), 1)


class HeldDriver:
    """Stands for the driver behind: its requests end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[SimpleNamespace] = []
        self.full = False
        self.failed: InferError | None = None

    @property
    def waiting(self) -> int:
        return sum(entry.done is not None for entry in self.begun)

    def submit(self, prepared, done):
        if self.full:
            raise unavailable("the queue is full", FailureReason.REJECTED)
        entry = SimpleNamespace(prepared=prepared, done=done, released=0)
        self.begun.append(entry)
        return entry

    def cancel(self, entry) -> None:
        entry.done = None

    def flow(self, entry, *, paused: bool) -> None: ...

    def kick(self) -> None: ...

    def fail_waiting(self, error: InferError) -> None:
        self.failed = error

    def answer(self, index: int = -1, parameters=None) -> SimpleNamespace:
        entry = self.begun[index]
        outputs = [OutputTensor("B", FP32, tensor.shape, tensor.data) for tensor in entry.prepared.inputs]

        def release() -> None:
            entry.released += 1

        response = InferenceResponse("m", 1, outputs, parameters, release)
        response.id = entry.prepared.request.id
        done, entry.done = entry.done, None
        if done is not None:
            done(response)
        return entry


class AskedCache(LocalCache):
    """A store that answers when the test says so."""

    immediate = False

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.asked: list[tuple[bytes, asyncio.Future]] = []

    async def fetch(self, key: bytes) -> bytes | None:
        self.asked.append((key, asyncio.get_running_loop().create_future()))
        return await self.asked[-1][1]


class Asked:
    def __init__(self) -> None:
        self.outcomes: list = []
        self.pending = None

    @property
    def values(self) -> list[float]:
        (response,) = self.outcomes
        return np.frombuffer(response.outputs[0].data, np.float32).tolist()


class Bench:
    """A driver under test, with what it stands on."""

    def __init__(self, cache=None, *, ordered: bool = False) -> None:
        self.cache = LocalCache(1 << 20) if cache is None else cache
        self.behind = HeldDriver()
        self.statistics = ModelStatistics()
        self.driver = CachedDriver(
            self.behind,
            self.cache,
            lambda: b"m",
            SIGNATURE,
            self.statistics,
            SystemClock(),
            OrderedRelease() if ordered else None,
        )

    def submit(self, *values: float, regions: RequestRegions | None = None, name: str = "", **fields) -> Asked:
        request = InferenceRequest("m", -1, SystemClock.now_ns())
        request.id = name
        for field, value in fields.items():
            setattr(request, field, value)
        data = np.array(values, np.float32).tobytes()
        place = regions.inputs.get("A") if regions is not None else None
        ref = RegionRef(place.region.name, place.offset, place.nbytes) if place is not None else None
        request.inputs = [InputTensor("A", FP32, (len(values),), b"" if ref else data, ref)]
        asked = Asked()
        asked.pending = self.driver.submit(SIGNATURE.prepare(request, regions), asked.outcomes.append)
        return asked


@pytest.fixture
def region(tmp_path):
    path = tmp_path / "region"
    path.write_bytes(np.arange(16, dtype=np.float32).tobytes())
    made = Region(1, "r", 64, fd=os.open(path, os.O_RDWR))
    yield made
    made.drop()


async def turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_an_answer_is_given_again_with_its_parameters_and_the_id_of_the_request():
    bench = Bench()
    first = bench.submit(1, 2, name="first")
    entry = bench.behind.answer(parameters={"p": 7})
    again = bench.submit(1, 2, name="again")
    assert again.outcomes == [], "not before submit returned"
    await turn()
    assert first.values == again.values == [1, 2]
    assert [asked.outcomes[0].id for asked in (first, again)] == ["first", "again"]
    assert again.outcomes[0].parameters == {"p": 7}
    assert again.outcomes[0].final
    assert len(bench.behind.begun) == 1
    assert entry.released == 0, "the answer's memory is its receiver's"
    statistics = bench.statistics
    assert (statistics.success_count, statistics.cache_hits, statistics.cache_misses) == (1, 1, 1)
    assert (statistics.inference_count, statistics.pending) == (0, 0)


async def test_who_fails_to_take_an_answer_is_told_so_and_the_answer_given_back():
    bench = Bench()
    told = []

    def fails_once(outcome) -> None:
        told.append(outcome)
        if len(told) == 1:
            raise ZeroDivisionError

    bench.submit(1.0).pending.done = fails_once
    held = bench.behind.answer()
    assert told[1].code is ErrorCode.INTERNAL
    assert (len(told), held.released) == (2, 1)


async def test_what_is_done_with_one_answer_does_not_change_the_next():
    bench = Bench()
    bench.submit(1)
    bench.behind.answer()
    spoilt = bench.submit(1)
    await turn()
    spoilt.outcomes[0].outputs[0].data = b""
    spoilt.outcomes[0].outputs.clear()
    spoilt.outcomes[0].release()
    again = bench.submit(1)
    await turn()
    assert again.values == [1]


async def test_errors_are_not_kept():
    bench = Bench()
    failed = bench.submit(1)
    bench.behind.begun[0].done(internal("the model failed"))
    assert failed.outcomes[0].message == "the model failed"
    bench.submit(1)
    await turn()
    assert len(bench.behind.begun) == 2


async def test_an_answer_that_the_store_does_not_take_is_given_all_the_same():
    bench = Bench(LocalCache(400))
    for _ in range(2):
        asked = bench.submit(*range(100))
        bench.behind.answer()
        assert asked.values == list(range(100))
    assert len(bench.behind.begun) == 2
    assert bench.cache.counts.skipped == 2


async def test_a_request_that_is_cancelled_before_its_kept_answer_comes_has_no_outcome():
    bench = Bench()
    bench.submit(1)
    bench.behind.answer()
    asked = bench.submit(1)
    bench.driver.cancel(asked.pending)
    bench.driver.cancel(asked.pending)
    await turn()
    assert asked.outcomes == []
    assert bench.statistics.failures[FailureReason.CANCELED] == 1
    assert (bench.statistics.pending, bench.statistics.success_count) == (0, 0)


async def test_a_full_queue_refuses_at_once_and_keeps_nothing_of_the_request():
    bench = Bench(ordered=True)
    bench.behind.full = True
    with pytest.raises(InferError) as raised:
        bench.submit(1)
    assert raised.value.code is ErrorCode.UNAVAILABLE
    bench.behind.full = False
    asked = bench.submit(2)
    bench.behind.answer()
    assert asked.values == [2], "nothing before it holds it back"


async def test_answers_come_in_the_order_of_requests_where_that_is_preserved():
    bench = Bench(ordered=True)
    bench.submit(1)
    bench.behind.answer()
    slow, hit, cancelled = bench.submit(2), bench.submit(1), bench.submit(3)
    last = bench.submit(1)
    await turn()
    assert hit.outcomes == last.outcomes == []
    bench.driver.cancel(cancelled.pending)
    bench.behind.answer(1)
    assert (slow.values, hit.values, last.values) == ([2], [1], [1])
    assert cancelled.outcomes == []


async def test_an_answer_held_back_by_the_order_is_let_go_where_its_client_went():
    bench = Bench(ordered=True)
    bench.submit(1)
    held = bench.submit(2)
    entry = bench.behind.answer(1)
    bench.driver.cancel(held.pending)
    assert entry.released == 0
    bench.behind.answer(0)
    assert (held.outcomes, entry.released) == ([], 1)


async def test_inputs_in_shared_memory_are_neither_looked_for_nor_kept(region):
    bench = Bench()
    for _ in range(2):
        regions = RequestRegions({"A": Slice(region, 0, 8)}, {})
        bench.submit(0, 1, regions=regions)
    assert len(bench.behind.begun) == 2
    assert bench.cache.counts.lookups == bench.cache.entries == 0
    assert (bench.statistics.cache_hits, bench.statistics.cache_misses) == (0, 0)


async def test_a_kept_answer_is_written_where_its_client_wants_it(region):
    bench = Bench()
    bench.submit(5, 6)
    bench.behind.answer()
    regions = RequestRegions({}, {"B": Slice(region, 16, 8)})
    asked = bench.submit(5, 6, regions=regions)
    await turn()
    assert asked.outcomes[0].outputs[0].in_region
    assert np.frombuffer(region.read(0, 32), np.float32).tolist() == [0, 1, 2, 3, 5, 6, 6, 7]


async def test_a_kept_answer_that_does_not_fit_its_place_is_an_error(region):
    bench = Bench()
    bench.submit(5, 6)
    bench.behind.answer()
    asked = bench.submit(5, 6, regions=RequestRegions({}, {"B": Slice(region, 0, 4)}))
    await turn()
    assert asked.outcomes[0].code is ErrorCode.INVALID_ARG
    assert bench.statistics.fail_count == 1


async def test_answers_that_went_into_shared_memory_are_not_kept(region):
    bench = Bench()
    bench.submit(5, 6, regions=RequestRegions({}, {"B": Slice(region, 0, 8)}))
    bench.behind.answer()
    assert bench.cache.entries == 0
    assert bench.statistics.cache_misses == 1


async def test_the_key_of_a_large_request_is_made_beside_the_loop():
    bench = Bench()
    values = range(HASHED_AT_ONCE // 4 + 1)
    first = bench.submit(*values)
    assert bench.behind.begun == []
    assert (bench.driver.waiting, bench.statistics.pending) == (1, 1)
    async with asyncio.timeout(5):
        while not bench.behind.begun:  # noqa: ASYNC110 - a thread makes the key
            await asyncio.sleep(0.001)
    assert (bench.driver.waiting, bench.statistics.pending) == (1, 0)
    bench.behind.answer()
    again = bench.submit(*values)
    async with asyncio.timeout(5):
        while not again.outcomes:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert first.values == again.values


async def test_a_store_elsewhere_is_asked_without_holding_anybody_up():
    cache = AskedCache()
    bench = Bench(cache)
    first, second = bench.submit(1), bench.submit(2)
    await turn()
    assert (len(cache.asked), bench.driver.waiting) == (2, 2)
    cache.asked[1][1].set_result(None)
    await turn()
    bench.behind.answer()
    assert second.values == [2]
    cache.asked[0][1].set_result(LocalCache.get(cache, cache.asked[1][0]))
    await turn()
    await turn()
    assert first.values == [2], "what the store gave"
    assert bench.driver.waiting == bench.statistics.pending == 0


async def test_a_queue_that_is_full_after_the_lookup_is_the_outcome():
    cache = AskedCache()
    bench = Bench(cache, ordered=True)
    asked = bench.submit(1)
    await turn()
    bench.behind.full = True
    cache.asked[0][1].set_result(None)
    await turn()
    assert asked.outcomes[0].code is ErrorCode.UNAVAILABLE


async def test_a_store_that_fails_or_lies_costs_the_request_nothing():
    for answer in (RuntimeError("broken"), b"garbage", None):
        cache = AskedCache()
        bench = Bench(cache)
        asked = bench.submit(1)
        await turn()
        future = cache.asked[0][1]
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        await turn()
        bench.behind.answer()
        assert asked.values == [1]


async def test_what_waits_for_the_store_is_cancelled_or_failed_like_what_waits_in_the_queue():
    cache = AskedCache()
    bench = Bench(cache)
    gone, stays = bench.submit(1), bench.submit(2)
    await turn()
    bench.driver.cancel(gone.pending)
    bench.driver.fail_waiting(unavailable("the server is stopping"))
    assert gone.outcomes == []
    assert stays.outcomes[0].message == "the server is stopping"
    assert bench.behind.failed is stays.outcomes[0]
    await turn()
    assert all(future.cancelled() for _, future in cache.asked)
    assert bench.statistics.pending == bench.driver.waiting == 0
    assert bench.statistics.failures[FailureReason.CANCELED] == 1
    assert isinstance(cache.counts, CacheCounts)
