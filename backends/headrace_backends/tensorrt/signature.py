"""What an engine's tensors and optimization profiles are, and which profile a batch runs in.

Pure but for `read_signature`, which asks the engine; nothing here runs anything.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from headrace_protocol import datatype
from headrace_protocol.datatype import DataType, element_count
from headrace_protocol.errors import InferError, invalid, unsupported
from headrace_protocol.tensor import TensorSpec

Shape = tuple[int, ...]

_BY_TENSORRT_NAME: Final = {
    "FLOAT": datatype.FP32,
    "HALF": datatype.FP16,
    "BF16": datatype.BF16,
    "INT8": datatype.INT8,
    "UINT8": datatype.UINT8,
    "INT32": datatype.INT32,
    "INT64": datatype.INT64,
    "BOOL": datatype.BOOL,
}
"""Names of tensorrt.DataType -> our types. The others (FP8, INT4 and the like) no client can send."""


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """One input or output of an engine."""

    name: str
    datatype: DataType
    shape: Shape
    """-1 for a dimension that varies."""
    is_shape_tensor: bool = False
    """Whether its values tell shapes of other tensors; it is in host memory then."""

    @property
    def on_device(self) -> bool:
        """Whether its elements are in GPU memory."""
        return not self.is_shape_tensor

    def nbytes(self, shape: Shape) -> int:
        """Return the bytes of a tensor of this type."""
        return element_count(shape) * self.datatype.itemsize

    def spec(self) -> TensorSpec:
        """Return it as the server is told it."""
        return TensorSpec(self.name, self.datatype.name, self.shape, is_shape_tensor=self.is_shape_tensor)


@dataclass(frozen=True, slots=True)
class Range:
    """What a profile takes of one input: of its shape, or of its values where it is a shape tensor."""

    least: Shape
    best: Shape
    most: Shape

    def holds(self, shape: Sequence[int]) -> bool:
        """Whether the profile takes `shape`."""
        return len(shape) == len(self.least) and all(
            low <= dim <= high for low, dim, high in zip(self.least, shape, self.most, strict=True)
        )

    def __str__(self) -> str:
        return f"{list(self.least)}" if self.least == self.most else f"{list(self.least)} to {list(self.most)}"


@dataclass(frozen=True, slots=True)
class Profile:
    """An optimization profile."""

    number: int
    shapes: Mapping[str, Range]
    """Of every input."""
    values: Mapping[str, Range]
    """Of shape tensors."""


@dataclass(frozen=True, slots=True)
class Given:
    """What the inputs of one execution are: all that the outputs' shapes can depend on before it runs."""

    shapes: tuple[Shape, ...]
    """In the order of EngineSignature.inputs."""
    values: tuple[tuple[int, ...] | None, ...]
    """Of shape tensors; None for the others."""


class EngineSignature:
    """The tensors and profiles of an engine."""

    def __init__(
        self,
        inputs: Sequence[EngineTensor],
        outputs: Sequence[EngineTensor],
        profiles: Sequence[Profile],
        unbatched: Collection[str] = (),
    ) -> None:
        self.inputs: Final = tuple(inputs)
        self.outputs: Final = {tensor.name: tensor for tensor in outputs}
        self.profiles: Final = tuple(profiles)
        self.unbatched: Final = frozenset(unbatched)
        """Tensors whose first dimension is not the batch's: ragged inputs, and what is made for a batch."""
        self.batching: Final = all(map(self._batches, (*self.inputs, *outputs)))
        """Whether the first dimension of every tensor varies."""

    def _batches(self, tensor: EngineTensor) -> bool:
        return tensor.name in self.unbatched or tensor.is_shape_tensor or tensor.shape[:1] == (-1,)

    def tensor(self, name: str) -> EngineTensor | None:
        """Return the input or output `name`."""
        found = self.outputs.get(name)
        return found or next((tensor for tensor in self.inputs if tensor.name == name), None)

    def max_batch_size(self, numbers: Sequence[int]) -> int:
        """Return the largest batch that one of the profiles `numbers` takes; 0 where the engine cannot batch."""
        if not self.batching:
            return 0
        return max(self._largest(self.profiles[number]) for number in numbers)

    def _largest(self, profile: Profile) -> int:
        sizes = [
            profile.shapes[tensor.name].most[0]
            for tensor in self.inputs
            if tensor.name not in self.unbatched and not tensor.is_shape_tensor
        ]
        return min(sizes, default=0)

    def choose(self, numbers: Sequence[int], given: Given, *, batching: bool) -> tuple[int, Given]:
        """Return the profile out of `numbers` that fits best, and what it is given.

        That is `given`, with more rows where the model batches and the profile takes no batch so small. Raises
        INVALID_ARG where none fits, with what they take.
        """
        best, chosen = math.inf, None
        for number in numbers:
            profile = self.profiles[number]
            widened = self._widened(profile, given) if batching and not self.unbatched else given
            if self._misfit(profile, widened) is None:
                distance = self._distance(profile, widened)
                if distance < best:
                    best, chosen = distance, (number, widened)
        if chosen is None:
            raise self._no_profile(numbers, given)
        return chosen

    def _widened(self, profile: Profile, given: Given) -> Given:
        """Return `given` with as many rows as the profile takes at least."""
        batched = [tensor.on_device and bool(shape) for tensor, shape in zip(self.inputs, given.shapes, strict=True)]
        least = [
            profile.shapes[tensor.name].least[0]
            for tensor, yes in zip(self.inputs, batched, strict=True)
            if yes and profile.shapes[tensor.name].least
        ]
        rows = max(least, default=0)
        shapes = [
            (max(shape[0], rows), *shape[1:]) if yes else shape
            for shape, yes in zip(given.shapes, batched, strict=True)
        ]
        return Given(tuple(shapes), given.values)

    def _misfit(self, profile: Profile, given: Given) -> str | None:
        """Return what the profile does not take, as a part of a sentence."""
        for tensor, shape, values in zip(self.inputs, given.shapes, given.values, strict=True):
            taken = profile.shapes[tensor.name]
            if not taken.holds(shape):
                return f"input '{tensor.name}' has the shape {list(shape)}, expected {taken}"
            bounds = profile.values.get(tensor.name)
            if bounds is not None and values is not None and not bounds.holds(values):
                return f"input '{tensor.name}' has the values {list(values)}, expected {bounds}"
        return None

    def _distance(self, profile: Profile, given: Given) -> float:
        """Return how far the inputs are from what the profile is best at."""
        total = 0
        for tensor, shape, values in zip(self.inputs, given.shapes, given.values, strict=True):
            best = profile.shapes[tensor.name].best
            total += sum(abs(ours - theirs) for ours, theirs in zip(shape, best, strict=True))
            bounds = profile.values.get(tensor.name)
            if bounds is not None and values is not None:
                total += sum(abs(ours - theirs) for ours, theirs in zip(values, bounds.best, strict=True))
        return total

    def _no_profile(self, numbers: Sequence[int], given: Given) -> InferError:
        misfits = [(number, self._misfit(self.profiles[number], given)) for number in numbers]
        if len(misfits) == 1:
            return invalid(f"the engine cannot run this: {misfits[0][1]}")
        each = "; ".join(f"profile {number}: {misfit}" for number, misfit in misfits)
        return invalid(f"no optimization profile of this instance can run this: {each}")


