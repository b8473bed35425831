from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from headrace_backends.tensorrt import cuda
from tensorrt_engines import FAKE_GPU


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in for TensorRT, fresh; nothing of it is left in the process when the test ends."""
    monkeypatch.syspath_prepend(str(FAKE_GPU))
    monkeypatch.setattr(cuda, "_loaded", [])
    _forget()
    yield importlib.import_module("tensorrt")
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt"]:
        del sys.modules[name]
