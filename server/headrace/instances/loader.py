"""InstanceLoader: from a version's folder to a ServedModel, and back to nothing.

The processes that will serve the model load it and tell what they found in its file (Ready); with that the
configuration is completed, checked and frozen. There is no separate pass that reads the model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import msgspec

from headrace.clock import Clock
from headrace.instances.environment import Environment, Environments
from headrace.instances.memory_limit import memory_limit
from headrace.instances.placement import Placement, asked_for, placements
from headrace.instances.process import ExecLauncher, Launcher
from headrace.instances.served_model import InstancePool, ServedModel
from headrace.instances.services import BackendServices
from headrace.instances.signature import ModelSignature
from headrace.instances.supervisor import ProcessSettings, Supervisor
from headrace.instances.warm_up import WarmUp, make_samples
from headrace.instances.zygote import ZygoteLauncher
from headrace.observability.statistics import ModelStatistics
from headrace.repository.config_loading import Completion, backend_values, draft_config, finish_config, with_instances
from headrace.repository.fingerprint import content_identity
from headrace.repository.labels import labels_of
from headrace.repository.model_config import ModelConfig
from headrace.repository.outside import environment_of
from headrace.repository.sources import ModelSource
from headrace.response_cache import ResponseCache
from headrace_protocol.errors import invalid
from headrace_protocol.messages import PROTOCOL, Initialize, Ready

_log = logging.getLogger("headrace.instances")
BACKENDS_GROUP: Final = "headrace.backends"
WITH_ENVIRONMENTS: Final = "python"
"""The backend whose models may bring a Python of their own."""


class InstanceLoader:
    """Implements repository.sources.ModelLoader with backend processes. Owns the zygotes until `close`."""

    def __init__(
        self,
        settings: ProcessSettings,
        completion: Completion,
        backend_settings: Callable[[str], dict[str, str]],
        make_statistics: Callable[[ModelConfig], ModelStatistics],
        clock: Clock,
        services: BackendServices | None = None,
        cache: ResponseCache | None = None,
    ) -> None:
        self._settings = settings
        self._completion = completion
        self._backend_settings = backend_settings
        self._make_statistics = make_statistics
        self._clock = clock
        self._services = BackendServices(clock) if services is None else services
        self._cache = cache
        self._loads = 0
        self._backends = installed_backends()
        self._zygotes: dict[str, ZygoteLauncher] = {}
        self._exec = ExecLauncher(variables=settings.variables)
        self._environments = Environments(policy=settings.variables)

    async def load(self, source: ModelSource, version: int) -> ServedModel:
        """Load a version; see repository.sources.ModelLoader."""
        model, _ = await self.load_with_notes(source, version)
        return model

    async def load_with_notes(self, source: ModelSource, version: int) -> tuple[ServedModel, list[str]]:
        """Load a version; return it with sentences on what was completed in its configuration."""
        started = time.monotonic()
        directory = source.versions[version]
        completion = self._completion
        draft = draft_config(
            source.config,
            model_name=source.name,
            model_directory=source.directory,
            version_directory=directory,
            completion=completion,
        )
        if draft.backend not in self._backends:
            raise invalid(
                f"backend '{draft.backend}' is not installed; this server has {', '.join(sorted(self._backends))}"
            )
        backend_config = self._backend_settings(draft.backend)
        completion = with_settings(completion, backend_config)
        pool = InstancePool(self._services)
        served: ServedModel | None = None

        def on_capacity() -> None:
            if served is not None:
                served.driver.kick()

        def on_given_up(reason: str) -> None:
            if served is not None:
                served.given_up(reason)

        try:
            ready: Ready | None = None
            pool.environment = await self._environment(draft, source)
            for message, placement in self._initializes(source, version, directory, draft, backend_config):
                answer = await self._start(message, placement, pool, pool.supervisors, on_capacity, on_given_up)
                ready = ready or answer
            assert ready is not None, "a normalised configuration has at least one instance"
            config, notes = finish_config(
                source.config,
                ready,
                model_name=source.name,
                model_directory=source.directory,
                version_directory=directory,
                completion=completion,
            )
            labels = await asyncio.to_thread(labels_of, config, source.directory)
            await self._warm_up(config, source, version, pool.supervisors, started)
            served = ServedModel(
                config,
                version,
                pool,
                labels,
                self._make_statistics(config),
                time.monotonic() - started,
                self._clock,
                *await self._caching(config, source, version),
            )
            served.admit()
            if pool.services is not None:
                pool.services.loaded = True
        except BaseException:
            await pool.stop()
            raise
        pids = ", ".join(map(str, served.pids()))
        _log.info("loaded model %s version %d in %.2f s, process %s", source.name, version, served.load_seconds, pids)
        return served, notes

    async def _start(
        self,
        message: Initialize,
        placement: Placement,
        pool: InstancePool,
        supervisors: list[Supervisor],
        on_capacity: Callable[[], None],
        on_given_up: Callable[[str], None],
    ) -> Ready:
        """Start processes for the instances of a message, as many as it takes, and add them to `supervisors`."""
        first: Ready | None = None
        left = message.instances
        while left:
            part = _with_instances(message, left)
            supervisor = Supervisor(
                pool.environment or self._launcher(part),
                part,
                self._settings,
                self._clock,
                on_capacity,
                on_given_up,
                pool.services,
                placement,
            )
            supervisors.append(supervisor)
            answer = await supervisor.start()
            first = first or answer
            left = left[max(1, answer.concurrency) :]
        assert first is not None, "there is an instance"
        return first

    async def resize(self, model: ServedModel, source: ModelSource) -> bool:
        """Change the instances of a version that serves; see repository.sources.ModelLoader.

        Processes whose instance groups say the same go on; others are started, and take the place of those before.
        """
        if model.sequences is not None:
            return False
        started = time.monotonic()
        directory = source.versions[model.version]
        draft = draft_config(
            source.config,
            model_name=source.name,
            model_directory=source.directory,
            version_directory=directory,
            completion=self._completion,
        )
        config = with_instances(model.config, draft, source.directory)
        limited = self._settings.limiter is not None
        before, after = (asked_for(asked, limited=limited) for asked in (model.config, config))
        kept = [s for s in model.pool.supervisors if after.get(s.placement) == before[s.placement]]
        new: list[Supervisor] = []
        messages = self._initializes(source, model.version, directory, draft, self._backend_settings(draft.backend))
        try:
            for message, placement in messages:
                if after[placement] != before.get(placement):
                    await self._start(message, placement, model.pool, new, model.driver.kick, model.given_up)
            await self._warm_up(config, source, model.version, new, started)
            model.resize(config, [*kept, *new], new)
        except BaseException:
            await asyncio.gather(*(supervisor.stop() for supervisor in new))
            raise
        text = "model %s version %d: %d processes go on, %d are new, in %.2f s"
        _log.info(text, source.name, model.version, len(kept), len(new), time.monotonic() - started)
        return True

    async def _warm_up(
        self, config: ModelConfig, source: ModelSource, version: int, supervisors: list[Supervisor], started: float
    ) -> None:
        """Have every instance run the samples of model_warmup, within what is left of the time for a load."""
        if not config.proto.model_warmup:
            return
        signature = ModelSignature(config, version)
        settings = self._settings
        samples = await asyncio.to_thread(make_samples, config, source.directory, signature, settings.arena_bytes)
        warm_up = WarmUp(signature, samples, decoupled=config.decoupled, sequences=config.sequence_batching is not None)
        left = settings.load_timeout_s - (time.monotonic() - started)
        warmings = [supervisor.warm_up(warm_up, left) for supervisor in supervisors]
        outcomes = await asyncio.gather(*warmings, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _caching(
        self, config: ModelConfig, source: ModelSource, version: int
    ) -> tuple[ResponseCache | None, bytes]:
        """Return where the model's answers are kept, and what tells this load of it from all others there."""
        if not config.proto.response_cache.enable:
            return None, b""
        if self._cache is None:
            _log.warning("model %s: response_cache.enable is not used, for there is no --cache-config", config.name)
            return None, b""
        if self._cache.shared:
            return self._cache, await asyncio.to_thread(content_identity, config, source, version)
        self._loads += 1
        return self._cache, f"{config.name}:{version}:{self._loads}".encode()

    async def unload(self, model: ServedModel) -> None:
        """Take a version down."""
        await model.stop()
        _log.info("unloaded model %s version %d", model.name, model.version)

    def close(self) -> None:
        """End the zygotes and remove unpacked environments; models must be gone."""
        for zygote in self._zygotes.values():
            zygote.close()
        self._environments.close()

    async def _environment(self, draft: ModelConfig, source: ModelSource) -> Environment | None:
        """Return the environment that the model asks for, None where it runs in the server's Python."""
        path = environment_of(draft.proto, source.directory) if draft.backend == WITH_ENVIRONMENTS else None
        return None if path is None else await self._environments.open(path)

    def _launcher(self, message: Initialize) -> Launcher:
        if message.kind == "KIND_GPU":
            return self._exec
        launcher = self._zygotes.get(message.backend)
        if launcher is None:
            launcher = self._zygotes[message.backend] = ZygoteLauncher(
                message.backend, variables=self._settings.variables
            )
        return launcher

    def _initializes(
        self, source: ModelSource, version: int, directory: Path, draft: ModelConfig, backend_config: dict[str, str]
    ) -> list[tuple[Initialize, Placement]]:
        """Return one message for each process, which says what instances it has; there may be more than it takes."""
        limited = self._settings.limiter is not None
        for group in draft.instance_groups:
            if group.host_policy and group.host_policy not in self._settings.host_policies:
                text = "model %s: there is no --host-policy %s; instances of group %s run on any processor"
                _log.warning(text, draft.name, group.host_policy, group.name)
        values = backend_values(draft)
        limit = memory_limit(draft.proto, self._settings.memory_limit)
        messages = []
        for placement, names in placements(draft.instance_groups, limited=limited).items():
            message = Initialize(
                protocol=PROTOCOL,
                backend=draft.backend,
                model_name=source.name,
                version=version,
                model_directory=str(source.directory),
                version_directory=str(directory),
                config=values,
                backend_config=backend_config,
                instances=tuple(names),
                kind=placement.kind,
                device=placement.device,
                auto_complete=self._completion.auto_complete,
                sharing=len(names),
                memory_limit=limit,
            )
            messages.append((message, placement))
        return messages


def installed_backends() -> frozenset[str]:
    """Return the names of the backends that this environment has."""
    return frozenset(entry.name for entry in entry_points(group=BACKENDS_GROUP))


def with_settings(completion: Completion, settings: Mapping[str, str]) -> Completion:
    """Return `completion` with the --backend-config settings that concern it. Raises INVALID_ARG for a bad one."""
    text = settings.get("default-max-batch-size")
    if text is None:
        return completion
    if not text.isdecimal():
        raise invalid(f"--backend-config default-max-batch-size: expected an integer >= 0, got '{text}'")
    return replace(completion, default_max_batch_size=int(text))


def _with_instances(message: Initialize, instances: tuple[str, ...]) -> Initialize:
    return msgspec.structs.replace(message, instances=instances)
