"""How a configuration becomes ONNX Runtime's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_backends.api import ModelContext
from headrace_backends.onnxruntime.options import ARENA_SHRINKAGE, CPU, CUDA, OPENVINO, TENSORRT, parse_options
from headrace_protocol.errors import ErrorCode, InferError

EVERYTHING = [TENSORRT, CUDA, OPENVINO, CPU]


def context(
    parameters: dict[str, str] | None = None,
    backend_config: dict[str, str] | None = None,
    kind: str = "KIND_CPU",
    threads: int = 3,
    **config: Any,
) -> ModelContext:
    values = {"parameters": {k: {"string_value": v} for k, v in (parameters or {}).items()}, **config}
    where = Path("/models/m")
    return ModelContext("m", 1, where, where / "1", values, backend_config or {}, ("m_0",), kind, 2, True, threads)


def accelerators(**by_device: list[dict[str, Any]]) -> dict[str, Any]:
    return {"execution_accelerators": by_device}


def test_by_default_threads_are_the_shared_out_cores_without_spinning_and_everything_is_optimised() -> None:
    options = parse_options(context(), [CPU])
    assert (options.intra_op_threads, options.inter_op_threads, options.parallel) == (3, 1, False)
    assert options.graph_level == "ORT_ENABLE_ALL"
    assert options.memory_arena
    assert options.memory_pattern
    assert options.entries["session.intra_op.allow_spinning"] == "0"
    assert options.providers == [(CPU, {})]
    assert options.run_entries == {}


@pytest.mark.parametrize(
    ("level", "name"),
    [(-1, "ORT_ENABLE_BASIC"), (0, "ORT_ENABLE_ALL"), (1, "ORT_ENABLE_EXTENDED"), (2, "ORT_DISABLE_ALL")],
)
def test_the_graph_level(level: int, name: str) -> None:
    assert parse_options(context(optimization={"graph": {"level": level}}), [CPU]).graph_level == name


def test_parameters_of_the_model_win_over_the_backend_configuration() -> None:
    settings = {"intra-op-thread-count": "5", "inter-op-thread-count": "6"}
    assert parse_options(context({}, settings), [CPU]).intra_op_threads == 5
    options = parse_options(context({"intra_op_thread_count": "7"}, settings), [CPU])
    assert (options.intra_op_threads, options.inter_op_threads) == (7, 6)


def test_parallel_execution_has_as_many_inter_op_threads_as_cores() -> None:
    options = parse_options(context({"execution_mode": "1"}), [CPU])
    assert options.parallel
    assert options.inter_op_threads == 3


def test_memory_settings_and_session_entries() -> None:
    parameters = {
        "enable_mem_arena": "0",
        "enable_mem_pattern": "false",
        ARENA_SHRINKAGE: "cpu:0",
        "session.use_device_allocator_for_initializers": "1",
        "session.intra_op.allow_spinning": "1",
        "colour": "blue",
    }
    options = parse_options(context(parameters), [CPU])
    assert not options.memory_arena
    assert not options.memory_pattern
    assert options.run_entries == {ARENA_SHRINKAGE: "cpu:0"}
    assert options.entries["session.use_device_allocator_for_initializers"] == "1"
    assert options.entries["session.intra_op.allow_spinning"] == "1"
    assert "colour" not in options.entries


def test_every_wrong_value_is_named_at_once() -> None:
    parameters = {
        "intra_op_thread_count": "-1",
        "inter_op_thread_count": "many",
        "execution_mode": "2",
        "enable_mem_arena": "yes",
        "enable_mem_pattern": "",
        ARENA_SHRINKAGE: "cpu",
    }
    with pytest.raises(InferError) as caught:
        parse_options(context(parameters, optimization={"graph": {"level": 9}}), [CPU])
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert "parameters.execution_mode: expected 0 (sequential) or 1 (parallel), got '2'" in caught.value.message
    assert "optimization.graph.level: expected -1, 0, 1 or 2, got 9" in caught.value.message
    for name in parameters:
        assert f"parameters.{name}: " in caught.value.message


def test_a_wrong_value_of_the_backend_configuration_is_named() -> None:
    with pytest.raises(InferError, match="backend config 'intra-op-thread-count': expected an integer"):
        parse_options(context(backend_config={"intra-op-thread-count": "x"}), [CPU])


def test_a_gpu_instance_runs_on_cuda_of_its_device() -> None:
    assert parse_options(context(kind="KIND_GPU"), EVERYTHING).providers == [(CUDA, {"device_id": "2"}), (CPU, {})]


def test_accelerators_come_before_the_device_they_need() -> None:
    tensorrt = {
        "name": "tensorrt",
        "parameters": {
            "precision_mode": "FP16",
            "max_workspace_size_bytes": "1024",
            "trt_engine_cache_enable": "True",
        },
    }
    cuda = {"name": "cuda", "parameters": {"cudnn_conv_use_max_workspace": "0"}}
    wanted = accelerators(gpu_execution_accelerator=[tensorrt, cuda])
    options = parse_options(context(kind="KIND_GPU", optimization=wanted), EVERYTHING)
    assert options.providers == [
        (
            TENSORRT,
            {
                "device_id": "2",
                "trt_fp16_enable": "True",
                "trt_max_workspace_size": "1024",
                "trt_engine_cache_enable": "True",
            },
        ),
        (CUDA, {"device_id": "2", "cudnn_conv_use_max_workspace": "0"}),
        (CPU, {}),
    ]


def test_openvino_is_an_accelerator_of_cpu_instances() -> None:
    wanted = accelerators(cpu_execution_accelerator=[{"name": "openvino", "parameters": {"num_of_threads": "2"}}])
    options = parse_options(context(optimization=wanted), EVERYTHING)
    assert options.providers == [(OPENVINO, {"num_of_threads": "2"}), (CPU, {})]


def test_a_provider_that_is_not_installed_is_named_with_those_that_are() -> None:
    with pytest.raises(InferError, match=f"needs {CUDA}, which .* it offers {CPU}") as caught:
        parse_options(context(kind="KIND_GPU"), [CPU])
    assert caught.value.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    ("kind", "wanted", "text"),
    [
        (
            "KIND_GPU",
            accelerators(gpu_execution_accelerator=[{"name": "warp"}]),
            "gpu_execution_accelerator: expected 'tensorrt' or 'cuda', got 'warp'",
        ),
        (
            "KIND_CPU",
            accelerators(cpu_execution_accelerator=[{"name": "warp"}]),
            "cpu_execution_accelerator: expected 'openvino', got 'warp'",
        ),
        (
            "KIND_GPU",
            accelerators(gpu_execution_accelerator=[{"name": "tensorrt", "parameters": {"precision_mode": "FP1"}}]),
            "parameters.precision_mode: expected FP32, FP16 or INT8, got 'FP1'",
        ),
        (
            "KIND_GPU",
            accelerators(gpu_execution_accelerator=[{"name": "tensorrt", "parameters": {"speed": "1"}}]),
            "parameters.speed: is not a parameter of this accelerator",
        ),
    ],
)
def test_an_unknown_accelerator_or_setting_of_one_is_named(kind: str, wanted: dict[str, Any], text: str) -> None:
    with pytest.raises(InferError) as caught:
        parse_options(context(kind=kind, optimization=wanted), EVERYTHING)
    assert text in caught.value.message
