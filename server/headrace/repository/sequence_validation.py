"""The rules that `sequence_batching` keeps: controls, states, strategies. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from headrace.repository.model_config import Problem
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.datatype import BY_NAME, BY_NUMBER
from headrace_protocol.tensor import TensorSpec

QUEUE_SIZE_PARAMETER: Final = "sequence_max_queue_size"
"""Parameter of a configuration, of ours: how many requests of sequences may wait."""
MOST_SLOTS: Final = 65536
"""Slots of one instance."""
_PATH: Final = "sequence_batching"
_CORRELATION: Final = pb.ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID
CORRELATION_TYPES: Final = (pb.TYPE_UINT64, pb.TYPE_INT64, pb.TYPE_UINT32, pb.TYPE_INT32, pb.TYPE_STRING)


def validate_sequences(proto: pb.ModelConfig, *, draft: bool) -> list[Problem]:
    """Return everything wrong with `sequence_batching`, which must be there; a draft may lack its max_batch_size."""
    batching = proto.sequence_batching
    problems = _controls(batching.control_input)
    problems += _states(batching.state, proto)
    problems += _names(proto)
    if batching.HasField("oldest"):
        problems += _oldest(batching.oldest, proto.max_batch_size, draft=draft)
    share = batching.direct.minimum_slot_utilization
    if not (math.isfinite(share) and 0 <= share <= 1):
        problems.append(Problem(f"{_PATH}.direct.minimum_slot_utilization", f"expected 0 to 1, got {share:g}"))
    text = proto.parameters[QUEUE_SIZE_PARAMETER].string_value if QUEUE_SIZE_PARAMETER in proto.parameters else "1"
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:10]) < 2**31):
        problems.append(Problem(f"parameters.{QUEUE_SIZE_PARAMETER}", f"expected an integer above 0, got {text!r}"))
    return problems


def control_type(control: pb.ModelSequenceBatching.Control) -> int:
    """Return the number of the datatype of a control's tensor."""
    if control.kind == _CORRELATION:
        return control.data_type
    if control.int32_false_true:
        return pb.TYPE_INT32
    return pb.TYPE_FP32 if control.fp32_false_true else pb.TYPE_BOOL


def _controls(inputs: Sequence[pb.ModelSequenceBatching.ControlInput]) -> list[Problem]:
    problems = []
    seen: dict[int, str] = {}
    for index, given in enumerate(inputs):
        path = f"{_PATH}.control_input[{index}]"
        if not given.name:
            problems.append(Problem(f"{path}.name", "missing"))
        if len(given.control) != 1:
            text = f"expected one kind of control for the tensor {given.name!r}, got {len(given.control)}"
            problems.append(Problem(f"{path}.control", text))
        for number, control in enumerate(given.control):
            where = f"{path}.control[{number}]"
            kind = pb.ModelSequenceBatching.Control.Kind.Name(control.kind)
            if control.kind in seen:
                problems.append(Problem(f"{where}.kind", f"{kind} is {seen[control.kind]} already"))
            seen.setdefault(control.kind, path)
            problems += _correlation(control, where) if control.kind == _CORRELATION else _values(control, where, kind)
    return problems


def _correlation(control: pb.ModelSequenceBatching.Control, path: str) -> list[Problem]:
    problems = []
    if control.data_type not in CORRELATION_TYPES:
        allowed = ", ".join(map(pb.DataType.Name, CORRELATION_TYPES))
        text = f"expected one of {allowed} for a correlation id, got {pb.DataType.Name(control.data_type)}"
        problems.append(Problem(f"{path}.data_type", text))
    if control.int32_false_true or control.fp32_false_true or control.bool_false_true:
        problems.append(Problem(path, "a correlation id has a data_type and no values for false and true"))
    return problems


