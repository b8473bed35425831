"""Programs that torch.export made: `.pt2` files that tell names, shapes and datatypes of their inputs and outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch._dynamo  # a second's import that loading needs: here, forked processes share it
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument
from torch.utils import _pytree as pytree

from headrace_backends.api import ModelContext, ModelDescription
from headrace_backends.pytorch.compiling import compiled
from headrace_backends.pytorch.mutation import keeps_state, written_inputs
from headrace_backends.pytorch.naming import (
    BOOL,
    FLOAT,
    INT,
    TENSOR,
    check_optional,
    configured_inputs,
    configured_outputs,
    place_by_path,
    plain_path,
)
from headrace_backends.pytorch.options import TorchOptions
from headrace_backends.pytorch.program import Input
from headrace_backends.pytorch.tensors import DATATYPES
from headrace_protocol import datatype
from headrace_protocol.datatype import DataType
from headrace_protocol.errors import InferError, invalid, unsupported
from headrace_protocol.tensor import TensorSpec

_DEFAULT_ROWS: Final = 4
"""What the server makes max_batch_size where nothing tells it."""
_NO_BOUND: Final = 1 << 31
_NUMBERS: Final[Mapping[type, tuple[str, DataType]]] = {
    torch.SymInt: (INT, datatype.INT64),
    torch.SymFloat: (FLOAT, datatype.FP64),
    torch.SymBool: (BOOL, datatype.BOOL),
    int: (INT, datatype.INT64),
    float: (FLOAT, datatype.FP64),
    bool: (BOOL, datatype.BOOL),
}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor or number among a program's inputs or outputs."""

    position: int
    """Among all leaves, constants included."""
    path: str
    name: str
    """What the program, or else this backend, calls it."""
    datatype: DataType
    kind: str
    dims: tuple[int | str, ...]
    """A dimension that varies is text: a symbol's name, or an expression of symbols."""
    mutated: bool = False
    """Whether it is an input that the program writes to."""

    def spec(self, name: str) -> TensorSpec:
        """Return it as the server is told it, under the name that the configuration gives it."""
        return TensorSpec(name, self.datatype.name, tuple(dim if isinstance(dim, int) else -1 for dim in self.dims))


class ExportedModel:
    """A program of torch.export, run operator by operator, or compiled by torch.compile."""

    def __init__(self, path: Path, model: ModelContext, options: TorchOptions, device: torch.device | None) -> None:
        """Load it. Raises InferError INVALID_ARG where the file, or the configuration for it, is wrong."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # a program of an older release: it still loads
                program = torch.export.load(path)
                if device is not None:
                    program = _moved(program, device)
            module = program.module()
        except InferError:
            raise
        except Exception as error:
            raise invalid(f"model '{model.name}': PyTorch cannot load {path}: {error}") from error
        check_optional(model.config, (), "a program of torch.export")
        constants, inputs = _inputs(program)
        outputs = _outputs(program)
        self._constants: Final = constants
        self._inputs: Final = _named(tuple(configured_inputs(model.config)), inputs, "the program's inputs")
        self._outputs: Final = _named(tuple(configured_outputs(model.config)), outputs, "the program's outputs")
        self.inputs: Final = {name: Input(leaf.datatype, leaf.kind) for name, leaf in self._inputs.items()}
        self.outputs: Final = {name: leaf.datatype for name, leaf in self._outputs.items()}
        batch = _batch_symbol([*inputs, *outputs])
        self.description: Final = ModelDescription(
            tuple(leaf.spec(name) for name, leaf in self._inputs.items()),
            tuple(leaf.spec(name) for name, leaf in self._outputs.items()),
            batch is not None,
            _proposed(_most_rows(program, batch), model),
        )
        self.keeps_state: Final = keeps_state(program)
        self.exclusive: Final = self.keeps_state and not options.weight_sharing
        self.written: Final = [name for name, leaf in self._inputs.items() if leaf.mutated]
        self._function: Final = compiled(_flat(module, program.call_spec.in_spec), options)

    def run(self, values: Mapping[str, Any], wanted: Sequence[str]) -> Mapping[str, Any]:
        flat = list(self._constants)
        for name, leaf in self._inputs.items():
            flat[leaf.position] = values[name]
        leaves = self._function(*flat)
        return {name: leaves[self._outputs[name].position] for name in wanted}


def _flat(module: torch.fx.GraphModule, in_spec: pytree.TreeSpec) -> Callable[..., Sequence[Any]]:
    """Return the module as a function from all leaves of its arguments to those of its result.

    Taking containers apart and together, and comparing their kinds, costs more than a small model. What a module checks
    of its arguments by guards it goes on checking; one without guards, of an older release, is called as it is.
    """
    if hasattr(module, "_guards_fn"):
        module.graph.set_codegen(torch.fx.graph.CodeGen())
        module.recompile()
        function: Callable[..., Sequence[Any]] = module.forward
        return function

    def called(*leaves: Any) -> Sequence[Any]:
        args, kwargs = pytree.tree_unflatten(leaves, in_spec)
        results: Sequence[Any] = pytree.tree_leaves(module(*args, **kwargs))
        return results

    return called


def _moved(program: ExportedProgram, device: torch.device) -> ExportedProgram:
    """Return the program on `device`, whichever it was exported on."""
    tensors = [*program.state_dict.values(), *program.constants.values()]
    elsewhere = any(isinstance(t, torch.Tensor) and t.device.type != device.type for t in tensors)
    if not elsewhere and device.type == "cpu":
        return program
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(program, str(device))


def _inputs(program: ExportedProgram) -> tuple[list[Any], list[Leaf]]:
    """Return all leaves of the arguments with the constants in their places, and those that are inputs."""
    spec = program.call_spec.in_spec
    paths = argument_paths(spec)
    names = program.graph_signature.user_inputs
    by_path = _argument_names(program)
    placeholders = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    mutated = written_inputs(program)
    constants: list[Any] = [None] * len(paths)
    leaves = []
    arguments = [found.arg for found in program.graph_signature.input_specs if found.kind.name == "USER_INPUT"]
    for position, (path, argument, name) in enumerate(zip(paths, arguments, names, strict=True)):
        if isinstance(argument, ConstantArgument):
            constants[position] = argument.value
        else:
            leaf = _leaf(position, path, by_path.get(path, str(name)), placeholders[argument.name])
            leaves.append(replace(leaf, mutated=argument.name in mutated))
    return constants, leaves


def _argument_names(program: ExportedProgram) -> dict[str, str]:
    """Return what forward() calls its arguments, by path. The program's own names are these, but in lower case."""
    signature = program.module_call_graph[0].signature
    names = (None if signature is None else signature.forward_arg_names) or ()
    return {f"ARGS[{index}]": name for index, name in enumerate(names)} | {f"KWARGS[{name}]": name for name in names}


