"""The planes where models are loaded on demand: requests to a model that is not in memory wait for it.

Around the planes of the registry, whose requests these become once their models are there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from headrace.clock import Clock
from headrace.controlplane import RegistryControlPlane
from headrace.dataplane import RegistryDataPlane
from headrace.instances.loaded_model import LoadedModel
from headrace.instances.served_model import InstancePool
from headrace.planes import Cancellable, LoadParameters, NotInMemoryError, Outcome
from headrace.repository.lifecycle import UNLOADED, VersionState
from headrace.residency.catalogue import Known
from headrace.residency.decisions import Stage
from headrace.residency.keeper import Keeper
from headrace.residency.waiting import Waiter
from headrace.types import (
    LATEST,
    SEQUENCE_START,
    IndexEntry,
    InferenceRequest,
    InferenceResponse,
    ModelMetadata,
    ServerMetadata,
)
from headrace_protocol._generated import grpc_service_pb2, model_config_pb2
from headrace_protocol.errors import InferError, internal, not_found, unavailable

ON_DEMAND: Final = "loaded on demand"
Begin = Callable[[InferenceRequest, Callable[[Outcome], None]], Cancellable]


class WaitingRequest:
    """Implements planes.Cancellable: a request that waits for its model, and then is one of that model's."""

    __slots__ = ("_begin", "_done", "_plane", "_request", "under_way", "waiter")

    def __init__(
        self, plane: ResidentDataPlane, request: InferenceRequest, done: Callable[[Outcome], None], begin: Begin
    ) -> None:
        self._plane = plane
        self._request: InferenceRequest | None = request
        self._done = done
        self._begin = begin
        self.waiter: Waiter | None = None
        self.under_way: Cancellable | None = None

    def there(self) -> None:
        """Begin, now that the model is there."""
        request, self._request, self.waiter = self._request, None, None
        assert request is not None, "a request that waits is begun once"
        self._plane.shorten(request)
        try:
            self.under_way = self._begin(request, self._done)
        except InferError as error:
            self._done(error.with_traceback(None))
        except Exception:
            self._done(
                internal("the server failed to begin a request that waited for its model; its log has the reason")
            )
            raise

    def fail(self, error: InferError) -> None:
        """Tell that it waited in vain."""
        request, self._request, self.waiter = self._request, None, None
        assert request is not None, "a request that waits fails once"
        self._plane.note_refusal(request, error)
        self._done(error)

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        request, self._request = self._request, None
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            self._plane.leave(waiter)
            assert request is not None
            self._plane.note_refusal(request, None)
        elif self.under_way is not None:
            self.under_way.cancel()


class _Leaving(NamedTuple):
    """Implements planes.Cancellable."""

    keeper: Keeper
    waiter: Waiter

    def cancel(self) -> None:
        self.keeper.leave(self.waiter)


