"""Runs PyTorch models: TorchScript, programs of torch.export, packages of AOTInductor, and plain modules in Python.

Inputs are read from the shared memory without a copy, on CPUs; outputs are copied into it once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

import numpy as np
import torch

from headrace_backends.api import Batch, ModelContext, ModelDescription
from headrace_backends.pytorch.aoti import CompiledPackage
from headrace_backends.pytorch.compiling import compile_now
from headrace_backends.pytorch.content import Content, content_of
from headrace_backends.pytorch.eager import EagerModel
from headrace_backends.pytorch.exported import ExportedModel
from headrace_backends.pytorch.options import TorchOptions, parse_options
from headrace_backends.pytorch.placement import Placement, device_lost, out_of_memory, place, set_up
from headrace_backends.pytorch.program import Program
from headrace_backends.pytorch.tensors import DATATYPES, dense, to_array, to_value
from headrace_backends.pytorch.torchscript import ScriptProgram
from headrace_protocol.datatype import BF16, Array
from headrace_protocol.errors import InferError, cancelled, internal, invalid

PARALLEL_BYTES: Final = 1 << 20
"""Outputs of at least this size are copied by PyTorch's threads."""
EXIT_DEVICE_LOST: Final = 4
ERROR_TEXT: Final = 2000
"""Characters of a model's error that a client is told."""
_DEFAULT_FILE: Final = "model.pt"
_SOURCE_FILE: Final = "model.py"
_LOG: Final = logging.getLogger(__name__)


class PyTorchBackend:
    """PyTorch on CPUs and on CUDA."""

    fork_safe: ClassVar[bool] = True
    threads: ClassVar[bool] = True

    def initialize(self, model: ModelContext) -> ModelDescription:
        """Load the model, and compile it where that is asked for."""
        options = parse_options(model)
        set_up(options)
        self._placement: Placement = place(model, options)
        self._program: Program = load_program(model, options, self._placement.device)
        self._mode: Callable[[], Any] = torch.inference_mode if options.inference_mode else torch.no_grad
        self._cleans = options.cache_cleaning
        self._parallel = options.intra_op_threads > 1
        if options.compiling is not None:
            compile_now(self._program, model, lambda values: self._run(0, values, tuple(self._program.outputs)))
        concurrency = 1 if self._program.exclusive else None
        return replace(self._program.description, concurrency=concurrency)

    def execute(self, batch: Batch) -> None:
        """Run the model once over all rows; where that fails, once for each request, so that one fails alone."""
        if batch.cancelled:
            raise cancelled()
        inputs: dict[str, Any] = {}
        try:
            inputs = self._tensors(batch, batch.inputs)
            batch.respond(self._outputs(batch, inputs, batch.wanted, together=True))
        except Exception as error:
            if device_lost(error):
                _end(error)
            if len(batch.requests) == 1 or self._program.keeps_state or _was_written(inputs):
                raise _failure(error, batch) from error
            self._one_by_one(batch)
        finally:
            if self._cleans:
                self._placement.clean()

    def finalize(self) -> None:
        """Free the model."""
        del self._program

    def _one_by_one(self, batch: Batch) -> None:
        for request in batch.requests:
            try:
                if request.cancelled:
                    raise cancelled()
                inputs = self._tensors(batch, request.alone())
                request.respond(self._outputs(batch, inputs, request.wanted, together=False))
            except Exception as error:
                request.fail(_failure(error, batch))

    def _tensors(self, batch: Batch, arrays: Mapping[str, Array]) -> dict[str, Any]:
        """Return the inputs as the model takes them; those that it may write to, in memory that it may."""
        program = self._program
        values = {}
        for name, given in program.inputs.items():
            array = arrays.get(name)
            if array is None:
                continue  # an optional input, for which the model has a default
            if name in program.written and not batch.owns(name):
                array = np.array(array)
            values[name] = to_value(name, array, given.datatype, given.kind)
        return values

    def _outputs(
        self, batch: Batch, inputs: Mapping[str, Any], wanted: Sequence[str] | None, *, together: bool
    ) -> dict[str, Array]:
        """Run the model and return what it gave as arrays, large ones in memory that the server reads."""
        outputs = self._program.outputs
        names = tuple(outputs) if wanted is None else wanted
        results = self._run(batch.instance, inputs, names)
        large = together and self._parallel
        return {
            name: _placed(batch, name, value) if large and _is_large(value) else to_array(name, value, outputs[name])
            for name, value in results.items()
        }

    def _run(self, instance: int, inputs: Mapping[str, Any], wanted: Sequence[str]) -> Mapping[str, Any]:
        """Run the model on its device; return results on the CPU."""
        placement = self._placement
        with placement.scope(instance), self._mode():
            values = {name: placement.put(value) for name, value in inputs.items()}
            return placement.fetch(self._program.run(values, wanted))