def read_signature(engine: Any, trt: Any, unbatched: Collection[str]) -> EngineSignature:
    """Return what `engine` (ICudaEngine of the module `trt`) says of itself; `unbatched` as in EngineSignature.

    Raises UNSUPPORTED where a tensor has a type or a memory layout that no client can send.
    """
    inputs: list[EngineTensor] = []
    outputs: list[EngineTensor] = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        (inputs if is_input else outputs).append(_read_tensor(engine, trt, name))
    profiles = [_read_profile(engine, number, inputs) for number in range(engine.num_optimization_profiles)]
    return EngineSignature(inputs, outputs, profiles, unbatched)


def _read_tensor(engine: Any, trt: Any, name: str) -> EngineTensor:
    found = _BY_TENSORRT_NAME.get(engine.get_tensor_dtype(name).name)
    if found is None:
        kind = engine.get_tensor_dtype(name).name
        raise unsupported(f"tensor '{name}' of the engine has the type {kind}, which the protocol lacks")
    if engine.get_tensor_vectorized_dim(name) != -1 or engine.get_tensor_format(name) != trt.TensorFormat.LINEAR:
        raise unsupported(
            f"tensor '{name}' of the engine has the format \"{engine.get_tensor_format_desc(name)}\", and only row-major "
            "linear ones are served: build the engine without other formats for its inputs and outputs"
        )
    on_host = engine.get_tensor_location(name) == trt.TensorLocation.HOST
    shape = tuple(engine.get_tensor_shape(name))
    if on_host and len(shape) > 1:
        raise unsupported(f"shape tensor '{name}' of the engine has {len(shape)} dimensions, expected 0 or 1")
    return EngineTensor(name, found, shape, on_host)


def _read_profile(engine: Any, number: int, inputs: Sequence[EngineTensor]) -> Profile:
    shapes: dict[str, Range] = {}
    values: dict[str, Range] = {}
    for tensor in inputs:
        shapes[tensor.name] = Range(*(tuple(dims) for dims in engine.get_tensor_profile_shape(tensor.name, number)))
        if tensor.is_shape_tensor:
            # The binding takes the number first, whatever its argument names say.
            bounds = engine.get_tensor_profile_values(number, tensor.name)
            if len(bounds) == 3:
                values[tensor.name] = Range(*(tuple(int(value) for value in bound) for bound in bounds))
    return Profile(number, shapes, values)


def shape_values(tensor: EngineTensor, array: np.ndarray[Any, Any], rows: int) -> tuple[int, ...]:
    """Return the values of a shape tensor as the engine takes them.

    A batch's tensor may lack the first value, which is its number of rows: then that is put before the others.
    """
    values = tuple(int(value) for value in array.reshape(-1))
    if tensor.shape and len(values) == tensor.shape[0] - 1:
        return (rows, *values)
    return values
