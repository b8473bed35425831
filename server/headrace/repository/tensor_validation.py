"""The rules that a configuration's inputs and outputs keep by themselves: names, types, shapes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.repository.model_config import Problem
from headrace.repository.platforms import TENSORRT
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.datatype import element_count

_THREE_DIMS: Final = (pb.ModelInput.FORMAT_NHWC, pb.ModelInput.FORMAT_NCHW)


def validate_tensors(proto: pb.ModelConfig, *, draft: bool) -> list[Problem]:
    """Return everything wrong with the inputs and outputs; a draft may have none yet."""
    problems = []
    lists: list[tuple[str, Sequence[pb.ModelInput | pb.ModelOutput]]]
    lists = [("input", proto.input), ("output", proto.output)]
    for kind, tensors in lists:
        seen: dict[str, int] = {}
        for index, tensor in enumerate(tensors):
            path = f"{kind}[{index}]"
            problems += _tensor(tensor, path, proto.backend)
            if tensor.name in seen:
                problems.append(Problem(f"{path}.name", f"{tensor.name!r} is {kind}[{seen[tensor.name]}] already"))
            elif tensor.name:
                seen[tensor.name] = index
    for index, tensor in enumerate(proto.input):
        if tensor.format in _THREE_DIMS and len(tensor.dims) != 3:
            name = pb.ModelInput.Format.Name(tensor.format)
            problems.append(Problem(f"input[{index}].format", f"{name} means 3 dims, got {list(tensor.dims)}"))
    if not draft and not proto.output:
        what = "outputs" if proto.input else "inputs and outputs"
        text = f"the configuration names no {what}, and the model does not tell them: write them down"
        problems.append(Problem("output", text))
    return problems


def _tensor(tensor: pb.ModelInput | pb.ModelOutput, path: str, backend: str) -> list[Problem]:
    problems = []
    if not tensor.name:
        problems.append(Problem(f"{path}.name", "missing"))
    if tensor.data_type == pb.TYPE_INVALID:
        problems.append(Problem(f"{path}.data_type", f"missing for {tensor.name!r}"))
    if not tensor.dims:
        text = f"missing for {tensor.name!r}; a scalar is written dims: [ 1 ] reshape: {{ shape: [ ] }}"
        problems.append(Problem(f"{path}.dims", text))
    problems += _dims(tensor.dims, f"{path}.dims")
    if tensor.HasField("reshape"):
        reshape = tensor.reshape.shape
        wrong = _dims(reshape, f"{path}.reshape.shape")
        problems += wrong
        if tensor.dims and not wrong and not _dims(tensor.dims, ""):
            problems += _reshape(tensor.dims, reshape, f"{path}.reshape.shape")
    if backend != TENSORRT:
        for name, is_set in (
            ("is_shape_tensor", tensor.is_shape_tensor),
            ("is_non_linear_format_io", tensor.is_non_linear_format_io),
        ):
            if is_set:
                problems.append(Problem(f"{path}.{name}", f"belongs to the backend {TENSORRT!r}, got {backend!r}"))
    elif tensor.is_non_linear_format_io:
        text = "only row-major linear formats are served: build the engine without other formats for its tensors"
        problems.append(Problem(f"{path}.is_non_linear_format_io", text))
    return problems


def _dims(dims: Sequence[int], path: str) -> list[Problem]:
    return [
        Problem(f"{path}[{index}]", f"expected a dimension >= 1, or -1 for one that varies, got {dim}")
        for index, dim in enumerate(dims)
        if dim < 1 and dim != -1
    ]


def _reshape(dims: Sequence[int], reshape: Sequence[int], path: str) -> list[Problem]:
    """Check that both shapes hold the same elements: between dimensions that vary, sizes must agree stretch by stretch."""
    varying, wanted = list(dims).count(-1), list(reshape).count(-1)
    if varying != wanted:
        text = f"dims {list(dims)} has {varying} dimensions that vary, the reshape {list(reshape)} has {wanted}"
        return [Problem(path, text)]
    if _stretches(dims) != _stretches(reshape):
        return [Problem(path, f"dims {list(dims)} and the reshape {list(reshape)} differ in their number of elements")]
    return []


def _stretches(dims: Sequence[int]) -> list[int]:
    counts, stretch = [], list[int]()
    for dim in dims:
        if dim == -1:
            counts.append(element_count(stretch))
            stretch = []
        else:
            stretch.append(dim)
    return [*counts, element_count(stretch)]
