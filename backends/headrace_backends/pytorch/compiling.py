"""torch.compile, where a model's configuration asks for it; done while the model loads, as far as shapes are known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from headrace_backends.api import ModelContext
from headrace_backends.pytorch.naming import TENSOR
from headrace_backends.pytorch.options import TorchOptions
from headrace_backends.pytorch.program import Input, Program
from headrace_backends.pytorch.tensors import TORCH_TYPES
from headrace_protocol.datatype import BYTES
from headrace_protocol.errors import invalid

_LOG: Final = logging.getLogger(__name__)


def compiled(module: Callable[..., Any], options: TorchOptions) -> Callable[..., Any]:
    """Return `module`, or what compiles it when it is first called."""
    if options.compiling is None:
        return module
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # workers of its own would outlive a process that is killed
    found: Callable[..., Any] = torch.compile(module, **options.compiling)
    return found


def compile_now(program: Program, model: ModelContext, run: Callable[[Mapping[str, Any]], object]) -> None:
    """Have `run` run the program, so that it is compiled before the first request: with as many rows as may come, two, and one.

    Where a dimension of an input is not known, nothing is done. Raises InferError INVALID_ARG where compiling fails.
    """
    sizes = _sizes(program, model)
    if sizes is None:
        _LOG.warning(
            "model '%s' is compiled by its first requests: the dims of its inputs are not all fixed", model.name
        )
        return
    most = int(model.config.get("max_batch_size", 0))
    for rows in sorted({most, min(most, 2), min(most, 1)}, reverse=True):
        values = {
            name: _example(given, ((rows,) if most else ()) + sizes[name]) for name, given in program.inputs.items()
        }
        try:
            run(values)
        except Exception as error:
            text = str(error).strip().partition("\n\n")[0]
            raise invalid(f"model '{model.name}' cannot be compiled: {type(error).__name__}: {text}") from error


def _sizes(program: Program, model: ModelContext) -> Mapping[str, tuple[int, ...]] | None:
    """Return the dims of every input, without the batch's, None where one varies or is not told."""
    sizes: dict[str, tuple[int, ...]] = {}
    for tensor in model.config.get("input") or ():
        reshape = tensor.get("reshape")
        sizes[tensor["name"]] = tuple(tensor["dims"] if reshape is None else reshape.get("shape", ()))
    for spec in () if sizes else program.description.inputs:
        sizes[spec.name] = spec.shape
    known = sizes.keys() >= program.inputs.keys() and all(min(dims, default=1) > 0 for dims in sizes.values())
    return sizes if known and all(given.datatype is not BYTES for given in program.inputs.values()) else None


def _example(given: Input, shape: tuple[int, ...]) -> Any:
    return torch.zeros(shape, dtype=TORCH_TYPES[given.datatype]) if given.kind == TENSOR else 1
