"""Payload: the requests of one batch on their way through a backend process, and their memory in its arena.

Gather writes the rows of all requests straight into the arena: the copy out of the request bodies is the
concatenation. Scatter hands each request its rows as views of the arena; the slice is freed when the backend is done
and the last response was released.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any, Final

from headrace.instances.signature import ModelSignature, PreparedRequest
from headrace.types import InferenceResponse, OutputTensor
from headrace_protocol.arena import ALIGNMENT, Arena
from headrace_protocol.datatype import BY_NAME, BYTES, DataType, element_count
from headrace_protocol.errors import ErrorCode, FailureReason, InferError
from headrace_protocol.messages import Error, Execute, RequestHeader, Response
from headrace_protocol.tensor import ARENA, INLINE, Tensor, TensorRef

_LENGTH: Final = struct.Struct("<I")


class Payload:
    """Owns one slice of `arena` between gather and the last release."""

    __slots__ = ("_arena", "_holders", "_offset", "owners", "requests", "rows", "signature")

    def __init__(self, signature: ModelSignature, requests: Sequence[PreparedRequest]) -> None:
        self.signature = signature
        self.requests = requests
        self.rows = sum(request.rows for request in requests)
        self.owners: Sequence[Any] = ()
        """What the submitter wants back beside each result, in the order of `requests`."""
        self._arena: Arena | None = None
        self._offset = 0
        self._holders = 1

    def gather(self, arena: Arena, batch: int, instance: int) -> Execute:
        """Copy the inputs into `arena` and return the command that runs them. Raises ArenaFullError."""
        requests = self.requests
        first = requests[0]
        sizes = []
        total = 0
        for index, tensor in enumerate(first.inputs):
            if tensor is None:
                sizes.append(-1)
                continue
            nbytes = len(tensor.data)
            for request in requests[1:]:
                other = request.inputs[index]
                assert other is not None
                nbytes += len(other.data)
            sizes.append(nbytes)
            total += (nbytes + ALIGNMENT - 1) & -ALIGNMENT
        space = self.signature.output_space(self.rows, total)
        base = arena.allocate(total + space)
        self._arena, self._offset = arena, base
        view = arena.view
        tensors = []
        position = base
        single = len(requests) == 1
        for index, (plan, nbytes) in enumerate(zip(self.signature.inputs, sizes, strict=True)):
            if nbytes < 0:
                continue
            tensor = first.inputs[index]
            assert tensor is not None
            if single:
                view[position : position + nbytes] = tensor.data
            else:
                at = position
                for request in requests:
                    data = request.inputs[index].data  # type: ignore[union-attr]
                    end = at + len(data)
                    view[at:end] = data
                    at = end
            shape = plan.backend_shape(tensor.shape, self.rows)
            tensors.append(Tensor(plan.name, plan.datatype.name, shape, TensorRef(position, nbytes)))
            position += (nbytes + ALIGNMENT - 1) & -ALIGNMENT
        return Execute(
            batch,
            instance,
            tuple(tensors),
            tuple([_header(request) for request in requests]),
            self._wanted(),
            TensorRef(base + total, space),
        )

    def _wanted(self) -> tuple[str, ...] | None:
        names: dict[str, None] = {}
        for request in self.requests:
            if request.wanted is None:
                return None
            names.update(dict.fromkeys(request.wanted))
        return tuple(names)

    def scatter(
        self, batched: Sequence[Tensor] | None, responses: Sequence[Response], descriptors: Sequence[int]
    ) -> list[InferenceResponse | InferError | None]:
        """Return what each request gets, in order; None where the backend said nothing about it.

        `descriptors` came with the frame and stay the caller's to close.
        """
        results: list[InferenceResponse | InferError | None] = [None] * len(self.requests)
        frame = _Frame(self._arena, descriptors)
        if batched is not None:
            self._scatter_batched(batched, frame, results)
        for response in responses:
            self._check_index(response)
            previous = results[response.request]
            if isinstance(previous, InferenceResponse):
                previous.release()
            results[response.request] = self._individual(response, frame)
        return results

    def stream(
        self, responses: Sequence[Response], descriptors: Sequence[int]
    ) -> list[tuple[int, InferenceResponse | InferError]]:
        """Return the responses that one frame of a decoupled model brought, each with the index of its request."""
        frame = _Frame(self._arena, descriptors)
        results = []
        for response in responses:
            self._check_index(response)
            results.append((response.request, self._streamed(response, frame)))
        return results

    def _check_index(self, response: Response) -> None:
        if not 0 <= response.request < len(self.requests):
            raise _nonsense(f"the backend answered request {response.request} of a batch of {len(self.requests)}")

    def _scatter_batched(
        self,
        batched: Sequence[Tensor],
        frame: _Frame,
        results: list[InferenceResponse | InferError | None],
    ) -> None:
        outputs: list[list[OutputTensor]] = [[] for _ in self.requests]
        signature = self.signature
        try:
            for tensor in batched:
                data = frame.bytes_of(tensor)
                plan = signature.output(tensor)
                shape = plan.client_shape(tensor, self.rows if signature.batches else None)
                if len(self.requests) == 1:
                    outputs[0].append(OutputTensor(plan.name, plan.datatype, shape, data))
                    continue
                rest = shape[1:]
                at = 0
                ends = (
                    _string_row_ends(data, [r.rows for r in self.requests], element_count(rest), tensor.name)
                    if plan.datatype is BYTES
                    else None
                )
                row_bytes = 0 if ends else len(data) // self.rows
                for index, request in enumerate(self.requests):
                    end = ends[index] if ends else at + request.rows * row_bytes
                    outputs[index].append(OutputTensor(plan.name, plan.datatype, (request.rows, *rest), data[at:end]))
                    at = end
        except InferError as error:
            results[:] = [error.with_traceback(None)] * len(results)  # frames would keep the arena's views
            return
        for index, request in enumerate(self.requests):
            results[index] = self._response(request, outputs[index], None)

    def _individual(self, response: Response, frame: _Frame) -> InferenceResponse | InferError:
        if response.error is not None:
            return _backend_error(response.error)
        request = self.requests[response.request]
        try:
            outputs = self._outputs(response, request.rows if self.signature.batches else None, frame)
        except InferError as error:
            return error.with_traceback(None)
        return self._response(request, outputs, response.parameters)

    def _streamed(self, response: Response, frame: _Frame) -> InferenceResponse | InferError:
        """Return one response of a decoupled model, which may hold any of its outputs, and any number of rows."""
        if response.error is not None:
            return _backend_error(response.error)
        wanted = self.requests[response.request].wanted
        try:
            outputs = self._outputs(response, None, frame)
        except InferError as error:
            return error.with_traceback(None)
        if wanted is not None:
            outputs = [output for output in outputs if output.name in wanted]
        self._holders += 1
        signature = self.signature
        result = InferenceResponse(signature.name, signature.version, outputs, response.parameters, self.release)
        result.final = response.final
        result.empty = response.empty
        return result

    def _outputs(self, response: Response, rows: int | None, frame: _Frame) -> list[OutputTensor]:
        outputs = []
        for tensor in response.outputs:
            plan = self.signature.output(tensor)
            shape = plan.client_shape(tensor, rows)
            outputs.append(OutputTensor(plan.name, plan.datatype, shape, frame.bytes_of(tensor)))
        return outputs

    def _response(
        self,
        request: PreparedRequest,
        outputs: list[OutputTensor],
        parameters: dict[str, str | int | bool | float] | None,
    ) -> InferenceResponse | InferError:
        if request.wanted is not None:
            by_name = {output.name: output for output in outputs}
            missing = [name for name in request.wanted if name not in by_name]
            if missing:
                return self.signature.missing_output(missing[0], list(by_name))
            if len(outputs) != len(request.wanted):
                wanted = set(request.wanted)
                outputs = [output for output in outputs if output.name in wanted]
        else:
            absent = self.signature.absent_outputs(outputs, request)
            if absent is not None:
                return absent
        self._holders += 1
        return InferenceResponse(self.signature.name, self.signature.version, outputs, parameters, self.release)

    def release(self) -> None:
        """Drop one hold: the backend's (when it is done) or a response's."""
        self._holders -= 1
        if not self._holders and self._arena is not None:
            self._arena.free(self._offset)
            self._arena = None


class _Frame:
    """Where the tensors of one frame lie: in the arena, in the frame's descriptors, or in the messages themselves."""

    __slots__ = ("_arena", "_descriptors", "_mapped")

    def __init__(self, arena: Arena | None, descriptors: Sequence[int]) -> None:
        self._arena = arena
        self._descriptors = descriptors
        self._mapped: dict[int, memoryview] | None = None

    def bytes_of(self, tensor: Tensor) -> memoryview:
        """Return the bytes of a tensor; raises INTERNAL where it does not fit its datatype, shape or memory."""
        datatype = BY_NAME.get(tensor.datatype)
        ref = tensor.ref
        if datatype is None:
            raise _nonsense(f"output '{tensor.name}' has the unknown datatype '{tensor.datatype}'")
        if any(dim < 0 for dim in tensor.shape):
            raise _nonsense(f"output '{tensor.name}' has the shape {list(tensor.shape)}")
        _check_size(tensor, datatype)
        try:
            if ref.source == ARENA:
                assert self._arena is not None
                return self._arena.slice(ref.offset, ref.nbytes)
            whole = memoryview(tensor.data) if ref.source == INLINE else self._spilled(ref.source)
        except (IndexError, ValueError, OSError) as error:
            raise _nonsense(f"output '{tensor.name}' lies outside the memory it was given") from error
        if ref.offset < 0 or ref.nbytes < 0 or ref.offset + ref.nbytes > len(whole):
            raise _nonsense(f"output '{tensor.name}' lies outside the memory it was given")
        return whole[ref.offset : ref.offset + ref.nbytes]

    def _spilled(self, source: int) -> memoryview:
        if source < 0:
            raise IndexError(source)
        if self._mapped is None:
            self._mapped = {}
        whole = self._mapped.get(source)
        if whole is None:
            whole = self._mapped[source] = _map(self._descriptors[source])
        return whole