class ResidentDataPlane:
    """Implements planes.DataPlane."""

    def __init__(self, plane: RegistryDataPlane, keeper: Keeper, clock: Clock) -> None:
        self._plane = plane
        self._keeper = keeper
        self._now_ns = clock.now_ns
        self._absent = keeper.absent
        self._used = keeper.used
        keeper.describe = plane.model_metadata

    # --- health and metadata ------------------------------------------------------------------------------------------

    def live(self) -> bool:
        """See planes.DataPlane."""
        return self._plane.live()

    def exiting(self) -> bool:
        """See planes.DataPlane."""
        return self._plane.exiting()

    def ready(self) -> bool:
        """Return whether the server serves what it should: what is loaded on demand does not count."""
        return self._plane.ready_apart_from_models() and (not self._plane.strict or self._keeper.ready())

    def model_ready(self, name: str, version: int) -> bool:
        """Return whether a request would be served, be it after a load."""
        if name not in self._absent:
            return self._plane.model_ready(name, version)
        self._check_version(name, version)
        return self._plane.ready_apart_from_models() and not self._keeper.why_not(name)

    def server_metadata(self) -> ServerMetadata:
        """See planes.DataPlane."""
        return self._plane.server_metadata()

    def under_way(self) -> int:
        """Return how many inference requests have begun and are not over, those that wait for models included."""
        return self._plane.under_way() + self._keeper.room.count

    def models(self) -> list[tuple[str, int]]:
        """Return name and version of every model that serves, and of those that did and are loaded on demand."""
        away = [
            (name, int(number))
            for name, known in self._keeper.known.items()
            if name in self._absent
            for number in known.metadata.versions
        ]
        return sorted({*self._plane.models(), *away})

    def model_metadata(self, name: str, version: int) -> ModelMetadata:
        """Return what a client must know to call the model; of one that is away, what it told when it was there."""
        if name not in self._absent:
            return self._plane.model_metadata(name, version)
        self._check_version(name, version)
        metadata = self._known(name).metadata
        return metadata if version == LATEST else replace_versions(metadata, version)

    def model_config(self, name: str, version: int) -> model_config_pb2.ModelConfig:
        """Return the normalised configuration; of a model that is away, as it was when it was there."""
        if name not in self._absent:
            return self._plane.model_config(name, version)
        self._check_version(name, version)
        return self._known(name).config

    def statistics(self, name: str, version: int) -> grpc_service_pb2.ModelStatisticsResponse:
        """See planes.DataPlane; a model that is away has none."""
        if name in self._absent:
            self._check_version(name, version)
            return grpc_service_pb2.ModelStatisticsResponse()
        return self._plane.statistics(name, version)

    # --- inference ----------------------------------------------------------------------------------------------------

    def submit(self, request: InferenceRequest, done: Callable[[Outcome], None]) -> Cancellable:
        """See planes.DataPlane."""
        name = request.model_name
        if name in self._absent and not self._passes(request):
            return self._wait(request, done, self._plane.submit)
        if name in self._used:
            self._used[name] = request.received_ns
        return self._plane.submit(request, done)

    def stream(self, request: InferenceRequest, on_outcome: Callable[[Outcome], None]) -> Cancellable:
        """See planes.DataPlane."""
        name = request.model_name
        if name in self._absent and not self._passes(request):
            return self._wait(request, on_outcome, self._plane.stream)
        if name in self._used:
            self._used[name] = request.received_ns
        return self._plane.stream(request, on_outcome)

    def decoupled(self, name: str, version: int) -> bool:
        """See planes.DataPlane; of a model that was never loaded, what its configuration says."""
        if name not in self._absent:
            return self._plane.decoupled(name, version)
        self._check_version(name, version)
        known = self._keeper.known.get(name)
        return self._keeper.entries[name].decoupled if known is None else known.decoupled

    def instances_of(self, name: str, version: int, outputs: Sequence[str] | None) -> Sequence[InstancePool]:
        """Return the instances that a request would wait for; none of a model that is away."""
        return () if name in self._absent else self._plane.instances_of(name, version, outputs)

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        """See planes.DataPlane."""
        if request.model_name not in self._absent or self._passes(request):
            if request.model_name in self._used:
                self._used[request.model_name] = request.received_ns
            return await self._plane.infer(request)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        waiting = self.submit(request, future.set_result)
        try:
            outcome = await future
        except asyncio.CancelledError:
            if future.cancelled():
                waiting.cancel()
            elif isinstance(outcome := future.result(), InferenceResponse):
                outcome.release()
            raise
        if isinstance(outcome, InferenceResponse):
            return outcome
        try:
            raise outcome
        finally:
            del outcome, future, waiting, request  # the error's traceback keeps this frame

    def _wait(self, request: InferenceRequest, done: Callable[[Outcome], None], begin: Begin) -> WaitingRequest:
        waiting = WaitingRequest(self, request, done, begin)
        name = request.model_name
        nbytes = sum(len(tensor.data) for tensor in request.inputs)
        expires_ns = self._expires_ns(name, request.received_ns, request.timeout_us)
        waiter = Waiter(name, expires_ns, nbytes, waiting.there, waiting.fail)
        try:
            self._check_version(name, request.model_version)
            self._keeper.join(waiter)
        except InferError as error:
            self._plane.note_refusal(request, error)
            raise
        waiting.waiter = waiter
        return waiting

    def _passes(self, request: InferenceRequest) -> bool:
        """Return whether a request goes on at once, though the model is away or closed: to be refused, or to end."""
        if self._plane.exiting() and not request.nested:
            return True
        if request.caller is not None and not request.caller.may_ask(request.model_name):
            return True
        goes_on = request.nested or (request.correlation_id and not request.flags & SEQUENCE_START)
        return bool(goes_on) and self._keeper.policy.stage(request.model_name) is Stage.RESIDENT

    def _expires_ns(self, name: str, received_ns: int, timeout_us: int) -> int:
        """Return until when a request may wait for its model: by its own timeout, and by that of the model's queue."""
        own = timeout_us * 1000 if timeout_us > 0 else self._keeper.wait_ns
        of_queue = self._keeper.entries[name].timeout_ns
        return received_ns + (min(own, of_queue) if of_queue else own)

    def _check_version(self, name: str, version: int) -> None:
        versions = self._keeper.entries[name].versions
        if version != LATEST and versions and version not in versions:  # none: there is a problem, which will be told
            has = ", ".join(map(str, versions))
            raise not_found(f"model {name!r} has no version {version}; it has {has}")

    def _known(self, name: str) -> Known:
        known = self._keeper.known.get(name)
        if known is None:
            reason = self._keeper.why_not(name)
            raise unavailable(reason) if reason else NotInMemoryError(name, partial(self._bring, name))
        return known

    def _bring(self, name: str, there: Callable[[], None], failed: Callable[[InferError], None]) -> Cancellable:
        """See planes.NotInMemoryError."""
        waiter = Waiter(name, self._expires_ns(name, self._now_ns(), 0), 0, there, failed)
        self._keeper.join(waiter)
        return _Leaving(self._keeper, waiter)

    # --- for those that wait ------------------------------------------------------------------------------------------

    def shorten(self, request: InferenceRequest) -> None:
        """Leave a request as much time in its queue as its wait has left it."""
        if request.timeout_us:
            request.timeout_us = max(1, request.timeout_us - (self._now_ns() - request.received_ns) // 1000)

    def leave(self, waiter: Waiter) -> None:
        """Let one go whose client is gone."""
        self._keeper.leave(waiter)

    def note_refusal(self, request: InferenceRequest, error: InferError | None) -> None:
        """Have the access log tell of a request that never began; None = its client is gone."""
        self._plane.note_refusal(request, error)


def replace_versions(metadata: ModelMetadata, version: int) -> ModelMetadata:
    """Return the metadata of one version."""
    return ModelMetadata(metadata.name, (str(version),), metadata.platform, metadata.inputs, metadata.outputs)


class ResidentControlPlane:
    """Implements planes.ControlPlane: loads of calls are made once there is room, and the index tells who is away."""

    def __init__(self, plane: RegistryControlPlane[LoadedModel], keeper: Keeper) -> None:
        self._plane = plane
        self._keeper = keeper
        self.memory = plane.memory
        self.trace = plane.trace
        self.log = plane.log
        self.traffic = plane.traffic

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """Return the repository index; models that are loaded on demand and not in memory say so."""
        entries: list[IndexEntry] = []
        for entry in self._plane.index(ready_only=ready_only):
            if entry.name not in self._keeper.absent:
                entries.append(entry)
            elif not entry.version and not entry.state:
                versions = [*map(str, self._keeper.entries[entry.name].versions)] or [""]
                entries += [IndexEntry(entry.name, number, *self._away(entry.name)) for number in versions]
            elif entry.state == VersionState.UNAVAILABLE.value and entry.reason == UNLOADED:
                state, reason = self._away(entry.name)
                entries.append(IndexEntry(entry.name, entry.version, state, reason))
            else:
                entries.append(entry)
        return entries

    def _away(self, name: str) -> tuple[str, str]:
        return VersionState.UNAVAILABLE.value, self._keeper.why_not(name) or ON_DEMAND

    async def load(self, name: str, parameters: LoadParameters) -> None:
        """Load or reload a model once there is room for it; see planes.ControlPlane."""
        self._plane.check(name, "loaded")
        await self._keeper.load(name, partial(self._plane.load, name, parameters), special=bool(parameters))

    async def unload(self, name: str, *, unload_dependents: bool, version: int | None = None) -> None:
        """Stop serving a model, which then stays away, or one version of it; see planes.ControlPlane."""
        self._plane.check(name, "unloaded")
        how = partial(self._plane.unload, name, unload_dependents=unload_dependents, version=version)
        if version is not None:
            await how()
        else:
            await self._keeper.unload(name, how)
