"""The ONNX Runtime backend: loading, describing and running models with peculiarities."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

import onnx_models
from headrace_backends.conformance import Answer, Case, Inputs, loaded
from headrace_backends.onnxruntime.backend import BIND_BYTES, OnnxRuntimeBackend
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.tensor import TensorSpec

LARGE = BIND_BYTES // 8


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the model belongs."""
    return tmp_path / "1" / "model.onnx"


def io(name: str, config_type: str, *dims: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": config_type, "dims": list(dims), **more}


def case(
    file: Path,
    inputs: list[dict[str, Any]],
    outputs: list[dict[str, Any]],
    example: Inputs | None = None,
    max_batch_size: int = 0,
    **config: Any,
) -> Case:
    values = {"name": "m", "max_batch_size": max_batch_size, "input": inputs, "output": outputs, **config}
    return Case(file.parent.parent, values, example or {})


def answer(case: Case) -> Answer:
    with loaded(OnnxRuntimeBackend, case) as model:
        (only,) = model.run(model.batch([case.inputs]))
    return only


def refused(case: Case) -> InferError:
    with pytest.raises(InferError) as caught, loaded(OnnxRuntimeBackend, case):
        pass
    return caught.value


def test_a_model_is_described_with_its_batch_dimension_and_varying_ones(file: Path) -> None:
    onnx_models.add_sub(file, ("batch", 4, "n"), TensorProto.INT32)
    with loaded(OnnxRuntimeBackend, case(file, [], [])) as model:
        found = model.description
    assert found.inputs == (TensorSpec("INPUT0", "INT32", (-1, 4, -1)), TensorSpec("INPUT1", "INT32", (-1, 4, -1)))
    assert found.outputs == (TensorSpec("OUTPUT0", "INT32", (-1, 4, -1)), TensorSpec("OUTPUT1", "INT32", (-1, 4, -1)))
    assert found.batching is True


@pytest.mark.parametrize("dims", [(), (3, "n")])
def test_a_model_whose_first_dimension_is_fixed_or_absent_does_not_batch(file: Path, dims: tuple) -> None:
    onnx_models.save(
        file,
        [onnx_models.helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])],
        [onnx_models.tensor("INPUT0", dims)],
        [onnx_models.tensor("OUTPUT0", dims)],
    )
    with loaded(OnnxRuntimeBackend, case(file, [], [])) as model:
        assert model.description.batching is False


def test_a_missing_file_is_named(file: Path) -> None:
    error = refused(case(file, [], []))
    assert error.code is ErrorCode.INVALID_ARG
    assert f"there is no file {file}" in error.message


def test_a_file_that_is_no_model_is_named_with_the_reason(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"not a model")
    error = refused(case(file, [], []))
    assert error.code is ErrorCode.INVALID_ARG
    assert f"cannot load {file}: " in error.message
    assert "Protobuf parsing failed" in error.message


def test_the_configuration_may_name_another_file(file: Path) -> None:
    onnx_models.identity(file.with_name("other.onnx"))
    with loaded(OnnxRuntimeBackend, case(file, [], [], default_model_filename="other.onnx")) as model:
        assert model.description.batching is True


def test_the_file_may_be_a_folder_with_external_data(file: Path) -> None:
    onnx_models.mlp(file / "mlp.onnx", external_data=True)
    assert (file / "weights.bin").is_file()
    example = {"x": np.ones((1, 8), np.float32)}
    got = answer(case(file, [io("x", "TYPE_FP32", 8)], [io("y", "TYPE_FP32", 4)], example, 8))
    assert got.outputs["y"].sum() == pytest.approx(1)


def test_a_folder_with_several_models_is_refused(file: Path) -> None:
    onnx_models.identity(file / "a.onnx")
    onnx_models.identity(file / "b.onnx")
    assert "expected one .onnx file" in refused(case(file, [], [])).message


