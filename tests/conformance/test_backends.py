"""Every backend of this distribution passes the suite that it offers to others, with models of every kind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

import onnx_models
from headrace_backends.api import Batch, ModelContext, ModelDescription, StreamResponse, send_many
from headrace_backends.conformance import CHECKS, Case, LoadedModel, check_backend, loaded
from headrace_backends.identity.backend import IdentityBackend
from headrace_backends.onnxruntime.backend import OnnxRuntimeBackend
from headrace_protocol import datatype
from headrace_protocol.datatype import BYTES, DataType
from headrace_protocol.errors import InferError, invalid


def io(name: str, config_type: str, *dims: int) -> dict:
    return {"name": name, "data_type": config_type, "dims": list(dims)}


def config(inputs: list[dict], outputs: list[dict], max_batch_size: int = 8, **parameters: str) -> dict:
    return {
        "name": "m",
        "max_batch_size": max_batch_size,
        "input": inputs,
        "output": outputs,
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }


def example(element: DataType, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    if element is BYTES:
        values = np.empty(count, object)
        values[:] = [f"é{i}".encode() for i in range(count)]
        return values.reshape(shape)
    return (np.arange(count) % 2).astype(element.numpy).reshape(shape)


ALL_NAMES = [element.name for element in datatype.ALL]


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_identity_passes_for_every_datatype(tmp_path: Path, name: str, max_batch_size: int) -> None:
    element = datatype.BY_NAME[name]
    dims = [-1] if max_batch_size else [-1, -1]
    case = Case(
        tmp_path,
        config(
            [io("INPUT0", element.config_name, *dims), io("INPUT1", element.config_name, *dims)],
            [io("OUTPUT0", element.config_name, *dims), io("OUTPUT1", element.config_name, *dims)],
            max_batch_size,
            allow_misbehaviour="true",
        ),
        {"INPUT0": example(element, (1, 4)), "INPUT1": example(element, (1, 5))},
        bad_parameters={"fail": "not this one"},
        slow_parameters={"hang": True},
    )
    check_backend(IdentityBackend, case)


ONNX_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
    "BF16": TensorProto.BFLOAT16,
}


@pytest.mark.parametrize("name", ONNX_TYPES)
def test_onnxruntime_passes_with_an_identity_of(tmp_path: Path, name: str) -> None:
    element = datatype.BY_NAME[name]
    onnx_models.identity(tmp_path / "1" / "model.onnx", ONNX_TYPES[name])
    not_text = np.array([[b"\xff\xfe", b"a", b"b"]], object)
    case = Case(
        tmp_path,
        config([io("INPUT0", element.config_name, -1)], [io("OUTPUT0", element.config_name, -1)]),
        {"INPUT0": example(element, (1, 3))},
        bad_inputs={"INPUT0": not_text} if element is BYTES else None,
    )
    check_backend(OnnxRuntimeBackend, case)


def test_onnxruntime_passes_with_a_model_that_runs_until_it_is_cancelled(tmp_path: Path) -> None:
    onnx_models.countdown(tmp_path / "1" / "model.onnx")
    inputs = {"INPUT0": np.ones((1, 1), np.float32), "STEPS": np.array([1])}
    case = Case(
        tmp_path,
        config(
            [io("INPUT0", "TYPE_FP32", -1, -1), io("STEPS", "TYPE_INT64", 1)], [io("OUTPUT0", "TYPE_FP32", -1, -1)], 0
        ),
        inputs,
        slow_inputs={**inputs, "STEPS": np.array([10**12])},
    )
    check_backend(OnnxRuntimeBackend, case)


def test_onnxruntime_passes_with_two_inputs_and_outputs(tmp_path: Path) -> None:
    onnx_models.add_sub(tmp_path / "1" / "model.onnx")
    tensors = [io(f"{kind}{i}", "TYPE_FP32", 16) for kind in ("INPUT", "OUTPUT") for i in (0, 1)]
    inputs = {"INPUT0": np.arange(16, dtype=np.float32)[None], "INPUT1": np.ones((1, 16), np.float32)}
    check_backend(OnnxRuntimeBackend, Case(tmp_path, config(tensors[:2], tensors[2:]), inputs))


def test_onnxruntime_passes_with_outputs_large_enough_to_be_written_in_place(tmp_path: Path) -> None:
    onnx_models.add_sub(tmp_path / "1" / "model.onnx", ("batch", "n"))
    tensors = [io(f"{kind}{i}", "TYPE_FP32", -1) for kind in ("INPUT", "OUTPUT") for i in (0, 1)]
    inputs = {f"INPUT{i}": np.arange(200_000, dtype=np.float32)[None] for i in (0, 1)}
    check_backend(OnnxRuntimeBackend, Case(tmp_path, config(tensors[:2], tensors[2:]), inputs))


def test_onnxruntime_passes_with_a_scalar_model(tmp_path: Path) -> None:
    onnx_models.scalar(tmp_path / "1" / "model.onnx")
    scalar = {"dims": [1], "reshape": {"shape": []}, "data_type": "TYPE_FP32"}
    case = Case(
        tmp_path,
        config([{"name": "INPUT0", **scalar}], [{"name": "OUTPUT0", **scalar}], 0),
        {"INPUT0": np.array(3, np.float32)},
    )
    check_backend(OnnxRuntimeBackend, case)


def test_onnxruntime_passes_with_a_shape_that_depends_on_the_data(tmp_path: Path) -> None:
    onnx_models.nonzero(tmp_path / "1" / "model.onnx")
    case = Case(
        tmp_path,
        config([io("INPUT0", "TYPE_FP32", -1)], [io("OUTPUT0", "TYPE_INT64", 1, -1)], 0),
        {"INPUT0": np.array([0, 1, 0, 2], np.float32)},
    )
    check_backend(OnnxRuntimeBackend, case)


def decoupled(max_batch_size: int = 0, **parameters: str) -> dict:
    tensors = [io("INPUT0", "TYPE_FP32", -1)], [io("OUTPUT0", "TYPE_FP32", -1)]
    return config(*tensors, max_batch_size, **parameters) | {"model_transaction_policy": {"decoupled": True}}


def values(*elements: float, rows: bool = False) -> dict[str, np.ndarray]:
    array = np.array(elements, np.float32)
    return {"INPUT0": array[None] if rows else array}


@pytest.mark.parametrize("max_batch_size", [0, 8])
@pytest.mark.parametrize("empty_final", ["true", "false"])
def test_identity_passes_where_it_streams(tmp_path: Path, max_batch_size: int, empty_final: str) -> None:
    case = Case(
        tmp_path,
        decoupled(max_batch_size, allow_misbehaviour="true", responses="3", empty_final=empty_final),
        values(1, 2, 3, rows=max_batch_size > 0),
        bad_parameters={"fail": "not this one"},
        slow_parameters={"hang": True},
    )
    check_backend(IdentityBackend, case)


def test_identity_passes_where_a_stream_holds_its_instance(tmp_path: Path) -> None:
    case = Case(
        tmp_path,
        decoupled(allow_misbehaviour="true", responses="2", hold_instance="true"),
        values(1, 2, 3),
        slow_parameters={"responses": 10**5, "response_delay_ms": 10**5},
    )
    check_backend(IdentityBackend, case)


def test_identity_passes_where_it_repeats(tmp_path: Path) -> None:
    inputs = [io("IN", "TYPE_INT32", -1), io("DELAY", "TYPE_UINT32", -1), io("WAIT", "TYPE_UINT32", 1)]
    repeat = config(inputs, [io("OUT", "TYPE_INT32", 1), io("IDX", "TYPE_UINT32", 1)], 0)
    example = {
        "IN": np.array([4, 5, 6], np.int32),
        "DELAY": np.array([1, 0, 2], np.uint32),
        "WAIT": np.array([1], np.uint32),
    }
    case = Case(
        tmp_path,
        repeat | {"model_transaction_policy": {"decoupled": True}},
        example,
        bad_inputs={**example, "DELAY": np.zeros(4, np.uint32)},
        slow_inputs={**example, "WAIT": np.array([10**6], np.uint32)},
    )
    check_backend(IdentityBackend, case)


def test_onnxruntime_passes_with_a_decoupled_model(tmp_path: Path) -> None:
    onnx_models.identity(tmp_path / "1" / "model.onnx", TensorProto.FLOAT)
    check_backend(OnnxRuntimeBackend, Case(tmp_path, decoupled(8), values(1, 2, rows=True)))


class CountingBackend(IdentityBackend):
    """Sends each element by itself, from `execute`, as the simplest decoupled backend does."""

    def execute(self, batch: Batch) -> None:
        for request in batch.requests:
            try:
                for element in request.input("INPUT0").reshape(-1):
                    request.send({"OUTPUT0": np.array([element])})
                    if element < 0:
                        raise invalid("an element below 0")
                    request.wait(float(element))
                request.complete()
            except InferError as error:
                request.fail(error)


def test_a_backend_that_sends_and_waits_in_execute_passes(tmp_path: Path) -> None:
    case = Case(tmp_path, decoupled(), values(0, 0.01), bad_inputs=values(0, -1), slow_inputs=values(0, 10**5, 10**5))
    check_backend(CountingBackend, case)


class EndlessBackend(IdentityBackend):
    """Defers what it never answers."""

    def execute(self, batch: Batch) -> None:
        batch.defer()


class HastyBackend(IdentityBackend):
    """Sends on although the client reads too slowly."""

    def execute(self, batch: Batch) -> None:
        for request in batch.requests:
            send_many(
                [StreamResponse(request, {"OUTPUT0": request.input("INPUT0")}), StreamResponse(request, final=True)]
            )


class ForgetfulBackend(IdentityBackend):
    """Goes on with what was cancelled."""

    def execute(self, batch: Batch) -> None:
        for request in batch.requests:
            with suppress(InferError):
                request.send({"OUTPUT0": request.input("INPUT0")})
            request.complete()


@pytest.mark.parametrize("broken", [EndlessBackend, HastyBackend, ForgetfulBackend])
def test_the_suite_finds_a_broken_backend_of_a_decoupled_model(tmp_path: Path, broken: type[IdentityBackend]) -> None:
    case = Case(tmp_path, decoupled(), values(1), slow_inputs=values(2), limit_s=0.3)
    with pytest.raises(AssertionError):
        check_backend(broken, case)


class CrossedBackend(IdentityBackend):
    """Gives the rows of a batch in the wrong order."""

    def execute(self, batch: Batch) -> None:
        batch.respond({"OUTPUT0": batch.inputs["INPUT0"][::-1]})


class SilentBackend(IdentityBackend):
    """Answers nothing."""

    def execute(self, batch: Batch) -> None:
        return


class DeafBackend(IdentityBackend):
    """Computes what nobody asked for and nothing else."""

    def initialize(self, model: ModelContext) -> ModelDescription:
        super().initialize(model)
        return ModelDescription()

    def execute(self, batch: Batch) -> None:
        batch.respond({"OUTPUT1": batch.inputs["INPUT0"]})


@pytest.mark.parametrize("broken", [CrossedBackend, SilentBackend, DeafBackend])
def test_the_suite_finds_a_broken_backend(tmp_path: Path, broken: type[IdentityBackend]) -> None:
    case = Case(
        tmp_path,
        config([io("INPUT0", "TYPE_FP32", 2)], [io("OUTPUT0", "TYPE_FP32", 2)]),
        {"INPUT0": np.array([[1, 2]], np.float32)},
    )
    with pytest.raises(AssertionError):
        check_backend(broken, case)


def test_the_suite_has_a_check_for_each_part_of_the_contract() -> None:
    assert {check.__name__ for check in CHECKS} >= {
        "check_single",
        "check_rows",
        "check_wanted",
        "check_failure_is_private",
        "check_cancelled_while_running",
        "check_no_elements",
        "check_spill",
    }


def test_a_loaded_model_is_finalized_at_the_end(tmp_path: Path) -> None:
    ended: list[bool] = []

    class Counting(IdentityBackend):
        def finalize(self) -> None:
            ended.append(True)

    case = Case(tmp_path, config([io("INPUT0", "TYPE_FP32", 2)], [io("OUTPUT0", "TYPE_FP32", 2)]), {})
    with loaded(Counting, case) as model:
        assert isinstance(model, LoadedModel)
        assert not ended
    assert ended == [True]
