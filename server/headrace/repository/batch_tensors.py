"""The rules of ragged inputs, and of the tensors that are made for a batch of them or shared out of it. Pure.

A ragged input reaches the model flat: the elements of all requests, one after another. What `batch_input` names tells
the model where one request's end, and an output in `batch_output` is cut up again by the shapes of an input.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from headrace.repository.model_config import Problem
from headrace_protocol._generated import model_config_pb2 as pb

_MADE_AS: Final = (pb.TYPE_INT32, pb.TYPE_FP32)
MAX_BATCH_TENSORS: Final = 256
"""Entries of batch_input and of batch_output, and targets of one entry, at most."""


def batch_tensor_problems(proto: pb.ModelConfig, *, draft: bool) -> list[Problem]:
    """Return everything wrong with ragged inputs, batch_input and batch_output; a draft may have no inputs yet."""
    problems = _ragged(proto, draft=draft)
    sequences = proto.HasField("sequence_batching") and not proto.sequence_batching.HasField("oldest")
    ragged = [f"input[{place}].allow_ragged_batch" for place, i in enumerate(proto.input) if i.allow_ragged_batch]
    if sequences:
        text = "the direct strategy of sequences keeps a row for each slot; use the oldest strategy"
        used = [*ragged, *(name for name in ("batch_input", "batch_output") if getattr(proto, name))]
        problems += [Problem(path, text) for path in used]
    for kind, entries in (("batch_input", len(proto.batch_input)), ("batch_output", len(proto.batch_output))):
        if entries > MAX_BATCH_TENSORS:
            return [*problems, Problem(kind, f"expected at most {MAX_BATCH_TENSORS} entries, got {entries}")]
        if entries and not proto.max_batch_size and not draft:
            problems.append(Problem(kind, "there are no batches: max_batch_size is 0"))
    return problems + _batch_inputs(proto, draft=draft) + _batch_outputs(proto, draft=draft)


def made_inputs(proto: pb.ModelConfig) -> dict[str, tuple[pb.DataType, int]]:
    """Return the inputs that are made for each batch, with their datatype and number of dimensions."""
    return {
        name: (made.data_type, 2 if made.kind == pb.BatchInput.BATCH_ITEM_SHAPE else 1)
        for made in proto.batch_input
        for name in made.target_name
    }


def scattered_outputs(proto: pb.ModelConfig) -> Mapping[str, str]:
    """Return which output is shared out by the shapes of which input."""
    return MappingProxyType({output.target_name[0]: output.source_input[0] for output in proto.batch_output})


def _ragged(proto: pb.ModelConfig, *, draft: bool) -> list[Problem]:
    problems = []
    for index, tensor in enumerate(proto.input):
        if tensor.allow_ragged_batch and not proto.max_batch_size and not draft:
            text = "there are no batches in which shapes could differ: max_batch_size is 0"
            problems.append(Problem(f"input[{index}].allow_ragged_batch", text))
        if tensor.allow_ragged_batch and tensor.is_shape_tensor:
            text = "a shape tensor is one for the whole batch, so it cannot be ragged"
            problems.append(Problem(f"input[{index}].allow_ragged_batch", text))
    return problems


def _batch_inputs(proto: pb.ModelConfig, *, draft: bool) -> list[Problem]:
    problems = []
    inputs = {tensor.name: tensor for tensor in proto.input}
    seen: dict[str, str] = {}
    for index, made in enumerate(proto.batch_input):
        path = f"batch_input[{index}]"
        if made.kind not in pb.BatchInput.Kind.values():
            problems.append(Problem(f"{path}.kind", f"there is no kind {made.kind}"))
        if made.data_type not in _MADE_AS:
            got = pb.DataType.Name(made.data_type)
            problems.append(Problem(f"{path}.data_type", f"expected TYPE_INT32 or TYPE_FP32, got {got}"))
        problems += _targets(list(made.target_name), f"{path}.target_name", seen)
        for place, name in enumerate(made.target_name):
            if name in inputs:
                text = f"{name!r} is an input that clients give; a tensor made for the batch has a name of its own"
                problems.append(Problem(f"{path}.target_name[{place}]", text))
        problems += _source(list(made.source_input), f"{path}.source_input", inputs, draft=draft)
    return problems


def _batch_outputs(proto: pb.ModelConfig, *, draft: bool) -> list[Problem]:
    problems = []
    inputs = {tensor.name: tensor for tensor in proto.input}
    outputs = {tensor.name: tensor for tensor in proto.output}
    seen: dict[str, str] = {}
    if proto.batch_output and proto.model_transaction_policy.decoupled:
        text = "a decoupled model gives each request responses of its own, which are not cut out of a batch"
        problems.append(Problem("batch_output", text))
    for index, scattered in enumerate(proto.batch_output):
        path = f"batch_output[{index}]"
        if scattered.kind not in pb.BatchOutput.Kind.values():
            problems.append(Problem(f"{path}.kind", f"there is no kind {scattered.kind}"))
        targets = list(scattered.target_name)
        problems += _targets(targets, f"{path}.target_name", seen)
        if len(targets) > 1:
            problems.append(Problem(f"{path}.target_name", f"expected one output, got {len(targets)}"))
        wrong = _source(list(scattered.source_input), f"{path}.source_input", inputs, draft=draft)
        problems += wrong
        for place, name in enumerate(targets):
            target = outputs.get(name)
            if target is None and (outputs or not draft):
                text = f"the model has no output {name!r}, it has {sorted(outputs)}"
                problems.append(Problem(f"{path}.target_name[{place}]", text))
            elif target is not None and not wrong and scattered.source_input[0] in inputs:
                problems += _fits(target, inputs[scattered.source_input[0]], f"{path}.target_name[{place}]")
    return problems


def _targets(names: list[str], path: str, seen: dict[str, str]) -> list[Problem]:
    if not names:
        return [Problem(path, "missing")]
    if len(names) > MAX_BATCH_TENSORS:
        return [Problem(path, f"expected at most {MAX_BATCH_TENSORS} names, got {len(names)}")]
    problems = []
    for place, name in enumerate(names):
        where = f"{path}[{place}]"
        if not name:
            problems.append(Problem(where, "missing"))
        elif name in seen:
            problems.append(Problem(where, f"{name!r} is {seen[name]} already"))
        seen.setdefault(name, where)
    return problems


def _source(names: list[str], path: str, inputs: Mapping[str, pb.ModelInput], *, draft: bool) -> list[Problem]:
    if len(names) != 1:
        return [Problem(path, f"expected one input, got {len(names)}")]
    source = inputs.get(names[0])
    if source is None:
        if draft and not inputs:
            return []
        return [Problem(f"{path}[0]", f"the model has no input {names[0]!r}, it has {sorted(inputs)}")]
    if source.optional:
        return [Problem(f"{path}[0]", f"{names[0]!r} is optional: where it is left out, nothing can be told of it")]
    return []


def _fits(output: pb.ModelOutput, source: pb.ModelInput, path: str) -> list[Problem]:
    """Check that each dimension of an output that varies has one of the source in its place."""
    if output.HasField("reshape") or source.HasField("reshape"):
        text = f"{output.name!r} takes its shape from {source.name!r}: neither can have a reshape"
        return [Problem(path, text)]
    varying = [place for place, dim in enumerate(output.dims) if dim == -1]
    if varying and varying[-1] >= len(source.dims):
        text = (
            f"{output.name!r} has the dims {list(output.dims)}: what varies there is taken from the same place of "
            f"{source.name!r}, which has {list(source.dims)}"
        )
        return [Problem(path, text)]
    return []