def load_program(model: ModelContext, options: TorchOptions, device: torch.device | None) -> Program:
    """Load the model's file, whatever kind it is of. Raises InferError where it is missing or cannot be loaded."""
    folder = model.version_directory
    path = folder / (model.config.get("default_model_filename") or _DEFAULT_FILE)
    source = path if path.suffix == ".py" else folder / _SOURCE_FILE
    if model.config.get("runtime", "").endswith(".py") or path == source or (source.is_file() and not path.is_file()):
        weights = folder / _DEFAULT_FILE if path == source else path
        return _eager(source, weights, model, options, device)
    if not path.is_file():
        raise invalid(f"model '{model.name}': there is no file {path}")
    content, names = _content(path, model)
    if content is Content.TORCHSCRIPT:
        return ScriptProgram(path, model, options, device)
    if content is Content.EXPORTED:
        return ExportedModel(path, model, options, device)
    if content is Content.COMPILED:
        return CompiledPackage(path, names, model, options, device)
    if content is Content.WEIGHTS and source.is_file():
        return _eager(source, path, model, options, device)
    hint = f"; weights need a {_SOURCE_FILE} with the model's class beside them" if content is Content.WEIGHTS else ""
    raise invalid(f"model '{model.name}': {path} is {content.value}, and no model that can be run by itself{hint}")


def _eager(
    source: Path, weights: Path, model: ModelContext, options: TorchOptions, device: torch.device | None
) -> Program:
    if not source.is_file():
        raise invalid(f"model '{model.name}': there is no file {source}")
    return EagerModel(source, weights if weights.is_file() else None, model, options, device)


def _content(path: Path, model: ModelContext) -> tuple[Content, Sequence[str]]:
    try:
        return content_of(path)
    except OSError as error:
        raise invalid(f"model '{model.name}': {path} cannot be read: {error.strerror}") from error


def _is_large(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.dtype in DATATYPES
        and value.nbytes >= PARALLEL_BYTES
    )


def _placed(batch: Batch, name: str, tensor: torch.Tensor) -> Array:
    """Copy an output to where the server reads it, by all threads that an operator may use."""
    plain = dense(name, tensor)
    place = batch.allocate(name, plain.shape, DATATYPES[plain.dtype])
    target = torch.from_numpy(place)
    (target.view(torch.bfloat16) if DATATYPES[plain.dtype] is BF16 else target).copy_(plain)
    return place


def _end(error: Exception) -> NoReturn:
    """End the process: the GPU refuses it everything from now on, and a new process can go on."""
    _LOG.error("the GPU has faulted, the process ends: %s", error)
    os._exit(EXIT_DEVICE_LOST)


def _was_written(inputs: Mapping[str, Any]) -> bool:
    """Return whether a run has changed its inputs, so that another one would give something else."""
    return any(isinstance(value, torch.Tensor) and value._version for value in inputs.values())


def _failure(error: Exception, batch: Batch) -> InferError:
    """Return what a request is told of an error in the model."""
    if isinstance(error, InferError):
        return error
    if batch.cancelled:
        return cancelled()
    text = str(error).strip()
    if isinstance(error, torch.jit.Error) or "TorchScript interpreter" in text:
        _LOG.info("TorchScript failed: %s", text)
        text = text.rpartition("\n")[2]  # what comes before is where in the model it happened
    elif not isinstance(error, RuntimeError):
        text = f"{type(error).__name__}: {text}"
    return out_of_memory(error) or internal(f"PyTorch failed: {text[:ERROR_TEXT]}")
