"""TorchScript models: `model.pt`, made by torch.jit.script or torch.jit.trace and saved."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from headrace_backends.api import ModelContext, ModelDescription
from headrace_backends.pytorch.naming import (
    DICT,
    STRINGS,
    TENSOR,
    Argument,
    Function,
    bind,
    check_optional,
    check_strings,
    configured_inputs,
    configured_outputs,
    place_outputs,
)
from headrace_backends.pytorch.options import TorchOptions
from headrace_backends.pytorch.program import Input
from headrace_backends.pytorch.tensors import pick
from headrace_protocol.errors import invalid

_FUNCTION: Final = "forward()"


class ScriptProgram:
    """A TorchScript module, which tells the names and kinds of its arguments and nothing of shapes and datatypes."""

    def __init__(self, path: Path, model: ModelContext, options: TorchOptions, device: torch.device | None) -> None:
        """Load it. Raises InferError INVALID_ARG where the file, or the configuration for it, is wrong."""
        if options.compiling is not None:
            raise invalid(f"model '{model.name}': a TorchScript model cannot be compiled by torch.compile")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # whoever serves a model does not choose its form
                self._module: Final = torch.jit.load(str(path), map_location=device).eval()
            schema = self._module.forward.schema
        except (RuntimeError, ValueError, AttributeError) as error:
            raise invalid(f"model '{model.name}': PyTorch cannot load {path}: {error}") from error
        check_strings(model.config)
        inputs, outputs = configured_inputs(model.config), configured_outputs(model.config)
        self._binding: Final = bind(inputs, _function(schema), _FUNCTION)
        check_optional(model.config, self._binding.droppable, _FUNCTION)
        self._placed: Final = place_outputs(tuple(outputs), _result_count(schema), _FUNCTION)
        arguments = self._binding.arguments
        self.inputs: Final = {name: Input(inputs[name], arguments[name].kind) for name in inputs}
        self.outputs: Final = outputs
        self.description: Final = ModelDescription()
        self._optimized: Final = options.optimized_execution
        self.keeps_state: Final = _writes_state(self._module)
        self.exclusive: Final = self.keeps_state and not options.weight_sharing
        self.written: Final = frozenset(inputs if self._binding.as_dict else self._written())

    def run(self, values: Mapping[str, Any], wanted: Sequence[str]) -> Mapping[str, Any]:
        args, kwargs = self._binding.call(values)
        if self._optimized:
            result = self._module(*args, **kwargs)
        else:
            with torch.jit.optimized_execution(False):
                result = self._module(*args, **kwargs)
        return pick(result, wanted, self._placed)

    def _written(self) -> list[str]:
        """Return the inputs that the model may write to, or to parts of which it may."""
        graph = self._module.inlined_graph
        aliases = graph.alias_db()
        written = {
            argument.name
            for argument, value in zip(self._module.forward.schema.arguments, graph.inputs(), strict=True)
            if aliases.has_writers(value)
        }
        return [name for name, argument in self._binding.arguments.items() if argument.name in written]


def _function(schema: Any) -> Function:
    return Function(tuple(_argument(argument) for argument in schema.arguments[1:]))  # the first is the module


def _argument(argument: Any) -> Argument:
    kind = str(argument.type)
    nullable = kind.startswith("Optional[") or kind == "NoneType"
    if nullable:
        kind = kind.removeprefix("Optional[").removesuffix("]")
    return Argument(argument.name, _KINDS.get(kind, kind), required=not argument.has_default_value(), nullable=nullable)


_KINDS: Final = {"number": "float", "Dict[str, Tensor]": DICT, "List[str]": STRINGS, "Tensor": TENSOR}


def _result_count(schema: Any) -> int | None:
    """Return how many outputs the function has, None where its declaration does not tell."""
    returned = schema.returns[0].type
    if returned.kind() == "TensorType":
        return 1
    if returned.kind() != "TupleType":
        return None
    elements = returned.elements()
    plain = all(element.kind() in {"TensorType", "StringType"} or str(element) == STRINGS for element in elements)
    return len(elements) if plain else None


def _writes_state(module: torch.jit.ScriptModule) -> bool:
    """Return whether the model may change its own attributes, or the tensors in them, while it runs."""
    graph = module.inlined_graph
    if any(True for _ in graph.findAllNodes("prim::SetAttr")):
        return True
    aliases = graph.alias_db()
    held = (node.output() for node in graph.findAllNodes("prim::GetAttr"))
    return any(value.type().kind() != "ClassType" and aliases.has_writers(value) for value in held)
