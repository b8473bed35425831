"""Runs TensorRT engines: one engine for all instances of a GPU, each with a stream and contexts of its own.

It imports TensorRT when it loads a model, so that what is known without it can be said without it.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

from headrace_backends.api import Batch, ModelContext, ModelDescription
from headrace_backends.tensorrt.cuda import Cuda, CudaError, load_cuda
from headrace_backends.tensorrt.engine import Engine, EngineLoader, import_tensorrt
from headrace_backends.tensorrt.options import TensorRtOptions, parse_options
from headrace_backends.tensorrt.plan_file import HEADER_BYTES, read_header
from headrace_backends.tensorrt.signature import EngineSignature
from headrace_backends.tensorrt.slot import Slot, profiles_of
from headrace_protocol.errors import InferError, invalid, unavailable

EXIT_DEVICE_LOST: Final = 4
_LOG: Final = logging.getLogger(__name__)


class TensorRtBackend:
    """TensorRT on one GPU."""

    fork_safe: ClassVar[bool] = False
    threads: ClassVar[bool] = True

    def __init__(self) -> None:
        self._thread: Final = threading.local()
        self._slots: Final[list[Slot]] = []

    def initialize(self, model: ModelContext) -> ModelDescription:
        """Load the engine and make an execution context for each profile of each instance."""
        options = parse_options(model)
        if model.kind != "KIND_GPU":
            raise _needs_gpu(model, options)
        trt = import_tensorrt()
        self._device = model.device
        self._cuda: Cuda = load_cuda()
        try:
            return self._load(model, options, trt)
        except CudaError as error:
            raise error.as_infer_error(f"model '{model.name}' on GPU {model.device}") from error

    def _load(self, model: ModelContext, options: TensorRtOptions, trt: Any) -> ModelDescription:
        count = self._cuda.device_count()
        if model.device >= count:
            raise unavailable(f"model '{model.name}' is to run on GPU {model.device}, and CUDA sees {count} of them")
        self._select()
        major, minor = self._cuda.capability(model.device)
        capability = f"{major}.{minor}"
        path = model.version_directory / options.by_capability.get(capability, options.filename)
        if not path.is_file():
            raise invalid(f"model '{model.name}': there is no file {path}")
        loader = EngineLoader(trt, capability, version_compatible=options.version_compatible, plugins=options.plugins)
        unbatched = _unbatched(model.config)
        engines: dict[int | None, Engine] = {}
        for instance in options.instances:
            if instance.dla_core not in engines:
                engines[instance.dla_core] = loader.load(path, instance.dla_core, unbatched)
        signature = next(iter(engines.values())).signature
        # a batch may go to any instance, also to one of another process
        limit = min(
            signature.max_batch_size(profiles_of(group, signature)) for group in options.groups or options.instances
        )
        size = _max_batch_size(model, signature, limit)
        for instance in options.instances:
            engine = engines[instance.dla_core]
            self._slots.append(Slot(self._cuda, engine, instance, options, batching=size > 0))
        self._capture(options)
        return _description(model, signature, limit, size)

    def _capture(self, options: TensorRtOptions) -> None:
        if not options.graphs:
            return
        for index, spec in enumerate(options.graph_specs):
            for slot in self._slots:
                reason = slot.try_capture(spec)
                if reason:
                    _LOG.warning("optimization.cuda.graph_spec[%d]: no graph was captured: %s", index, reason)
                    break

    def execute(self, batch: Batch) -> None:
        """Run the engine once over all rows."""
        try:
            self._select()
            outputs = self._slots[batch.instance].run(batch)
        except CudaError as error:
            if error.fatal:
                self._give_up(error)
            raise error.as_infer_error(f"GPU {self._device}") from error
        batch.respond(outputs)

    def finalize(self) -> None:
        """Free the engine and what its instances have on the GPU."""
        self._select()
        for slot in self._slots:
            slot.close()
        self._slots.clear()

    def _select(self) -> None:
        """Have this thread's CUDA calls be about our GPU."""
        if not getattr(self._thread, "selected", False):
            self._cuda.select(self._device)
            self._thread.selected = True

    def _give_up(self, error: CudaError) -> NoReturn:
        """End the process: CUDA answers every call with this error from now on, and the next process starts afresh."""
        _LOG.error("GPU %d cannot be used by this process any more: %s", self._device, error)
        os._exit(EXIT_DEVICE_LOST)


