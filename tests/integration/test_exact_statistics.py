"""Statistics are exact: what a thousand clients of both doors saw is what the API and the metrics count."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import aiohttp
import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from prometheus_client.parser import text_string_to_metric_families

from doors import Door, open_door, to_wire
from harness import RunningServer, running
from headrace_protocol._generated import grpc_service_pb2 as pb
from repositories import add_identity
from stock_doors import DOORS, client, refused, statistics

DECOUPLED = "model_transaction_policy { decoupled: true }"
QUEUED = "dynamic_batching { default_queue_policy { max_queue_size: 2 } }"
CASES = ("batched", "failing", "full", "cancelled", "streams")
_PHASES = ("compute_input", "compute_infer", "compute_output")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("counted")
    add_identity(repository, "batched", dims="4", extra="dynamic_batching { max_queue_delay_microseconds: 2000 }")
    add_identity(repository, "failing", dims="4")
    add_identity(repository, "full", dims="4", extra=QUEUED, max_batch_size=1, execute_delay_ms="30")
    add_identity(repository, "cancelled", dims="4", extra="instance_group { count: 2 kind: KIND_CPU }")
    add_identity(repository, "streams", dims="4", extra=DECOUPLED)
    add_identity(repository, "reloaded", dims="4", extra="version_policy { all {} }")
    (repository / "reloaded" / "2").mkdir()
    with running(
        repository,
        "--model-control-mode=explicit",
        "--load-model=*",
        "--metrics-config=histogram_latencies=true",
        "--metrics-config=summary_latencies=true",
    ) as started:
        yield started


@dataclass
class Seen:
    """What clients saw of one model."""

    rows: int = 0
    """Of the requests that were answered."""
    codes: Counter[str] = field(default_factory=Counter)

    def note(self, code: str, rows: int = 0) -> None:
        self.codes[code] += 1
        if code == "OK":
            self.rows += rows


def told(server: RunningServer, model: str) -> pb.ModelStatistics:
    """Return the statistics of a model, which both doors must tell alike."""
    answers = []
    for door in DOORS:
        with client(server, door) as api:
            (message,) = statistics(api, model)
            answers.append(message)
    assert answers[0] == answers[1]
    return answers[0]


def metrics(server: RunningServer, model: str) -> dict[str, float]:
    """Return the series of a model by name and the labels that are not its own."""
    found = {}
    for family in text_string_to_metric_families(server.metrics()):
        for sample in family.samples:
            if sample.labels.get("model") == model:
                rest = [f"{key}={value}" for key, value in sample.labels.items() if key not in {"model", "version"}]
                found[" ".join([sample.name, *rest])] = sample.value
    return found


def failures(server: RunningServer, model: str) -> dict[str, int]:
    series = metrics(server, model)
    reasons = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    return {reason: int(series[f"nv_inference_request_failure reason={reason}"]) for reason in reasons}


def check_sums(server: RunningServer, model: str) -> None:
    """Assert that statistics and metrics say the same, and that their parts add up."""
    message, series = told(server, model), metrics(server, model)
    stats = message.inference_stats
    success = stats.success.count
    assert series["nv_inference_request_success"] == success
    assert series["nv_inference_count"] == message.inference_count
    assert series["nv_inference_exec_count"] == message.execution_count
    assert sum(failures(server, model).values()) == stats.fail.count
    assert series["nv_inference_pending_request_count"] == series["headrace_queue_depth"] == 0
    for phase in ("queue", *_PHASES):
        duration = getattr(stats, phase)
        assert duration.count == success, phase
        assert series[f"nv_inference_{phase}_duration_us"] == duration.ns // 1000
        assert series[f"nv_inference_{phase}_summary_us_count"] == success
    assert series["nv_inference_request_duration_us"] == stats.success.ns // 1000
    assert stats.queue.ns + sum(getattr(stats, phase).ns for phase in _PHASES) <= stats.success.ns
    assert (stats.cache_hit.count, stats.cache_miss.count) == (0, 0)
    for histogram in ("request", "queue", "compute"):
        assert series[f"headrace_{histogram}_duration_seconds_count"] == success
    assert sum(batch.compute_infer.count for batch in message.batch_stats) == message.execution_count
    for batch in message.batch_stats:
        assert batch.compute_input.count == batch.compute_infer.count == batch.compute_output.count
    assert series["headrace_batch_size_sum"] == sum(b.batch_size * b.compute_infer.count for b in message.batch_stats)


@pytest.fixture(params=DOORS)
async def door(server: RunningServer, request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    async with open_door(server, request.param) as opened:
        yield opened


def rows(count: int) -> np.ndarray:
    return np.ones((count, 4), np.float32)


async def send(door: Door, model: str, count: int, seen: Seen, **parameters: str | int | bool) -> None:
    seen.note((await door.infer(model, rows(count), parameters=parameters)).code, count)


async def until(true: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(20):
            while not await asyncio.to_thread(true):  # noqa: ASYNC110 - a server in another process
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(what)


# --- Models that answer once --------------------------------------------------------------------------------------


async def test_batches_are_counted_by_request_by_row_and_by_execution(server: RunningServer, door: Door) -> None:
    before, seen = told(server, "batched"), Seen()
    for _ in range(10):
        await asyncio.gather(*(send(door, "batched", 1 + number % 5, seen) for number in range(30)))
    after = told(server, "batched")
    assert seen.codes == {"OK": 300}
    assert after.inference_stats.success.count - before.inference_stats.success.count == 300
    assert after.inference_count - before.inference_count == seen.rows == 900
    assert after.execution_count - before.execution_count < 300, "nothing was batched"
    assert sum(batch.batch_size * batch.compute_infer.count for batch in after.batch_stats) == after.inference_count
    assert after.last_inference > before.last_inference
    check_sums(server, "batched")
    series = metrics(server, "batched")
    assert series["nv_inference_first_response_histogram_ms_count"] == after.inference_stats.success.count


async def test_requests_that_are_no_good_are_not_counted(server: RunningServer, door: Door) -> None:
    before = told(server, "failing")
    for array in (np.ones((1, 5), np.float32), np.ones((9, 4), np.float32), np.ones((1, 4), np.int32)):
        for _ in range(10):
            assert (await door.infer("failing", array)).code == "INVALID_ARGUMENT"
    assert (await door.infer("failing", rows(1), version="9")).code == "NOT_FOUND"
    assert (await door.infer("failing", rows(1), parameters={"triton_x": 1})).code == "INVALID_ARGUMENT"
    assert told(server, "failing") == before
    check_sums(server, "failing")


async def test_failures_of_the_model_are_counted_as_its_own(server: RunningServer, door: Door) -> None:
    before, reasons, seen = told(server, "failing"), failures(server, "failing"), Seen()
    wrong = [{}, {"fail": "no"}, {"wrong_dtype": True}, {"fail_all": "no"}]
    await asyncio.gather(*(send(door, "failing", 2, seen, **wrong[number % 4]) for number in range(80)))
    after = told(server, "failing")
    assert seen.codes == {"OK": 20, "INTERNAL": 60}
    assert after.inference_stats.success.count - before.inference_stats.success.count == 20
    assert after.inference_count - before.inference_count == seen.rows == 40
    assert after.inference_stats.fail.count - before.inference_stats.fail.count == 60
    assert failures(server, "failing") == {**reasons, "BACKEND": reasons["BACKEND"] + 60}
    check_sums(server, "failing")


async def test_requests_that_find_the_queue_full_are_counted_as_rejected(server: RunningServer, door: Door) -> None:
    before, reasons, seen = told(server, "full"), failures(server, "full"), Seen()
    await asyncio.gather(*(send(door, "full", 1, seen) for _ in range(60)))
    after = told(server, "full")
    assert set(seen.codes) == {"OK", "UNAVAILABLE"}
    assert after.inference_stats.success.count - before.inference_stats.success.count == seen.codes["OK"]
    assert after.inference_count - before.inference_count == seen.rows
    assert after.execution_count - before.execution_count == seen.codes["OK"]
    rejected = reasons["REJECTED"] + seen.codes["UNAVAILABLE"]
    assert failures(server, "full") == {**reasons, "REJECTED": rejected}
    check_sums(server, "full")


async def test_requests_whose_client_went_away_are_counted_as_cancelled(server: RunningServer, door: Door) -> None:
    reasons, before = failures(server, "cancelled"), told(server, "cancelled")
    calls = [asyncio.ensure_future(door.infer("cancelled", rows(1), parameters={"hang": True})) for _ in range(40)]
    await until(lambda: metrics(server, "cancelled")["headrace_queue_depth"] == 38, "two are to run, the rest to wait")
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    wanted = {**reasons, "CANCELED": reasons["CANCELED"] + 40}
    await until(lambda: failures(server, "cancelled") == wanted, "not every cancelled request is counted")
    after = told(server, "cancelled")
    assert after.inference_stats.success == before.inference_stats.success
    assert after.execution_count == before.execution_count
    check_sums(server, "cancelled")


async def test_requests_that_nothing_becomes_of_leave_the_others_right(server: RunningServer, door: Door) -> None:
    """Successes, failures and cancels of one model at once."""
    before, reasons, seen = told(server, "cancelled"), failures(server, "cancelled"), Seen()
    hanging = [asyncio.ensure_future(door.infer("cancelled", rows(1), parameters={"hang": True})) for _ in range(20)]
    others = [
        asyncio.ensure_future(send(door, "cancelled", 3, seen, **({"fail": "no"} if number % 2 else {})))
        for number in range(60)
    ]
    await until(lambda: metrics(server, "cancelled")["headrace_queue_depth"] >= 70, "they do not arrive")
    for call in hanging:
        call.cancel()
    await asyncio.gather(*others)
    assert seen.codes == {"OK": 30, "INTERNAL": 30}
    wanted = {**reasons, "CANCELED": reasons["CANCELED"] + 20, "BACKEND": reasons["BACKEND"] + 30}
    await until(lambda: failures(server, "cancelled") == wanted, "failures are counted wrongly")
    after = told(server, "cancelled")
    assert after.inference_stats.success.count - before.inference_stats.success.count == 30
    assert after.inference_count - before.inference_count == 90
    check_sums(server, "cancelled")


# --- Models that stream -------------------------------------------------------------------------------------------


class Streamer:
    """Sends one request to a decoupled model and counts what comes back; over HTTP by generate_stream."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self.responses: Counter[int] = Counter()
        """How many requests had a response of this index."""
        self.errors: Counter[int] = Counter()
        """The same of errors."""

    def note(self, good: int, bad: int) -> None:
        for index in range(good):
            self.responses[index] += 1
        if bad:
            self.errors[good] += 1

    async def http(self, **parameters: str | int) -> None:
        good = bad = 0
        body = {"INPUT0": [1.0, 2.0, 3.0, 4.0], **parameters}
        url = f"http://{self._server.http}/v2/models/streams/generate_stream"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            if answer.status != 200:
                await answer.read()
                self.note(0, 1)
                return
            async for line in answer.content:
                if line.startswith(b"data:"):
                    error = "error" in json.loads(line[5:])
                    good, bad = good + (not error), bad + error
        self.note(good, bad)

    async def grpc(self, **parameters: str | int) -> None:
        good = bad = 0
        request = pb.ModelInferRequest(model_name="streams", raw_input_contents=[to_wire(rows(1))])
        request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])
        for key, value in parameters.items():
            setattr(request.parameters[key], "int64_param" if isinstance(value, int) else "string_param", value)
        async with grpc.aio.insecure_channel(self._server.grpc) as channel:
            open_stream = channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=pb.ModelInferRequest.SerializeToString,
                response_deserializer=pb.ModelStreamInferResponse.FromString,
            )
            async for response in open_stream(iter([request])):
                bad += bool(response.error_message)
                good += not response.error_message
        self.note(good, bad)


