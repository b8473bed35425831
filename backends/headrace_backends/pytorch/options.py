"""How a model's configuration becomes PyTorch's settings. Pure: it does not import torch.

Configuration parameters: INTRA_OP_THREAD_COUNT (or NUM_THREADS), INTER_OP_THREAD_COUNT (or NUM_INTEROP_THREADS),
INFERENCE_MODE, DISABLE_OPTIMIZED_EXECUTION, ENABLE_JIT_EXECUTOR, ENABLE_JIT_PROFILING, DISABLE_CUDNN,
ENABLE_CACHE_CLEANING, ENABLE_WEIGHT_SHARING, TORCH_COMPILE_OPTIONAL_PARAMETERS, MODEL_CLASS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from headrace_backends.api import ModelContext
from headrace_protocol.errors import invalid

COMPILE: Final = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
MAX_THREADS: Final = 1024
_COUNT_DIGITS: Final = 8
_SHOWN: Final = 80
"""Characters of a bad value that are told."""
_COMPILE_KEYS: Final[dict[str, tuple[type, ...]]] = {
    "backend": (str,),
    "disable": (bool,),
    "dynamic": (bool, type(None)),
    "fullgraph": (bool,),
    "mode": (str, type(None)),
    "options": (dict, type(None)),
}
_SWITCHES: Final = {"true": True, "1": True, "false": False, "0": False}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Settings of a model, every value checked."""

    intra_op_threads: int
    """Threads of one operator."""
    inter_op_threads: int | None
    """Threads for the tasks that a TorchScript model forks; None = PyTorch's default."""
    inference_mode: bool
    """Whether tensors are made that can never need a gradient; if not, gradients are merely off."""
    optimized_execution: bool
    """Whether TorchScript's executor optimizes."""
    jit_executor: bool | None
    """Whether TorchScript's executor is the one that profiles; None = PyTorch's default."""
    jit_profiling: bool | None
    """Whether it profiles; None = PyTorch's default."""
    cudnn: bool
    cache_cleaning: bool
    """Whether unused GPU memory is given back after every batch."""
    weight_sharing: bool
    """Whether instances may share one copy of a model although it may keep a state."""
    compiling: Mapping[str, Any] | None
    """Arguments of torch.compile; None = the model is not compiled."""
    model_class: str | None
    """Name of the class in model.py."""
    pinned_input: bool
    """Whether inputs go to a GPU through pinned memory."""
    pinned_output: bool


def parse_options(model: ModelContext) -> TorchOptions:
    """Return the settings for `model`. Raises InferError INVALID_ARG with every parameter that cannot be used."""
    problems: list[str] = []

    def setting(names: tuple[str, ...], default: T, parse: Callable[[str], T]) -> T:
        given = [(name, text) for name in names if (text := model.parameter(name)) is not None]
        found = default
        for name, text in given:
            try:
                value = parse(text)
            except ValueError as error:
                problems.append(f"parameters.{name}: expected {error}, got '{text[:_SHOWN]}'")
                continue
            if name != given[0][0] and value != found:
                problems.append(f"parameters.{name}: expected the value of {given[0][0]}, got '{text}'")
            found = value
        return found

    def switch(name: str, default: bool) -> bool:
        return setting((name,), default, _switch)

    none_or_switch: Callable[[str], bool | None] = _switch
    none_or_count: Callable[[str], int | None] = _count
    optimization: dict[str, Any] = model.config.get("optimization") or {}
    options = TorchOptions(
        intra_op_threads=setting(("INTRA_OP_THREAD_COUNT", "NUM_THREADS"), model.threads, _count),
        inter_op_threads=setting(("INTER_OP_THREAD_COUNT", "NUM_INTEROP_THREADS"), None, none_or_count),
        inference_mode=switch("INFERENCE_MODE", True),
        optimized_execution=not switch("DISABLE_OPTIMIZED_EXECUTION", False),
        jit_executor=setting(("ENABLE_JIT_EXECUTOR",), None, none_or_switch),
        jit_profiling=setting(("ENABLE_JIT_PROFILING",), None, none_or_switch),
        cudnn=not switch("DISABLE_CUDNN", False),
        cache_cleaning=switch("ENABLE_CACHE_CLEANING", False),
        weight_sharing=switch("ENABLE_WEIGHT_SHARING", False),
        compiling=setting((COMPILE,), None, _compiling),
        model_class=model.parameter("MODEL_CLASS"),
        pinned_input=_pinned(optimization, "input_pinned_memory"),
        pinned_output=_pinned(optimization, "output_pinned_memory"),
    )
    if problems:
        raise invalid(f"model '{model.name}': " + "; ".join(problems))
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > _COUNT_DIGITS or not 1 <= int(text) <= MAX_THREADS:
        raise ValueError(f"an integer from 1 to {MAX_THREADS}")
    return int(text)


def _switch(text: str) -> bool:
    value = _SWITCHES.get(text.lower())
    if value is None:
        raise ValueError("true or false")
    return value


def _compiling(text: str) -> Mapping[str, Any] | None:
    """Return the arguments of torch.compile, None where they switch it off."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ValueError(  # noqa: TRY004 - the text is what is wrong
            'a JSON object of arguments of torch.compile, as in {"mode": "default"}'
        )
    for key, value in values.items():
        kinds = _COMPILE_KEYS.get(key)
        if kinds is None:
            raise ValueError(f"arguments of torch.compile, which are {', '.join(_COMPILE_KEYS)}")
        if isinstance(value, str) and bool in kinds and value.lower() in _SWITCHES:
            values[key] = _SWITCHES[value.lower()]
        elif not isinstance(value, kinds):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ValueError(f"{key} to be of type {names}")
    return None if values.pop("disable", False) else values


def _pinned(optimization: Mapping[str, Any], name: str) -> bool:
    return bool((optimization.get(name) or {}).get("enable", True))
