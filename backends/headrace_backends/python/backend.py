"""The Python backend: a model is a class TritonPythonModel in the file model.py of its version's directory.

The class sees what it sees under Triton: the module triton_python_backend_utils, and calls of its methods by one thread,
that of `initialize`, in a process of its own for each instance.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import sys
import threading
from typing import Any, ClassVar, Final

from headrace_backends.api import Batch, ModelContext, ModelDescription
from headrace_backends.python import pb_utils
from headrace_backends.python.answers import Answers
from headrace_backends.python.configuring import completed
from headrace_backends.python.failures import describe
from headrace_backends.python.model_code import load_model_class
from headrace_backends.python.process import PROCESS
from headrace_backends.python.received import ModelTensors
from headrace_backends.python.running import Run, SingleRun, StreamRun
from headrace_protocol.datatype import ALL, BF16, DataType
from headrace_protocol.errors import internal, invalid

MODEL_FILE: Final = "model.py"
CANCEL_GRACE_S: Final = 30.0
"""Seconds that `execute` may go on after all its requests were cancelled, where no setting says otherwise."""
_CANCEL_GRACE: Final = "cancel-grace-seconds"
_LOOP_LIMIT_S: Final = 2.0
_EXIT_STUCK: Final = 4
_BY_CONFIG_NAME: Final = {datatype.config_name: datatype for datatype in ALL}
_LOG: Final = logging.getLogger(__name__)


class PythonBackend:
    """Runs one instance of one model's class."""

    fork_safe: ClassVar[bool] = True
    threads: ClassVar[bool] = False

    def initialize(self, model: ModelContext) -> ModelDescription:
        """Import the model's file, let it complete the configuration, make an instance and initialize it."""
        self._instance = model.instances[0] if model.instances else model.name
        self._grace_s = cancel_grace(model.backend_config)
        self._executing: Batch | None = None
        self._patience = threading.Lock()
        """Held to end `_executing` and to change `_timer`: cancels come by another thread."""
        self._timer: threading.Timer | None = None
        """Runs while `execute` goes on for nobody: one thread, however many requests are cancelled."""
        _flush_lines()
        pb_utils.install()
        path = model.version_directory / (model.config.get("default_model_filename") or MODEL_FILE)
        PROCESS.server, PROCESS.model_file = model.server, path
        model_class = load_model_class(model.name, path, model.model_directory)
        changes = completed(model_class, model.config) if model.auto_complete else {}
        config = {**model.config, **changes}
        self._model = self._make(model_class, model, config)
        self._run = self._running(config)
        is_ready = getattr(self._model, "is_ready", None)
        return ModelDescription(
            config=changes or None,
            replaces=True,
            is_ready=None if is_ready is None else lambda: self._ready(is_ready()),
        )

    def execute(self, batch: Batch) -> None:
        """Give the batch to the model's code."""
        self._executing = batch
        batch.on_cancel(self._on_cancel)
        try:
            self._run.run(batch)
        finally:
            with self._patience:
                self._executing = None
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None

    def finalize(self) -> None:
        """Let the model finalize, if it wants to."""
        finalize = getattr(self._model, "finalize", None)
        try:
            if finalize is not None:
                finalize()
        except BaseException as error:
            _LOG.warning("model instance %s failed to finalize: %s", self._instance, describe(error))
        self._run.close(_LOOP_LIMIT_S)

    def _make(self, model_class: type[Any], model: ModelContext, config: dict[str, Any]) -> Any:
        try:
            instance = model_class()
            initialize = getattr(instance, "initialize", None)
            if initialize is not None:
                initialize(arguments(model, config, self._instance))
        except BaseException as error:
            raise internal(f"model instance '{self._instance}' failed to initialize: {describe(error)}") from error
        return instance

    def _running(self, config: dict[str, Any]) -> Run:
        datatypes = {side: _datatypes(config, side) for side in ("input", "output")}
        tensors = ModelTensors(
            frozenset(name for name, datatype in datatypes["input"].items() if datatype is BF16),
            tuple(output["name"] for output in config.get("output", ())),
            Answers(datatypes["output"]),
            bool(config.get("sequence_batching", {}).get("iterative_sequence", False)),
        )
        if config.get("model_transaction_policy", {}).get("decoupled", False):
            return StreamRun(self._instance, self._model.execute, tensors, int(config.get("max_batch_size", 0)))
        return SingleRun(self._instance, self._model.execute, tensors)

    def _ready(self, answer: Any) -> bool:
        """Return what the model's `is_ready` says, be it a coroutine function or not."""
        return bool(asyncio.run(answer) if inspect.iscoroutine(answer) else answer)

    def _on_cancel(self) -> None:
        with self._patience:
            batch = self._executing
            if batch is not None and batch.cancelled and self._grace_s and self._timer is None:
                self._timer = threading.Timer(self._grace_s, self._give_up, (batch,))
                self._timer.daemon = True
                self._timer.start()

    def _give_up(self, batch: Batch) -> None:
        """End the process where the model's code still runs for requests that were cancelled long ago."""
        if self._executing is batch:
            _LOG.error(
                "model instance %s: execute goes on %g s after its requests were cancelled; the process is ended",
                self._instance,
                self._grace_s,
            )
            os._exit(_EXIT_STUCK)


def arguments(model: ModelContext, config: dict[str, Any], instance: str) -> dict[str, str]:
    """Return what the `initialize` of a model's class is given."""
    return {
        "model_config": json.dumps(config),
        "model_instance_kind": model.kind.removeprefix("KIND_"),
        "model_instance_name": instance,
        "model_instance_device_id": str(model.device),
        "model_repository": str(model.model_directory),
        "model_version": str(model.version),
        "model_name": model.name,
    }


def cancel_grace(settings: dict[str, str]) -> float:
    """Return the seconds of --backend-config=python,cancel-grace-seconds; 0 = for ever. Raises INVALID_ARG."""
    text = settings.get(_CANCEL_GRACE)
    if text is None:
        return CANCEL_GRACE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise invalid(f"--backend-config python,{_CANCEL_GRACE}: expected seconds >= 0, got '{text}'")
    return seconds


def _datatypes(config: dict[str, Any], side: str) -> dict[str, DataType]:
    return {
        tensor["name"]: _BY_CONFIG_NAME[tensor["data_type"]]
        for tensor in config.get(side, ())
        if tensor.get("data_type") in _BY_CONFIG_NAME
    }


def _flush_lines() -> None:
    """Have what a model prints appear when it is printed, not when a buffer is full or never, and each line in one piece.

    In pieces, as PYTHONUNBUFFERED has it, lines of this process and of the server get into each other.
    """
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, write_through=False)
