"""What a loaded version of a model is to the planes, be it served by processes of its own or made of other models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace.instances.served_model import InstancePool
from headrace.instances.signature import ModelSignature
from headrace.observability.statistics import ModelStatistics
from headrace.repository.sources import ServedModel
from headrace.scheduling.driver import Driver
from headrace.scheduling.sequence_driver import SequenceDriver


class LoadedModel(ServedModel, Protocol):
    """Owned by the registry, which leases it to requests and stops it once no lease is left."""

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        """Class labels by output name."""
        ...

    @property
    def load_seconds(self) -> float: ...

    @property
    def signature(self) -> ModelSignature: ...

    @property
    def statistics(self) -> ModelStatistics: ...

    @property
    def driver(self) -> Driver: ...

    def pools(self, outputs: Sequence[str] | None) -> Sequence[InstancePool]:
        """Return the instances that a request for these outputs (None = all) needs, its own or its members'."""
        ...

    @property
    def cached(self) -> bool:
        """Whether answers are kept in the response cache."""
        ...

    @property
    def sequences(self) -> SequenceDriver | None:
        """The driver, where the model takes sequences."""
        ...

    @property
    def restarts(self) -> int:
        """How often its processes were started again."""
        ...

    def pids(self) -> list[int]:
        """Return the process numbers of its backends that run now."""
        ...

    async def stop(self) -> None:
        """End it. What still waits is refused."""
        ...
