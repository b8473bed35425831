"""Runs one batch on a backend and turns whatever happens into messages. No sockets: conformance uses it as it is."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace_backends.api import Backend, ModelContext, ModelDescription
from headrace_backends.batch import Batch
from headrace_backends.calls import ServerCalls
from headrace_backends.model_memory import ModelMemory
from headrace_backends.ragged import batch_inputs, scattered_outputs
from headrace_backends.sequences import SequenceStates
from headrace_backends.streaming import Outlet, StreamingBatch
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import ALL, BY_NAME, DataType
from headrace_protocol.errors import InferError, internal
from headrace_protocol.messages import BatchDone, Execute, Initialize, Ready, error_message

_LOG: Final = logging.getLogger(__name__)
_BY_CONFIG_NAME: Final = {datatype.config_name: datatype for datatype in ALL}


def model_context(message: Initialize, cores: int, server: ServerCalls | None = None) -> ModelContext:
    """Return what `initialize` is given for `message` on a machine where this process may use `cores`."""
    return ModelContext(
        name=message.model_name,
        version=message.version,
        model_directory=Path(message.model_directory),
        version_directory=Path(message.version_directory),
        config=message.config,
        backend_config=message.backend_config,
        instances=message.instances,
        kind=message.kind,
        device=message.device,
        auto_complete=message.auto_complete,
        threads=max(1, cores // max(1, message.sharing or len(message.instances))),
        server=ServerCalls() if server is None else server,
    )


def model_memory(
    arena: Arena, config: dict[str, Any], description: ModelDescription, model_directory: Path = Path()
) -> ModelMemory:
    """Return what the batches of a loaded model share. Types that the user configured win over the model's own.

    Raises INVALID_ARG where the file of an initial state is no good.
    """
    if description.replaces and description.config:
        config = {**config, **description.config}
    datatypes: dict[str, DataType] = {spec.name: BY_NAME[spec.datatype] for spec in description.outputs}
    for output in config.get("output", ()):
        if output["data_type"] in _BY_CONFIG_NAME:
            datatypes[output["name"]] = _BY_CONFIG_NAME[output["data_type"]]
    decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
    return ModelMemory(
        arena,
        datatypes,
        batching=config.get("max_batch_size", 0) > 0,
        decoupled=decoupled,
        batch_inputs=batch_inputs(config),
        scattered=scattered_outputs(config),
        sequences=SequenceStates(config, model_directory) if "sequence_batching" in config else None,
    )


def new_batch(message: Execute, model: ModelMemory, outlet: Outlet) -> Batch:
    """Return the batch of `message`; the responses of a decoupled model go to `outlet` while it runs and after."""
    return StreamingBatch(message, model, outlet) if model.decoupled else Batch(message, model)


def slot_count(backend: type[Backend], instances: Sequence[str]) -> int:
    """Return how many executions at once the process takes."""
    return max(1, len(instances)) if backend.threads else 1


def initialize(factory: Callable[[], Backend], context: ModelContext) -> tuple[Backend, ModelDescription]:
    """Make the backend and load the model. Raises InferError, whatever went wrong."""
    try:
        backend = factory()
        return backend, backend.initialize(context)
    except BaseException as error:
        raise as_infer_error(error, f"the backend failed to load model '{context.name}'") from error


def ready(description: ModelDescription, slots: int) -> Ready:
    """Return the answer to an Initialize that succeeded."""
    return Ready(
        None,
        description.inputs,
        description.outputs,
        description.batching,
        description.config,
        concurrency=min(slots, description.concurrency or slots),
        replaces=description.replaces,
    )


def refusal(error: InferError) -> Ready:
    """Return the answer to an Initialize that failed."""
    return Ready(error=error_message(error))


def execute(backend: Backend, batch: Batch, descriptors: Sequence[int] = ()) -> tuple[list[msgspec.Struct], list[int]]:
    """Run the batch and return the frame to send: messages and descriptors (the caller closes those).

    Of a decoupled model, the messages end only what the backend did not end; requests that it deferred are `open`.
    """
    started = opened = time.perf_counter_ns()
    failure: InferError | None = None
    try:
        batch.open_inputs(descriptors)
        opened = time.perf_counter_ns()
        backend.execute(batch)
    except BaseException as error:
        failure = as_infer_error(error, "the backend failed to execute the batch")
    executed = time.perf_counter_ns()
    responses, spilled = batch.finish(failure)
    output_ns = batch.output_ns
    infer_ns = max(0, executed - opened - output_ns)
    output_ns += time.perf_counter_ns() - executed
    done = BatchDone(batch.number, opened - started, infer_ns, output_ns)
    return [done] if responses is None else [responses, done], spilled


def as_infer_error(error: BaseException, what: str) -> InferError:
    """Return the error as the server is told it: one of ours as it is, another by type and text, with a log line."""
    if isinstance(error, InferError):
        return error
    _LOG.warning("%s:\n%s", what, "".join(traceback.format_exception(error)))
    return internal(f"{what}: {type(error).__name__}: {error}")


def available_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))