def test_an_input_with_a_default_is_described_only_where_it_is_configured(file: Path) -> None:
    onnx_models.with_default(file)
    with loaded(OnnxRuntimeBackend, case(file, [], [])) as model:
        assert [spec.name for spec in model.description.inputs] == ["INPUT0"]
    inputs = [io("INPUT0", "TYPE_FP32", -1, 4), io("BIAS", "TYPE_FP32", 4)]
    with loaded(OnnxRuntimeBackend, case(file, inputs, [io("OUTPUT0", "TYPE_FP32", -1, 4)])) as model:
        assert model.description.inputs[1] == TensorSpec("BIAS", "FP32", (4,), optional=True)


@pytest.mark.parametrize(("given", "expected"), [({}, 1), ({"BIAS": np.full(4, 5, np.float32)}, 5)])
def test_an_input_with_a_default_may_be_left_out(file: Path, given: dict, expected: float) -> None:
    onnx_models.with_default(file)
    inputs = [io("INPUT0", "TYPE_FP32", -1, 4), io("BIAS", "TYPE_FP32", 4)]
    example = {"INPUT0": np.zeros((2, 4), np.float32), **given}
    got = answer(case(file, inputs, [io("OUTPUT0", "TYPE_FP32", -1, 4)], example))
    assert got.outputs["OUTPUT0"].tolist() == [[expected] * 4] * 2


def test_one_number_an_item_is_an_output_of_rank_one(file: Path) -> None:
    onnx_models.item_mean(file)
    output = io("OUTPUT0", "TYPE_FP32", 1, reshape={"shape": []})
    example = {"INPUT0": np.array([[1, 3], [5, 7]], np.float32)}
    got = answer(case(file, [io("INPUT0", "TYPE_FP32", 2)], [output], example, 4))
    assert got.outputs["OUTPUT0"].tolist() == [2, 6]


def test_an_output_of_unknown_rank_has_the_shape_that_the_configuration_says(file: Path) -> None:
    onnx_models.reshaped(file)
    inputs = [io("INPUT0", "TYPE_FP32", -1, -1), io("SHAPE", "TYPE_INT64", -1)]
    example = {"INPUT0": np.zeros((2, 3), np.float32), "SHAPE": np.array([3, 2])}
    of_model = case(file, inputs, [io("OUTPUT0", "TYPE_FP32", -1, -1)], example)
    with loaded(OnnxRuntimeBackend, of_model) as model:
        assert model.description.outputs == (TensorSpec("OUTPUT0", "FP32", (-1, -1)),)
    assert answer(of_model).outputs["OUTPUT0"].shape == (3, 2)


def test_an_output_that_is_no_tensor_is_refused_where_the_configuration_names_it(file: Path) -> None:
    onnx_models.sequence(file)
    error = refused(case(file, [], [io("OUTPUT0", "TYPE_FP32", -1)]))
    assert error.code is ErrorCode.UNSUPPORTED
    assert "'OUTPUT0'" in error.message


def test_an_output_that_is_no_tensor_does_not_cost_a_model_its_others(file: Path) -> None:
    onnx_models.sequence(file)
    example = {"INPUT0": np.ones(2, np.float32)}
    got = answer(case(file, [io("INPUT0", "TYPE_FP32", -1)], [io("OUTPUT1", "TYPE_FP32", -1)], example))
    assert got.outputs.keys() == {"OUTPUT1"}


@pytest.mark.parametrize("element", [TensorProto.FLOAT, TensorProto.BFLOAT16])
def test_a_model_that_breaks_its_promise_of_shapes_runs_all_the_same(
    file: Path, element: int, caplog: pytest.LogCaptureFixture
) -> None:
    name, dtype = ("TYPE_FP32", np.float32) if element == TensorProto.FLOAT else ("TYPE_BF16", np.uint16)
    onnx_models.identity(file, element, ("a", "b"), ("b", "a"))
    example = {"INPUT0": np.arange(3 * LARGE).reshape(3, LARGE).astype(dtype)}
    of_model = case(file, [io("INPUT0", name, -1, -1)], [io("OUTPUT0", name, -1, -1)], example)
    with loaded(OnnxRuntimeBackend, of_model) as model:
        for _ in range(2):
            (got,) = model.run(model.batch([example], space=32 << 20))
            assert np.array_equal(got.outputs["OUTPUT0"], example["INPUT0"])
    assert len([record for record in caplog.records if "shapes that it declares" in record.message]) == 1


