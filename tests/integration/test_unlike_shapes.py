"""Requests of unlike shapes at one model: apart, ragged, padded, with inputs left out; each gets its own, at both doors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

import onnx_models
import torch_models
from figures import figures
from harness import RunningServer, running
from repositories import add_identity, add_onnx

DELAY_US = 1_000_000
BATCHING = f"max_batch_size: 16 dynamic_batching {{ max_queue_delay_microseconds: {DELAY_US} }}"
FILLING = "dynamic_batching { max_queue_delay_microseconds: 20000000 preferred_batch_size: [ 8 ] }"
"""Runs eight rows at once, and fewer only after a time that no test waits for."""
SLOW_BATCHING = f"max_batch_size: 8 {FILLING}"
LENGTHS = range(1, 9)
CLIENTS = len(LENGTHS)

RAGGED_SUMS = f"""
backend: "onnxruntime" {SLOW_BATCHING} instance_group {{ count: 1 kind: KIND_CPU }}
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }}
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}, {{ name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] }} ]
batch_input {{ kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "ENDS" data_type: TYPE_INT32 source_input: "INPUT0" }}
batch_output {{ kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "OUTPUT0" source_input: "INPUT0" }}
"""
MASKED_MEAN = f"""
backend: "onnxruntime" {SLOW_BATCHING} instance_group {{ count: 1 kind: KIND_CPU }}
parameters {{ key: "pad_batch" value {{ string_value: "INPUT0=7, MASK" }} }}
parameters {{ key: "pad_batch_to" value {{ string_value: "any" }} }}
parameters {{ key: "pad_batch_cut" value {{ string_value: "OUTPUT0[0] = INPUT0[0]" }} }}
"""
RAGGED_PYTHON = f"""
backend: "python" {SLOW_BATCHING} instance_group {{ count: 1 kind: KIND_CPU }}
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }},
        {{ name: "SCALE" data_type: TYPE_FP32 dims: [ 1 ] optional: true }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }}, {{ name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] }} ]
"""
PYTHON_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            scale = given.get("SCALE", np.float32(1))
            seen = f"{len(requests)} {sorted(given)}".encode()
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("OUTPUT0", given["INPUT0"] * scale),
                        pb_utils.Tensor("SEEN", np.array([[seen]], np.object_)),
                    ]
                )
            )
        return responses
"""


def save_sums(path: Path) -> Path:
    return torch_models.save_script(path, torch_models.RaggedSums())


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    dynamic = f"dynamic_batching {{ max_queue_delay_microseconds: {DELAY_US} }} instance_group {{ count: 1 }}"
    add_identity(repository, "apart", max_batch_size=16, extra=dynamic)
    add_identity(repository, "apart_strings", datatype="STRING", max_batch_size=16, extra=dynamic)
    for kind, datatype in (("ragged", "FP32"), ("ragged_strings", "STRING")):
        folder = add_identity(repository, kind, datatype=datatype, max_batch_size=8, extra=FILLING)
        config = (folder / "config.pbtxt").read_text()
        (folder / "config.pbtxt").write_text(config.replace("dims: [ -1 ]", "dims: [ -1 ] allow_ragged_batch: true", 1))
    add_onnx(repository, "ragged_sums", onnx_models.ragged_sums, config=RAGGED_SUMS)
    torch_config = RAGGED_SUMS.replace("onnxruntime", "pytorch")
    torch_models.add_torch(repository, "torch_sums", save_sums, torch_config)
    add_onnx(repository, "masked_mean", onnx_models.masked_mean, config=MASKED_MEAN)
    rounded = (
        MASKED_MEAN.replace(SLOW_BATCHING, BATCHING)
        + 'parameters { key: "pad_batch_to" value { string_value: "4, 8" } }'
    )
    add_onnx(repository, "rounded", onnx_models.masked_mean, config=rounded)
    optional = f"""backend: "onnxruntime" {BATCHING} instance_group {{ count: 1 kind: KIND_CPU }}
        input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }},
                {{ name: "BIAS" data_type: TYPE_FP32 dims: [ 1 ] optional: true }} ]"""
    add_onnx(repository, "optional", onnx_models.defaulted_rows, config=optional)
    python = repository / "python"
    (python / "1").mkdir(parents=True)
    (python / "config.pbtxt").write_text(RAGGED_PYTHON)
    (python / "1" / "model.py").write_text(PYTHON_MODEL)
    return repository


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[RunningServer]:
    with running(repository) as server:
        yield server


