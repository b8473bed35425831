"""Shared memory as a client has it: one object of /dev/shm, and tritonclient's calls that put tensors into it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import np_to_triton_dtype

from harness import RunningServer

CLIENTS = {"http": httpclient, "grpc": grpcclient}
FOLDER = Path("/dev/shm")
_numbers = itertools.count()


class Object:
    """An object of shared memory and the client's mapping of it. `close` removes it."""

    def __init__(self, nbytes: int) -> None:
        self.key = f"test_{os.getpid()}_{next(_numbers)}"
        self.name = f"region {self.key}"
        self.nbytes = nbytes
        self.path = FOLDER / self.key
        self._handle = shm.create_shared_memory_region(self.name, f"/{self.key}", nbytes, create_only=True)

    def write(self, array: np.ndarray, offset: int = 0) -> None:
        """Put a tensor of fixed size."""
        shm.set_shared_memory_region(self._handle, [array], offset)

    def write_bytes(self, data: bytes, offset: int = 0) -> None:
        """Put bytes."""
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def read(self, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
        """Return a copy of a tensor."""
        return np.array(shm.get_contents_as_numpy(self._handle, dtype, list(shape), offset))

    def truncate(self, nbytes: int) -> None:
        """Shorten it. Nothing of it may be touched through the mapping afterwards."""
        os.truncate(self.path, nbytes)

    def close(self) -> None:
        """Remove it."""
        shm.destroy_shared_memory_region(self._handle)


class Client:
    """tritonclient over one door."""

    def __init__(self, server: RunningServer, door: str) -> None:
        self.module: ModuleType = CLIENTS[door]
        self.door = door
        self._address = server.grpc if door == "grpc" else server.http
        self.calls = self.module.InferenceServerClient(self._address)

    def register(self, memory: Object, offset: int = 0, nbytes: int | None = None) -> None:
        """Register the object, or a part of it, under its name."""
        size = memory.nbytes - offset if nbytes is None else nbytes
        self.calls.register_system_shared_memory(memory.name, f"/{memory.key}", size, offset)

    def unregister(self, name: str) -> None:
        """Unregister a region; "" = all."""
        self.calls.unregister_system_shared_memory(name)

    def names(self) -> set[str]:
        """Return the names of all regions."""
        status = self.calls.get_system_shared_memory_status()
        return {region["name"] for region in status} if self.door == "http" else set(status.regions)

    def input(self, memory: Object, shape: tuple[int, ...], dtype: Any, nbytes: int, offset: int = 0) -> Any:
        """Return an input that lies in a region."""
        tensor = self.module.InferInput("INPUT0", list(shape), np_to_triton_dtype(dtype))
        tensor.set_shared_memory(memory.name, nbytes, offset)
        return tensor

    def wire_input(self, array: np.ndarray) -> Any:
        """Return an input that travels in the request."""
        tensor = self.module.InferInput("INPUT0", list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        return tensor

    def output(self, memory: Object, nbytes: int, offset: int = 0) -> Any:
        """Return an output that is to go into a region."""
        output = self.module.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory(memory.name, nbytes, offset)
        return output

    def infer(self, model: str, tensor: Any, output: Any = None, **parameters: Any) -> Any:
        """Return tritonclient's result."""
        return self.calls.infer(model, [tensor], outputs=output and [output], parameters=parameters or None)

    def infer_alone(self, model: str, tensor: Any, output: Any = None, **parameters: Any) -> Any:
        """Return tritonclient's result, over a connection of its own: for threads."""
        with self.module.InferenceServerClient(self._address) as calls:
            return calls.infer(model, [tensor], outputs=output and [output], parameters=parameters or None)

    def shape(self, result: Any, name: str = "OUTPUT0") -> list[int]:
        """Return the shape that a response tells of an output, which must have no bytes there."""
        output = result.get_output(name)
        if self.door == "grpc":
            assert list(result.get_response().raw_output_contents) == [b""]
            return list(output.shape)
        assert set(output) <= {"name", "datatype", "shape"}
        return list(output["shape"])


@contextlib.contextmanager
def objects(*sizes: int) -> Iterator[list[Object]]:
    """Lend objects of these sizes."""
    made = [Object(nbytes) for nbytes in sizes]
    try:
        yield made
    finally:
        for memory in made:
            memory.close()


@contextlib.contextmanager
def threads(count: int = 8) -> Iterator[ThreadPoolExecutor]:
    """Lend threads to call from."""
    with ThreadPoolExecutor(count) as pool:
        yield pool