def test_a_failed_run_tells_what_onnx_runtime_said(file: Path) -> None:
    onnx_models.identity(file, dims=("batch", "n"))
    example = {"INPUT0": np.ones((1, 2, 3), np.float32)}
    got = answer(case(file, [io("INPUT0", "TYPE_FP32", -1, -1, -1)], [io("OUTPUT0", "TYPE_FP32", -1)], example))
    assert got.code == "INTERNAL"
    assert "Invalid rank for input: INPUT0" in got.message


def test_a_string_that_is_not_utf8_fails_with_the_input_named(file: Path) -> None:
    onnx_models.identity(file, TensorProto.STRING, ("n",))
    example = {"INPUT0": np.array([b"\xff"], object)}
    got = answer(case(file, [io("INPUT0", "TYPE_STRING", -1)], [io("OUTPUT0", "TYPE_STRING", -1)], example))
    assert got.code == "INVALID_ARG"
    assert "'INPUT0'" in got.message


def test_cancelling_every_request_stops_a_running_model(file: Path) -> None:
    onnx_models.countdown(file)
    inputs = [io("INPUT0", "TYPE_FP32", -1, -1), io("STEPS", "TYPE_INT64", 1)]
    outputs = [io("OUTPUT0", "TYPE_FP32", -1, -1)]

    def example(steps: int) -> dict[str, np.ndarray]:
        return {"INPUT0": np.ones((1, 1), np.float32), "STEPS": np.array([steps])}

    with loaded(OnnxRuntimeBackend, case(file, inputs, outputs)) as model:
        batch = model.batch([example(10**12)])
        answers: list[Answer] = []
        running = threading.Thread(target=lambda: answers.extend(model.run(batch)), daemon=True)
        running.start()
        batch.cancel(-1)
        running.join(30)
        assert [got.code for got in answers] == ["CANCELLED"]
        (good,) = model.run(model.batch([example(3)]))
        assert good.outputs["OUTPUT0"].tolist() == [[1]]


def test_a_large_output_is_written_where_the_server_reads_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx_models.add_sub(file, ("batch", "n"))
    tensors = [io(f"{kind}{i}", "TYPE_FP32", -1) for kind in ("INPUT", "OUTPUT") for i in (0, 1)]
    example = {f"INPUT{i}": np.full((1, LARGE), i + 1, np.float32) for i in (0, 1)}
    with loaded(OnnxRuntimeBackend, case(file, tensors[:2], tensors[2:], example, 4)) as model:

        def no_copy(*_: object) -> None:
            raise AssertionError("the run allocated its own outputs")

        monkeypatch.setattr(model.backend, "_run_plain", no_copy)
        (got,) = model.run(model.batch([example], space=16 << 20))
    assert not got.code
    assert got.outputs["OUTPUT1"].tolist() == [[-1] * LARGE]


def test_a_custom_operator_library_that_is_absent_is_named(file: Path) -> None:
    onnx_models.identity(file)
    operations = {"op_library_filename": ["libnone.so"]}
    assert "there is no file 'libnone.so'" in refused(case(file, [], [], model_operations=operations)).message


def test_a_custom_operator_library_that_cannot_be_loaded_is_named(file: Path) -> None:
    onnx_models.identity(file)
    (file.parent.parent / "libbad.so").write_bytes(b"no library")
    error = refused(case(file, [], [], model_operations={"op_library_filename": ["libbad.so"]}))
    assert "libbad.so: " in error.message


def test_an_accelerator_that_onnxruntime_does_not_offer_is_refused(file: Path) -> None:
    onnx_models.identity(file)
    wanted = {"execution_accelerators": {"cpu_execution_accelerator": [{"name": "openvino"}]}}
    error = refused(case(file, [], [], optimization=wanted))
    assert error.code is ErrorCode.UNSUPPORTED
    assert "OpenVINOExecutionProvider" in error.message
