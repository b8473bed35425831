"""The captured graphs of one instance: which inputs they are for, how many are kept, when they hold no more."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from headrace_backends.tensorrt.contexts import ReadyContext
from headrace_backends.tensorrt.cuda import Cuda
from headrace_backends.tensorrt.layout import Layout
from headrace_backends.tensorrt.options import GraphSpec
from headrace_backends.tensorrt.signature import EngineSignature, EngineTensor, Given, Shape
from headrace_protocol.errors import invalid

MAX_GRAPHS: Final = 32
"""Graphs that an instance keeps; a new one takes the place of the one that was not used for longest."""
MAX_SEEN: Final = 256
"""Shapes of which an instance remembers that they came."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured execution. Its context is its own, for a graph holds as long as its context stays as it was."""

    ready: ReadyContext
    layout: Layout
    given: Given
    executable: int
    lower_batch: int | None = None
    """The smallest batch that may run as its first rows; None = only inputs of exactly its shapes."""

    def holds(self, given: Given) -> bool:
        """Whether a batch may run as the first rows of this one."""
        if self.lower_batch is None or self.given.values != given.values:
            return False
        return all(
            bool(shape) and self.lower_batch <= shape[0] <= ours[0] and shape[1:] == ours[1:]
            for ours, shape in zip(self.given.shapes, given.shapes, strict=True)
        )


class Graphs:
    """Owns graphs, all of one generation of the instance's buffers: they know where those are."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda: Final = cuda
        self._graphs: Final[OrderedDict[Given, Graph]] = OrderedDict()
        self._seen: Final[OrderedDict[Given, None]] = OrderedDict()
        self._generation = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, given: Given) -> Graph | None:
        """Return the graph of exactly these inputs."""
        found = self._graphs.get(given)
        if found is not None:
            self._graphs.move_to_end(given)
        return found

    def find(self, given: Given, *, batching: bool) -> Graph | None:
        """Return a graph that can run these inputs: one of exactly these, else the smallest that may hold them."""
        exact = self.get(given)
        if exact is not None or not batching:
            return exact
        fitting = [graph for graph in self._graphs.values() if graph.holds(given)]
        return min(fitting, key=lambda graph: graph.given.shapes[0][0], default=None)

    def are_stale(self, generation: int) -> bool:
        """Whether they know buffers of another generation, which are gone."""
        return bool(self._graphs) and self._generation != generation

    def add(self, graph: Graph, generation: int) -> None:
        """Keep a graph that was captured with buffers of this generation, and no older ones."""
        if self._generation != generation:
            self.drop()
            self._generation = generation
        replaced = self._graphs.pop(graph.given, None)
        self._graphs[graph.given] = graph
        if replaced is None and len(self._graphs) > MAX_GRAPHS:
            _, replaced = self._graphs.popitem(last=False)
        if replaced is not None:
            self._cuda.destroy_graph(replaced.executable)

    def drop(self) -> None:
        """Destroy all of them."""
        while self._graphs:
            _, graph = self._graphs.popitem()
            self._cuda.destroy_graph(graph.executable)

    def came_before(self, given: Given) -> bool:
        """Note that these inputs came; return whether they had come before, as far as that is remembered."""
        if given in self._seen:
            self._seen.move_to_end(given)
            return True
        self._seen[given] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return False


def given_by(spec: GraphSpec, signature: EngineSignature, *, batching: bool) -> Given:
    """Return the inputs that a configuration wants a graph for. Raises INVALID_ARG where it leaves some open."""
    shapes = tuple(_shape(tensor, spec, spec.batch_size if batching else 0) for tensor in signature.inputs)
    return Given(shapes, (None,) * len(shapes))


def _shape(tensor: EngineTensor, spec: GraphSpec, rows: int) -> Shape:
    if tensor.is_shape_tensor:
        raise invalid(
            f"input '{tensor.name}' is a shape tensor: without graph_spec a graph is captured when values come"
        )
    batch = (rows,) if rows else ()
    dims = spec.dims.get(tensor.name)
    shape = (*batch, *dims) if dims is not None else (*batch, *tensor.shape[len(batch) :])
    if -1 in shape:
        raise invalid(f"input '{tensor.name}' has dimensions that vary, {list(tensor.shape)}: give its dims")
    return shape
