"""Sources: where the tensors of an ensemble's request lie while its steps need them.

A source is the request, or a response of a step. It is let go of when the run, the steps that read it and the responses
that hold something of it have all done with it; only then may a backend process use that memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from headrace.instances.arenas import ArenaTable
from headrace.instances.regions import RequestRegions, Slice
from headrace.instances.signature import ModelSignature, PreparedRequest
from headrace.types import InferenceResponse, Parameter, RegionRef
from headrace_protocol.datatype import Buffer, DataType


class GivenTensor(NamedTuple):
    """A tensor of a source."""

    datatype: DataType
    shape: tuple[int, ...]
    data: Buffer
    """Its wire form; empty where only `place` has it."""
    place: Slice | None = None
    """Where a backend process can read it, if it can."""
    region: RegionRef | None = None
    """What its client called that place; None where `data` has the bytes too."""
    in_region: bool = False
    """Whether it is where the client wants it already."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return len(self.data) if self.region is None else self.region.nbytes


class Source:
    """Tensors with the memory they lie in. Held by its maker until `drop`; `release` gives the memory back."""

    __slots__ = ("_holders", "_release", "parameters", "tensors")

    def __init__(
        self,
        tensors: dict[str, GivenTensor],
        release: Callable[[], None],
        parameters: dict[str, Parameter] | None = None,
    ) -> None:
        self.tensors = tensors
        self.parameters = parameters
        self._release: Callable[[], None] | None = release
        self._holders = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def hold(self) -> None:
        """Keep it until one more `drop`."""
        self._holders += 1

    def drop(self) -> None:
        """Let go of it."""
        self._holders -= 1
        if not self._holders and self._release is not None:
            self.tensors = {}
            release, self._release = self._release, None
            release()


class StepMemory(RequestRegions):
    """The regions of a step's request, which also holds the sources that its inputs come from."""

    __slots__ = ("_sources",)

    def __init__(self, inputs: Mapping[str, Slice], outputs: Mapping[str, Slice], sources: Iterable[Source]) -> None:
        super().__init__(inputs, outputs)
        self._sources = tuple(sources)
        for source in self._sources:
            source.hold()

    def drop(self) -> None:
        """Let go of the regions, and with the last hold of the sources."""
        super().drop()
        if not self._holders:
            sources, self._sources = self._sources, ()
            for source in sources:
                source.drop()


def of_request(prepared: PreparedRequest, signature: ModelSignature) -> Source:
    """Return the inputs of an ensemble's request, in the shapes that its steps see. Holds the request's regions."""
    regions = prepared.regions
    places: Mapping[str, Slice] = regions.inputs if regions is not None else {}
    tensors = {}
    for plan, tensor in zip(signature.inputs, prepared.inputs, strict=True):
        if tensor is not None:
            shape = plan.backend_shape(tensor.shape, tensor.shape[0] if plan.batches else 1)
            tensors[plan.name] = GivenTensor(tensor.datatype, shape, tensor.data, places.get(plan.name), tensor.region)
    if regions is None:
        return Source(tensors, _nothing)
    regions.hold()
    return Source(tensors, regions.drop)


def _nothing() -> None:
    return


def of_response(response: InferenceResponse, arenas: ArenaTable) -> Source:
    """Return the outputs of a step's response, which is released with the source."""
    tensors = {
        output.name: GivenTensor(
            output.datatype, output.shape, output.data, arenas.place(output.data), None, output.in_region
        )
        for output in response.outputs
    }
    return Source(tensors, response.release, response.parameters)