def _values(control: pb.ModelSequenceBatching.Control, path: str, kind: str) -> list[Problem]:
    lists = {
        "int32_false_true": len(control.int32_false_true),
        "fp32_false_true": len(control.fp32_false_true),
        "bool_false_true": len(control.bool_false_true),
    }
    given = [name for name, length in lists.items() if length]
    problems = []
    if len(given) != 1:
        text = f"{kind} needs one of {', '.join(lists)}, got {', '.join(given) or 'none'}"
        problems.append(Problem(path, text))
    problems += [
        Problem(f"{path}.{name}", f"expected two values, for false and for true, got {lists[name]}")
        for name in given
        if lists[name] != 2
    ]
    if control.data_type != pb.TYPE_INVALID:
        problems.append(Problem(f"{path}.data_type", f"belongs to the correlation id alone, this is {kind}"))
    return problems


def _states(states: Sequence[pb.ModelSequenceBatching.State], proto: pb.ModelConfig) -> list[Problem]:
    problems = []
    outputs = {tensor.name: tensor for tensor in proto.output}
    for index, state in enumerate(states):
        path = f"{_PATH}.state[{index}]"
        problems += [
            Problem(f"{path}.{name}", "missing")
            for name, value in (("input_name", state.input_name), ("output_name", state.output_name))
            if not value
        ]
        if state.data_type == pb.TYPE_INVALID:
            problems.append(Problem(f"{path}.data_type", "missing"))
        problems += _dims(state.dims, f"{path}.dims")
        problems += _initial_states(state, path)
        shown = outputs.get(state.output_name)
        if shown is not None and (shown.data_type != state.data_type or list(shown.dims) != list(state.dims)):
            text = f"the output {shown.name!r} has another data_type or other dims than the state that it shows"
            problems.append(Problem(path, text))
    return problems


def _dims(dims: Sequence[int], path: str, *, varying: bool = True) -> list[Problem]:
    expected = "a dimension >= 1, or -1 for one that varies" if varying else "a dimension >= 1"
    return [
        Problem(f"{path}[{index}]", f"expected {expected}, got {dim}")
        for index, dim in enumerate(dims)
        if dim < 1 and not (varying and dim == -1)
    ]


def _initial_states(state: pb.ModelSequenceBatching.State, path: str) -> list[Problem]:
    problems = []
    if len(state.initial_state) > 1:
        text = f"expected one for the state input {state.input_name!r} at most, got {len(state.initial_state)}"
        problems.append(Problem(f"{path}.initial_state", text))
    for index, initial in enumerate(state.initial_state):
        where = f"{path}.initial_state[{index}]"
        if not initial.name:
            problems.append(Problem(f"{where}.name", "missing"))
        if initial.data_type != state.data_type:
            expected, got = pb.DataType.Name(state.data_type), pb.DataType.Name(initial.data_type)
            problems.append(Problem(f"{where}.data_type", f"expected the state's own, {expected}, got {got}"))
        problems += _dims(initial.dims, f"{where}.dims", varying=False)
        fits = len(initial.dims) == len(state.dims) and all(
            wanted in (got, -1) for wanted, got in zip(state.dims, initial.dims, strict=True)
        )
        if not fits:
            text = f"expected dims that fit the state's {list(state.dims)}, got {list(initial.dims)}"
            problems.append(Problem(f"{where}.dims", text))
        if initial.WhichOneof("state_data") is None:
            problems.append(Problem(where, "neither zero_data nor data_file says what the state is at first"))
        elif initial.WhichOneof("state_data") == "zero_data" and not initial.zero_data:
            problems.append(Problem(f"{where}.zero_data", "expected true: false says nothing of the state at first"))
    return problems


def _names(proto: pb.ModelConfig) -> list[Problem]:
    """Find tensors that have two meanings."""
    batching = proto.sequence_batching
    seen = {tensor.name: f"input[{index}]" for index, tensor in enumerate(proto.input)}
    outputs: dict[str, str] = {}
    problems = []
    made = [(given.name, f"{_PATH}.control_input[{index}].name") for index, given in enumerate(batching.control_input)]
    made += [(state.input_name, f"{_PATH}.state[{index}].input_name") for index, state in enumerate(batching.state)]
    for name, path in made:
        if name and name in seen:
            problems.append(Problem(path, f"{name!r} is {seen[name]} already; what the server makes is no other input"))
        seen.setdefault(name, path)
    for index, state in enumerate(batching.state):
        path = f"{_PATH}.state[{index}].output_name"
        if state.output_name and state.output_name in outputs:
            problems.append(Problem(path, f"{state.output_name!r} is {outputs[state.output_name]} already"))
        outputs.setdefault(state.output_name, path)
    return problems


