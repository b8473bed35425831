"""Which argument of a model an input of the configuration is, and which of its results an output is.

Pure: it knows names, places and kinds, and not torch. The rules are Triton's, in this order:

- inputs: the names of the arguments; `<anything>__<index>`; the order of the configuration. A model whose one argument
  is a dictionary gets all inputs in it, by their names.
- outputs: the keys of a dictionary; `<anything>__<index>`; the order of the configuration.
- of programs that torch.export made, also paths: `ARGS[0]`, `KWARGS[key]`, `RESULT[0][key]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headrace_protocol.datatype import BOOL as BOOL_TYPE
from headrace_protocol.datatype import BY_NAME, BYTES, FP32, INT32, DataType
from headrace_protocol.errors import invalid

TENSOR: Final = "Tensor"
STRINGS: Final = "List[str]"
STRING: Final = "str"
INT: Final = "int"
FLOAT: Final = "float"
BOOL: Final = "bool"
DICT: Final = "Dict[str, Tensor]"
ANY: Final = "Any"
SCALARS: Final = frozenset({INT, FLOAT, BOOL})

_INDEXED: Final = re.compile(r".*?__(\d{1,9})", re.DOTALL)
_MAX_SHOWN: Final = 16


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a model's function."""

    name: str
    kind: str = TENSOR
    """One of the kinds above; others cannot be given."""
    required: bool = True
    """Whether it has no default."""
    nullable: bool = False
    """Whether None will do."""


@dataclass(frozen=True, slots=True)
class Function:
    """What can be given to a model."""

    arguments: tuple[Argument, ...]
    more: bool = False
    """Whether it takes any number of further tensors by position."""
    keywords: bool = False
    """Whether it takes any further tensors by name."""

    @property
    def takes_dict(self) -> bool:
        """Whether its one argument is a dictionary of tensors."""
        return len(self.arguments) == 1 and self.arguments[0].kind == DICT and not self.more


