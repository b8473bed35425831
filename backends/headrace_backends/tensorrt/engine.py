"""From an engine file to an engine that can run, or to the sentence that says why it cannot.

The one module besides slot.py that calls TensorRT. An engine file fits one version of TensorRT and one kind of GPU;
where it does not, both sides are named.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import re
import threading
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from headrace_backends.tensorrt.plan_file import PlanHeader, read_header, same_version
from headrace_backends.tensorrt.signature import EngineSignature, read_signature
from headrace_protocol.errors import InferError, internal, invalid, unavailable, unsupported

_DEVICE_ERROR: Final = re.compile(r"expecting compute (\d+\.\d+),? got compute (\d+\.\d+)")
_VERSION_ERROR: Final = re.compile(
    r"expecting (?:library )?version (\S+?),? got (?:version )?(\S+?),? please", re.IGNORECASE
)
_BROKEN: Final[list[Any]] = []
"""Runtimes that TensorRT could not make but for an empty shell, which crashes the process when it is used or freed."""
_KEPT: Final = 8
"""Error messages that are kept of each thread."""
_LOG: Final = logging.getLogger(__name__)


class EngineLog:
    """What TensorRT says: warnings go to the server's log, errors are kept for whoever called it in the same thread."""

    def __init__(self, trt: Any) -> None:
        self._kept: Final = threading.local()
        keep = self._keep

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                    keep(message)
                elif severity == trt.ILogger.WARNING:
                    _LOG.warning("TensorRT: %s", message)

        self.logger: Final = Logger()
        """The ILogger; TensorRT refers to it for as long as anything of it lives."""

    def _keep(self, message: str) -> None:
        self._messages().append(message)

    def _messages(self) -> deque[str]:
        messages: deque[str] | None = getattr(self._kept, "messages", None)
        if messages is None:
            messages = self._kept.messages = deque(maxlen=_KEPT)
        return messages

    @property
    def heard(self) -> bool:
        """Whether there are errors of this thread."""
        return bool(self._messages())

    def clear(self) -> None:
        """Forget the errors of this thread."""
        self._messages().clear()

    def take(self) -> str:
        """Return the errors of this thread since they were taken last, as one text."""
        messages = self._messages()
        text = "; ".join(messages)
        messages.clear()
        return text or "TensorRT gave no reason"


class Engine:
    """A loaded engine. Owned by the backend; its instances make their execution contexts from it."""

    def __init__(self, trt: Any, engine: Any, log: EngineLog, unbatched: Collection[str]) -> None:
        self.trt: Final = trt
        self.log: Final = log
        self.signature: Final[EngineSignature] = read_signature(engine, trt, unbatched)
        self._engine: Final = engine
        self._making: Final = threading.Lock()

    def new_context(self) -> Any:
        """Return an IExecutionContext that is to be given its memory. Raises INTERNAL where TensorRT cannot make one."""
        with self._making:
            self.log.clear()
            context = self._engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise internal(f"TensorRT cannot make an execution context: {self.log.take()}")
        return context

    def memory(self, profile: int) -> int:
        """Return how many bytes a context needs that uses `profile`."""
        return int(self._engine.get_device_memory_size_for_profile_v2(profile))


def import_tensorrt() -> Any:
    """Return the module. Raises UNAVAILABLE where it is not installed, or too old."""
    try:
        import tensorrt
    except ModuleNotFoundError as error:
        if error.name != "tensorrt":
            raise
        raise unavailable("tensorrt is not installed: pip install 'headrace[tensorrt]'") from error
    except OSError as error:
        raise unavailable(f"tensorrt is installed, but a library of it cannot be loaded: {error}") from error
    if not hasattr(tensorrt.IExecutionContext, "set_device_memory"):
        raise unavailable(f"tensorrt {tensorrt.__version__} is too old, 10.1 is the oldest that will do")
    return tensorrt


class EngineLoader:
    """Loads engine files by one IRuntime. The GPU is selected, and was seen to be there: without one TensorRT crashes."""

    def __init__(self, trt: Any, capability: str, *, version_compatible: bool, plugins: Collection[str]) -> None:
        self._trt: Final = trt
        self._capability: Final = capability
        self._version_compatible: Final = version_compatible
        self._log: Final = EngineLog(trt)
        for path in plugins:
            try:
                ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise invalid(f"backend config 'plugins': {path} cannot be loaded: {error}") from error
        if hasattr(trt, "init_libnvinfer_plugins"):  # the lean runtime has none
            trt.init_libnvinfer_plugins(self._log.logger, "")
        self._log.clear()

    def load(self, path: Path, dla_core: int | None, unbatched: Collection[str]) -> Engine:
        """Load `path`. Raises InferError with what is wrong with it, naming versions and GPUs where they do not fit."""
        try:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
                memoryview(data) as view,
            ):
                header = read_header(view)
                if header is None:
                    raise invalid(f"{path} is no TensorRT engine: it does not begin as one")
                with view[header.start :] as plan:
                    engine = self._deserialise(plan, dla_core)
        except (OSError, ValueError) as error:
            raise invalid(f"{path} cannot be read: {error}") from error
        if engine is None:
            raise self._explain(path, header, self._log.take())
        return Engine(self._trt, engine, self._log, unbatched)

    def _deserialise(self, plan: memoryview, dla_core: int | None) -> Any:
        """Return an ICudaEngine, or None where TensorRT refuses."""
        self._log.clear()
        runtime = self._trt.Runtime(self._log.logger)
        if self._log.heard:
            _BROKEN.append(runtime)
            raise unavailable(f"TensorRT cannot be used here: {self._log.take()}")
        if dla_core is not None:
            if dla_core >= runtime.num_DLA_cores:
                cores = runtime.num_DLA_cores
                raise invalid(f"secondary_devices: there is no DLA core {dla_core}, this GPU has {cores} of them")
            runtime.DLA_core = dla_core
        runtime.engine_host_code_allowed = self._version_compatible
        return runtime.deserialize_cuda_engine(plan)

    def _explain(self, path: Path, header: PlanHeader, text: str) -> InferError:
        """Return the error for an engine that TensorRT refused with `text`."""
        installed = self._trt.__version__
        device = _DEVICE_ERROR.search(text)
        if device is not None:
            expected, got = self._capabilities(device)
            return unsupported(
                f"{path} was built for GPUs of compute capability {got}, and this one has {expected}: build the engine on "
                f"such a GPU, or with a hardware compatibility level that covers both. TensorRT says: {text}"
            )
        built = header.version or _built_version(text)
        if built and not same_version(built, installed):
            return unsupported(
                f"{other_version(path, built, installed, self._version_compatible)}. TensorRT says: {text}"
            )
        return invalid(f"{path} cannot be loaded by TensorRT {installed}: {text}")

    def _capabilities(self, found: re.Match[str]) -> tuple[str, str]:
        first, second = found.groups()
        return (first, second) if first == self._capability else (self._capability, second)


def other_version(path: Path, built: str, installed: str, version_compatible: bool) -> str:
    """Return the sentence for an engine that another version of TensorRT built."""
    text = f"{path} was built by TensorRT {built}, and this is {installed}: build the engine with TensorRT {installed}"
    if version_compatible:
        return f"{text}, or with the flag VERSION_COMPATIBLE"
    return (
        f"{text}, or with the flag VERSION_COMPATIBLE and start the server with "
        "--backend-config=tensorrt,version-compatible=true, which lets code in engines run"
    )


def _built_version(text: str) -> str:
    found = _VERSION_ERROR.search(text)
    return found[2] if found else ""
