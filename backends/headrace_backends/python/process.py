"""What the functions of triton_python_backend_utils must know of the process that they are called in.

A process serves one model, so this is the one place of the backend with state of the process's own: modules that models
import have nobody to pass it to them.
"""

from __future__ import annotations

import contextvars
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace_backends.python.errors import TritonModelException

if TYPE_CHECKING:
    from headrace_backends.api import Batch
    from headrace_backends.calls import ServerCalls

EXECUTING: Final[contextvars.ContextVar[Batch | None]] = contextvars.ContextVar("executing", default=None)
"""The batch for which a coroutine of the model runs."""


class ModelProcess:
    """The model of this process and the server that it may call. Filled when the model is loaded."""

    def __init__(self) -> None:
        self.server: ServerCalls | None = None
        self.model_file: Path | None = None

    def require_server(self) -> ServerCalls:
        """Return the server. Raises TritonModelException where there is none to call."""
        if self.server is None:
            raise TritonModelException("there is no server to call: this is not the process of a loaded model")
        return self.server


PROCESS: Final = ModelProcess()


def get_model_dir() -> str:
    """Return the directory of the model's file: that of its version."""
    if PROCESS.model_file is None:
        raise TritonModelException("get_model_dir: there is no model in this process")
    return str(PROCESS.model_file.parent)
