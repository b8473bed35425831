"""Python models of the kinds that Triton shows as examples, with their tensors and names, under the stock clients."""

from __future__ import annotations

import queue
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcclient_aio
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from harness import RunningServer, running
from torch_models import AddSub, add_torch, save_script

EXAMPLES = Path(__file__).resolve().parents[1] / "python_examples"
CLIENTS: dict[str, ModuleType] = {"http": httpclient, "grpc": grpcclient}
FIRST, SECOND = np.array([1, 2, 3, 4], np.float32), np.array([10, 0.5, -3, 0], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("examples") / "models"
    shutil.copytree(EXAMPLES, repository, ignore=shutil.ignore_patterns("__pycache__"))
    tensors = ", ".join(f'{{ name: "{{kind}}{n}" data_type: TYPE_FP32 dims: [ 4 ] }}' for n in (0, 1))
    io = f"input [ {tensors.replace('{kind}', 'INPUT')} ] output [ {tensors.replace('{kind}', 'OUTPUT')} ]"
    config = f'backend: "pytorch" {io} instance_group [ {{ kind: KIND_CPU }} ]'
    add_torch(repository, "pytorch", lambda path: save_script(path, AddSub()), config)
    with running(repository) as started:
        yield started


def pair(module: ModuleType, first: np.ndarray = FIRST, second: np.ndarray = SECOND, *, name: str = "") -> list[Any]:
    """Return INPUT0 and INPUT1, and MODEL_NAME where there is one."""
    arrays = {"INPUT0": first, "INPUT1": second}
    if name:
        arrays["MODEL_NAME"] = np.array([name.encode()], np.object_)
    inputs = []
    for tensor, array in arrays.items():
        datatype = "BYTES" if array.dtype == np.object_ else "FP32"
        inputs.append(module.InferInput(tensor, array.shape, datatype))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def address(server: RunningServer, door: str) -> str:
    return server.http if door == "http" else server.grpc


@pytest.mark.parametrize("door", CLIENTS)
@pytest.mark.parametrize(
    ("model", "callee"),
    [
        *(("add_sub", ""), ("custom_metrics", ""), ("nobatch_auto_complete", ""), ("bls_async", "")),
        *(("bls_sync", "add_sub"), ("bls_sync", "pytorch")),
    ],
)
def test_sum_and_difference(server: RunningServer, door: str, model: str, callee: str) -> None:
    module = CLIENTS[door]
    outputs = [module.InferRequestedOutput("OUTPUT0"), module.InferRequestedOutput("OUTPUT1")]
    with module.InferenceServerClient(address(server, door)) as client:
        answer = client.infer(model, pair(module, name=callee), request_id="1", outputs=outputs)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), FIRST + SECOND)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), FIRST - SECOND)


@pytest.mark.parametrize("door", CLIENTS)
def test_a_call_to_a_model_that_is_not_there_is_an_error_that_names_it(server: RunningServer, door: str) -> None:
    module = CLIENTS[door]
    with (
        module.InferenceServerClient(address(server, door)) as client,
        pytest.raises(InferenceServerException, match="undefined_model"),
    ):
        client.infer("bls_sync", pair(module, name="undefined_model"))


@pytest.mark.parametrize("door", CLIENTS)
def test_a_model_that_completes_its_configuration_takes_batches(server: RunningServer, door: str) -> None:
    module = CLIENTS[door]
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    with module.InferenceServerClient(address(server, door)) as client:
        config = client.get_model_config("batch_auto_complete", **({"as_json": True} if door == "grpc" else {}))
        config = config.get("config", config)
        answer = client.infer("batch_auto_complete", pair(module, rows, rows))
    assert config["max_batch_size"] == 4
    assert [tensor["name"] for tensor in config["output"]] == ["OUTPUT0", "OUTPUT1"]
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), 2 * rows)


