"""How requests that differ in the shape of an input lie together in one batch: ragged, padded, and shape tensors.

A ragged input is flat: the elements of all requests, one after another. A padded one has the largest extents of the
batch, and each request's rows end in padding; outputs that follow it are cut back. A shape tensor is there once for all.
Knows tensors and memory, nothing of scheduling; models without any of it never come here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from headrace.instances.frame import nonsense, string_row_ends
from headrace.instances.regions import IN_REGION
from headrace.repository.model_config import Cut, ModelConfig, PadValue
from headrace.types import InputTensor
from headrace_protocol.datatype import BYTES, Array, element_count
from headrace_protocol.tensor import Tensor

if TYPE_CHECKING:
    from headrace.instances.signature import PreparedRequest, TensorPlan

Shape = tuple[int, ...]
Part = tuple[Shape, memoryview]
"""What one request gets of an output: its shape and its bytes."""


class Layout(NamedTuple):
    """How one input of a batch lies in memory, where that is not its rows one after another."""

    shape: Shape
    """As the backend sees it."""
    nbytes: int
    item_shapes: tuple[Shape, ...] | None
    """As each request gave it; None where the backend does not need to know."""
    pad: PadValue | None = None
    """With what rows are padded; None = they are copied as they are."""
    single: bool = False
    """Whether the first request's tensor stands for all."""


class UnlikeShapes:
    """What of a model's inputs and outputs is laid out in another way; of one model version."""

    def __init__(self, config: ModelConfig, inputs: Sequence[TensorPlan]) -> None:
        places = {plan.name: plan.index for plan in inputs}
        padding = config.padding
        tensors = list(enumerate(config.inputs)) if config.max_batch_size > 0 else []
        self._inputs: Final = inputs
        self._ragged: Final = frozenset(place for place, tensor in tensors if tensor.allow_ragged_batch)
        self._single: Final = frozenset(place for place, tensor in tensors if tensor.is_shape_tensor)
        self._padding: Final = padding
        self._padded: Final[Mapping[int, PadValue]] = (
            {} if padding is None else {places[name]: value for name, value in padding.values.items()}
        )
        self._cuts: Final[Mapping[str, Sequence[tuple[Cut, int]]]] = (
            {}
            if padding is None
            else {name: [(cut, places[cut.source]) for cut in cuts] for name, cuts in padding.cuts.items()}
        )
        self._scattered: Final = {name: places[source] for name, source in config.scattered.items()}
        made_from = {name for made in config.proto.batch_input for name in made.source_input}
        self._told: Final = frozenset(places[name] for name in made_from)
        """Inputs of whose shapes the backend makes others."""

    @property
    def any(self) -> bool:
        """Whether the model has anything of the kind."""
        return bool(self._ragged or self._single or self._padded or self._scattered)

    @property
    def rounds(self) -> bool:
        """Whether a request that runs alone may be padded too."""
        return self._padding is not None and bool(self._padding.sizes)

    def same_for_all(self, plan: TensorPlan) -> bool:
        """Return whether requests may share a batch whatever they have of this input."""
        if plan.index in self._ragged:
            return True
        if plan.index in self._padded:
            return self._padding is not None and self._padding.any_lengths
        return plan.fixed and plan.index not in self._single

    def key(self, plan: TensorPlan, tensor: InputTensor) -> object:
        """Return what of an input the requests of a batch have in common."""
        if plan.index in self._ragged:
            return ()
        if plan.index in self._single:
            return bytes(tensor.data) if tensor.region is None else object()  # equal to no other: it runs alone
        if plan.index in self._padded:
            assert self._padding is not None
            return tuple(map(self._padding.group, tensor.shape[1:]))
        return tensor.shape[1:] if plan.batches else tensor.shape

    # --- inputs -------------------------------------------------------------------------------------------------

    def layouts(self, requests: Sequence[PreparedRequest], rows: int, *, in_place: bool) -> dict[int, Layout]:
        """Return the inputs of a batch that are laid out in another way, by their place in the model.

        Nothing is padded where the backend works `in_place`, in memory of a client that is alone in its batch.
        """
        found = {}
        for index, first in enumerate(requests[0].inputs):
            if first is None:
                continue
            plan = self._inputs[index]
            if index in self._ragged:
                found[index] = _ragged(plan, requests)
            elif index in self._single:
                nbytes = len(first.data) if first.region is None else first.region.nbytes
                found[index] = Layout(plan.backend_shape(first.shape, rows), nbytes, None, single=True)
            elif index in self._padded and not in_place:
                layout = self._pad(plan, [_given(request, index).shape for request in requests], rows)
                if layout is not None:
                    found[index] = layout
        return found

    def _pad(self, plan: TensorPlan, shapes: Sequence[Shape], rows: int) -> Layout | None:
        """Return how a padded input lies; None where all requests have it as it is to be."""
        assert self._padding is not None
        largest = [max(extents) for extents in zip(*(shape[1:] for shape in shapes), strict=True)]
        extents = tuple(
            self._padding.rounded(extent) if dim == -1 else extent
            for dim, extent in zip(plan.dims, largest, strict=True)
        )
        if all(shape[1:] == extents for shape in shapes):
            return None
        whole = (rows, *extents)
        told = tuple(shapes) if plan.index in self._told else None
        return Layout(whole, element_count(whole) * plan.datatype.itemsize, told, self._padded[plan.index])

    # --- outputs ------------------------------------------------------------------------------------------------

    def parts(
        self,
        plan: TensorPlan,
        tensor: Tensor,
        data: memoryview,
        requests: Sequence[PreparedRequest],
        layouts: Mapping[int, Layout],
    ) -> list[Part] | None:
        """Return what each request gets of an output of the whole batch; None where that is its rows as they are.

        Raises INTERNAL where the output is not as its configuration says.
        """
        source = self._scattered.get(plan.name)
        if source is not None:
            return _scattered(plan, tensor, data, [_given(request, source).shape for request in requests])
        cuts = self._cuts_for(plan, layouts)
        if not cuts:
            return None
        plan.client_shape(tensor, sum(request.rows for request in requests))
        whole: Array = np.ndarray(tensor.shape, plan.datatype.numpy, data)
        parts = []
        start = 0
        for request in requests:
            parts.append(_cut(plan, whole[start : start + request.rows], request, cuts))
            start += request.rows
        return parts

    def own_part(
        self,
        plan: TensorPlan,
        tensor: Tensor,
        data: memoryview,
        rows: int | None,
        request: PreparedRequest,
        layouts: Mapping[int, Layout],
    ) -> Part | None:
        """Return what a request gets of an output of its own response; None where that is all of it, as it is.

        Raises INTERNAL where the output is not as its configuration says.
        """
        source = self._scattered.get(plan.name)
        if source is not None and len(tensor.shape) != len(plan.dims) + 1:
            return _scattered(plan, tensor, data, [_given(request, source).shape])[0]
        cuts = self._cuts_for(plan, layouts)
        if not cuts:
            return None
        plan.client_shape(tensor, rows)
        return _cut(plan, np.ndarray(tensor.shape, plan.datatype.numpy, data), request, cuts)

    def _cuts_for(self, plan: TensorPlan, layouts: Mapping[int, Layout]) -> list[tuple[Cut, int, int]]:
        """Return the cuts of an output in this batch: with the place of the input, and how far it was padded."""
        return [
            (cut, place, layouts[place].shape[cut.source_axis + 1])
            for cut, place in self._cuts.get(plan.name, ())
            if place in layouts
        ]