class Asking:
    """Stock clients at one of the doors, one for each request: that for HTTP is for a single thread."""

    def __init__(self, server: RunningServer, door: str) -> None:
        self.kit = {"http": tritonclient.http, "grpc": tritonclient.grpc}[door]
        self.address = server.http if door == "http" else server.grpc

    def one(self, model: str, arrays: Mapping[str, np.ndarray]):
        inputs = []
        for name, array in arrays.items():
            datatype = "BYTES" if array.dtype == np.object_ else "FP32"
            tensor = self.kit.InferInput(name, list(array.shape), datatype)
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        with self.kit.InferenceServerClient(self.address) as client:
            return client.infer(model, inputs)

    def together(self, model: str, requests: list[Mapping[str, np.ndarray]]) -> list:
        """Send requests at once; return their answers in order."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda arrays: self.one(model, arrays), requests))


@pytest.fixture(params=["http", "grpc"])
def door(request: pytest.FixtureRequest, server: RunningServer) -> Asking:
    return Asking(server, request.param)


def row(length: int, start: float = 0.0) -> np.ndarray:
    return np.arange(start, start + length, dtype=np.float32).reshape(1, length)


def strings(length: int) -> np.ndarray:
    return np.array([[b"%d" % length * at for at in range(length)]], np.object_)


@pytest.mark.parametrize(("model", "make"), [("apart", row), ("apart_strings", strings)])
def test_unlike_shapes_are_never_in_one_execution_and_do_not_wait_for_each_other(server, door, model, make) -> None:
    before = figures(server, model)
    started = time.monotonic()
    waits = []

    def ask(length: int) -> np.ndarray:
        answer = door.one(model, {"INPUT0": make(length)}).as_numpy("OUTPUT0")
        waits.append(time.monotonic() - started)
        return answer

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(ask, LENGTHS))
    for length, answer in zip(LENGTHS, answers, strict=True):
        assert np.array_equal(answer, make(length))
    assert figures(server, model).since(before).executions == CLIENTS
    assert sorted(waits)[-2] < DELAY_US / 1e6, "only the last shape has nobody behind it, and may wait for more"


@pytest.mark.parametrize(("model", "make"), [("ragged", row), ("ragged_strings", strings)])
def test_ragged_requests_share_an_execution_and_each_gets_its_own(server, door, model, make) -> None:
    before = figures(server, model)
    answers = door.together(model, [{"INPUT0": make(length)} for length in LENGTHS])
    for length, answer in zip(LENGTHS, answers, strict=True):
        assert np.array_equal(answer.as_numpy("OUTPUT0"), make(length))
    assert figures(server, model).since(before).executions == 1


@pytest.mark.parametrize("model", ["ragged_sums", "torch_sums"])
def test_a_model_is_told_where_ragged_requests_end_and_its_outputs_are_shared_out(server, door, model) -> None:
    before = figures(server, model)
    given = [row(length, 10.0 * length) for length in LENGTHS]
    for array, answer in zip(given, door.together(model, [{"INPUT0": a} for a in given]), strict=True):
        assert np.array_equal(answer.as_numpy("OUTPUT0"), array * 2)
        assert answer.as_numpy("SUM").tolist() == [[array.sum()]]
    assert figures(server, model).since(before).executions == 1


def test_a_ragged_request_that_the_model_refuses_fails_alone(server, door) -> None:
    given = [row(length) - (length == 5) for length in LENGTHS]

    def ask(array: np.ndarray) -> object:
        try:
            return door.one("torch_sums", {"INPUT0": array})
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(ask, given))
    for array, answer in zip(given, answers, strict=True):
        if array.min() < 0:
            assert "a negative element" in str(answer)
        else:
            assert answer.as_numpy("SUM").tolist() == [[array.sum()]]


def test_a_ragged_input_may_be_empty_beside_others(server, door) -> None:
    given = [row(length) for length in (3, 0, *range(1, 7))]
    for array, answer in zip(given, door.together("ragged_sums", [{"INPUT0": a} for a in given]), strict=True):
        assert answer.as_numpy("OUTPUT0").shape == array.shape
        assert answer.as_numpy("SUM").tolist() == [[array.sum()]]


def test_a_python_model_sees_each_ragged_request_in_its_own_shape_and_the_inputs_that_came(server, door) -> None:
    before = figures(server, "python")
    given = [row(length) for length in LENGTHS]
    for array, answer in zip(given, door.together("python", [{"INPUT0": a} for a in given]), strict=True):
        assert np.array_equal(answer.as_numpy("OUTPUT0"), array)
        assert answer.as_numpy("SEEN").tolist() == [[b"8 ['INPUT0']"]]
    assert figures(server, "python").since(before).executions == 1


def test_requests_that_leave_an_optional_input_out_are_not_mixed_with_those_that_give_it(server, door) -> None:
    before = figures(server, "optional")
    bias = np.array([[5.0]], np.float32)
    requests = [{"INPUT0": row(4, n), **({"BIAS": bias * n} if n % 2 else {})} for n in range(CLIENTS)]
    for n, answer in enumerate(door.together("optional", requests)):
        assert answer.as_numpy("OUTPUT0").tolist() == (row(4, n) + (5 * n if n % 2 else 1)).tolist()
    assert 2 <= figures(server, "optional").since(before).executions <= CLIENTS


def test_padded_requests_share_an_execution_and_get_back_their_own_length(server, door) -> None:
    before = figures(server, "masked_mean")
    given = [row(length, 10.0 * length) for length in LENGTHS]
    requests = [{"INPUT0": array, "MASK": np.ones_like(array)} for array in given]
    for array, answer in zip(given, door.together("masked_mean", requests), strict=True):
        assert np.array_equal(answer.as_numpy("OUTPUT0"), array + 1)
        assert answer.as_numpy("MEAN").tolist() == [[array.mean()]]
    assert figures(server, "masked_mean").since(before).executions == 1


def test_requests_that_are_padded_to_unlike_sizes_are_apart(server, door) -> None:
    before = figures(server, "rounded")
    given = [row(length, 10.0 * length) for length in LENGTHS]
    requests = [{"INPUT0": array, "MASK": np.ones_like(array)} for array in given]
    for array, answer in zip(given, door.together("rounded", requests), strict=True):
        assert np.array_equal(answer.as_numpy("OUTPUT0"), array + 1)
        assert answer.as_numpy("MEAN").tolist() == [[array.mean()]]
    assert 2 <= figures(server, "rounded").since(before).executions < CLIENTS