@pytest.mark.parametrize("door", CLIENTS)
@pytest.mark.parametrize("model", ["bls_decoupled_sync", "bls_decoupled_async"])
@pytest.mark.parametrize("number", [0, 1, 7])
def test_the_responses_of_a_decoupled_model_add_up_to_the_square(
    server: RunningServer, door: str, model: str, number: int
) -> None:
    module = CLIENTS[door]
    tensor = module.InferInput("IN", [1], "INT32")
    tensor.set_data_from_numpy(np.array([number], np.int32))
    with module.InferenceServerClient(address(server, door)) as client:
        assert client.infer(model, [tensor]).as_numpy("SUM").tolist() == [number**2]


def streamed(server: RunningServer, requests: dict[str, tuple[str, dict[str, np.ndarray]]]) -> dict[str, list[tuple]]:
    """Send requests by id in one stream; return the outputs of the responses of each, in order."""
    arrived: queue.Queue = queue.Queue()
    got: dict[str, list[tuple]] = {name: [] for name in requests}
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: arrived.put(error or result))
        for name, (model, arrays) in requests.items():
            inputs = []
            for tensor, array in arrays.items():
                inputs.append(
                    grpcclient.InferInput(tensor, array.shape, {"i": "INT32", "u": "UINT32"}[array.dtype.kind])
                )
                inputs[-1].set_data_from_numpy(array)
            client.async_stream_infer(model, inputs, request_id=name, enable_empty_final_response=True)
        open_ones = set(requests)
        while open_ones:
            result = arrived.get(timeout=30)
            assert not isinstance(result, Exception), result
            response = result.get_response()
            if response.outputs:
                got[response.id].append(tuple(result.as_numpy(output.name).item() for output in response.outputs))
            if response.parameters["triton_final_response"].bool_param:
                open_ones.remove(response.id)
    return got


def test_squares_of_many_requests_of_one_stream(server: RunningServer) -> None:
    numbers = [4, 2, 0, 1]
    asked = {str(number): ("square_int32", {"IN": np.array([number], np.int32)}) for number in numbers}
    assert streamed(server, asked) == {str(number): [(number,)] * number for number in numbers}


def test_each_element_is_repeated_after_its_delay(server: RunningServer) -> None:
    def asked(values: list[int], delay: int) -> tuple[str, dict[str, np.ndarray]]:
        delays = np.full(len(values), delay, np.uint32)
        return "repeat_int32", {"IN": np.array(values, np.int32), "DELAY": delays, "WAIT": np.zeros(1, np.uint32)}

    got = streamed(server, {"slow": asked([4, 2, 0, 1], 20), "fast": asked([7, 8], 0)})
    assert got == {"slow": [(4, 0), (2, 1), (0, 2), (1, 3)], "fast": [(7, 0), (8, 1)]}


async def test_the_client_for_event_loops_streams_too(server: RunningServer) -> None:
    tensor = grpcclient_aio.InferInput("IN", [1], "INT32")
    tensor.set_data_from_numpy(np.array([3], np.int32))

    async def requests() -> Any:
        yield {"model_name": "square_int32", "inputs": [tensor]}

    async with grpcclient_aio.InferenceServerClient(server.grpc) as client:
        answers = [(result, error) async for result, error in client.stream_infer(requests())]
    assert [error for _, error in answers] == [None] * 3
    assert [result.as_numpy("OUT").tolist() for result, _ in answers] == [[3]] * 3


def test_a_metric_of_its_own_counts_on(server: RunningServer) -> None:
    def total() -> float:
        (found,) = re.findall(
            r'^requests_process_latency_ns\w*\{model="custom_metrics",version="1"\} (\S+)$',
            server.metrics(),
            re.MULTILINE,
        )
        return float(found)

    with httpclient.InferenceServerClient(server.http) as client:
        client.infer("custom_metrics", pair(httpclient))
        before = total()
        client.infer("custom_metrics", pair(httpclient))
    assert total() > before > 0