async def test_streams_are_counted_by_request_and_by_response(server: RunningServer) -> None:
    before, reasons = told(server, "streams"), failures(server, "streams")
    streamer = Streamer(server)
    kinds: list[dict[str, str | int]] = [
        {"responses": 1},
        {"responses": 5},
        {"responses": 3, "empty_final": 1},
        {"responses": 0},
        {"responses": 2, "fail": "no more"},
    ]
    for _ in range(5):
        await asyncio.gather(
            *(ask(**kinds[number % 5]) for number in range(20) for ask in (streamer.http, streamer.grpc))
        )
    after = told(server, "streams")
    success = after.inference_stats.success.count - before.inference_stats.success.count
    assert success == 160, "200 requests, of which a fifth fails"
    assert after.inference_count - before.inference_count == 160
    assert failures(server, "streams") == {**reasons, "BACKEND": reasons["BACKEND"] + 40}
    keys = {str(key): stats for key, stats in after.response_stats.items()}
    for index in range(5):
        was = before.response_stats.get(str(index), pb.InferResponseStatistics())
        assert keys[str(index)].success.count - was.success.count == streamer.responses[index], index
        assert keys[str(index)].fail.count - was.fail.count == streamer.errors[index], index
    empties = {
        key: stats.empty_response.count - before.response_stats[key].empty_response.count for key, stats in keys.items()
    }
    assert {key: count for key, count in empties.items() if count} == {"0": 40, "3": 40}
    assert sum(stats.success.count for stats in keys.values()) >= sum(streamer.responses.values())
    for stats in keys.values():
        assert stats.compute_infer.count == stats.success.count + stats.fail.count
        assert stats.compute_output.count == stats.success.count
        assert stats.success.ns + stats.fail.ns == stats.compute_infer.ns + stats.compute_output.ns
        assert stats.cancel.count == 0
    check_sums(server, "streams")
    first = metrics(server, "streams")["nv_inference_first_response_histogram_ms_count"]
    assert first == keys["0"].success.count, "an end without a response is no response"


