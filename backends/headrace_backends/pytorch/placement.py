"""Where a model's tensors are: on the CPU, where nothing moves, or on a GPU, with a stream for each instance."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch

from headrace_backends.api import ModelContext
from headrace_backends.pytorch.options import TorchOptions
from headrace_protocol.errors import InferError, unavailable, unsupported


class Placement(Protocol):
    """A device, and how tensors get there and back."""

    @property
    def device(self) -> torch.device | None:
        """Where the model is loaded to; None = where it was saved from."""
        ...

    def scope(self, instance: int) -> AbstractContextManager[object]:
        """Return what a batch of this instance runs in."""
        ...

    def put(self, value: Any) -> Any:
        """Return an input on the device."""
        ...

    def fetch(self, results: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return results on the CPU, complete."""
        ...

    def clean(self) -> None:
        """Give memory that nothing uses back to the device's driver."""
        ...


class CpuPlacement:
    """The CPU, and whatever devices a KIND_MODEL model chooses by itself."""

    def __init__(self, *, anywhere: bool = False) -> None:
        self.device: Final = None if anywhere else torch.device("cpu")

    def scope(self, instance: int) -> AbstractContextManager[object]:  # noqa: ARG002 - all are alike
        return contextlib.nullcontext()

    def put(self, value: Any) -> Any:
        return value

    def fetch(self, results: Mapping[str, Any]) -> Mapping[str, Any]:
        return results

    def clean(self) -> None:
        if self.device is None and torch.cuda.is_available():
            torch.cuda.empty_cache()


class CudaPlacement:
    """One GPU. Each instance has a stream; copies go through pinned memory, which PyTorch keeps for the next ones."""

    def __init__(self, index: int, instances: int, options: TorchOptions) -> None:
        self.device: Final = torch.device("cuda", index)
        self._streams: Final[Sequence[torch.cuda.Stream]] = [
            torch.cuda.Stream(self.device) for _ in range(max(1, instances))
        ]
        self._pinned_input: Final = options.pinned_input
        self._pinned_output: Final = options.pinned_output

    def scope(self, instance: int) -> AbstractContextManager[object]:
        scope: AbstractContextManager[object] = torch.cuda.stream(self._streams[instance])
        return scope

    def put(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        source = value.pin_memory() if self._pinned_input and value.numel() else value
        return source.to(self.device, non_blocking=self._pinned_input)

    def fetch(self, results: Mapping[str, Any]) -> Mapping[str, Any]:
        fetched = {name: self._take(value) for name, value in results.items()}
        torch.cuda.current_stream(self.device).synchronize()
        return fetched

    def _take(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cuda" or value.layout is not torch.strided:
            return value
        if not self._pinned_output:
            return value.detach().cpu()
        target = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return target.copy_(value.detach(), non_blocking=True)

    def clean(self) -> None:
        torch.cuda.empty_cache()


def place(model: ModelContext, options: TorchOptions) -> Placement:
    """Return where the model goes. Raises UNSUPPORTED where this PyTorch has no CUDA, UNAVAILABLE without that GPU."""
    if model.kind != "KIND_GPU":
        return CpuPlacement(anywhere=model.kind == "KIND_MODEL")
    if torch.version.cuda is None:
        raise unsupported(
            f"model '{model.name}' on KIND_GPU needs a PyTorch with CUDA; the installed one is {torch.__version__}"
        )
    if not torch.cuda.is_available() or model.device >= torch.cuda.device_count():
        raise unavailable(
            f"model '{model.name}': PyTorch finds {torch.cuda.device_count()} GPUs, GPU {model.device} is not among them"
        )
    torch.cuda.set_device(model.device)
    return CudaPlacement(model.device, len(model.instances), options)


def set_up(options: TorchOptions) -> None:
    """Apply the settings that hold for the whole process, which serves one model."""
    torch.set_num_threads(options.intra_op_threads)
    if options.inter_op_threads not in {None, torch.get_num_interop_threads()}:
        torch.set_num_interop_threads(options.inter_op_threads or 1)
    torch.backends.cudnn.enabled = options.cudnn
    if options.jit_executor is not None:
        torch._C._jit_set_profiling_executor(options.jit_executor)
    if options.jit_profiling is not None:
        torch._C._jit_set_profiling_mode(options.jit_profiling)


def out_of_memory(error: BaseException) -> InferError | None:
    """Return what to tell the client where a GPU had too little memory for a batch."""
    if isinstance(error, torch.OutOfMemoryError):
        return unavailable(f"the GPU has too little memory for this batch: {str(error).partition('. ')[0]}")
    return None


def device_lost(error: BaseException) -> bool:
    """Return whether a GPU has faulted under this process, as by an index out of bounds in a kernel."""
    return isinstance(error, torch.AcceleratorError)
