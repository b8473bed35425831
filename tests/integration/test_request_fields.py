"""Priority, timeout and the fields of sequences act, or reach the backend, whichever door they came in by."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from clients import call
from harness import RunningServer, running
from headrace_protocol._generated import grpc_service_pb2 as pb
from repositories import add_identity
from stock_doors import DOORS, Client, client, refused

BUSY_MS = 1000
"""How long the request runs behind which the others wait."""
LEVELS = "priority_levels: 3 default_priority_level: 2"
OVERRIDE = "allow_timeout_override: true default_timeout_microseconds: 10000000"
SHORT = "allow_timeout_override: true default_timeout_microseconds: 100000"
FIXED = "default_timeout_microseconds: 10000000"
DELAYED = f"timeout_action: DELAY {OVERRIDE}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository: Path = tmp_path_factory.mktemp("fields")
    add_identity(repository, "echo", dims="4", echo_request="true", echo_parameters="true", allow_misbehaviour="false")
    models = {
        "levels": f"dynamic_batching {{ {LEVELS} }}",
        "hurried": f"dynamic_batching {{ default_queue_policy {{ {OVERRIDE} }} }}",
        "short": f"dynamic_batching {{ default_queue_policy {{ {SHORT} }} }}",
        "fixed": f"dynamic_batching {{ default_queue_policy {{ {FIXED} }} }}",
        "delayed": f"dynamic_batching {{ default_queue_policy {{ {DELAYED} }} }}",
        "plain": "",
    }
    for name, extra in models.items():
        add_identity(repository, name, dims="4", max_batch_size=1, extra=extra, echo_request="true")
    with running(repository) as started:
        yield started


@pytest.fixture(params=DOORS)
def api(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[Client]:
    with client(server, request.param) as opened:
        yield opened


def ask(api: Client, model: str, **keywords: Any) -> Any:
    """Infer with one row of INPUT0 by a stock client of either door."""
    module = grpcclient if isinstance(api, grpcclient.InferenceServerClient) else httpclient
    tensor = module.InferInput("INPUT0", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    return api.infer(model, [tensor], **keywords)


def told(result: Any) -> dict[str, Any]:
    """Return the response parameters."""
    response = result.get_response()
    return dict(response["parameters"]) if isinstance(response, dict) else values(response.parameters)


def values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of parameters as gRPC has them."""
    found = {}
    for key, parameter in parameters.items():
        found[key] = getattr(parameter, parameter.WhichOneof("parameter_choice"))
    return found