@dataclass(frozen=True, slots=True)
class Binding:
    """Which argument each input is."""

    arguments: Mapping[str, Argument]
    """By input: first those of `positional`, in order."""
    as_dict: bool = False
    """Whether all inputs go into one dictionary."""
    positional: tuple[str, ...] = ()
    """The inputs that are the function's first arguments."""
    absent: Mapping[str, None] = field(default_factory=dict)
    """Arguments, by name, that are None because no input is one."""

    @property
    def droppable(self) -> tuple[str, ...]:
        """The inputs that may be left out."""
        if self.as_dict:
            return tuple(self.arguments)
        return tuple(name for name, found in self.arguments.items() if found.nullable or not found.required)

    def call(self, values: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return positional and keyword arguments for these values of inputs, some of which may be left out."""
        if self.as_dict:
            return (dict(values),), {}
        args: list[Any] = []
        for name in self.positional:
            if name not in values:
                break
            args.append(values[name])
        if len(args) == len(self.arguments):
            return args, self.absent
        kwargs: dict[str, Any] = dict(self.absent)
        for name in tuple(self.arguments)[len(args) :]:
            argument = self.arguments[name]
            if name in values:
                kwargs[argument.name] = values[name]
            elif argument.required and argument.nullable:
                kwargs[argument.name] = None
        return args, kwargs


def index_of(name: str) -> int | None:
    """Return the index in a name like `INPUT__1`, None where there is none."""
    found = _INDEXED.fullmatch(name)
    return None if found is None else int(found[1])


def bind(inputs: Mapping[str, DataType], function: Function, what: str) -> Binding:
    """Return which arguments the configured inputs, in order, are. `what` names the function in errors.

    Raises InferError INVALID_ARG where they do not fit: too many or too few, or of a kind that is not given.
    """
    if function.takes_dict:
        for name, datatype in inputs.items():
            _check_kind(name, Argument(name), datatype, what)
        return Binding({name: Argument(name) for name in inputs}, as_dict=True)
    known = {argument.name: argument for argument in function.arguments}
    indices = {name: index_of(name) for name in inputs}
    if all(name in known for name in inputs):
        chosen = {name: known[name] for name in inputs}
    elif all(index is not None for index in indices.values()):
        chosen = {name: _at(function, index or 0, name, what) for name, index in indices.items()}
    elif function.keywords:
        chosen = {name: known.get(name, Argument(name)) for name in inputs}
    else:
        chosen = {name: _at(function, index, name, what) for index, name in enumerate(inputs)}
    _check_distinct(chosen, what)
    for name, argument in chosen.items():
        _check_kind(name, argument, inputs[name], what)
    return _binding({argument.name: name for name, argument in chosen.items()}, chosen, function, what)


def _binding(inputs: Mapping[str, str], chosen: Mapping[str, Argument], function: Function, what: str) -> Binding:
    """Put the inputs, given by argument, into the order of the arguments."""
    absent: dict[str, None] = {}
    for argument in function.arguments:
        if argument.required and argument.name not in inputs:
            if not argument.nullable:
                raise invalid(f"{what} needs {_described(argument)}, which no input of the configuration is")
            absent[argument.name] = None
    known = [argument.name for argument in function.arguments]
    further = [_further(index) for index in range(len(known), len(known) + len(inputs))]
    positional: list[str] = []
    for name in (*known, *further):
        if name not in inputs:
            break
        positional.append(inputs[name])
    lost = [name for argument, name in inputs.items() if argument.startswith("*") and name not in positional]
    if lost:
        raise invalid(f"input {shown(lost)}: the arguments of {what} before it are no inputs of the configuration")
    order = [*positional, *(name for name in chosen if name not in positional)]
    return Binding({name: chosen[name] for name in order}, positional=tuple(positional), absent=absent)


def _further(index: int) -> str:
    """Return what an argument beyond those that have names is called here."""
    return f"*{index}"


def _at(function: Function, index: int, name: str, what: str) -> Argument:
    if index < len(function.arguments):
        return function.arguments[index]
    if function.more:
        return Argument(_further(index))
    taken = ", ".join(_described(argument) for argument in function.arguments[:_MAX_SHOWN]) or "nothing"
    raise invalid(f"input '{name}' would be argument {index} of {what}, which takes {taken}")


def _check_distinct(chosen: Mapping[str, Argument], what: str) -> None:
    seen: dict[str, str] = {}
    for name, argument in chosen.items():
        if argument.name in seen:
            raise invalid(f"inputs '{seen[argument.name]}' and '{name}' are both argument '{argument.name}' of {what}")
        seen[argument.name] = name


def _check_kind(name: str, argument: Argument, datatype: DataType, what: str) -> None:
    kind = argument.kind
    if kind == ANY:
        return
    text = kind in {STRINGS, STRING}
    if kind not in {TENSOR, STRINGS, STRING, *SCALARS}:
        raise invalid(f"input '{name}' is {_described(argument)} of {what}, which no tensor can be")
    if text != (datatype is BYTES):
        raise invalid(f"input '{name}' is {_described(argument)} of {what}, got {datatype.config_name}")


def _described(argument: Argument) -> str:
    return f"argument '{argument.name}' ({argument.kind})"


def place_outputs(names: Sequence[str], count: int | None, what: str) -> dict[str, int]:
    """Return which result each configured output is, where the results have no names.

    `count` is how many there are, None where only a run tells. Raises InferError INVALID_ARG for one too many.
    """
    indices = {name: index_of(name) for name in names}
    if all(index is not None for index in indices.values()):
        placed = {name: index or 0 for name, index in indices.items()}
    else:
        placed = {name: index for index, name in enumerate(names)}
    for name, index in placed.items():
        if count is not None and index >= count:
            raise invalid(f"output '{name}' would be result {index} of {what}, which gives {count}")
    return placed


def place_by_path(names: Sequence[str], paths: Sequence[str], aliases: Sequence[str], what: str) -> dict[str, int]:
    """Return which leaf each configured name is: by `aliases` (the program's own names), by path, by index, in order.

    Raises InferError INVALID_ARG for a name beyond the leaves, or two names for one of them.
    """
    known = {plain_path(path): index for index, path in enumerate(paths)}
    known |= {alias: index for index, alias in enumerate(aliases)}
    named = [known.get(plain_path(name), known.get(name, index_of(name))) for name in names]
    indices = list(range(len(names))) if any(index is None for index in named) else [index or 0 for index in named]
    seen: dict[int, str] = {}
    for name, index in zip(names, indices, strict=True):
        if index >= len(paths):
            shown = ", ".join(aliases[:_MAX_SHOWN]) or "none"
            raise invalid(f"'{name}' would be number {index} of {what}, which are: {shown}")
        if index in seen:
            raise invalid(f"'{seen[index]}' and '{name}' are both {aliases[index]} of {what}")
        seen[index] = name
    return dict(zip(names, indices, strict=True))


def check_optional(config: Mapping[str, Any], droppable: Sequence[str], what: str) -> None:
    """Raise INVALID_ARG where the configuration lets clients leave out an input without which `what` cannot run."""
    needed = [tensor["name"] for tensor in config.get("input") or () if tensor.get("optional")]
    needed = [name for name in needed if name not in droppable]
    if needed:
        raise invalid(f"input {shown(needed)} is optional in the configuration, but {what} needs it")


def plain_path(path: str) -> str:
    """Return a path like `KWARGS['x']` without the quotes around its keys."""
    return re.sub(r"\[(['\"])(.*?)\1\]", r"[\2]", path)


def configured_inputs(config: Mapping[str, Any]) -> dict[str, DataType]:
    """Return name and datatype of every input that the model gets: the client's, then those that the server makes."""
    found = _named(config.get("input"), "name")
    sequences = config.get("sequence_batching") or {}
    for control_input in sequences.get("control_input") or ():
        control: Mapping[str, Any] = next(iter(control_input.get("control") or ()), {})
        found[control_input["name"]] = _control_type(control)
    found |= _named(sequences.get("state"), "input_name")
    for made in config.get("batch_input") or ():
        found |= dict.fromkeys(made.get("target_name") or (), _datatype(made["data_type"]))
    return found


def configured_outputs(config: Mapping[str, Any]) -> dict[str, DataType]:
    """Return name and datatype of every output that the model gives: the client's, then states."""
    sequences = config.get("sequence_batching") or {}
    return _named(config.get("output"), "name") | _named(sequences.get("state"), "output_name")


def _named(tensors: Iterable[Mapping[str, Any]] | None, key: str) -> dict[str, DataType]:
    return {
        tensor[key]: _datatype(tensor["data_type"])
        for tensor in tensors or ()
        if tensor.get("data_type", "TYPE_INVALID") != "TYPE_INVALID"
    }


def _control_type(control: Mapping[str, Any]) -> DataType:
    given = control.get("data_type", "TYPE_INVALID")
    if given != "TYPE_INVALID":
        return _datatype(given)
    if control.get("fp32_false_true"):
        return FP32
    return BOOL_TYPE if control.get("bool_false_true") else INT32


def _datatype(config_name: str) -> DataType:
    return BYTES if config_name == "TYPE_STRING" else BY_NAME[config_name.removeprefix("TYPE_")]


def check_strings(config: Mapping[str, Any]) -> None:
    """Raise INVALID_ARG where a tensor of strings has not one dimension: PyTorch has lists of them, no arrays."""
    batch = 1 if config.get("max_batch_size", 0) > 0 else 0
    for which in ("input", "output"):
        for tensor in config.get(which) or ():
            reshape = tensor.get("reshape")
            dims = tensor.get("dims", ()) if reshape is None else reshape.get("shape", ())
            if tensor.get("data_type") == "TYPE_STRING" and batch + len(dims) != 1:
                text = "the batch dimension and dims" if batch else "dims"
                raise invalid(
                    f"{which} '{tensor['name']}': strings are a list for PyTorch, of one dimension, but {text} make "
                    f"{batch + len(dims)}" + ("; write dims: [ 1 ] reshape: { shape: [ ] }" if batch else "")
                )


def shown(names: Iterable[str]) -> str:
    """Return names for an error, not too many of them."""
    listed = list(names)
    return (", ".join(f"'{name}'" for name in listed[:_MAX_SHOWN]) or "none") + (
        ", ..." if len(listed) > _MAX_SHOWN else ""
    )
