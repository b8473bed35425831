"""What a model is given beside its inputs where it takes sequences: controls, and states that are kept between requests.

A sequence is told by a number of the server's that is never used again, so the state of one can never meet another.
Knows nothing of sockets and of how outputs travel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from headrace_protocol.datatype import (
    ALL,
    BF16,
    BOOL,
    BYTES,
    FP32,
    INT32,
    Array,
    DataType,
    element_count,
    of_numpy,
    to_numpy,
)
from headrace_protocol.errors import InferError, internal, invalid
from headrace_protocol.messages import Execute, RequestHeader

START: Final = 1
END: Final = 2
INITIAL_STATE_FOLDER: Final = "initial_state"
_KEY_MASK: Final = (1 << 62) - 1
_BY_CONFIG_NAME: Final = {datatype.config_name: datatype for datatype in ALL}


class EndedSequence(NamedTuple):
    """A sequence that gets no further request, though none of its requests had the end flag."""

    instance: int
    slot: int
    correlation_id: int | str


class Control(NamedTuple):
    """An input of one element a row that tells where in its sequence the row's request is."""

    name: str
    datatype: DataType
    of_request: Callable[[RequestHeader], object]
    of_nobody: object
    """For a row without a request."""


class State(NamedTuple):
    """A tensor that a request hands on to the next of its sequence."""

    input_name: str
    output_name: str
    datatype: DataType
    dims: tuple[int, ...]
    """Of one row; -1 = varies."""
    initial: Array
    """Of one row."""


class _Kept:
    """What is kept of one sequence."""

    __slots__ = ("ended", "values")

    def __init__(self, ended: EndedSequence, values: dict[str, Array]) -> None:
        self.ended = ended
        """What is told if it ends without the end flag."""
        self.values = values
        """By name of the state's output: its last value, of one row."""


class SequenceStates:
    """The sequences of one process. Used by its threads, of which no two work on the same sequence."""

    def __init__(self, config: Mapping[str, Any], model_directory: Path) -> None:
        """`config` is what the server has checked. Raises INVALID_ARG where the file of an initial state is no good."""
        batching = config["sequence_batching"]
        self.rows_are_slots: Final = "oldest" not in batching and config.get("max_batch_size", 0) > 0
        self.batching: Final = config.get("max_batch_size", 0) > 0
        self.controls: Final = tuple(_controls(batching.get("control_input", ())))
        self.states: Final = tuple(_state(state, model_directory) for state in batching.get("state", ()))
        self.outputs: Final = tuple(state.output_name for state in self.states)
        shown = {output["name"] for output in config.get("output", ())}
        self.hidden: Final = frozenset(self.outputs) - shown
        """Outputs that clients do not see."""
        self.varying: Final = any(-1 in state.dims for state in self.states)
        self._initial_key = _shapes([state.initial for state in self.states])
        self._kept: dict[int, _Kept] = {}

    def __len__(self) -> int:
        """Return how many sequences something is kept of."""
        return len(self._kept)

    def open(self, header: RequestHeader, instance: int) -> _Kept:
        """Return what is kept of a request's sequence, at first what a sequence begins with."""
        kept = self._kept.get(header.sequence)
        if kept is None or header.flags & START:
            ended = EndedSequence(instance, header.slot, header.correlation_id)
            kept = _Kept(ended, {state.output_name: state.initial for state in self.states})
            if header.sequence:
                self._kept[header.sequence] = kept
        return kept

    def end(self, numbers: Iterable[int]) -> list[EndedSequence]:
        """Forget sequences; return those of which something was kept."""
        found = [self._kept.pop(number, None) for number in numbers]
        return [kept.ended for kept in found if kept is not None]

    def key(self, kept: _Kept) -> int:
        """Return a number for the shapes of a sequence's states: 0 for those that it began with."""
        shapes = _shapes(kept.values.values())
        return 0 if shapes == self._initial_key else hash(shapes) & _KEY_MASK | 1


