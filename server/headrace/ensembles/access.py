"""How ensembles come to their members: by the registry's leases and the members' own drivers, as any request does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headrace.instances.loaded_model import LoadedModel
from headrace.instances.regions import RequestRegions
from headrace.observability.trace import Trace
from headrace.observability.tracing import Tracer
from headrace.repository.registry import ModelRegistry
from headrace.scheduling.batch_driver import Outcome
from headrace.types import InferenceRequest


class LeasePlane(Protocol):
    """The data plane, as far as it counts who is under way."""

    def lease(self, request: InferenceRequest) -> LoadedModel:
        """Return the model of a request, leased until `give_back`. Raises NOT_FOUND, UNAVAILABLE."""
        ...

    def give_back(self, model: LoadedModel) -> None:
        """Give a lease back."""
        ...


class MemberAccess:
    """One a server; borrows the registry, the tracer and the data plane."""

    def __init__(self, registry: ModelRegistry[LoadedModel], tracer: Tracer, plane: LeasePlane) -> None:
        self._registry = registry
        self._tracer = tracer
        self._plane = plane

    @property
    def generation(self) -> int:
        """A number that changes whenever another copy of some model serves."""
        return self._registry.generation

    def find(self, name: str, version: int) -> LoadedModel:
        """Return the model that a step would be given now, without a lease. Raises NOT_FOUND, UNAVAILABLE."""
        return self._registry.get(name, version)

    def lease(self, request: InferenceRequest) -> LoadedModel:
        """Return the model of a step's request, leased until `give_back`."""
        return self._plane.lease(request)

    def give_back(self, model: LoadedModel) -> None:
        """Give a lease back."""
        self._plane.give_back(model)

    def begin(
        self,
        model: LoadedModel,
        request: InferenceRequest,
        regions: RequestRegions,
        parent: Trace | None,
        done: Callable[[Outcome], None],
    ) -> Any:
        """Begin a step's request; see Driver.submit. The caller drops `regions` where this raises InferError."""
        prepared = model.signature.prepare(request, regions)
        prepared.passed_on = True
        if parent is not None:
            request.trace = self._tracer.child(parent, request, model.name, model.version)
        return model.driver.submit(prepared, done)