def _needs_gpu(model: ModelContext, options: TensorRtOptions) -> InferError:
    text = f"model '{model.name}': TensorRT engines run on GPUs alone, and this instance is {model.kind}"
    built = _built_by(model.version_directory / options.filename)
    return unavailable(f"{text}: this server has no GPU that it can use, or the configuration asks for no GPU{built}")


def _built_by(path: Path) -> str:
    """Return what an engine file says of itself, as the end of a sentence."""
    try:
        data = path.read_bytes() if path.stat().st_size <= HEADER_BYTES else _beginning(path)
    except OSError as error:
        return f" (and {path} cannot be read: {error.strerror})"
    header = read_header(memoryview(data))
    if header is None:
        return f" (and {path} is no TensorRT engine: it does not begin as one)"
    return f" (the engine was built by TensorRT {header.version})" if header.version else ""


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read((1 << 20) + 64)


def _unbatched(config: dict[str, Any]) -> set[str]:
    """Return the tensors whose first dimension is not the batch's."""
    ragged = {tensor["name"] for tensor in config.get("input", ()) if tensor.get("allow_ragged_batch")}
    made = {
        name
        for kind in ("batch_input", "batch_output")
        for tensor in config.get(kind, ())
        for name in tensor.get("target_name", ())
    }
    return ragged | made


def _max_batch_size(model: ModelContext, signature: EngineSignature, limit: int) -> int:
    """Return the batch size that the model is served with; 0 = it does not batch.

    `limit` is the largest that every instance can run. Raises INVALID_ARG where the configuration asks for more.
    """
    configured: int = model.config.get("max_batch_size", 0)
    hint = _batching_hint(model.config, signature)
    if configured > limit and (limit or configured > 1):
        largest = f"its engine takes batches of {limit} at most" if limit else "its engine cannot batch"
        raise invalid(f"model '{model.name}': max_batch_size is {configured}, and {largest}")
    if configured or not model.auto_complete:
        return configured
    if hint and not limit:
        raise invalid(
            f"model '{model.name}': the dims of its configuration leave out a batch dimension, and its engine cannot batch"
        )
    return 0 if hint is False else limit


def _batching_hint(config: dict[str, Any], signature: EngineSignature) -> bool | None:
    """Return whether the dims that the user wrote leave out a batch dimension; None where none are written."""
    hints = set()
    for tensor in (*config.get("input", ()), *config.get("output", ())):
        found = signature.tensor(tensor["name"])
        if found is None or found.is_shape_tensor:
            continue
        reshape = tensor.get("reshape")
        dims = tensor["dims"] if reshape is None else reshape.get("shape", ())
        if tensor.get("allow_ragged_batch") or len(dims) == len(found.shape) - 1:
            hints.add(True)
        elif len(dims) == len(found.shape):
            hints.add(False)
    return hints.pop() if len(hints) == 1 else None


def _description(model: ModelContext, signature: EngineSignature, limit: int, size: int) -> ModelDescription:
    config: dict[str, Any] = {}
    if size and not model.config.get("max_batch_size", 0):
        config["max_batch_size"] = size
        if size > 1:
            config["dynamic_batching"] = {}
    return ModelDescription(
        tuple(tensor.spec() for tensor in signature.inputs),
        tuple(tensor.spec() for tensor in signature.outputs.values()),
        limit > 0,
        config or None,
    )