class BatchSequences:
    """The sequences of one batch. Made for each; states come into force by `commit`, or one by one with `keep`."""

    def __init__(self, model: SequenceStates, message: Execute) -> None:
        self._model: Final = model
        self._headers: Final = message.requests
        self._instance: Final = message.instance
        slots = [header.slot for header in message.requests]
        expands = model.rows_are_slots and message.requests[0].sequence != 0
        self.starts: Final = slots if expands else _starts(message.requests)
        """The first row of each request."""
        self.rows: Final = max(slots) + 1 if expands else sum(header.rows for header in message.requests)
        """Rows as the backend sees them."""
        self.sparse: Final = expands and self.rows != len(slots)
        """Whether some of them belong to nobody."""
        self._kept: list[_Kept] = []
        self._staged: dict[int, dict[str, Array]] = {}
        self._keys: list[tuple[int, int]] = []

    @property
    def state_outputs(self) -> tuple[str, ...]:
        """Outputs that the model has to give, whoever asks for what."""
        return self._model.outputs

    def expand(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the inputs with rows for nobody, of zeros, between those of requests."""
        expanded = {}
        for name, given in inputs.items():
            rows = np.full((self.rows, *given.shape[1:]), b"" if given.dtype == object else 0, given.dtype)
            rows[self.starts] = given
            expanded[name] = rows
        return expanded

    def made_inputs(self, given: Collection[str]) -> dict[str, Array]:
        """Return the inputs that clients do not give, but for those `given` all the same."""
        model = self._model
        self._kept = [model.open(header, self._instance) for header in self._headers]
        made = {control.name: self._control(control) for control in model.controls if control.name not in given}
        for state in model.states:
            if state.input_name not in given:
                made[state.input_name] = self._state(state)
        return made

    def take_all(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Stage the states out of outputs with all rows; return what clients see, with the rows of requests alone.

        Raises INTERNAL where the outputs are not what the configuration says, and stages nothing.
        """
        if self.sparse:
            for name, array in outputs.items():
                if not array.ndim or array.shape[0] != self.rows:
                    raise internal(
                        f"output '{name}' has shape {list(array.shape)}, expected a first dimension of {self.rows}: "
                        "the rows without a request too"
                    )
        staged: list[dict[str, Array]] = [{} for _ in self._headers]
        for state in self._model.states:
            array = self._output(state, outputs)
            for index, start in enumerate(self.starts):
                staged[index][state.output_name] = _copy(array[start] if self._model.batching else array)
        for index, values in enumerate(staged):
            self._staged.setdefault(index, values)
        shown = {name: array for name, array in outputs.items() if name not in self._model.hidden}
        return {name: array[self.starts] for name, array in shown.items()} if self.sparse else shown

    def take(self, index: int, outputs: Mapping[str, Array], *, partial: bool = False) -> dict[str, Array]:
        """Stage the states out of one request's outputs, all of them unless `partial`; return what clients see."""
        values = {}
        for state in self._model.states:
            if state.output_name in outputs or not partial:
                array = self._output(state, outputs)
                values[state.output_name] = _copy(array[0] if self._model.batching else array)
        self._staged[index] = {**self._staged.get(index, {}), **values}
        return {name: array for name, array in outputs.items() if name not in self._model.hidden}

    def commit(self, failed: Collection[int] = ()) -> None:
        """Let the staged states of every request be those of its sequence; what failed has left no trace."""
        for index in range(len(self._headers)):
            self.keep(index, failed=index in failed)

    def keep(self, index: int, *, failed: bool = False) -> None:
        """As `commit`, for one request that has come to its end."""
        header, values = self._headers[index], self._staged.pop(index, None)
        if values and not failed and self._kept:
            self._kept[index].values.update(values)
            if self._model.varying:
                self._keys.append((index, self._model.key(self._kept[index])))
        if header.flags & END and header.sequence:
            self._model.end([header.sequence])

    def take_keys(self) -> tuple[tuple[int, int], ...]:
        """Return the new keys of states whose shapes vary, by index of the request; once each."""
        keys, self._keys = self._keys, []
        return tuple(keys)

    def _control(self, control: Control) -> Array:
        values = np.full(self.rows, control.of_nobody, control.datatype.numpy)
        for start, header in zip(self.starts, self._headers, strict=True):
            values[start : start + header.rows] = control.of_request(header)
        return values.reshape(-1, 1) if self._model.batching else values[:1]

    def _state(self, state: State) -> Array:
        values = [kept.values[state.output_name] for kept in self._kept]
        if not self._model.batching:
            return values[0]
        shape = values[0].shape
        if any(value.shape != shape for value in values):
            raise internal(f"states '{state.input_name}' of unequal shapes came in one batch")
        if self.rows == 1:
            return values[0][np.newaxis]
        array = np.full((self.rows, *shape), b"" if state.datatype is BYTES else 0, state.datatype.numpy)
        for start, header, value in zip(self.starts, self._headers, values, strict=True):
            array[start : start + header.rows] = value
        return array

    def _output(self, state: State, outputs: Mapping[str, Array]) -> Array:
        name = state.output_name
        array = outputs.get(name)
        if array is None:
            raise internal(f"the model gave no output '{name}', which holds a state of the sequence")
        datatype = of_numpy(array.dtype)
        if datatype is not state.datatype and not (state.datatype is BF16 and array.dtype == BF16.numpy):
            got = array.dtype if datatype is None else datatype.name
            raise internal(f"state output '{name}' has the datatype {got}, expected {state.datatype.name}")
        shape = array.shape[1:] if self._model.batching else array.shape
        if len(shape) != len(state.dims) or any(
            wanted not in (got, -1) for wanted, got in zip(state.dims, shape, strict=True)
        ):
            raise internal(f"state output '{name}' has rows of shape {list(shape)}, expected {list(state.dims)}")
        return array


def _starts(headers: Sequence[RequestHeader]) -> list[int]:
    starts, at = [], 0
    for header in headers:
        starts.append(at)
        at += header.rows
    return starts


def _copy(array: Array) -> Array:
    """Return a copy to keep; strings of whatever kind as bytes."""
    if of_numpy(array.dtype) is not BYTES:
        return np.array(array)
    encoded = np.empty(array.size, np.object_)
    encoded[:] = [item.encode() if isinstance(item, str) else bytes(item) for item in array.reshape(-1).tolist()]
    return encoded.reshape(array.shape)


def _shapes(values: Iterable[Array]) -> tuple[tuple[int, ...], ...]:
    return tuple(value.shape for value in values)


def _controls(inputs: Iterable[Mapping[str, Any]]) -> Iterable[Control]:
    for given in inputs:
        for control in given["control"]:
            yield _control(given["name"], control)


def _control(name: str, control: Mapping[str, Any]) -> Control:
    kind = control.get("kind", "CONTROL_SEQUENCE_START")
    if kind == "CONTROL_SEQUENCE_CORRID":
        datatype = _BY_CONFIG_NAME[control["data_type"]]
        if datatype is BYTES:
            return Control(name, BYTES, lambda header: str(header.correlation_id or "").encode(), b"")
        return Control(name, datatype, lambda header: header.correlation_id or 0, 0)
    lists = {"int32_false_true": INT32, "fp32_false_true": FP32, "bool_false_true": BOOL}
    field = next(field for field in lists if control.get(field))
    no, yes = control[field]
    flag = {"CONTROL_SEQUENCE_START": START, "CONTROL_SEQUENCE_END": END}.get(kind)
    if flag is None:
        return Control(name, lists[field], lambda _: yes, no)
    return Control(name, lists[field], lambda header: yes if header.flags & flag else no, no)


def _state(state: Mapping[str, Any], model_directory: Path) -> State:
    datatype = _BY_CONFIG_NAME[state["data_type"]]
    dims = tuple(int(dim) for dim in state.get("dims", ()))
    given = state.get("initial_state") or ()
    if given:
        shape = tuple(int(dim) for dim in given[0].get("dims", ()))
        initial = (
            _from_file(given[0]["data_file"], datatype, shape, model_directory) if "data_file" in given[0] else None
        )
    else:
        shape, initial = tuple(1 if dim == -1 else dim for dim in dims), None
    if initial is None:
        initial = np.full(shape, b"" if datatype is BYTES else 0, datatype.numpy)
    return State(state["input_name"], state["output_name"], datatype, dims, initial)


def _from_file(name: str, datatype: DataType, shape: tuple[int, ...], model_directory: Path) -> Array:
    where = f"sequence_batching.state.initial_state: data_file '{name}'"
    folder = (model_directory / INITIAL_STATE_FOLDER).resolve()
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder):
            raise invalid(f"{where} lies outside the folder {INITIAL_STATE_FOLDER} of the model")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise invalid(f"{where} cannot be read in the model's folder {INITIAL_STATE_FOLDER}: {reason}") from None
    expected = element_count(shape) * datatype.itemsize
    if datatype is not BYTES and len(data) != expected:
        raise invalid(f"{where} has {len(data)} bytes, a state of shape {list(shape)} has {expected}")
    try:
        return to_numpy(datatype, shape, data)
    except InferError as error:
        raise invalid(f"{where}: {error.message}") from None
