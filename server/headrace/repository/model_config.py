"""ModelConfig as the server uses it: parsed once, complete, frozen. Text, JSON and defaults are other modules' work.

Names follow Triton's config.pbtxt. `proto` keeps the whole normalised message, for the configuration endpoints and
for backends; the fields beside it are what the server itself decides by.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.datatype import DataType


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in a configuration: where (`dynamic_batching.max_queue_delay_microseconds`) and what."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(Exception):
    """A configuration that cannot be used; holds every problem found, not the first."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class TensorConfig:
    """An input or output. `dims` leave out the batch dimension where the model batches; -1 = varies."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    """Shape the backend sees instead of dims (batch dimension left out too); None = dims."""
    optional: bool = False
    allow_ragged_batch: bool = False
    is_shape_tensor: bool = False
    label_filename: str = ""


class TimeoutAction(enum.Enum):
    """What happens to a request whose time in the queue is over."""

    REJECT = "REJECT"
    DELAY = "DELAY"


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How long and how many requests may wait. 0 = without limit."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_us: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Settings of the dynamic batcher. Sizes count rows; priority 1 is the highest; priority_levels 0 = no levels."""

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policies: Mapping[int, QueuePolicy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Settings of the sequence batcher: of the oldest strategy, or else of the direct one."""

    oldest: bool = False
    max_idle_us: int = 1_000_000
    """How long a sequence may wait for its client."""
    max_queue_delay_us: int = 0
    minimum_slot_utilization: float = 0.0
    """Of the direct strategy: the share of an instance's slots for which an execution waits, 0 to 1."""
    max_candidate_sequences: int = 0
    """Of the oldest strategy: slots of an instance; 0 = as many as the model's batch has rows."""
    preferred_batch_sizes: tuple[int, ...] = ()
    preserve_ordering: bool = False
    iterative: bool = False
    correlation: DataType | None = None
    """As what the model takes correlation ids; None = it does not, and any will do."""
    largest_id: int = 2**64 - 1
    max_queue_size: int = 65536
    """Requests that may wait, in slots and in the backlog together."""
    inputs: frozenset[str] = frozenset()
    """Inputs that the server makes: controls and states."""
    outputs: frozenset[str] = frozenset()
    """Outputs that hold states."""


@dataclass(frozen=True, slots=True)
class Need:
    """So many of a resource, which an instance takes while it runs a batch."""

    name: str
    """In small letters."""
    count: int
    """> 0."""
    everywhere: bool = False
    """Whether the resource is the whole machine's; otherwise each device has its own."""


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` executions at once on each of its devices. kind: KIND_CPU, KIND_GPU or KIND_MODEL."""

    name: str
    kind: str
    count: int
    gpus: tuple[int, ...] = ()
    passive: bool = False
    """Whether its instances are loaded and get no requests."""
    host_policy: str = ""
    """Names processors; "" = a name by kind and device."""
    needs: tuple[Need, ...] = ()
    """What one of its instances takes while it runs, where executions are limited by resources."""
    priority: int = 1
    """Of priority n, it gets 1/n of the turns that one of priority 1 gets."""


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which versions of a model serve: `specific` if not None, else the `latest` highest; latest 0 = all."""

    latest: int = 1
    specific: tuple[int, ...] | None = None


PadValue = bool | int | float


@dataclass(frozen=True, slots=True)
class Cut:
    """Dimension `axis` of an output follows dimension `source_axis` of the padded input `source`."""

    axis: int
    source: str
    source_axis: int


@dataclass(frozen=True, slots=True)
class Padding:
    """How unlike shapes are made one."""

    values: Mapping[str, PadValue]
    """The padded inputs, and with what they are padded."""
    sizes: tuple[int, ...] = ()
    """Extents to which dimensions are rounded up, ascending; () = the largest of the batch counts."""
    any_lengths: bool = False
    """Whether requests share a batch however much they differ."""
    cuts: Mapping[str, tuple[Cut, ...]] = field(default_factory=dict)
    """By output."""

    def rounded(self, dim: int) -> int:
        """Return the smallest size that holds `dim`; `dim` itself where there is none."""
        return next((size for size in self.sizes if size >= dim), dim)

    def group(self, dim: int) -> int:
        """Return what requests with extents like `dim` have in common: the size, or else the next power of two."""
        if self.any_lengths:
            return 0
        return self.rounded(dim) if self.sizes else (dim - 1).bit_length()


@dataclass(frozen=True)
class ModelConfig:
    """A model's complete configuration. Build it with config_text/normalise, never by hand outside tests."""

    name: str
    backend: str
    platform: str
    max_batch_size: int
    inputs: tuple[TensorConfig, ...]
    outputs: tuple[TensorConfig, ...]
    instance_groups: tuple[InstanceGroup, ...]
    version_policy: VersionPolicy
    dynamic_batching: DynamicBatching | None
    decoupled: bool
    default_model_filename: str
    parameters: Mapping[str, str]
    metric_tags: Mapping[str, str]
    proto: pb.ModelConfig
    """The normalised message. Read-only by agreement."""
    sequence_batching: SequenceBatching | None = None

    scattered: Mapping[str, str] = field(default_factory=dict)
    """Outputs that are shared out among the requests of a batch by the shapes of an input: output -> input."""
    padding: Padding | None = None
    """How requests of unlike shapes are made to share a batch; None = they are not."""

    @cached_property
    def output_by_name(self) -> dict[str, TensorConfig]:
        """Outputs by name."""
        return {tensor.name: tensor for tensor in self.outputs}
