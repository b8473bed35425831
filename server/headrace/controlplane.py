"""The repository API over the registry: who may load by the control mode, and what a call may bring with it."""

from __future__ import annotations

import asyncio
from typing import Final, Generic

from headrace.config import ControlMode
from headrace.planes import LoadParameters, LogSettings, SharedMemory, TraceSettings, TrafficControl
from headrace.repository.layout import name_problem
from headrace.repository.overrides import OverrideRequest, parse_override
from headrace.repository.registry import ModelRegistry
from headrace.repository.remote import Mirrors, RemoteError
from headrace.repository.sources import LoadOverride, M
from headrace.repository.uploads import UploadStore
from headrace.types import IndexEntry
from headrace_protocol.errors import invalid, unavailable


class RegistryControlPlane(Generic[M]):
    """Implements planes.ControlPlane. Borrows all it is given; without a store it refuses uploaded files."""

    def __init__(
        self,
        registry: ModelRegistry[M],
        mode: ControlMode,
        *,
        memory: SharedMemory,
        trace: TraceSettings,
        log: LogSettings,
        uploads: UploadStore | None = None,
        mirrors: Mirrors | None = None,
        traffic: TrafficControl,
    ) -> None:
        self._registry = registry
        self._mode = mode
        self._uploads = uploads
        self._mirrors = mirrors if mirrors is not None and mirrors.repositories else None
        self.memory: Final = memory
        self.trace: Final = trace
        self.log: Final = log
        self.traffic: Final = traffic

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """Return the repository index."""
        return self._registry.index(ready_only=ready_only)

    async def load(self, name: str, parameters: LoadParameters) -> None:
        """Load or reload a model and return once it serves."""
        self.check(name, "loaded")
        version = parameters.get("version")
        if version is not None and len(parameters) > 1:
            raise invalid("load parameter 'version' stands alone: the version is loaded from the repository")
        others = {key: value for key, value in parameters.items() if key != "version"}
        request = parse_override(others, allow_files=self._uploads is not None)
        if self._mirrors is not None:
            try:
                await asyncio.to_thread(self._mirrors.fetch, name)
            except RemoteError as error:
                raise unavailable(str(error)) from None
        if version is not None:
            with self.traffic.pinned(name):
                await self._registry.load_version(name, int(version))
            return
        if request is None:
            await self._registry.load(name)
            return
        await self._registry.load(name, await self._write(name, request))

    async def unload(self, name: str, *, unload_dependents: bool, version: int | None = None) -> None:
        """Stop serving a model, or one version of it, and return; requests in it end in peace."""
        self.check(name, "unloaded")
        if version is not None:
            if unload_dependents:
                raise invalid("unload parameters 'version' and 'unload_dependents' exclude each other")
            self.traffic.unloading(name, version)
            await self._registry.unload_version(name, version)
            return
        await self._registry.unload(name, unload_dependents=unload_dependents)

    async def _write(self, name: str, request: OverrideRequest) -> LoadOverride:
        if self._uploads is None or not request.files:
            return LoadOverride(request.config)
        writing = asyncio.create_task(asyncio.to_thread(self._uploads.write, name, request))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            # The thread cannot be stopped, and nobody else knows its folder.
            writing.add_done_callback(_discard)
            raise

    def check(self, name: str, what: str) -> None:
        """Raise UNAVAILABLE where models cannot be loaded or unloaded by a call, INVALID_ARG for what is no model's name."""
        if self._mode is not ControlMode.EXPLICIT:
            raise unavailable(
                f"models cannot be {what} by a call: the model control mode is {self._mode.value!r}, not 'explicit'"
            )
        problem = name_problem(name)
        if problem:
            raise invalid(problem)


def _discard(written: asyncio.Task[LoadOverride]) -> None:
    """Remove files that nobody waits for any more."""
    if not written.cancelled() and written.exception() is None:
        temporary = written.result().temporary
        if temporary is not None:
            asyncio.get_running_loop().run_in_executor(None, temporary.remove)