def _oldest(oldest: pb.ModelSequenceBatching.StrategyOldest, max_batch_size: int, *, draft: bool) -> list[Problem]:
    path, problems = f"{_PATH}.oldest", []
    if not 0 <= oldest.max_candidate_sequences <= MOST_SLOTS:
        text = f"expected 0 to {MOST_SLOTS}, got {oldest.max_candidate_sequences}"
        problems.append(Problem(f"{path}.max_candidate_sequences", text))
    for index, size in enumerate(oldest.preferred_batch_size):
        where = f"{path}.preferred_batch_size[{index}]"
        if size <= 0:
            problems.append(Problem(where, f"expected a size > 0, got {size}"))
        elif size > max_batch_size and (max_batch_size > 0 or not draft):
            problems.append(Problem(where, f"expected at most max_batch_size = {max_batch_size}, got {size}"))
    return problems


def made_inputs(proto: pb.ModelConfig) -> frozenset[str]:
    """Return the names of the inputs that the server makes for sequences."""
    batching = proto.sequence_batching
    return frozenset([*(c.name for c in batching.control_input), *(s.input_name for s in batching.state)])


def state_outputs(proto: pb.ModelConfig) -> frozenset[str]:
    """Return the names of the outputs that hold states."""
    return frozenset(state.output_name for state in proto.sequence_batching.state)


def shown_to_clients(
    proto: pb.ModelConfig, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return a model's inputs and outputs without those that are made for, and kept from, sequences."""
    made, states = made_inputs(proto), state_outputs(proto)
    return tuple(s for s in inputs if s.name not in made), tuple(s for s in outputs if s.name not in states)


def check_sequence_tensors(
    proto: pb.ModelConfig, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> list[Problem]:
    """Return where controls and states differ from what the model declares. Nothing declared = nothing to check."""
    problems = []
    batching = proto.sequence_batching
    wanted: list[tuple[str, int, Sequence[int], str, bool]] = []
    for index, given in enumerate(batching.control_input):
        wanted += [(given.name, control_type(c), (1,), f"{_PATH}.control_input[{index}]", True) for c in given.control]
    for index, state in enumerate(batching.state):
        path = f"{_PATH}.state[{index}]"
        wanted.append((state.input_name, state.data_type, state.dims, f"{path}.input_name", True))
        wanted.append((state.output_name, state.data_type, state.dims, f"{path}.output_name", False))
    batches = (-1,) if proto.max_batch_size > 0 else ()
    for name, number, dims, path, is_input in wanted:
        specs = {spec.name: spec for spec in (inputs if is_input else outputs)}
        if specs:
            problems += _compare(name, BY_NUMBER[number].name, (*batches, *dims), path, specs)
    return problems


def _compare(
    name: str, datatype: str, shape: tuple[int, ...], path: str, specs: dict[str, TensorSpec]
) -> list[Problem]:
    spec = specs.get(name)
    if spec is None:
        return [Problem(path, f"the model has no {name!r}, it has {', '.join(map(repr, list(specs)[:16]))}")]
    if spec.datatype != datatype:
        expected = BY_NAME[spec.datatype].config_name if spec.datatype in BY_NAME else spec.datatype
        return [Problem(path, f"the model's {name!r} is {expected}, got {BY_NAME[datatype].config_name}")]
    fits = len(spec.shape) == len(shape) and all(
        -1 in (theirs, ours) or theirs == ours for theirs, ours in zip(spec.shape, shape, strict=True)
    )
    if spec.shape and not fits:
        return [Problem(path, f"the model's {name!r} has the shape {list(spec.shape)}, got {list(shape)}")]
    return []
