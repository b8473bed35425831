"""Padding: requests of unlike shapes in one batch, by lines of a model's `parameters`. Own, not Triton's. Pure.

    pad_batch: "tokens, mask=0"                these inputs are padded at the end of each dimension that varies, with 0
                                               or what is named, up to the largest of the batch
    pad_batch_to: "16, 32, 64"                 up to one of these instead; requests share a batch if they need the same.
                                               Without it they share one between two powers of two; with "any", always
    pad_batch_cut: "vectors[0] = tokens[0]"    the output's dimension is cut back to what the request's own input had

Dimensions are counted as in `dims`, from 0, without the batch dimension.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from headrace.repository.model_config import Cut, Padding, PadValue, Problem
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.datatype import BF16, BOOL, BY_NUMBER, BYTES, DataType

INPUTS: Final = "pad_batch"
SIZES: Final = "pad_batch_to"
CUTS: Final = "pad_batch_cut"
ANY: Final = "any"
MAX_SIZES: Final = 256
MAX_SIZE: Final = 1 << 31
_CUT: Final = re.compile(
    r"(?P<output>.+?)\s*\[\s*(?P<axis>\d{1,2})\s*\]\s*=\s*(?P<input>.+?)\s*\[\s*(?P<of>\d{1,2})\s*\]"
)


def padding_problems(proto: pb.ModelConfig, *, draft: bool) -> list[Problem]:
    """Return everything wrong with the parameters of padding; a draft may have no inputs and outputs yet."""
    return _parse(proto, draft=draft)[1]


def padding_of(proto: pb.ModelConfig) -> Padding | None:
    """Return the padding that a valid configuration asks for, None where it asks for none."""
    return _parse(proto, draft=True)[0]


def _parse(proto: pb.ModelConfig, *, draft: bool) -> tuple[Padding | None, list[Problem]]:
    if INPUTS not in proto.parameters:
        return None, [
            Problem(f"parameters.{name}", f"has no effect without {INPUTS}, which names the inputs")
            for name in (SIZES, CUTS)
            if name in proto.parameters
        ]
    problems: list[Problem] = []
    if not proto.max_batch_size and not draft:
        problems.append(Problem(f"parameters.{INPUTS}", "there are no batches: max_batch_size is 0"))
    if proto.HasField("sequence_batching"):
        text = "is of the dynamic batcher: the requests of sequences are not padded"
        problems.append(Problem(f"parameters.{INPUTS}", text))
    values = _inputs(proto, draft, problems)
    any_lengths = _text(proto, SIZES).strip() == ANY
    sizes = () if any_lengths else _sizes(_text(proto, SIZES), problems)
    cuts = _cuts(proto, values, draft, problems)
    return Padding(MappingProxyType(values), sizes, any_lengths, MappingProxyType(cuts)), problems


def _text(proto: pb.ModelConfig, name: str) -> str:
    return proto.parameters[name].string_value if name in proto.parameters else ""


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _inputs(proto: pb.ModelConfig, draft: bool, problems: list[Problem]) -> dict[str, PadValue]:
    path = f"parameters.{INPUTS}"
    inputs = {tensor.name: tensor for tensor in proto.input}
    values: dict[str, PadValue] = {}
    parts = _parts(_text(proto, INPUTS))
    if not parts:
        problems.append(Problem(path, "expected names of inputs, each with =VALUE where it is not padded with 0"))
    for part in parts:
        name, separator, written = part.partition("=")
        name, written = name.strip(), written.strip()
        tensor = inputs.get(name)
        if name in values:
            problems.append(Problem(path, f"names {name!r} twice"))
        elif tensor is None:
            if inputs or not draft:
                problems.append(Problem(path, f"the model has no input {name!r}, it has {sorted(inputs)}"))
            values[name] = 0
        else:
            text = _unpaddable(tensor)
            value = None if text else _value(written if separator else "0", BY_NUMBER[tensor.data_type])
            if value is None:
                expected = f"cannot pad {name!r} with {written!r}: it is {pb.DataType.Name(tensor.data_type)}"
                problems.append(Problem(path, text or expected))
            values[name] = value or 0
    return values


def _unpaddable(tensor: pb.ModelInput) -> str:
    """Return why an input cannot be padded, "" if it can."""
    datatype = BY_NUMBER.get(tensor.data_type)
    if datatype is None or datatype is BYTES:
        return f"{tensor.name!r} is {pb.DataType.Name(tensor.data_type)}, of which there is nothing to pad with"
    if -1 not in tensor.dims:
        return f"no dimension of {tensor.name!r} varies: its dims are {list(tensor.dims)}"
    for name, is_set in (
        ("a reshape", tensor.HasField("reshape")),
        ("allow_ragged_batch", tensor.allow_ragged_batch),
        ("is_shape_tensor", tensor.is_shape_tensor),
    ):
        if is_set:
            return f"{tensor.name!r} has {name} and cannot be padded as well"
    return ""


def _value(text: str, datatype: DataType) -> PadValue | None:
    """Return the element that `text` means, None where it is none of `datatype`."""
    kind = datatype.numpy.kind
    try:
        if datatype is BOOL:
            return {"0": False, "false": False, "1": True, "true": True}.get(text.lower())
        if datatype is BF16 or kind == "f":
            value = float(text)
            if datatype is BF16 and value:
                return None  # its elements are bit patterns here, of which only that of zero is plain
            return value if math.isinf(value) or math.isnan(value) or abs(value) <= _largest(datatype) else None
        number = int(text)
    except ValueError:
        return None
    bits = 8 * datatype.itemsize
    low, high = (0, 2**bits) if kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return number if low <= number < high else None


def _largest(datatype: DataType) -> float:
    return {2: 65504.0, 4: 3.4028234663852886e38}.get(datatype.itemsize, 1.7976931348623157e308)


def _sizes(text: str, problems: list[Problem]) -> tuple[int, ...]:
    sizes = []
    for part in _parts(text):
        if not part.isdecimal() or not 1 <= int(part) <= MAX_SIZE:
            problems.append(
                Problem(f"parameters.{SIZES}", f"expected {ANY}, or sizes from 1 to {MAX_SIZE}, got {part!r}")
            )
            return ()
        sizes.append(int(part))
    if len(sizes) > MAX_SIZES:
        problems.append(Problem(f"parameters.{SIZES}", f"expected at most {MAX_SIZES} sizes, got {len(sizes)}"))
    return tuple(sorted(set(sizes)))


def _cuts(
    proto: pb.ModelConfig, values: Mapping[str, PadValue], draft: bool, problems: list[Problem]
) -> dict[str, tuple[Cut, ...]]:
    path = f"parameters.{CUTS}"
    inputs = {tensor.name: tensor for tensor in proto.input}
    outputs = {tensor.name: tensor for tensor in proto.output}
    cuts: dict[str, tuple[Cut, ...]] = {}
    for part in _parts(_text(proto, CUTS)):
        match = _CUT.fullmatch(part)
        if match is None:
            problems.append(Problem(path, f"expected OUTPUT[i] = INPUT[j], got {part!r}"))
            continue
        output, source = outputs.get(match["output"]), inputs.get(match["input"])
        cut = Cut(int(match["axis"]), match["input"], int(match["of"]))
        if match["input"] not in values:
            problems.append(Problem(path, f"{match['input']!r} is not padded: {INPUTS} does not name it"))
        elif source is not None and (cut.source_axis >= len(source.dims) or source.dims[cut.source_axis] != -1):
            text = f"dimension {cut.source_axis} of {source.name!r} does not vary: its dims are {list(source.dims)}"
            problems.append(Problem(path, text))
        if output is None:
            if outputs or not draft:
                problems.append(Problem(path, f"the model has no output {match['output']!r}, it has {sorted(outputs)}"))
        else:
            text = _uncuttable(output, cut.axis, proto)
            if text:
                problems.append(Problem(path, text))
        have = cuts.get(match["output"], ())
        if any(other.axis == cut.axis for other in have):
            problems.append(Problem(path, f"says twice what dimension {cut.axis} of {match['output']!r} follows"))
        cuts[match["output"]] = (*have, cut)
    return cuts


def _uncuttable(output: pb.ModelOutput, axis: int, proto: pb.ModelConfig) -> str:
    """Return why a dimension of an output cannot be cut, "" if it can."""
    if axis >= len(output.dims) or output.dims[axis] != -1:
        return f"dimension {axis} of {output.name!r} does not vary: its dims are {list(output.dims)}"
    if output.data_type == pb.TYPE_STRING:
        return f"{output.name!r} holds strings, which are not cut"
    if output.HasField("reshape"):
        return f"{output.name!r} has a reshape and cannot be cut as well"
    if any(output.name in scattered.target_name for scattered in proto.batch_output):
        return f"{output.name!r} is in batch_output and takes its whole shape from there"
    return ""
