"""From the responses of a model's code to the answers of its batch.

Responses to all requests that hold equal outputs are joined: their rows go straight to where the server reads them, and
one message answers the whole batch. Others are placed one by one, so that what is wrong with one is its own alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace_backends.api import Batch, BatchRequest
from headrace_backends.python.errors import as_infer_error
from headrace_backends.python.response import InferenceResponse
from headrace_backends.python.tensor import Tensor
from headrace_protocol.datatype import BF16, BYTES, Array, DataType
from headrace_protocol.errors import InferError, internal


class Answers:
    """Answers the batches of one model. Knows the datatypes of its outputs, as far as the configuration says."""

    def __init__(self, datatypes: Mapping[str, DataType]) -> None:
        self._datatypes = datatypes

    def give(self, batch: Batch, responses: Sequence[Any]) -> None:
        """Answer every request of the batch that has no answer yet; `responses` are in the order of the requests.

        Raises InferError where the whole batch cannot be answered.
        """
        if len(responses) == 1 and not batch.scattered:
            request = batch.requests[0]
            response = responses[0]
            if type(response) is InferenceResponse and response._error is None and not response._parameters:
                batch.respond(self.outputs(response))
            else:
                self.answer(request, response)
            return
        joined = None if batch.scattered else self._joined(batch, responses)
        if joined is not None:
            batch.respond(joined)
            return
        for request, response in zip(batch.requests, responses, strict=True):
            if not request.answered:
                self.answer(request, response)

    def answer(self, request: BatchRequest, response: object) -> None:
        """Answer one request. What is wrong with the response becomes its error."""
        if not isinstance(response, InferenceResponse):
            request.fail(
                internal(
                    "execute returned None for a request whose response sender was not used"
                    if response is None
                    else f"execute has to return InferenceResponse objects, one is of type {type(response).__name__}"
                )
            )
            return
        error = response._error
        if error is not None:
            request.fail(as_infer_error(error))
            return
        try:
            request.respond(self.outputs(response), dict(response._parameters) or None)
        except InferError as unfit:
            request.fail(unfit)

    def outputs(self, response: InferenceResponse) -> dict[str, Array]:
        """Return the arrays of a response by name. Raises INTERNAL for one that is there twice or of another type."""
        outputs = {}
        for tensor in response._tensors:
            if tensor._datatype is BF16:
                self._check_bf16(tensor)
            outputs[tensor._name] = tensor._array
        if len(outputs) != len(response._tensors):
            names = [tensor._name for tensor in response._tensors]
            twice = next(name for name in names if names.count(name) > 1)
            raise internal(f"the model returned output '{twice}' twice")
        return outputs

    def _check_bf16(self, tensor: Tensor) -> None:
        declared = self._datatypes.get(tensor._name)
        if declared is not BF16:
            expected = "none such" if declared is None else f"{declared.name}"
            raise internal(f"the model returned output '{tensor._name}' as BF16, its configuration has {expected}")

    def _joined(self, batch: Batch, responses: Sequence[Any]) -> dict[str, Array] | None:
        """Return each output with the rows of all requests, or None where the responses cannot be joined."""
        first = responses[0]
        if type(first) is not InferenceResponse:
            return None
        names = [tensor._name for tensor in first._tensors]
        columns: list[list[Tensor]] = [[] for _ in names]
        for response in responses:
            if type(response) is not InferenceResponse or response._error is not None or response._parameters:
                return None
            tensors = response._tensors
            if len(tensors) != len(names):
                return None
            for name, column, tensor in zip(names, columns, tensors, strict=True):
                if tensor._name != name or tensor._datatype is BF16:
                    return None
                column.append(tensor)
        if len(set(names)) != len(names):
            return None
        rows = [request.rows for request in batch.requests]
        arrays = []
        for column in columns:
            column_arrays = _alike(column, rows)
            if column_arrays is None:
                return None
            arrays.append(column_arrays)
        wanted = batch.wanted
        return {
            name: _together(batch, name, parts, column[0]._datatype)
            for name, parts, column in zip(names, arrays, columns, strict=True)
            if wanted is None or name in wanted
        }


def _alike(column: Sequence[Tensor], rows: Sequence[int]) -> list[Array] | None:
    """Return the arrays of one output where they differ in nothing but their number of rows, which is as it must be."""
    datatype = column[0]._datatype
    shape = column[0]._array.shape
    if not shape:
        return None
    rest = shape[1:]
    arrays = []
    for tensor, count in zip(column, rows, strict=True):
        array = tensor._array
        if tensor._datatype is not datatype or array.shape[:1] != (count,) or array.shape[1:] != rest:
            return None
        arrays.append(array)
    return arrays


def _together(batch: Batch, name: str, arrays: list[Array], datatype: DataType) -> Array:
    if datatype is BYTES:
        return np.concatenate([array.astype(np.object_, copy=False) for array in arrays])
    shape = (batch.rows, *arrays[0].shape[1:])
    return np.concatenate(arrays, out=batch.allocate(name, shape, datatype))