async def test_a_stream_whose_client_went_away_is_one_cancel(server: RunningServer) -> None:
    before, reasons = told(server, "streams"), failures(server, "streams")
    streamer = Streamer(server)
    endless = {"responses": 100_000, "response_delay_ms": 5}
    calls = [asyncio.ensure_future(ask(**endless)) for _ in range(5) for ask in (streamer.http, streamer.grpc)]

    def long_enough() -> bool:
        with client(server, "grpc") as api:
            return len(statistics(api, "streams")[0].response_stats) > 20

    await until(long_enough, "nothing is streamed")
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    wanted = {**reasons, "CANCELED": reasons["CANCELED"] + 10}
    await until(lambda: failures(server, "streams") == wanted, "not every cancelled stream is counted")
    after = told(server, "streams")
    cancels = sum(stats.cancel.count for stats in after.response_stats.values())
    assert cancels - sum(stats.cancel.count for stats in before.response_stats.values()) == 10
    assert after.inference_stats.success == before.inference_stats.success
    check_sums(server, "streams")


# --- Whose statistics ---------------------------------------------------------------------------------------------


def as_json(message: Message) -> dict[str, object]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def infer_once(server: RunningServer, version: str = "") -> None:
    async def ask() -> None:
        async with open_door(server, "grpc") as door:
            assert (await door.infer("reloaded", rows(1), version=version)).ok

    asyncio.run(ask())


