"""ModelSignature: a model's inputs and outputs prepared for checking requests and answers fast.

It turns a parsed request into a PreparedRequest once (order of checks as in KServe v2 servers), and it checks every
tensor that a backend returns against the configuration, so that what leaves the server has the declared type and shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

from headrace.instances.regions import RequestRegions
from headrace.instances.unlike import UnlikeShapes
from headrace.repository.model_config import ModelConfig, TensorConfig
from headrace.types import InferenceRequest, InputTensor, OutputTensor
from headrace_protocol.arena import ALIGNMENT
from headrace_protocol.datatype import BYTES, DataType, check_bytes, element_count
from headrace_protocol.errors import ErrorCode, FailureReason, InferError, invalid
from headrace_protocol.tensor import Tensor

MAX_EXTENT: Final = 1 << 40
"""Product of the dimensions beside a 0, of which no byte is sent: above it, arrays of whole batches overflow."""


class TensorPlan:
    """One input or output of the model, with what its checks need computed ahead."""

    __slots__ = ("batches", "datatype", "dims", "fixed", "index", "name", "optional", "reshape", "row_bytes")

    def __init__(self, index: int, config: TensorConfig, batches: bool, *, is_output: bool = False) -> None:
        self.index = index
        self.name = config.name
        self.datatype: DataType = config.datatype
        self.dims = config.dims
        self.reshape = config.reshape
        self.optional = config.optional
        self.batches = batches and (is_output or not config.is_shape_tensor)
        self.fixed = -1 not in config.dims
        self.row_bytes = element_count(config.dims) * config.datatype.itemsize if self.fixed else 0
        """Bytes of one row (of the whole tensor where the model does not batch); 0 where it varies."""

    def full_dims(self) -> list[int]:
        """Return the shape as metadata shows it."""
        return [-1, *self.dims] if self.batches else list(self.dims)

    def matches(self, shape: Sequence[int]) -> bool:
        """Return whether `shape`, without batch dimension, is one the configuration allows.

        A scalar, which dims cannot say (`dims: [ 1 ] reshape: { shape: [ ] }`), may also come without a dimension.
        """
        if not shape and self.reshape == ():
            return True
        return len(shape) == len(self.dims) and all(
            want in (got, -1) for want, got in zip(self.dims, shape, strict=True)
        )

    def backend_shape(self, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """Return the shape that the backend sees for a batch of `rows`, from a request's full shape."""
        if self.reshape is None:
            return (rows, *shape[1:]) if self.batches else shape
        if not self.reshape:
            return (rows,) if self.batches else ()
        rest = shape[1:] if self.batches else shape
        varying = iter([got for want, got in zip(self.dims, rest, strict=True) if want == -1])
        seen = [next(varying) if dim == -1 else dim for dim in self.reshape]
        return (rows, *seen) if self.batches else tuple(seen)

    def check_datatype(self, tensor: Tensor) -> None:
        """Raise INTERNAL for an output of another type than the configuration says."""
        if tensor.datatype != self.datatype.name:
            raise _broken(
                f"output '{self.name}' has the datatype {tensor.datatype}, "
                f"the model's configuration says {self.datatype.name}"
            )

    def client_shape(self, tensor: Tensor, rows: int | None) -> tuple[int, ...]:
        """Return the shape that the client sees of an output; raises INTERNAL where the model broke its promise."""
        shape = tensor.shape
        self.check_datatype(tensor)
        if not self.batches:
            rest = shape
        elif not shape or (rows is not None and shape[0] != rows):
            raise _broken(f"output '{self.name}' has the shape {list(shape)}, expected {rows} rows")
        else:
            rest = shape[1:]
        if self.reshape is None:
            if rest != self.dims and not self.matches(rest):
                raise self._shape_broken(shape)
            return shape
        if len(rest) != len(self.reshape) or any(
            want not in (got, -1) for want, got in zip(self.reshape, rest, strict=True)
        ):
            raise self._shape_broken(shape)
        varying = iter([got for want, got in zip(self.reshape, rest, strict=True) if want == -1])
        seen = [next(varying) if dim == -1 else dim for dim in self.dims]
        return (shape[0], *seen) if self.batches else tuple(seen)

    def _shape_broken(self, shape: Sequence[int]) -> InferError:
        declared = list(self.reshape if self.reshape is not None else self.dims)
        expected = [-1, *declared] if self.batches else declared
        return _broken(f"output '{self.name}' has the shape {list(shape)}, the model's configuration says {expected}")


