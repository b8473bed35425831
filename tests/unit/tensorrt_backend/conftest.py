from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from headrace_backends.tensorrt import cuda
from headrace_backends.tensorrt.backend import TensorRtBackend
from headrace_backends.tensorrt.cuda import CudaError
from tensorrt_engines import FAKE_GPU


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in for TensorRT, fresh; nothing of it is left in the process when the test ends."""
    monkeypatch.syspath_prepend(str(FAKE_GPU))
    monkeypatch.setattr(cuda, "_loaded", [])
    monkeypatch.setattr(TensorRtBackend, "_give_up", _lost)
    _forget()
    yield importlib.import_module("tensorrt")
    _forget()


def _lost(self: TensorRtBackend, error: CudaError) -> NoReturn:
    raise AssertionError(f"a backend process would have ended here: {error}")


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt"]:
        del sys.modules[name]
