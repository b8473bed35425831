"""Loading and unloading models of the server out of a model's code."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_backends.calls import LATEST
from headrace_backends.python.errors import TritonModelException
from headrace_backends.python.process import PROCESS
from headrace_protocol.errors import InferError


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model, or load it again, and return once it serves.

    `config` is its configuration as JSON text, "" = the repository's; `files` are contents by "file:<version>/<path>",
    which stand for the repository's. Raises TritonModelException where the model cannot be loaded.
    """
    server = PROCESS.require_server()
    try:
        server.load(model_name, config or "", files)
    except InferError as error:
        raise TritonModelException(error.message) from error


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Stop serving a model. Raises TritonModelException where there is none of that name, or it may not be."""
    server = PROCESS.require_server()
    try:
        server.unload(model_name, unload_dependents=unload_dependents)
    except InferError as error:
        raise TritonModelException(error.message) from error


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether the model, or that version of it, would serve a request now."""
    server = PROCESS.require_server()
    try:
        version = int(model_version) if model_version else LATEST
    except ValueError:
        raise TritonModelException(f"is_model_ready: a version is a number as text, got {model_version!r}") from None
    try:
        return server.ready(model_name, version)
    except InferError as error:
        raise TritonModelException(error.message) from error