class SequencePlace(NamedTuple):
    """What a backend is told of a request's sequence."""

    number: int
    """Of the sequence; never used again for another one in its process."""
    slot: int
    """Of the sequence, in its instance."""
    correlation_id: int | str
    flags: int
    """SEQUENCE_START and SEQUENCE_END."""


class PreparedRequest:
    """A request that fits its model: `inputs` in the model's order (None = an optional one left out)."""

    __slots__ = ("inputs", "passed_on", "regions", "request", "rows", "sequence", "shape_key", "wanted")

    def __init__(
        self,
        request: InferenceRequest,
        inputs: list[InputTensor | None],
        rows: int,
        shape_key: Hashable,
        wanted: tuple[str, ...] | None,
        regions: RequestRegions | None = None,
    ) -> None:
        self.request = request
        self.inputs = inputs
        self.rows = rows
        self.shape_key = shape_key
        """Requests with equal keys may share a batch."""
        self.wanted = wanted
        """Output names asked for; None = all."""
        self.regions = regions
        """Where those of its tensors lie that are in clients' shared memory; None = none is."""
        self.sequence: SequencePlace | None = None
        """Set where a sequence batcher hands it out."""
        self.passed_on = False
        """Whether its outputs are for other models, which read them where they lie."""

    def read_region(self, tensor: InputTensor, view: memoryview) -> None:
        """Fill `view` with an input that lies in a region. Raises INVALID_ARG where it cannot be read."""
        assert self.regions is not None
        place = self.regions.inputs[tensor.name]
        place.region.read_into(view, place.offset)


