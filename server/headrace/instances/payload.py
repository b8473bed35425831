"""Payload: the requests of one batch on their way through a backend process, and their memory in its arena.

Gather writes the rows of all requests straight into the arena: the copy out of the request bodies is the
concatenation. Scatter hands each request its rows as views of the arena; the slice is freed when the backend is done
and the last response was released. Tensors in clients' shared memory stay where they are if the request is alone in its
batch; otherwise they are copied, as those that came over the wire are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from headrace.instances.frame import Frame, nonsense, string_row_ends
from headrace.instances.regions import RequestRegions, Slice, deliver
from headrace.instances.signature import ModelSignature, PreparedRequest, SequencePlace, TensorPlan
from headrace.instances.unlike import Layout, fill
from headrace.types import InferenceResponse, InputTensor, OutputTensor
from headrace_protocol.arena import ALIGNMENT, Arena
from headrace_protocol.datatype import BYTES, element_count
from headrace_protocol.errors import ErrorCode, FailureReason, InferError
from headrace_protocol.messages import Error, Execute, RequestHeader, Response, infer_error
from headrace_protocol.tensor import Tensor, TensorRef

_NOWHERE: Final[Mapping[str, Slice]] = {}
_ALL_ALIKE: Final[Mapping[int, Layout]] = {}
_SHARE_OF_OUTPUTS: Final = 4
"""What part of the arena is set aside for a batch's outputs, at most: larger ones come in a descriptor of the backend's."""


class UnreadableInputError(Exception):
    """One request of a batch has an input in shared memory that cannot be read; `error` is what it gets."""

    def __init__(self, index: int, error: InferError) -> None:
        super().__init__(index)
        self.index = index
        self.error = error


class RescheduledError(InferError):
    """What a request gets that its backend wants to run once more; an error where the model is not iterative."""

    def __init__(self, model_name: str) -> None:
        super().__init__(
            ErrorCode.INVALID_ARG,
            f"the backend asks for the request to be run again, and model '{model_name}' is not configured for that: "
            "it needs sequence_batching with iterative_sequence: true",
            FailureReason.BACKEND,
        )


class Payload:
    """Owns one slice of `arena` between gather and the last release."""

    __slots__ = (
        "_arena",
        "_copied_out",
        "_holders",
        "_layouts",
        "_offset",
        "copied_in",
        "in_place",
        "owners",
        "requests",
        "rows",
        "signature",
        "state_keys",
    )

    def __init__(self, signature: ModelSignature, requests: Sequence[PreparedRequest]) -> None:
        self.signature = signature
        self.requests = requests
        self.rows = sum(request.rows for request in requests)
        self.owners: Sequence[Any] = ()
        """What the submitter wants back beside each result, in the order of `requests`."""
        self.in_place = requests[0].regions if len(requests) == 1 else None
        """Regions that the backend is to work in; whoever cannot give it these sets None, and all is copied."""
        unlike = signature.unlike
        if unlike is not None and unlike.rounds and self.in_place is not None and not self.in_place.is_cuda:
            self.in_place = None  # what is there may have to be padded
        self._layouts = _ALL_ALIKE
        self.copied_in = 0
        """Bytes of inputs copied into the arena."""
        self.state_keys: dict[int, int] = {}
        """By index of the request: what the shapes of its sequence's state are now; see messages.Responses."""
        self._copied_out = 0
        self._arena: Arena | None = None
        self._offset = 0
        self._holders = 1

    def gather(self, arena: Arena, batch: int, instance: int) -> Execute:
        """Copy the inputs into `arena` and return the command that runs them.

        Raises ArenaFullError, or UnreadableInputError for one request; nothing is taken then.
        """
        requests = self.requests
        in_place = self.in_place.inputs if self.in_place is not None else _NOWHERE
        if self.signature.unlike is not None:
            self._layouts = self.signature.unlike.layouts(requests, self.rows, in_place=self.in_place is not None)
        sizes, total = self._sizes(in_place)
        placed = sum([place.nbytes for place in in_place.values()]) if in_place else 0
        space = min(self.signature.output_space(self.rows, total + placed), arena.capacity // _SHARE_OF_OUTPUTS)
        base = arena.allocate(total + space)
        try:
            command = Execute(
                batch,
                instance,
                tuple(self._write(arena.view, base, sizes, in_place)),
                tuple([_header(request, self.in_place) for request in requests]),
                self._wanted(),
                TensorRef(base + total, space),
            )
        except BaseException:
            arena.free(base)
            raise
        self._arena, self._offset = arena, base
        self.copied_in = sum(sizes)
        for request in requests:
            if request.regions is not None:
                request.regions.hold()
        return command

    def _sizes(self, in_place: Mapping[str, Slice]) -> tuple[list[int], int]:
        """Return how many bytes each input has that goes into the arena (0 = it does not), and what all take there."""
        layouts = self._layouts
        alone = len(self.requests) == 1
        sizes = []
        total = 0
        for index, tensor in enumerate(self.requests[0].inputs):
            if tensor is None or (in_place and tensor.name in in_place):
                sizes.append(0)
                continue
            if layouts and index in layouts:
                nbytes = layouts[index].nbytes
            else:
                nbytes = len(tensor.data) if tensor.region is None else tensor.region.nbytes
                if not alone:
                    nbytes += self._bytes_of_others(index)
            sizes.append(nbytes)
            total += (nbytes + ALIGNMENT - 1) & -ALIGNMENT
        return sizes, total

    def _write(
        self, view: memoryview, position: int, sizes: Sequence[int], in_place: Mapping[str, Slice]
    ) -> list[Tensor]:
        """Copy the inputs to `position` and what follows it; return where each lies. Raises UnreadableInputError."""
        requests, layouts = self.requests, self._layouts
        alone = len(requests) == 1
        tensors = []
        for index, (plan, nbytes) in enumerate(zip(self.signature.inputs, sizes, strict=True)):
            tensor = requests[0].inputs[index]
            if tensor is None:
                continue
            layout = layouts.get(index) if layouts else None
            shape = plan.backend_shape(tensor.shape, self.rows) if layout is None else layout.shape
            item_shapes = None if layout is None else layout.item_shapes
            if in_place and tensor.name in in_place:
                ref = in_place[tensor.name].ref()
                tensors.append(Tensor(plan.name, plan.datatype.name, shape, ref, item_shapes))
                continue
            if layout is None and alone and tensor.region is None:
                view[position : position + nbytes] = tensor.data
            elif layout is not None and layout.pad is not None:
                self._fill(layout, plan, view[position : position + nbytes])
            else:
                single = layout is not None and layout.single
                self._copy(index, view, position, requests[:1] if single else requests)
            tensors.append(Tensor(plan.name, plan.datatype.name, shape, TensorRef(position, nbytes), item_shapes))
            position += (nbytes + ALIGNMENT - 1) & -ALIGNMENT
        return tensors

    def _bytes_of_others(self, index: int) -> int:
        """Return how many bytes of an input all requests but the first have."""
        nbytes = 0
        for request in self.requests[1:]:
            other = request.inputs[index]
            assert other is not None
            nbytes += len(other.data) if other.region is None else other.region.nbytes
        return nbytes

    def _copy(self, index: int, view: memoryview, at: int, requests: Sequence[PreparedRequest]) -> None:
        """Copy an input of `requests` to `at` and what follows it. Raises UnreadableInputError."""
        for number, request in enumerate(requests):
            source = request.inputs[index]
            assert source is not None
            if source.region is None:
                end = at + len(source.data)
                view[at:end] = source.data
            else:
                end = at + source.region.nbytes
                _read_region(number, request, source, view[at:end])
            at = end

    def _fill(self, layout: Layout, plan: TensorPlan, target: memoryview) -> None:
        """Write a padded input of all requests. Raises UnreadableInputError."""
        given = []
        for number, request in enumerate(self.requests):
            source = request.inputs[plan.index]
            assert source is not None
            data = memoryview(source.data)
            if source.region is not None:
                data = memoryview(bytearray(source.region.nbytes))
                _read_region(number, request, source, data)
            given.append((source, data))
        fill(target, layout, plan, given)

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

        `descriptors` came with the frame and stay the caller's to close. Raises INTERNAL for a request that there is not.
        """
        for response in responses:
            self._check_index(response)
        results: list[InferenceResponse | InferError | None] = [None] * len(self.requests)
        frame = Frame(self._arena, descriptors, self.in_place)
        if batched is not None:
            self._scatter_batched(batched, frame, results)
        for response in responses:
            previous = results[response.request]
            if isinstance(previous, InferenceResponse):
                previous.release()
            results[response.request] = self._individual(response, frame)
        return results

    def stream(
        self, responses: Sequence[Response], descriptors: Sequence[int]
    ) -> Iterator[tuple[int, InferenceResponse | InferError, bool]]:
        """Yield the responses that one frame of a decoupled model brought, each with the index of its request.

        And whether the backend sends no more to it: an error may also be ours, about a response that is no good. Raises
        INTERNAL for a request that there is not.
        """
        frame = Frame(self._arena, descriptors, self.in_place)
        for response in responses:
            self._check_index(response)
            last = response.final or response.error is not None
            yield response.request, self._streamed(response, frame), last

    def _check_index(self, response: Response) -> None:
        if not 0 <= response.request < len(self.requests):
            raise nonsense(f"the backend answered request {response.request} of a batch of {len(self.requests)}")

    def _scatter_batched(
        self,
        batched: Sequence[Tensor],
        frame: Frame,
        results: list[InferenceResponse | InferError | None],
    ) -> None:
        outputs: list[list[OutputTensor]] = [[] for _ in self.requests]
        signature = self.signature
        try:
            for tensor in batched:
                data = frame.bytes_of(tensor)
                self._copied_out += len(data)
                plan = signature.output(tensor)
                if signature.unlike is not None:
                    parts = signature.unlike.parts(plan, tensor, data, self.requests, self._layouts)
                    if parts is not None:
                        for own, part in zip(outputs, parts, strict=True):
                            own.append(OutputTensor(plan.name, plan.datatype, *part))
                        continue
                shape = plan.client_shape(tensor, self.rows if signature.batches else None)
                if len(self.requests) == 1:
                    outputs[0].append(OutputTensor(plan.name, plan.datatype, shape, data))
                    continue
                rest = shape[1:]
                at = 0
                ends = (
                    string_row_ends(data, [r.rows for r in self.requests], element_count(rest), tensor.name)
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

    def _individual(self, response: Response, frame: Frame) -> InferenceResponse | InferError:
        if response.error is not None:
            return _backend_error(response.error)
        if response.reschedule:
            return RescheduledError(self.signature.name)
        request = self.requests[response.request]
        try:
            outputs = self._outputs(response, request.rows if self.signature.batches else None, frame)
        except InferError as error:
            return error.with_traceback(None)
        return self._response(request, outputs, response.parameters)

    def _streamed(self, response: Response, frame: Frame) -> InferenceResponse | InferError:
        """Return one response of a decoupled model, which may hold any of its outputs, and any number of rows."""
        if response.error is not None:
            return _backend_error(response.error)
        if response.reschedule:
            return RescheduledError(self.signature.name)
        request = self.requests[response.request]
        try:
            outputs = self._outputs(response, None, frame)
            if request.wanted is not None:
                outputs = [output for output in outputs if output.name in request.wanted]
            if request.regions is not None:
                request.regions.check()
                deliver(request.regions, outputs)
        except InferError as error:
            return error.with_traceback(None)
        if request.passed_on:
            self._pass_on(outputs)
        self._holders += 1
        signature = self.signature
        result = InferenceResponse(signature.name, signature.version, outputs, response.parameters, self.release)
        result.final = response.final
        result.empty = response.empty
        return result

    def _outputs(self, response: Response, rows: int | None, frame: Frame) -> list[OutputTensor]:
        outputs = []
        unlike = self.signature.unlike
        for tensor in response.outputs:
            plan = self.signature.output(tensor)
            data = frame.bytes_of(tensor)
            self._copied_out += len(data)
            part = None
            if unlike is not None:
                part = unlike.own_part(plan, tensor, data, rows, self.requests[response.request], self._layouts)
            shape, data = part or (plan.client_shape(tensor, rows), data)
            outputs.append(OutputTensor(plan.name, plan.datatype, shape, data))
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
        if request.regions is not None:
            try:
                deliver(request.regions, outputs)
            except InferError as error:
                return error.with_traceback(None)
        if request.passed_on:
            self._pass_on(outputs)
        self._holders += 1
        return InferenceResponse(self.signature.name, self.signature.version, outputs, parameters, self.release)

    def _pass_on(self, outputs: list[OutputTensor]) -> None:
        """Take back that outputs were taken out of the arena, where they stay."""
        self._copied_out -= sum([len(output.data) for output in outputs])

    def take_copied_out(self) -> int:
        """Return how many bytes of outputs came out of the arena, messages and descriptors since it was asked last."""
        nbytes, self._copied_out = self._copied_out, 0
        return nbytes

    def release(self) -> None:
        """Drop one hold: the backend's (when it is done) or a response's."""
        self._holders -= 1
        if not self._holders and self._arena is not None:
            self._arena.free(self._offset)
            self._arena = None
            for request in self.requests:
                if request.regions is not None:
                    request.regions.drop()


def _read_region(number: int, request: PreparedRequest, source: InputTensor, target: memoryview) -> None:
    try:
        request.read_region(source, target)
    except InferError as error:
        raise UnreadableInputError(number, error) from None


def _backend_error(error: Error) -> InferError:
    return infer_error(error, FailureReason.BACKEND)


def _header(request: PreparedRequest, in_place: RequestRegions | None) -> RequestHeader:
    original = request.request
    if request.sequence is not None:
        return _sequence_header(request, request.sequence, in_place)
    named = original.parameters or original.id or original.correlation_id or request.wanted
    if in_place is None and not (named or original.flags or original.timeout_us):
        return RequestHeader(request.rows)
    return RequestHeader(
        request.rows,
        original.id,
        original.parameters,
        original.correlation_id,
        original.flags,
        original.timeout_us,
        request.wanted,
        in_place.output_refs() if in_place is not None else (),
    )


def _sequence_header(request: PreparedRequest, place: SequencePlace, in_place: RequestRegions | None) -> RequestHeader:
    original = request.request
    return RequestHeader(
        request.rows,
        original.id,
        original.parameters,
        place.correlation_id,
        place.flags,
        original.timeout_us,
        request.wanted,
        in_place.output_refs() if in_place is not None else (),
        place.number,
        place.slot,
    )
