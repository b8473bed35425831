"""DataPlane: health, metadata, statistics and inference, the same for every door."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from headrace import classification
from headrace.access.caller import Caller, forbidden
from headrace.instances.loaded_model import LoadedModel
from headrace.instances.regions import RequestRegions
from headrace.instances.served_model import InstancePool
from headrace.observability.access_log import AccessLog
from headrace.observability.tracing import Tracer
from headrace.repository.registry import ModelRegistry
from headrace.rollout.rollouts import Rollouts
from headrace.rollout.shadow import ShadowSender
from headrace.scheduling.batch_driver import Outcome
from headrace.shared_memory import RegionTable
from headrace.types import (
    LATEST,
    SEQUENCE_START,
    InferenceRequest,
    InferenceResponse,
    ModelMetadata,
    ServerMetadata,
    TensorMetadata,
)
from headrace.under_way import Inference, Stream
from headrace_protocol._generated import grpc_service_pb2, model_config_pb2
from headrace_protocol.errors import InferError, unavailable, unsupported
from headrace_protocol.generation import CARD_PARAMETER

_log = logging.getLogger("headrace.requests")


EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "system_shared_memory",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


class RegistryDataPlane:
    """Implements planes.DataPlane over the registry."""

    def __init__(
        self,
        registry: ModelRegistry[LoadedModel],
        metadata: ServerMetadata,
        memory: RegionTable | None = None,
        tracer: Tracer | None = None,
        access_log: AccessLog | None = None,
        *,
        strict_readiness: bool,
    ) -> None:
        self._registry = registry
        self._memory = RegionTable(enabled=False) if memory is None else memory
        self._tracer = Tracer.off() if tracer is None else tracer
        self._access_log = access_log
        self._metadata = metadata
        self.strict: Final = strict_readiness
        self._exiting = False
        self._leaving = False
        self.requests = 0
        """Inference requests begun."""
        self._inflight = 0
        self._sequenced = 0
        """Models with sequences in them."""
        self._idle: Callable[[], None] | None = None
        self.traffic: Rollouts | None = None
        """Who chooses the version of requests that name none, while some model's requests go to several."""
        self.shadows: ShadowSender | None = None
        """Who sends requests to another version as well, while some model has one for that."""

    # --- health and metadata --------------------------------------------------------------------------------------

    def live(self) -> bool:
        """Return True: whoever is asked lives."""
        return True

    def exiting(self) -> bool:
        """Return whether the server was told to stop."""
        return self._exiting

    def ready(self) -> bool:
        """Return whether the server serves what it should."""
        return not self._leaving and self._registry.ready(strict=self.strict)

    def ready_apart_from_models(self) -> bool:
        """Return whether the server serves what it has."""
        return not self._leaving and self._registry.ready(strict=False)

    def model_ready(self, name: str, version: int) -> bool:
        """Return whether the model would serve now."""
        return not self._leaving and self._registry.model_ready(name, version)

    def server_metadata(self) -> ServerMetadata:
        """Return the server's name, version and extensions."""
        return self._metadata

    def under_way(self) -> int:
        """Return how many inference requests have begun and are not over."""
        return self._inflight

    def models(self) -> list[tuple[str, int]]:
        """Return name and version of every model that serves, in that order."""
        return [(model.name, model.version) for model in self._registry.served()]

    def model_metadata(self, name: str, version: int) -> ModelMetadata:
        """Return what a client must know to call the model."""
        model = self._registry.get(name, version)
        versions = [model.version] if version != LATEST else self._registry.ready_versions(name)
        signature = model.signature
        return ModelMetadata(
            name=model.name,
            versions=tuple(map(str, versions)),
            platform=model.config.platform or model.config.backend,
            inputs=tuple(TensorMetadata(p.name, p.datatype.name, tuple(p.full_dims())) for p in signature.inputs),
            outputs=tuple(TensorMetadata(p.name, p.datatype.name, tuple(p.full_dims())) for p in signature.outputs),
        )

    def model_config(self, name: str, version: int) -> model_config_pb2.ModelConfig:
        """Return the normalised configuration."""
        return self._registry.get(name, version).config.proto

    def statistics(self, name: str, version: int) -> grpc_service_pb2.ModelStatisticsResponse:
        """Return the statistics of one version, of a model, or of all."""
        if not name:
            models = self._registry.served()
        elif version == LATEST:
            self._registry.get(name, version)
            models = [model for model in self._registry.served() if model.name == name]
        else:
            models = [self._registry.get(name, version)]
        return grpc_service_pb2.ModelStatisticsResponse(
            model_stats=[model.statistics.to_proto(model.name, str(model.version)) for model in models]
        )

    # --- inference ------------------------------------------------------------------------------------------------

    def submit(self, request: InferenceRequest, done: Callable[[Outcome], None]) -> Inference:
        """Begin one request; see planes.DataPlane."""
        model = self._enter(request)
        regions: RequestRegions | None = None
        try:
            if model.config.decoupled:
                raise unsupported(f"model '{model.name}' is decoupled: use a streaming call")
            regions = self._memory.resolve(request)
            prepared = model.signature.prepare(request, regions)
            classes = _classes(model, request) if request.outputs else None
            if self._tracer.active:
                request.trace = self._tracer.pick(request, model.name, model.version)
            inference = Inference(self, model, classes, done, request)
            inference.pending = model.driver.submit(prepared, inference.finish)
            if self.shadows is not None:
                self.shadows.consider(request, model)
        except BaseException as error:
            self._refused(model, request, regions, error)
            raise
        return inference

    def stream(self, request: InferenceRequest, on_outcome: Callable[[Outcome], None]) -> Stream:
        """Begin one request that may have many responses; see planes.DataPlane."""
        model = self._enter(request)
        regions: RequestRegions | None = None
        try:
            regions = self._memory.resolve(request)
            if regions is not None and model.config.decoupled and regions.fills_cuda:
                raise unsupported(f"model '{model.name}' is decoupled: its outputs cannot go into GPU memory")
            prepared = model.signature.prepare(request, regions)
            classes = _classes(model, request) if request.outputs else None
            if self._tracer.active:
                request.trace = self._tracer.pick(request, model.name, model.version)
            stream = Stream(self, model, classes, on_outcome, request)
            stream.pending = model.driver.submit(prepared, stream.deliver)
            if self.shadows is not None:
                self.shadows.consider(request, model)
        except BaseException as error:
            self._refused(model, request, regions, error)
            raise
        return stream

    def decoupled(self, name: str, version: int) -> bool:
        """Return whether the model may give any number of responses."""
        try:
            return self._registry.get(name, version).config.decoupled
        except InferError:
            # A sequence may go on in a model that is unloaded.
            model = self._registry.acquire_where(name, version, lambda model: model.sequences is not None)
            if model is None:
                raise
            self._registry.release(model)
            return model.config.decoupled

    def instances_of(self, name: str, version: int, outputs: Sequence[str] | None) -> Sequence[InstancePool]:
        """Return the instances that a request for these outputs would wait for; raises NOT_FOUND, UNAVAILABLE."""
        return self._registry.get(name, version).pools(outputs)

    def _enter(self, request: InferenceRequest) -> LoadedModel:
        """Lease the model of a request, and count it with its caller until `leave_model`. Raises as both do."""
        if self._access_log is not None:
            entry = self._access_log.entry(request)
            try:
                return self._let_in(request)
            except BaseException as error:
                entry.end(error)
                raise
        return self.lease(request, self.traffic) if request.caller is None else self._let_in(request)

    def _let_in(self, request: InferenceRequest) -> LoadedModel:
        caller = request.caller
        if caller is None:
            return self.lease(request, self.traffic)
        caller.begin(request.model_name, request.received_ns)
        try:
            model = self.lease(request, self.traffic)
        except BaseException:
            caller.end()
            raise
        if caller.counts_tokens and not request.counts_tokens and CARD_PARAMETER in model.config.proto.parameters:
            self.leave_model(model, caller)
            raise forbidden(f"the tokens of caller '{caller.name}' are counted: it asks language models at /v1 alone")
        return model

    def note_refusal(self, request: InferenceRequest, error: InferError | None) -> None:
        """Have the access log tell of a request that never came to a model; None = its client is gone."""
        if self._access_log is not None:
            self._access_log.entry(request).end(error)

    def leave_model(self, model: LoadedModel, caller: Caller | None) -> None:
        """Note that a request of a door is over."""
        if caller is not None:
            caller.end()
        self.give_back(model)

    def lease(self, request: InferenceRequest, traffic: Rollouts | None = None) -> LoadedModel:
        """Return the model of a request, which is under way until `give_back`. Raises NOT_FOUND, UNAVAILABLE.

        Without `traffic`, one that names no version gets the default: steps of ensembles, which are checked against that.
        """
        if request.correlation_id and not request.flags & SEQUENCE_START:
            found = self._continued(request)
            if found is not None:
                return found
        if self._exiting and not request.nested:
            raise unavailable("the server is shutting down")
        if traffic is not None and request.model_version == LATEST:
            model = traffic.acquire(request)
        else:
            model = self._registry.acquire(request.model_name, request.model_version)
        self.requests += 1
        self._inflight += 1
        sequences = model.sequences
        if sequences is not None and sequences.on_occupied is None:
            sequences.on_occupied = partial(self._occupied, model)
        return model

    def _continued(self, request: InferenceRequest) -> LoadedModel | None:
        """Lease the model in which the sequence of a request is under way, though it be replaced or unloaded."""

        def fits(model: LoadedModel) -> bool:
            return model.sequences is not None and model.sequences.holds(request.correlation_id)

        model = self._registry.acquire_where(request.model_name, request.model_version, fits)
        if model is not None:
            self.requests += 1
            self._inflight += 1
        return model

    def _occupied(self, model: LoadedModel, occupied: bool) -> None:
        """Keep a model for as long as there are sequences in it, which may have requests yet to come."""
        if occupied:
            self._registry.hold(model)
            self._sequenced += 1
        else:
            self._registry.release(model)
            self._sequenced -= 1
            self._tell_idle()

    def _refused(
        self, model: LoadedModel, request: InferenceRequest, regions: RequestRegions | None, error: BaseException
    ) -> None:
        """Take back what was done for a request that does not begin."""
        _log.debug("model %s: request %r is refused: %s", model.name, request.id[:80], error)
        if regions is not None:
            regions.drop()
        if request.access is not None:
            request.access.end(error)
        self.leave_model(model, request.caller)

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        """Answer one request; see planes.DataPlane."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        inference = self.submit(request, future.set_result)
        try:
            outcome = await future
        except asyncio.CancelledError:
            if future.cancelled():
                inference.cancel()
            elif isinstance(outcome := future.result(), InferenceResponse):
                outcome.release()  # it came in the same turn of the loop, and nobody will read it
            raise
        if isinstance(outcome, InferenceResponse):
            return outcome
        try:
            raise outcome
        finally:
            # The error's traceback keeps this frame, which must not keep the error, nor the request's memory.
            del outcome, future, inference, request

    def give_back(self, model: LoadedModel) -> None:
        """Note that a request is over."""
        self._registry.release(model)
        self._inflight -= 1
        self._tell_idle()

    def _tell_idle(self) -> None:
        if not self._inflight and not self._sequenced and self._idle is not None:
            self._idle()

    def leave(self) -> None:
        """Tell everybody who asks that the server is not ready, and go on serving."""
        self._leaving = True

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those that run, and for sequences; return whether all requests ended in time.

        A sequence may go on meanwhile, and ends when it is idle for too long.
        """
        self._leaving = self._exiting = True
        if not self._inflight and not self._sequenced:
            return True
        idle = asyncio.Event()
        self._idle = idle.set
        try:
            async with asyncio.timeout(timeout_s):
                await idle.wait()
        except TimeoutError:
            return not self._inflight
        return True


def _classes(model: LoadedModel, request: InferenceRequest) -> dict[str, int] | None:
    """Return how many classes of which output are asked for; None where no classes are."""
    found: dict[str, int] | None = None
    for output in request.outputs or ():
        if output.classification:
            classification.check(model.config.output_by_name[output.name])
            found = found or {}
            found[output.name] = output.classification
    return found