def _backend_error(error: Error) -> InferError:
    return InferError(ErrorCode.__members__.get(error.code, ErrorCode.INTERNAL), error.message, FailureReason.BACKEND)


def _header(request: PreparedRequest) -> RequestHeader:
    original = request.request
    if not (original.parameters or original.id or original.correlation_id or request.wanted):
        return RequestHeader(request.rows)
    return RequestHeader(
        request.rows,
        original.id,
        original.parameters,
        original.correlation_id,
        original.flags,
        original.timeout_us,
        request.wanted,
    )


def _map(descriptor: int) -> memoryview:
    """Map a spill descriptor whole. The mapping lives as long as a view of it does."""
    size = os.fstat(descriptor).st_size
    return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)) if size else memoryview(b"")


def _check_size(tensor: Tensor, datatype: DataType) -> None:
    if datatype is BYTES:
        return
    expected = element_count(tensor.shape) * datatype.itemsize
    if tensor.ref.nbytes != expected:
        raise _nonsense(
            f"output '{tensor.name}' of shape {list(tensor.shape)} has {tensor.ref.nbytes} bytes, expected {expected}"
        )


def _string_row_ends(data: memoryview, rows: Sequence[int], elements_a_row: int, name: str) -> list[int]:
    """Return where each request's rows end in the wire form of a batched BYTES tensor."""
    ends = []
    at = 0
    total = len(data)
    unpack = _LENGTH.unpack_from
    for count in rows:
        for _ in range(count * elements_a_row):
            if at + 4 > total:
                raise _nonsense(f"output '{name}' has fewer strings than its shape")
            at += 4 + unpack(data, at)[0]
        ends.append(at)
    if at != total:
        raise _nonsense(f"the strings of output '{name}' do not fill its {total} bytes")
    return ends


def _nonsense(message: str) -> InferError:
    return InferError(ErrorCode.INTERNAL, message, FailureReason.BACKEND)
