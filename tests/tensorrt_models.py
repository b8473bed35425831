"""A TensorRT model that is loaded in this process, over the stand-in for TensorRT and CUDA (fake_gpu)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_backends.api import ModelContext
from headrace_backends.conformance.model import ARENA_BYTES
from headrace_backends.execution import execute, model_memory, new_batch
from headrace_backends.tensorrt.backend import TensorRtBackend
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import BY_NAME, from_numpy, of_numpy, to_numpy
from headrace_protocol.errors import InferError
from headrace_protocol.messages import Execute, RequestHeader, Responses
from headrace_protocol.tensor import Tensor, TensorRef


class Loaded:
    """A model that the backend loaded, and its answers to batches."""

    def __init__(self, backend: TensorRtBackend, description: Any, config: dict[str, Any]) -> None:
        self.backend, self.description = backend, description
        self.arena = Arena.create(ARENA_BYTES)
        self.memory = model_memory(self.arena, {**config, **(description.config or {})}, description)
        self.number = 0

    def batch(
        self,
        inputs: dict[str, np.ndarray],
        requests: tuple[int, ...] = (1,),
        instance: int = 0,
        outputs: tuple[str, ...] | None = None,
        bf16: bool = False,
        cancel: bool = False,
    ) -> Responses:
        self.number += 1
        position, tensors = 0, []
        for name, array in inputs.items():
            datatype = BY_NAME["BF16"] if bf16 else of_numpy(array.dtype)
            assert datatype is not None
            data = from_numpy(array, datatype)
            self.arena.view[position : position + len(data)] = data
            tensors.append(Tensor(name, datatype.name, array.shape, TensorRef(position, len(data))))
            position = (position + len(data) + 63) & -64
        headers = tuple(RequestHeader(rows) for rows in requests)
        message = Execute(self.number, instance, tuple(tensors), headers, outputs, TensorRef(position, 1 << 20))
        batch = new_batch(message, self.memory, None)  # type: ignore[arg-type]
        if cancel:
            batch.cancel(-1)
        (responses, _), spilled = execute(self.backend, batch)
        assert not spilled
        return responses

    def run(self, *arguments: Any, **more: Any) -> dict[str, np.ndarray]:
        responses = self.batch(*arguments, **more)
        assert responses.batched is not None, responses.responses
        return {
            out.name: to_numpy(
                BY_NAME[out.datatype], out.shape, bytes(self.arena.slice(out.ref.offset, out.ref.nbytes))
            )
            for out in responses.batched
        }

    def fails(self, *arguments: Any, **more: Any) -> tuple[str, str]:
        responses = self.batch(*arguments, **more)
        assert responses.batched is None
        error = responses.responses[0].error
        assert error is not None
        return error.code, error.message


def context(folder: Path, config: dict[str, Any], kind: str = "KIND_GPU", **more: Any) -> ModelContext:
    config = {"name": "m", **config}
    groups = config.setdefault("instance_group", [{"name": "m", "count": 1, "kind": kind, "gpus": [0]}])
    names = tuple(f"{group['name']}_{number}" for group in groups for number in range(group["count"]))
    values = {"backend_config": {}, "device": 0, "auto_complete": True, "threads": 1, **more}
    return ModelContext("m", 1, folder, folder / "1", config, instances=names, kind=kind, **values)


@contextmanager
def loading(
    folder: Path, content: bytes, config: dict[str, Any] | None = None, *, stand_in: bool = True, **more: Any
) -> Iterator[Loaded]:
    """Load an engine for the length of a block. `stand_in`: and check that nothing is left on its GPU afterwards."""
    (folder / "1").mkdir(exist_ok=True)
    (folder / "1" / "model.plan").write_bytes(content)
    config = config or {}
    backend = TensorRtBackend()
    model = Loaded(backend, backend.initialize(context(folder, config, **more)), config)
    yield model
    backend.finalize()
    assert not stand_in or sys.modules["tensorrt"].cuda.idle, "something was left on the GPU"


def pair(rows: int, start: int = 0) -> dict[str, np.ndarray]:
    first = np.arange(start, start + rows * 4, dtype=np.float32).reshape(rows, 4)
    return {"INPUT0": first, "INPUT1": np.full((rows, 4), 2, np.float32)}


def refusal(folder: Path, content: bytes, config: dict[str, Any] | None = None, **more: Any) -> InferError:
    with pytest.raises(InferError) as caught, loading(folder, content, config, **more):
        pass
    return caught.value