# --- Sequences ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("identifier", [1, 2**63 - 1, "a", "0", "x" * 128, "é" * 128])
@pytest.mark.parametrize(("start", "end"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_fields_of_a_sequence_reach_the_backend(api: Client, identifier: int | str, start: bool, end: bool) -> None:
    echoed = told(ask(api, "echo", sequence_id=identifier, sequence_start=start, sequence_end=end, timeout=7))
    del echoed["execution"]
    assert echoed == {"sequence_id": identifier, "sequence_start": start, "sequence_end": end, "timeout": 7}


def raw(server: RunningServer, door: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Send parameters that the stock clients cannot; numbers above int64 over gRPC as the bits that they have."""
    if door == "http":
        tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
        status, answer = call(server, "/v2/models/echo/infer", {"inputs": [tensor], "parameters": parameters})
        assert status == 200, answer
        return answer["parameters"]
    request = pb.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(16)])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])
    for key, value in parameters.items():
        if isinstance(value, bool):
            request.parameters[key].bool_param = value
        elif isinstance(value, str):
            request.parameters[key].string_param = value
        else:
            request.parameters[key].int64_param = value - 2**64 if value >= 2**63 else value
    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        return values(infer(request, timeout=30).parameters)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("identifier", [0, "", 2**63, 2**64 - 1])
def test_identifiers_at_the_edges_reach_the_backend(server: RunningServer, door: str, identifier: int | str) -> None:
    assert raw(server, door, {"sequence_id": identifier})["sequence_id"] == (identifier or 0)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("parameters", "field", "value"),
    [
        ({"timeout": 5}, "timeout", 5),
        ({"sequence_start": True}, "sequence_start", True),
        ({"sequence_end": True}, "sequence_end", True),
        ({"sequence_id": "s"}, "sequence_id", "s"),
    ],
)
def test_each_field_reaches_the_backend_though_it_is_the_only_one(
    server: RunningServer, door: str, parameters: dict[str, Any], field: str, value: object
) -> None:
    nothing = {"sequence_id": 0, "sequence_start": False, "sequence_end": False, "timeout": 0}
    echoed = raw(server, door, parameters)
    del echoed["execution"]
    assert echoed == {**nothing, field: value}


@pytest.mark.parametrize("door", DOORS)
def test_reserved_fields_do_not_appear_among_the_parameters(server: RunningServer, door: str) -> None:
    """`echo_parameters` gives back what the backend gets as the client's own parameters."""
    echoed = raw(server, door, {"priority": 1, "timeout": 3, "sequence_id": 4, "mine": "x"})
    del echoed["execution"]
    assert echoed == {"sequence_id": 4, "sequence_start": False, "sequence_end": False, "timeout": 3, "mine": "x"}


# --- Priority -----------------------------------------------------------------------------------------------------


class Crowd:
    """Requests that wait behind one that runs, each with a client of its own. The backend tells in what order they ran."""

    def __init__(self, server: RunningServer, door: str, model: str) -> None:
        self._server = server
        self._door = door
        self._model = model
        self._pool = ThreadPoolExecutor(16)
        self._executions: dict[str, int] = {}
        self._waiting = 0

    @property
    def order(self) -> list[str]:
        """The names of those that were answered, in the order in which they ran."""
        return sorted(self._executions, key=self._executions.__getitem__)

    def __enter__(self) -> Crowd:
        self._busy = self._pool.submit(self._ask, "busy", {"parameters": {"delay_ms": BUSY_MS}})
        time.sleep(0.15)  # it runs by now: no client can see when
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def add(self, name: str, **keywords: Any) -> Future[float]:
        """Send one more and wait until it is in the queue. Its result is the seconds it took."""
        future = self._pool.submit(self._ask, name, keywords)
        self._waiting += 1
        until(lambda: depth(self._server, self._model) == self._waiting or future.done(), f"{name} does not wait")
        return future

    def left(self) -> None:
        """Note that one of those that wait has left the queue."""
        self._waiting -= 1

    def _ask(self, name: str, keywords: dict[str, Any]) -> float:
        began = time.monotonic()
        with client(self._server, self._door) as api:
            self._executions[name] = told(ask(api, self._model, **keywords))["execution"]
        return time.monotonic() - began


def depth(server: RunningServer, model: str) -> int:
    line = next(line for line in server.metrics().splitlines() if f'headrace_queue_depth{{model="{model}"' in line)
    return int(float(line.rpartition(" ")[2]))


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, what


@pytest.mark.parametrize("door", DOORS)
def test_lower_numbers_run_first_and_what_is_no_level_has_the_default(server: RunningServer, door: str) -> None:
    with Crowd(server, door, "levels") as crowd:
        crowd.add("third", priority=3)
        crowd.add("none")
        crowd.add("above", priority=99)
        crowd.add("second", priority=2)
        crowd.add("first", priority=1)
    assert crowd.order == ["busy", "first", "none", "above", "second", "third"]


@pytest.mark.parametrize("door", DOORS)
def test_without_levels_priority_changes_nothing(server: RunningServer, door: str) -> None:
    with Crowd(server, door, "plain") as crowd:
        crowd.add("first", priority=9)
        crowd.add("second", priority=1)
    assert crowd.order == ["busy", "first", "second"]


# --- Timeout ------------------------------------------------------------------------------------------------------


def rejected(future: Future[float]) -> str:
    with pytest.raises(InferenceServerException) as raised:
        future.result()
    assert str(raised.value.status()) in {"503", "StatusCode.UNAVAILABLE"}
    return raised.value.message()


@pytest.mark.parametrize("door", DOORS)
def test_a_request_may_shorten_its_time_in_the_queue(server: RunningServer, door: str) -> None:
    with Crowd(server, door, "hurried") as crowd:
        began = time.monotonic()
        short = crowd.add("short", timeout=50_000)
        assert "waited" in rejected(short)
        assert time.monotonic() - began < BUSY_MS / 1000 - 0.15, "it was rejected only once the instance was free"
        crowd.left()
        crowd.add("patient")
    assert crowd.order == ["busy", "patient"]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("model", ["fixed", "plain"])
def test_a_timeout_counts_only_where_the_policy_allows_it(server: RunningServer, door: str, model: str) -> None:
    with Crowd(server, door, model) as crowd:
        crowd.add("short", timeout=1)
    assert crowd.order == ["busy", "short"]


@pytest.mark.parametrize("door", DOORS)
def test_a_request_cannot_lengthen_its_time_in_the_queue(server: RunningServer, door: str) -> None:
    with Crowd(server, door, "short") as crowd:
        rejected(crowd.add("long", timeout=60_000_000))
    assert crowd.order == ["busy"]


@pytest.mark.parametrize("door", DOORS)
def test_where_the_action_is_delay_a_late_request_runs_behind_the_others(server: RunningServer, door: str) -> None:
    with Crowd(server, door, "delayed") as crowd:
        crowd.add("late", timeout=1_000)
        crowd.add("patient")
    assert crowd.order == ["busy", "patient", "late"]


@pytest.mark.parametrize("field", ["priority", "timeout"])
@pytest.mark.parametrize("value", [2**64, -1, 1.5, "1", True, None])
def test_a_value_out_of_range_is_refused_with_the_range(server: RunningServer, field: str, value: object) -> None:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    status, answer = call(server, "/v2/models/levels/infer", {"inputs": [tensor], "parameters": {field: value}})
    assert (status, field in answer["error"]) == (400, True)
    assert str(2**64 - 1) in answer["error"]


def test_a_negative_value_is_refused_over_grpc_too(server: RunningServer) -> None:
    with client(server, "grpc") as api:
        code, text = refused(ask, api, "levels", timeout=-1)
        assert (code, "timeout" in text) == ("INVALID_ARGUMENT", True)