def fill(target: memoryview, layout: Layout, plan: TensorPlan, given: Sequence[tuple[InputTensor, memoryview]]) -> None:
    """Write the rows of each request, with padding behind them, into `target`."""
    assert layout.pad is not None
    whole: Array = np.ndarray(layout.shape, plan.datatype.numpy, target)
    start = 0
    for tensor, data in given:
        shape = tensor.shape
        rows = slice(start, start + shape[0])
        start += shape[0]
        whole[(rows, *map(slice, shape[1:]))] = np.ndarray(shape, plan.datatype.numpy, data)
        for axis in range(1, len(shape)):
            if shape[axis] < layout.shape[axis]:
                whole[(rows, *map(slice, shape[1:axis]), slice(shape[axis], None))] = layout.pad


def _given(request: PreparedRequest, index: int) -> InputTensor:
    tensor = request.inputs[index]
    assert tensor is not None, "requests of one batch have the same inputs"
    return tensor


def _ragged(plan: TensorPlan, requests: Sequence[PreparedRequest]) -> Layout:
    shapes = []
    count = nbytes = 0
    for request in requests:
        tensor = _given(request, plan.index)
        shapes.append(plan.backend_shape(tensor.shape, request.rows))
        count += element_count(tensor.shape)
        nbytes += len(tensor.data) if tensor.region is None else tensor.region.nbytes
    return Layout((count,), nbytes, tuple(shapes))


def _scattered(plan: TensorPlan, tensor: Tensor, data: memoryview, sources: Sequence[Shape]) -> list[Part]:
    """Return each request's part: its dimensions that vary are those of the source, in the same place."""
    plan.check_datatype(tensor)
    shapes = [
        (source[0], *(source[place] if dim == -1 else dim for place, dim in enumerate(plan.dims, 1)))
        for source in sources
    ]
    counts = list(map(element_count, shapes))
    if element_count(tensor.shape) != sum(counts):
        raise nonsense(
            f"output '{plan.name}' has the shape {list(tensor.shape)}, with {element_count(tensor.shape)} elements; "
            f"to be shared out by the shapes of its input it needs {sum(counts)}"
        )
    if data is IN_REGION:
        return [(shapes[0], data)]
    if plan.datatype is BYTES:
        ends = string_row_ends(data, counts, 1, plan.name)
    else:
        ends = [end * plan.datatype.itemsize for end in np.cumsum(counts).tolist()]
    starts = [0, *ends[:-1]]
    return [(shape, data[start:end]) for shape, start, end in zip(shapes, starts, ends, strict=True)]


def _cut(plan: TensorPlan, array: Array, request: PreparedRequest, cuts: Sequence[tuple[Cut, int, int]]) -> Part:
    """Return a request's rows of an output without what belongs to padding; the model may have cut them itself."""
    for cut, place, padded in cuts:
        extent = _given(request, place).shape[cut.source_axis + 1]
        axis = cut.axis + 1
        if array.shape[axis] == padded:
            array = array[(*([slice(None)] * axis), slice(extent))]
        elif array.shape[axis] != extent:
            raise nonsense(
                f"output '{plan.name}' has {array.shape[axis]} in dimension {cut.axis}, which follows dimension "
                f"{cut.source_axis} of '{cut.source}', in this batch padded to {padded}"
            )
    return array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
