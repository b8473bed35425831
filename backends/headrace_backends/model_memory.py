"""ModelMemory: what every batch of a model needs to know, made once when the model is loaded."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from headrace_backends.ragged import BatchInput
from headrace_backends.regions import RegionMap
from headrace_backends.sequences import SequenceStates
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import DataType


class ModelMemory:
    """What every batch of a model needs to know: the memory shared with the server, and the declared outputs."""

    def __init__(
        self,
        arena: Arena,
        datatypes: Mapping[str, DataType],
        *,
        batching: bool = False,
        decoupled: bool = False,
        batch_inputs: Sequence[BatchInput] = (),
        scattered: Collection[str] = (),
        sequences: SequenceStates | None = None,
    ) -> None:
        self.arena: Final = arena
        self.readonly: Final = arena.view.toreadonly()
        self.regions: Final = RegionMap()
        """Clients' shared memory."""
        self.datatypes: Final = datatypes
        """Of the outputs whose type is declared."""
        self.batching: Final = batching
        """Whether the first dimension is known to be the batch's; where it is not, more than one row tells."""
        self.decoupled: Final = decoupled
        """Whether its requests may have any number of responses: its batches are StreamingBatches then."""
        self.batch_inputs: Final = batch_inputs
        """Tensors that are made for each batch."""
        self.made: Final = frozenset(name for made in batch_inputs for name in made.targets)
        """Their names."""
        self.scattered: Final = frozenset(scattered)
        """Outputs of a batch that the server shares out by the shapes of an input."""
        self.sequences: Final = sequences
        """There where the model takes sequences."""
        self.changed: Final = threading.Condition()
        """Notified when a request of any batch was cancelled, paused or let go on."""
