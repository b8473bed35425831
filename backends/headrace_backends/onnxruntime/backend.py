"""Runs ONNX models: one session for all instances of the process.

Inputs are read from the shared memory, and large outputs written to it, without a copy.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import onnxruntime

from headrace_backends.api import Batch, ModelContext, ModelDescription
from headrace_backends.onnxruntime.options import OnnxOptions, parse_options
from headrace_backends.onnxruntime.signature import OnnxSignature
from headrace_protocol.datatype import BF16, Array, element_count
from headrace_protocol.errors import InferError, cancelled, internal, invalid, unsupported

BIND_BYTES: Final = 1 << 20
"""Outputs of together at least this size are written in place. Binding costs 40 µs more than a plain run, as long as
copying about a megabyte takes."""
_ERRORS_ONLY: Final = 3
"""ONNX Runtime's severity for its own log, on the standard error."""
_DEFAULT_FILE: Final = "model.onnx"
_LOG: Final = logging.getLogger(__name__)


class OnnxRuntimeBackend:
    """ONNX Runtime on CPU, CUDA, TensorRT or OpenVINO, whichever the installed package offers."""

    fork_safe: ClassVar[bool] = True
    threads: ClassVar[bool] = True

    def initialize(self, model: ModelContext) -> ModelDescription:
        """Create the session."""
        options = parse_options(model, onnxruntime.get_available_providers())
        path = model_file(model)
        session_options = _session_options(options, model)
        try:
            self._session = onnxruntime.InferenceSession(
                path,
                session_options,
                providers=[name for name, _ in options.providers],
                provider_options=[values for _, values in options.providers],
                enable_fallback=0,
            )
        except Exception as error:
            raise invalid(f"model '{model.name}': ONNX Runtime cannot load {path}: {error}") from error
        self._run_entries = dict(options.run_entries)
        self._signature = OnnxSignature(
            self._session.get_inputs(),
            self._session.get_overridable_initializers(),
            self._session.get_outputs(),
            model.config,
        )
        if self._signature.has_bf16 and self._signature.string_inputs:
            raise unsupported(f"model '{model.name}' has both BF16 tensors and string inputs")
        self._shapes_hold = True
        for output in self._signature.left_out:
            _LOG.warning("an output is left out: %s", output)
        return ModelDescription(
            tuple(tensor.spec() for tensor in self._signature.inputs.values()),
            tuple(tensor.spec() for tensor in self._signature.outputs.values()),
            self._signature.batching,
        )

    def execute(self, batch: Batch) -> None:
        """Run the session once over all rows."""
        names = list(self._signature.outputs) if batch.wanted is None else list(batch.wanted)
        inputs: Mapping[str, Array] = batch.inputs
        if self._signature.string_inputs:
            inputs = {
                **inputs,
                **{name: _texts(batch, name) for name in self._signature.string_inputs if name in inputs},
            }
        options = self._run_options(batch)
        try:
            shapes = self._promised_shapes(names, inputs)
            if self._signature.has_bf16 or self._is_large(shapes):
                outputs = self._run_in_place(batch, names, inputs, shapes, options)
            else:
                outputs = self._run_plain(names, inputs, options)
        except InferError:
            raise
        except Exception as error:
            raise cancelled() if batch.cancelled else internal(f"ONNX Runtime failed: {error}") from error
        batch.respond(outputs)

    def finalize(self) -> None:
        """Free the session."""
        del self._session

    def _run_options(self, batch: Batch) -> Any:
        options = onnxruntime.RunOptions()
        for key, value in self._run_entries.items():
            options.add_run_config_entry(key, value)

        def terminate() -> None:
            if batch.cancelled:
                options.terminate = True

        batch.on_cancel(terminate)
        return options

    def _promised_shapes(self, names: Sequence[str], inputs: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
        if not self._shapes_hold:
            return {}
        promised = ((name, self._signature.output_shape(name, inputs)) for name in names)
        return {name: shape for name, shape in promised if shape is not None}

    def _is_large(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        total = 0
        for name, shape in shapes.items():
            total += element_count(shape) * self._signature.outputs[name].datatype.itemsize
        return total >= BIND_BYTES and not self._signature.string_inputs

    def _run_plain(self, names: list[str], inputs: Mapping[str, Array], options: Any) -> dict[str, Array]:
        results = self._session.run(names, dict(inputs), options)
        return dict(zip(names, results, strict=True))

    def _run_in_place(
        self,
        batch: Batch,
        names: list[str],
        inputs: Mapping[str, Array],
        shapes: Mapping[str, tuple[int, ...]],
        options: Any,
    ) -> dict[str, Array]:
        """Run with outputs of promised shape written where the server reads them; others are fetched afterwards."""
        places = {name: batch.allocate(name, shapes[name], self._signature.outputs[name].datatype) for name in shapes}
        try:
            return self._run_bound(names, inputs, places, options)
        except Exception:
            if not shapes or batch.cancelled:
                raise
        # The model may have broken its promise of shapes, which a run that allocates its own outputs does not mind.
        outputs = (
            self._run_bound(names, inputs, {}, options)
            if self._signature.has_bf16
            else self._run_plain(names, inputs, options)
        )
        self._shapes_hold = False
        _LOG.warning("the model's outputs do not have the shapes that it declares: %s", shapes)
        return outputs

    def _run_bound(
        self, names: list[str], inputs: Mapping[str, Array], places: Mapping[str, Array], options: Any
    ) -> dict[str, Array]:
        binding = self._session.io_binding()
        for name, array in inputs.items():
            onnx_type = self._signature.inputs[name].onnx_type
            binding.bind_input(name, "cpu", 0, onnx_type, array.shape, array.ctypes.data)
        for name in names:
            place = places.get(name)
            if place is None:
                binding.bind_output(name, "cpu")
            else:
                onnx_type = self._signature.outputs[name].onnx_type
                binding.bind_output(name, "cpu", 0, onnx_type, place.shape, place.ctypes.data)
        self._session.run_with_iobinding(binding, options)
        outputs: dict[str, Array] = {}
        for name, value in zip(names, binding.get_outputs(), strict=True):
            place = places.get(name)
            if place is not None:
                outputs[name] = place
            elif self._signature.outputs[name].datatype is BF16:
                outputs[name] = _bits(value)
            else:
                outputs[name] = value.numpy()
        return outputs


def model_file(model: ModelContext) -> Path:
    """Return the file to load: the configured one, or the one inside where it is a folder (with external data)."""
    path = model.version_directory / (model.config.get("default_model_filename") or _DEFAULT_FILE)
    if path.is_dir():
        inside = path / _DEFAULT_FILE
        candidates = [inside] if inside.is_file() else sorted(path.glob("*.onnx"))
        if len(candidates) != 1:
            raise invalid(f"model '{model.name}': expected one .onnx file in {path}, found {len(candidates)}")
        return candidates[0]
    if not path.is_file():
        raise invalid(f"model '{model.name}': there is no file {path}")
    return path


def _session_options(options: OnnxOptions, model: ModelContext) -> onnxruntime.SessionOptions:
    session = onnxruntime.SessionOptions()
    session.graph_optimization_level = onnxruntime.GraphOptimizationLevel.__members__[options.graph_level]
    session.intra_op_num_threads = options.intra_op_threads
    session.inter_op_num_threads = options.inter_op_threads
    mode = onnxruntime.ExecutionMode
    session.execution_mode = mode.ORT_PARALLEL if options.parallel else mode.ORT_SEQUENTIAL
    session.enable_cpu_mem_arena = options.memory_arena
    session.enable_mem_pattern = options.memory_pattern
    session.log_severity_level = _ERRORS_ONLY
    session.logid = model.name
    for key, value in options.entries.items():
        session.add_session_config_entry(key, value)
    for name in options.op_libraries:
        library = _op_library(model, name)
        try:
            session.register_custom_ops_library(str(library))
        except Exception as error:
            raise invalid(f"model '{model.name}': operator library {library}: {error}") from error
    return session


def _op_library(model: ModelContext, name: str) -> Path:
    """Return the library of custom operators `name`: absolute, or beside the model or one of its versions."""
    for folder in (model.version_directory, model.model_directory):
        if (folder / name).is_file():
            return folder / name
    raise invalid(f"model '{model.name}': model_operations.op_library_filename: there is no file '{name}'")


def _texts(batch: Batch, name: str) -> Array:
    """Return a string input as ONNX Runtime takes it: UTF-8 text. A request with other bytes fails by itself."""
    encoded = batch.inputs[name]
    decoded = np.empty(encoded.size, np.object_)
    try:
        decoded[:] = [element.decode() for element in encoded.reshape(-1).tolist()]
    except UnicodeDecodeError:
        decoded[:] = [element.decode(errors="replace") for element in encoded.reshape(-1).tolist()]
        for request in batch.requests:
            if not request.answered and not all(map(_is_text, request.input(name).reshape(-1).tolist())):
                request.fail(invalid(f"input '{name}' has an element that is not UTF-8, as ONNX strings must be"))
    return decoded.reshape(encoded.shape)


def _is_text(element: bytes) -> bool:
    try:
        element.decode()
    except UnicodeDecodeError:
        return False
    return True


def _bits(value: Any) -> Array:
    """Return the BF16 elements of an OrtValue, which numpy cannot name, as uint16; a copy."""
    shape = tuple(value.shape())
    if not element_count(shape):
        return np.empty(shape, np.uint16)
    memory = (ctypes.c_uint16 * element_count(shape)).from_address(value.data_ptr())
    return np.array(memory, np.uint16).reshape(shape)
