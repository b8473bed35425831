"""Parameters of the configuration as PyTorch's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_backends.api import ModelContext
from headrace_backends.pytorch.options import TorchOptions, parse_options
from headrace_protocol.errors import ErrorCode, InferError


def options(config: dict[str, Any] | None = None, **parameters: str) -> TorchOptions:
    values = {"parameters": {name: {"string_value": text} for name, text in parameters.items()}, **(config or {})}
    folder = Path("/models/m")
    return parse_options(
        ModelContext("m", 1, folder, folder / "1", values, {}, ("m_0",), "KIND_CPU", 0, auto_complete=True, threads=3)
    )


def refusal(**parameters: str) -> str:
    with pytest.raises(InferError) as caught:
        options(**parameters)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def test_without_parameters_a_model_has_its_share_of_the_cores_and_needs_no_gradients() -> None:
    assert options() == TorchOptions(
        intra_op_threads=3,
        inter_op_threads=None,
        inference_mode=True,
        optimized_execution=True,
        jit_executor=None,
        jit_profiling=None,
        cudnn=True,
        cache_cleaning=False,
        weight_sharing=False,
        compiling=None,
        model_class=None,
        pinned_input=True,
        pinned_output=True,
    )


@pytest.mark.parametrize(
    ("parameter", "text", "field", "value"),
    [
        ("INTRA_OP_THREAD_COUNT", "7", "intra_op_threads", 7),
        ("NUM_THREADS", "7", "intra_op_threads", 7),
        ("INTER_OP_THREAD_COUNT", "2", "inter_op_threads", 2),
        ("NUM_INTEROP_THREADS", "2", "inter_op_threads", 2),
        ("INFERENCE_MODE", "false", "inference_mode", False),
        ("DISABLE_OPTIMIZED_EXECUTION", "true", "optimized_execution", False),
        ("ENABLE_JIT_EXECUTOR", "False", "jit_executor", False),
        ("ENABLE_JIT_PROFILING", "1", "jit_profiling", True),
        ("DISABLE_CUDNN", "true", "cudnn", False),
        ("ENABLE_CACHE_CLEANING", "true", "cache_cleaning", True),
        ("ENABLE_WEIGHT_SHARING", "TRUE", "weight_sharing", True),
        ("MODEL_CLASS", "Net", "model_class", "Net"),
        ("TORCH_COMPILE_OPTIONAL_PARAMETERS", "{}", "compiling", {}),
        ("TORCH_COMPILE_OPTIONAL_PARAMETERS", '{"disable": "true"}', "compiling", None),
        ("TORCH_COMPILE_OPTIONAL_PARAMETERS", '{"disable": false, "mode": null}', "compiling", {"mode": None}),
        (
            "TORCH_COMPILE_OPTIONAL_PARAMETERS",
            '{"mode": "max-autotune", "fullgraph": "true", "dynamic": true}',
            "compiling",
            {"mode": "max-autotune", "fullgraph": True, "dynamic": True},
        ),
    ],
)
def test_each_parameter_is_one_setting(parameter: str, text: str, field: str, value: object) -> None:
    assert getattr(options(**{parameter: text}), field) == value


def test_two_names_of_one_setting_have_to_agree() -> None:
    assert options(INTRA_OP_THREAD_COUNT="2", NUM_THREADS="2").intra_op_threads == 2
    assert refusal(INTRA_OP_THREAD_COUNT="2", NUM_THREADS="4") == (
        "model 'm': parameters.NUM_THREADS: expected the value of INTRA_OP_THREAD_COUNT, got '4'"
    )


def test_pinned_memory_is_switched_off_in_the_configuration() -> None:
    found = options({"optimization": {"output_pinned_memory": {"enable": False}}})
    assert (found.pinned_input, found.pinned_output) == (True, False)


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "1025", "9" * 5000])
def test_a_number_of_threads_is_from_one_to_a_bound(text: str) -> None:
    assert "parameters.INTRA_OP_THREAD_COUNT: expected an integer from 1 to 1024" in refusal(INTRA_OP_THREAD_COUNT=text)


@pytest.mark.parametrize(
    "name",
    [
        "INFERENCE_MODE",
        "DISABLE_OPTIMIZED_EXECUTION",
        "ENABLE_JIT_EXECUTOR",
        "ENABLE_JIT_PROFILING",
        "DISABLE_CUDNN",
        "ENABLE_CACHE_CLEANING",
        "ENABLE_WEIGHT_SHARING",
    ],
)
def test_a_switch_is_true_or_false(name: str) -> None:
    assert refusal(**{name: "on"}) == f"model 'm': parameters.{name}: expected true or false, got 'on'"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("default", "a JSON object"),
        ("[]", "a JSON object"),
        ("[" * 100_000, "a JSON object"),
        ('{"model": "x"}', "arguments of torch.compile, which are backend"),
        ('{"mode": 3}', "mode to be of type str or null"),
        ('{"fullgraph": "maybe"}', "fullgraph to be of type bool"),
    ],
)
def test_arguments_of_torch_compile_are_checked(text: str, expected: str) -> None:
    assert expected in refusal(TORCH_COMPILE_OPTIONAL_PARAMETERS=text)


def test_all_problems_are_told_together() -> None:
    said = refusal(INFERENCE_MODE="x", NUM_THREADS="y")
    assert "INFERENCE_MODE" in said
    assert "NUM_THREADS" in said
