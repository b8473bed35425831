"""Requests and responses of the stock client's ModelStreamInfer."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton

from harness import RunningServer

LIMIT_S = 30.0


class Stream:
    """One ModelStreamInfer call of the stock client."""

    def __init__(self, client: triton.InferenceServerClient) -> None:
        self._client = client
        self._outcomes: queue.Queue[tuple[triton.InferResult | None, Exception | None]] = queue.Queue()
        client.start_stream(lambda result, error: self._outcomes.put((result, error)))

    def send(self, model: str, tensors: dict[str, np.ndarray], **options: Any) -> None:
        """Send a request."""
        self._client.async_stream_infer(model, inputs(tensors), enable_empty_final_response=True, **options)

    def next(self) -> triton.InferResult:
        """Return the next response; raises the error that came instead."""
        result, error = self._outcomes.get(timeout=LIMIT_S)
        if error is not None:
            raise error
        assert result is not None
        return result

    def to_final(self) -> list[triton.InferResult]:
        """Return the responses up to the final one of a request."""
        results = [self.next()]
        while not is_final(results[-1]):
            results.append(self.next())
        return results


def inputs(tensors: dict[str, np.ndarray]) -> list[triton.InferInput]:
    made = []
    for name, array in tensors.items():
        tensor = triton.InferInput(name, list(array.shape), triton.np_to_triton_dtype(array.dtype))
        made.append(tensor.set_data_from_numpy(array))
    return made


def is_final(result: triton.InferResult) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


@contextlib.contextmanager
def streaming(server: RunningServer) -> Iterator[Stream]:
    with triton.InferenceServerClient(server.grpc) as client:
        yield Stream(client)
        client.stop_stream(cancel_requests=True)