def _outputs(program: ExportedProgram) -> list[Leaf]:
    paths = result_paths(program.call_spec.out_spec)
    node = next(node for node in program.graph.nodes if node.op == "output")
    signature = [found.kind.name for found in program.graph_signature.output_specs]
    results = [
        result for result, kind in zip(node.args[0], signature, strict=True) if kind in {"USER_OUTPUT", "LOSS_OUTPUT"}
    ]
    leaves = []
    for position, (path, result) in enumerate(zip(paths, results, strict=True)):
        value = result.meta["val"] if isinstance(result, torch.fx.Node) else result
        if value is not None:
            leaves.append(_leaf(position, path, result_name(path, position), value))
    return leaves


def _leaf(position: int, path: str, name: str, value: Any) -> Leaf:
    if isinstance(value, torch.Tensor):
        element = DATATYPES.get(value.dtype)
        if element is None:
            raise unsupported(f"tensor '{name}' of the program is of {value.dtype}, which is no tensor datatype")
        dims = tuple(dim if isinstance(dim, int) else str(dim) for dim in value.shape)
        return Leaf(position, path, name, element, TENSOR, dims)
    number = _NUMBERS.get(type(value))
    if number is None:
        raise unsupported(f"'{name}' of the program is of type {type(value).__name__}, which is no tensor")
    kind, element = number
    return Leaf(position, path, name, element, kind, ())


def argument_paths(spec: pytree.TreeSpec) -> list[str]:
    """Return paths like `ARGS[0]` and `KWARGS[key]` for the leaves of (args, kwargs)."""
    return [plain_path(("ARGS", "KWARGS")[path[0].idx] + pytree.keystr(path[1:])) for path, _ in _leaves(spec)]


def result_paths(spec: pytree.TreeSpec) -> list[str]:
    """Return paths like `RESULT[0]` for the leaves of a result."""
    return [plain_path("RESULT" + pytree.keystr(path)) for path, _ in _leaves(spec)]


def result_name(path: str, position: int) -> str:
    """Return the name of an output where the configuration gives none: the key of a dictionary, or OUTPUT__<index>."""
    key = path.removeprefix("RESULT").removeprefix("[").removeprefix(".").removesuffix("]")
    return key if key and not key.isdecimal() and "[" not in key and "." not in key else f"OUTPUT__{position}"


def _leaves(spec: pytree.TreeSpec) -> list[tuple[tuple[Any, ...], Any]]:
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    leaves: list[tuple[tuple[Any, ...], Any]] = pytree.tree_flatten_with_path(tree)[0]
    return leaves


def _named(names: Sequence[str], leaves: Sequence[Leaf], what: str) -> dict[str, Leaf]:
    """Return the leaves by the names that the configuration gives them, or by their own where it has none."""
    if not names:
        return {leaf.name: leaf for leaf in leaves}
    own = [leaf.name for leaf in leaves]
    placed = place_by_path(names, [leaf.path for leaf in leaves], own, what)
    return {name: leaves[index] for name, index in placed.items()}


def _batch_symbol(leaves: Sequence[Leaf]) -> str | None:
    """Return the symbol that is the first dimension of every tensor; None where there is none, so no batch."""
    firsts = {leaf.dims[:1] for leaf in leaves}
    first = next(iter(firsts)) if len(firsts) == 1 else ()
    return first[0] if first and isinstance(first[0], str) and first[0].isidentifier() else None


def _most_rows(program: ExportedProgram, batch: str | None) -> int | None:
    """Return how many rows the program was exported for at most, None where that has no bound."""
    for symbol, bounds in program.range_constraints.items():
        if str(symbol) == batch and bounds.upper < _NO_BOUND:
            return int(bounds.upper)
    return None


def _proposed(most_rows: int | None, model: ModelContext) -> dict[str, Any] | None:
    """Return the batching that such a program can do. Raises INVALID_ARG where the configuration lets in more rows."""
    if most_rows is None:
        return None
    config = model.config
    wanted = int(config.get("max_batch_size", 0))
    if wanted > most_rows:
        raise invalid(f"model '{model.name}': the program takes up to {most_rows} rows, max_batch_size is {wanted}")
    if wanted or config.get("input") or config.get("output"):
        return None
    default = model.backend_config.get("default-max-batch-size", "")
    fits = (int(default) if default.isdecimal() else _DEFAULT_ROWS) <= most_rows
    return None if fits else {"max_batch_size": most_rows}
