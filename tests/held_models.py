"""A registry's surroundings for its tests: model folders, and a loader whose loads end when the test says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.repository.registry import ModelRegistry
from headrace.repository.sources import ModelSource
from headrace_protocol.errors import InferError, invalid

ALL = 'backend: "identity" version_policy: { all {} }'


class Model:
    """A served model that a test can kill."""

    def __init__(self, source: ModelSource, version: int) -> None:
        self.name = source.name
        self.version = version
        self.source = source
        self.config = None
        self.ready = True
        self.accepting = True
        self.not_ready_reason = ""
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def die(self, reason: str) -> None:
        """Give up: no backend will be started again."""
        self.ready, self.accepting, self.not_ready_reason = False, False, reason


class HeldLoad:
    """A load that waits for the test."""

    def __init__(self, source: ModelSource, version: int) -> None:
        self.source = source
        self.version = version
        self.result: asyncio.Future[Model] = asyncio.get_running_loop().create_future()

    def succeed(self) -> Model:
        model = Model(self.source, self.version)
        self.result.set_result(model)
        return model

    def fail(self, reason: str) -> None:
        self.result.set_exception(invalid(reason))


class Loader:
    """Loads at once; what is named in `hold` waits, what is named in `broken` fails."""

    def __init__(self) -> None:
        self.hold: set[str] = set()
        self.broken: dict[tuple[str, int], str] = {}
        self.loaded: list[tuple[str, int]] = []
        self.unloaded: list[Model] = []
        self.resized: list[tuple[str, int]] = []
        self.rigid: set[str] = set()
        """Models that cannot be changed in place."""
        self.alive: set[Model] = set()
        self.most_at_once = 0
        self.at_once = 0
        self._held: asyncio.Queue[HeldLoad] = asyncio.Queue()
        self._unloads: asyncio.Queue[Model] = asyncio.Queue()

    async def load(self, source: ModelSource, version: int) -> Model:
        self.loaded.append((source.name, version))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if (source.name, version) in self.broken:
                raise invalid(self.broken[source.name, version])
            if source.name in self.hold:
                held = HeldLoad(source, version)
                self._held.put_nowait(held)
                model = await held.result
            else:
                await asyncio.sleep(0)
                model = Model(source, version)
        finally:
            self.at_once -= 1
        self.alive.add(model)
        return model

    async def unload(self, model: Model) -> None:
        self.alive.remove(model)
        self.unloaded.append(model)
        self._unloads.put_nowait(model)

    async def resize(self, model: Model, source: ModelSource) -> bool:
        self.resized.append((source.name, model.version))
        if (source.name, model.version) in self.broken:
            raise invalid(self.broken[source.name, model.version])
        return source.name not in self.rigid

    async def next_held(self) -> HeldLoad:
        return await asyncio.wait_for(self._held.get(), 5)

    async def next_unload(self) -> Model:
        return await asyncio.wait_for(self._unloads.get(), 5)


def put(repository: Path, name: str, versions=(1,), config: str = "") -> Path:
    directory = repository / name
    directory.mkdir(parents=True, exist_ok=True)
    for version in versions:
        (directory / str(version)).mkdir(parents=True, exist_ok=True)
        (directory / str(version) / "model.bin").write_text(f"{name} {version}")
    (directory / "config.pbtxt").write_text(config or 'backend: "identity"')
    return directory


def refused(registry: ModelRegistry, name: str, version: int = -1) -> InferError:
    with pytest.raises(InferError) as raised:
        registry.acquire(name, version)
    return raised.value


async def ended(task: asyncio.Task) -> InferError:
    with pytest.raises(InferError) as raised:
        await asyncio.wait_for(task, 5)
    return raised.value


async def until(condition) -> None:
    """Let the loop run until something holds that no event tells of."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the loop is the event
            await asyncio.sleep(0)