class ModelSignature:
    """What the server checks requests and answers of one model version against."""

    def __init__(self, config: ModelConfig, version: int) -> None:
        self.name = config.name
        self.version = version
        self.max_batch_size = config.max_batch_size
        self.batches = config.max_batch_size > 0
        self.inputs = [TensorPlan(i, tensor, self.batches) for i, tensor in enumerate(config.inputs)]
        self.outputs = [TensorPlan(i, t, self.batches, is_output=True) for i, t in enumerate(config.outputs)]
        self._input_by_name = {plan.name: plan for plan in self.inputs}
        self._output_by_name = {plan.name: plan for plan in self.outputs}
        self._required = sum(not plan.optional for plan in self.inputs)
        unlike = UnlikeShapes(config, self.inputs)
        self.unlike = unlike if unlike.any else None
        """How inputs and outputs lie in a batch where that is not row by row; None = all do."""
        self._one_shape = all(unlike.same_for_all(plan) and not plan.optional for plan in self.inputs)
        self._optional_inputs = self._required < len(self.inputs)
        exact = all(plan.fixed and plan.datatype is not BYTES for plan in self.outputs)
        self._row_bytes = [plan.row_bytes for plan in self.outputs] if exact else []
        """Bytes a row of each output, where every one is fixed; else empty."""
        self._learned_row = 0

    # --- requests -----------------------------------------------------------------------------------------------

    def prepare(self, request: InferenceRequest, regions: RequestRegions | None = None) -> PreparedRequest:
        """Check `request`, whose tensors lie in `regions` in part, against the model.

        Raises InferError INVALID_ARG that names what does not fit.
        """
        try:
            if request.raw_body is not None:
                self._deduce_raw(request)
            wanted = self._wanted(request) if request.outputs else None
            inputs = self._order(request)
            rows = self._rows(inputs) if self.batches else 1
            for plan, tensor in zip(self.inputs, inputs, strict=True):
                if tensor is not None:
                    self._check(plan, tensor)
        except InferError as error:
            if request.id:
                raise InferError(error.code, f"[request id: {request.id}] {error.message}", error.reason) from None
            raise
        key: Hashable
        if regions is not None and regions.is_cuda:
            key = object()  # equal to no other: it runs alone
        elif self._one_shape:
            key = None
        elif self.unlike is not None:
            key = self._unlike_key(self.unlike, inputs)
        elif self.batches:
            key = tuple([None if tensor is None else tensor.shape[1:] for tensor in inputs])
        else:
            key = tuple([None if tensor is None else tensor.shape for tensor in inputs])
        return PreparedRequest(request, inputs, rows, key, wanted, regions)

    def _unlike_key(self, unlike: UnlikeShapes, inputs: list[InputTensor | None]) -> Hashable:
        return tuple(
            [
                None if tensor is None else unlike.key(plan, tensor)
                for plan, tensor in zip(self.inputs, inputs, strict=True)
            ]
        )

    def _wanted(self, request: InferenceRequest) -> tuple[str, ...] | None:
        assert request.outputs is not None
        names: dict[str, None] = {}
        for output in request.outputs:
            if output.name not in self._output_by_name:
                raise invalid(
                    f"model '{self.name}' has no output '{output.name}'; its outputs are {_names(self.outputs)}"
                )
            if output.name in names:
                raise invalid(f"output '{output.name}' is asked for twice")
            names[output.name] = None
        return None if len(names) == len(self.outputs) and not self._optional_inputs else tuple(names)

    def _order(self, request: InferenceRequest) -> list[InputTensor | None]:
        ordered: list[InputTensor | None] = [None] * len(self.inputs)
        required = 0
        for tensor in request.inputs:
            plan = self._input_by_name.get(tensor.name)
            if plan is None:
                raise invalid(f"model '{self.name}' has no input '{tensor.name}'; its inputs are {_names(self.inputs)}")
            if ordered[plan.index] is not None:
                raise invalid(f"input '{tensor.name}' is given twice")
            ordered[plan.index] = tensor
            required += not plan.optional
        if required != self._required or not request.inputs:
            missing = [p.name for p in self.inputs if ordered[p.index] is None and not p.optional]
            given = [tensor.name for tensor in request.inputs]
            if not missing:
                raise invalid(f"model '{self.name}' needs at least one of its optional inputs {_names(self.inputs)}")
            raise invalid(f"model '{self.name}' needs the input(s) {missing} too, got {given}")
        return ordered

    def _rows(self, inputs: list[InputTensor | None]) -> int:
        rows = -1
        first = ""
        for plan, tensor in zip(self.inputs, inputs, strict=True):
            if tensor is None or not plan.batches:
                continue
            if not tensor.shape:
                raise invalid(f"input '{tensor.name}' has no dimensions, model '{self.name}' needs a batch dimension")
            if rows < 0:
                rows, first = tensor.shape[0], tensor.name
            elif tensor.shape[0] != rows:
                raise invalid(
                    f"inputs must agree in their batch dimension: '{first}' has {rows}, "
                    f"'{tensor.name}' has {tensor.shape[0]}"
                )
        if not 1 <= rows <= self.max_batch_size:
            raise invalid(f"batch size {rows} is outside 1 to {self.max_batch_size}, which model '{self.name}' takes")
        return rows

    def _check(self, plan: TensorPlan, tensor: InputTensor) -> None:
        if tensor.datatype is not plan.datatype:
            raise invalid(
                f"input '{plan.name}' has the datatype {tensor.datatype.name}, "
                f"model '{self.name}' expects {plan.datatype.name}"
            )
        shape = tensor.shape
        rest = shape[1:] if plan.batches else shape
        if rest != plan.dims and not plan.matches(rest):
            raise self._wrong_shape(plan, shape)
        for dim in shape:
            if dim < 0:
                raise invalid(f"input '{plan.name}' has the negative dimension {dim} in its shape {list(shape)}")
        if 0 in shape and not _within_extent(shape):
            raise invalid(
                f"input '{plan.name}' has no elements, but the dimensions beside the 0 of its shape {list(shape)} "
                f"have a product above {MAX_EXTENT}"
            )
        if plan.datatype is BYTES:
            if tensor.region is not None:
                return  # GPU memory, which only the backend can read
            try:
                check_bytes(tensor.data, element_count(shape))
            except InferError as error:
                raise invalid(f"input '{plan.name}': {error.message}") from None
            return
        if plan.row_bytes and plan.batches:
            expected = plan.row_bytes * shape[0]
        else:
            expected = element_count(shape) * plan.datatype.itemsize
        nbytes = len(tensor.data) if tensor.region is None else tensor.region.nbytes
        if nbytes != expected:
            raise invalid(
                f"input '{plan.name}' of shape {list(shape)} and datatype {plan.datatype.name} needs {expected} bytes, "
                f"got {nbytes}"
            )

    def _wrong_shape(self, plan: TensorPlan, shape: Sequence[int]) -> InferError:
        for dim in shape:
            if dim < 0:
                return invalid(f"input '{plan.name}' has the negative dimension {dim} in its shape {list(shape)}")
        note = " (the first dimension is the batch)" if plan.batches else ""
        return invalid(
            f"input '{plan.name}' has the shape {list(shape)}, model '{self.name}' expects {plan.full_dims()}{note}"
        )

    def _deduce_raw(self, request: InferenceRequest) -> None:
        """Turn a raw body into the model's one input: batch 1, at most one varying dimension from the size."""
        body = request.raw_body
        assert body is not None
        if len(self.inputs) != 1:
            raise invalid(
                f"a raw request needs a model with exactly one input, model '{self.name}' has {len(self.inputs)}"
            )
        plan = self.inputs[0]
        varying = [index for index, dim in enumerate(plan.dims) if dim == -1]
        if len(varying) > 1:
            raise invalid(
                f"the shape of raw input '{plan.name}' cannot be deduced: "
                f"{len(varying)} dimensions vary in {list(plan.dims)}"
            )
        dims = list(plan.dims)
        data: bytes | bytearray | memoryview = body
        if plan.datatype is BYTES:
            if element_count([dim for dim in dims if dim != -1]) != 1:
                raise invalid(f"raw input '{plan.name}' is a single string, its shape is {dims}")
            dims = [1] * len(dims)
            data = len(body).to_bytes(4, "little") + bytes(body)
        elif varying:
            unit = element_count([dim for dim in dims if dim != -1]) * plan.datatype.itemsize
            if not unit or len(body) % unit:
                raise invalid(
                    f"a raw body of {len(body)} bytes does not fill input '{plan.name}' of shape {list(plan.dims)}"
                )
            dims[varying[0]] = len(body) // unit
        shape = (1, *dims) if plan.batches else tuple(dims)
        request.inputs = [InputTensor(plan.name, plan.datatype, shape, data)]
        request.raw_body = None

    # --- answers ------------------------------------------------------------------------------------------------

    def output_space(self, rows: int, input_bytes: int) -> int:
        """Return how many bytes to set aside for the outputs of a batch: exact where dims are fixed, else learned."""
        if self._row_bytes:
            space = 0
            for row_bytes in self._row_bytes:
                space += (row_bytes * rows + ALIGNMENT - 1) & -ALIGNMENT
            return space
        return max(self._learned_row * rows, input_bytes) + 4096

    def learn_output(self, rows: int, nbytes: int) -> None:
        """Remember how large outputs of varying size were; sparse memory makes a generous guess cheap."""
        self._learned_row = max(self._learned_row, -(-nbytes // rows))

    def output(self, tensor: Tensor) -> TensorPlan:
        """Return the plan of an output that the backend sent; raises INTERNAL for one the model does not have."""
        plan = self._output_by_name.get(tensor.name)
        if plan is None:
            raise _broken(f"the model returned an output '{tensor.name}' that its configuration does not have")
        return plan

    def check_output(self, output: OutputTensor) -> None:
        """Raise INTERNAL where an answer that was kept elsewhere has an output that is not this model's."""
        plan = self._output_by_name.get(output.name)
        rest = output.shape[1:] if plan is not None and plan.batches else output.shape
        if plan is None or output.datatype is not plan.datatype or not plan.matches(rest):
            raise _broken(f"the model has no output '{output.name}' of {output.datatype.name} {list(output.shape)}")

    def missing_output(self, name: str, got: list[str]) -> InferError:
        """Return the error for an output that was asked for and not produced."""
        return _broken(f"the model returned no output '{name}'; it returned {got}")

    def absent_outputs(self, outputs: list[OutputTensor], request: PreparedRequest) -> InferError | None:
        """Return the error for a request that wants all outputs where one is missing.

        A model with optional inputs may leave out outputs where it was given only part of its inputs.
        """
        if len(outputs) == len(self.outputs) or (self._optional_inputs and None in request.inputs):
            return None
        got = {output.name for output in outputs}
        return self.missing_output(next(p.name for p in self.outputs if p.name not in got), sorted(got))


def _within_extent(shape: Sequence[int]) -> bool:
    extent = 1
    for dim in shape:
        extent *= dim or 1
        if extent > MAX_EXTENT:
            return False
    return True


def _names(plans: Sequence[TensorPlan]) -> list[str]:
    return [plan.name for plan in plans]


def _broken(message: str) -> InferError:
    return InferError(ErrorCode.INTERNAL, message, FailureReason.BACKEND)
