"""EnsembleLoader: loads ensembles itself and leaves every other model to the loader of processes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from headrace.clock import Clock
from headrace.ensembles.access import MemberAccess
from headrace.ensembles.model import EnsembleModel
from headrace.instances.arenas import ArenaTable
from headrace.instances.loaded_model import LoadedModel
from headrace.instances.loader import InstanceLoader
from headrace.instances.served_model import ServedModel
from headrace.observability.statistics import ModelStatistics
from headrace.repository.config_loading import Completion, finish_config
from headrace.repository.labels import labels_of
from headrace.repository.model_config import ModelConfig
from headrace.repository.platforms import ENSEMBLE
from headrace.repository.sources import ModelSource
from headrace.response_cache import ResponseCache
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.errors import unavailable
from headrace_protocol.messages import Ready

_log = logging.getLogger("headrace.ensembles")


def is_ensemble(proto: pb.ModelConfig) -> bool:
    """Return whether a configuration, as its author wrote it, is that of an ensemble."""
    return proto.platform == ENSEMBLE or proto.HasField("ensemble_scheduling")


def ensemble_config(source: ModelSource, version: int, completion: Completion) -> tuple[ModelConfig, list[str]]:
    """Return the configuration of an ensemble as far as its members do not matter, and notes. Raises ConfigError."""
    return finish_config(
        source.config,
        Ready(),
        model_name=source.name,
        model_directory=source.directory,
        version_directory=source.versions[version],
        completion=completion,
    )


class EnsembleLoader:
    """Implements repository.sources.ModelLoader. Owns the loader it is given."""

    def __init__(
        self,
        processes: InstanceLoader,
        completion: Completion,
        make_statistics: Callable[[ModelConfig], ModelStatistics],
        arenas: ArenaTable,
        clock: Clock,
        cache: ResponseCache | None = None,
    ) -> None:
        self._processes = processes
        self._completion = completion
        self._make_statistics = make_statistics
        self._arenas = arenas
        self._clock = clock
        self._cache = cache
        self._access: MemberAccess | None = None

    def connect(self, access: MemberAccess) -> None:
        """Let ensembles come to their members from now on."""
        self._access = access

    async def load(self, source: ModelSource, version: int) -> LoadedModel:
        """Load a version; see repository.sources.ModelLoader."""
        if not is_ensemble(source.config.proto):
            return await self._processes.load(source, version)
        started = time.monotonic()
        config, notes = ensemble_config(source, version, self._completion)
        labels = await asyncio.to_thread(labels_of, config, source.directory)
        if self._access is None:
            raise unavailable("there are no other models here")
        cache = self._cache if config.proto.response_cache.enable else None
        if config.proto.response_cache.enable and cache is None:
            _log.warning("model %s: response_cache.enable is not used, for there is no --cache-config", config.name)
        model = EnsembleModel(
            config,
            version,
            labels,
            self._make_statistics(config),
            self._access,
            self._arenas,
            self._clock,
            cache,
        )
        model.statistics.streamed = model.config.decoupled
        model.load_seconds = time.monotonic() - started
        for note in notes:
            _log.info("model %s: %s", source.name, note)
        _log.info("loaded ensemble %s version %d", source.name, version)
        return model

    async def unload(self, model: LoadedModel) -> None:
        """Take a version down."""
        if isinstance(model, ServedModel):
            await self._processes.unload(model)
        else:
            await model.stop()
            _log.info("unloaded ensemble %s version %d", model.name, model.version)

    async def resize(self, model: LoadedModel, source: ModelSource) -> bool:
        """Change a version's instances; an ensemble has none."""
        return isinstance(model, ServedModel) and await self._processes.resize(model, source)

    def close(self) -> None:
        """End what the processes of models were forked from; models must be gone."""
        self._processes.close()
