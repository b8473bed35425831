"""Plain PyTorch models: a `model.py` that has the class, and `model.pt` with its weights, if any."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from headrace_backends.api import ModelContext, ModelDescription
from headrace_backends.pytorch.compiling import compiled
from headrace_backends.pytorch.naming import (
    ANY,
    BOOL,
    DICT,
    FLOAT,
    INT,
    STRING,
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
    shown,
)
from headrace_backends.pytorch.options import TorchOptions
from headrace_backends.pytorch.program import Input
from headrace_backends.pytorch.tensors import pick
from headrace_protocol.errors import internal, invalid

_FUNCTION: Final = "forward()"
_MODULE_NAME: Final = "headrace_model"
_KINDS: Final = {
    "Tensor": TENSOR,
    "torch.Tensor": TENSOR,
    "str": STRING,
    "int": INT,
    "float": FLOAT,
    "bool": BOOL,
    "list[str]": STRINGS,
    "List[str]": STRINGS,
}
_LOG: Final = logging.getLogger(__name__)


class EagerModel:
    """A torch.nn.Module. Nobody can tell what it keeps from one call to the next, so every instance gets a process."""

    keeps_state: Final = False

    def __init__(
        self,
        source: Path,
        weights: Path | None,
        model: ModelContext,
        options: TorchOptions,
        device: torch.device | None,
    ) -> None:
        """Run `source`, make the model of its class, and load `weights` into it.

        Raises InferError INVALID_ARG where the files, or the configuration for them, are wrong, INTERNAL where the
        code of the model fails.
        """
        check_strings(model.config)
        made = _made(source, model, options)
        if weights is not None:
            _load_weights(made, weights, model)
        made.eval()
        if device is not None:
            made.to(device)
        inputs, outputs = configured_inputs(model.config), configured_outputs(model.config)
        self._binding: Final = bind(inputs, _function(made.forward), _FUNCTION)
        check_optional(model.config, self._binding.droppable, _FUNCTION)
        self._placed: Final = place_outputs(tuple(outputs), None, _FUNCTION)
        arguments = self._binding.arguments
        self.inputs: Final = {name: Input(inputs[name], _kind(arguments[name], inputs[name].name)) for name in inputs}
        self.outputs: Final = outputs
        self.written: Final = frozenset(inputs)
        self.exclusive: Final = not options.weight_sharing
        self.description: Final = ModelDescription()
        self._module: Final = compiled(made, options)

    def run(self, values: Mapping[str, Any], wanted: Sequence[str]) -> Mapping[str, Any]:
        args, kwargs = self._binding.call(values)
        return pick(self._module(*args, **kwargs), wanted, self._placed)


def _made(source: Path, model: ModelContext, options: TorchOptions) -> torch.nn.Module:
    code = _run(source, model)
    chosen = _class_in(code, model, options)
    try:
        return chosen()
    except Exception as error:
        raise internal(f"model '{model.name}': {chosen.__name__}() failed: {type(error).__name__}: {error}") from error


def _run(source: Path, model: ModelContext) -> ModuleType:
    """Import the model's code; modules beside it can be imported by it."""
    folder = str(source.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, source)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    code = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE_NAME] = code
    try:
        spec.loader.exec_module(code)
    except Exception as error:
        raise internal(f"model '{model.name}': {source} failed: {type(error).__name__}: {error}") from error
    return code


def _class_in(code: ModuleType, model: ModelContext, options: TorchOptions) -> type[torch.nn.Module]:
    """Return the class that MODEL_CLASS names; without it the only one, or the first by name."""
    classes = {
        name: value
        for name, value in sorted(vars(code).items())
        if isinstance(value, type) and issubclass(value, torch.nn.Module)
    }
    own = {name: value for name, value in classes.items() if value.__module__ == code.__name__}
    if options.model_class is not None:
        if options.model_class not in classes:
            raise invalid(
                f"model '{model.name}': parameters.MODEL_CLASS: {code.__file__} has no torch.nn.Module "
                f"'{options.model_class}', it has {shown(own)}"
            )
        return classes[options.model_class]
    candidates = own or classes
    if not candidates:
        raise invalid(f"model '{model.name}': {code.__file__} has no class that is a torch.nn.Module")
    name = next(iter(candidates))
    if len(candidates) > 1:
        _LOG.warning(
            "model '%s': %s was taken of the classes %s; parameter MODEL_CLASS chooses another",
            model.name,
            name,
            shown(candidates),
        )
    return candidates[name]


def _load_weights(made: torch.nn.Module, weights: Path, model: ModelContext) -> None:
    try:
        state = torch.load(weights, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise invalid(f"model '{model.name}': {weights} does not hold the weights of a model: {text}") from error
    try:
        made.load_state_dict(state)
    except Exception as error:
        raise invalid(
            f"model '{model.name}': the weights of {weights} do not fit {type(made).__name__}: {error}"
        ) from error


def _function(forward: Any) -> Function:
    """Return what a Python function takes; annotations tell the kind of an argument, tensors need none."""
    arguments = []
    more = keywords = False
    for name, parameter in inspect.signature(forward).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            more = True
        elif parameter.kind is parameter.VAR_KEYWORD:
            keywords = True
        else:
            kind, nullable = _annotated(parameter.annotation)
            required = parameter.default is parameter.empty
            arguments.append(Argument(name, kind, required=required, nullable=nullable))
    return Function(tuple(arguments), more=more, keywords=keywords)


def _annotated(annotation: Any) -> tuple[str, bool]:
    if annotation is inspect.Parameter.empty:
        return ANY, False
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = text.replace("typing.", "").replace("torch.Tensor", "Tensor").replace(" ", "")
    nullable = text.startswith("Optional[") or text.endswith("|None")
    text = text.removeprefix("Optional[").removesuffix("]" if text.startswith("Optional[") else "|None")
    if text.lower().startswith(("dict[str,tensor", "mapping[str,tensor")) or text in {"dict", "Dict"}:
        return DICT, nullable
    return _KINDS.get(text, ANY), nullable


def _kind(argument: Argument, datatype: str) -> str:
    """Return what an argument without an annotation gets."""
    if argument.kind != ANY:
        return argument.kind
    return STRINGS if datatype == "BYTES" else TENSOR