@pytest.mark.parametrize("door", DOORS)
def test_each_version_has_statistics_of_its_own_and_a_reload_begins_anew(server: RunningServer, door: str) -> None:
    with client(server, door) as api:
        api.load_model("reloaded")
        before = {message.version: message.inference_count for message in statistics(api, "reloaded")}
        infer_once(server, "1")
        infer_once(server)
        counts = {message.version: message.inference_count for message in statistics(api, "reloaded")}
        assert counts == {"1": before["1"] + 1, "2": before["2"] + 1}
        (one,) = statistics(api, "reloaded", "1")
        assert (one.name, one.version, one.inference_count) == ("reloaded", "1", counts["1"])
        api.load_model("reloaded")
        assert statistics(api, "reloaded", "1") == [one], "a load that changed nothing begins anew"
        config = api.get_model_config("reloaded")
        api.load_model("reloaded", config=json.dumps(config if door == "http" else as_json(config.config)))
        api.load_model("reloaded")
        assert [message.inference_count for message in statistics(api, "reloaded")] == [0, 0]
        assert {message.name for message in statistics(api, "")} >= {*CASES, "reloaded"}


@pytest.mark.parametrize("door", DOORS)
def test_statistics_of_what_is_not_there_are_not_found_or_unavailable(server: RunningServer, door: str) -> None:
    with client(server, door) as api:
        assert refused(api.get_inference_statistics, "ghost")[0] == "NOT_FOUND"
        assert refused(api.get_inference_statistics, "batched", "9")[0] == "NOT_FOUND"
        api.unload_model("reloaded")
        assert refused(api.get_inference_statistics, "reloaded")[0] == "UNAVAILABLE"
        assert "reloaded" not in {message.name for message in statistics(api, "")}
        assert not metrics(server, "reloaded")
        api.load_model("reloaded")


def test_memory_that_is_not_measured_by_model_is_not_told(server: RunningServer) -> None:
    assert not told(server, "batched").memory_usage
    assert any(name.startswith("headrace_backend_memory_bytes") for name in metrics(server, "batched"))
