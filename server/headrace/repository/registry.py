"""The models of this server by name: leases for requests, operations for the control plane, and what the index tells.

Operations on different models run side by side; those on one begin in the order they were asked for, and a newer one
takes the place of an older that still loads. What to do is decided in lifecycle.py. Leases and operations stand together
because each ends the other: a model goes with its last lease, and a lease must not be had of one that goes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Hashable, Sequence
from pathlib import Path
from typing import Any, Final, Generic

from headrace.repository import layout as layouts
from headrace.repository.ensembles import Ensembles
from headrace.repository.layout import ModelLayout, RepositorySnapshot
from headrace.repository.lifecycle import VersionState
from headrace.repository.loading import BoundedLoader
from headrace.repository.model_config import ConfigError
from headrace.repository.overlay import Overlay
from headrace.repository.planning import members_of, same_in_place
from headrace.repository.preparing import Preparer, log_warnings
from headrace.repository.sources import LoadOverride, M, ModelLoader, ModelSource, Preference, TrafficBook
from headrace.repository.standing import index_entries, refusal, refusal_of_absent, shown_versions, stands
from headrace.repository.tracked import Copy, TrackedModel, sentence
from headrace.types import LATEST, IndexEntry
from headrace_protocol.errors import ErrorCode, InferError, invalid, not_found, unavailable

_log = logging.getLogger(__name__)

ALL_MODELS: Final = "*"
MOST_STRANGERS: Final = 1000
"""Models without a folder in the repositories (they were uploaded) that are remembered after their end."""
_FREE_GRACE_S: Final = 10.0


class ModelRegistry(Generic[M]):
    """Owns every loaded model from `start` to `close`; used from one event loop.

    Files are looked at in threads, but for the index: where models are loaded on demand it lists the repositories.
    """

    def __init__(
        self,
        loader: ModelLoader[M],
        repositories: Sequence[Path],
        *,
        config_name: str | None = None,
        load_concurrency: int = 4,
        load_retries: int = 0,
        overlay: Overlay | None = None,
        traffic: TrafficBook | None = None,
    ) -> None:
        """`overlay` changes what the repositories' configurations say; `traffic` is told what they say of it."""
        self._repositories = tuple(repositories)
        self._preparer = Preparer(config_name, overlay)
        self._traffic = traffic
        self._preferences: dict[str, Preference] = {}
        self._models: dict[str, TrackedModel[M]] = {}
        self._ensembles = Ensembles(self._models)
        self._loader = BoundedLoader(loader, load_concurrency, load_retries, self._ensembles.wait)
        self._copies: dict[int, Copy[M]] = {}
        """Copies by the id() of their model, so that a lease finds its count."""
        self._known: dict[str, bool] = {}
        """Names of the folders in the repositories when last looked at; True = in several repositories."""
        self._snapshot: RepositorySnapshot | None = None
        self._on_demand = False
        self._started = False
        self._scanned = False
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._operations: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.generation = 0
        """Another number whenever another copy of some model may serve."""
        self.takes_over: Callable[[RepositorySnapshot], None] | None = None
        """Who is told what the repositories hold, and has models loaded (`load_seen`), in place of `apply`."""
        self.on_change: Callable[[str], None] | None = None
        """Called with the name of a model whose copies may be others."""

    # For every request

    def acquire(self, name: str, version: int = LATEST) -> M:
        """Lease a model that takes requests; `release` must follow. LATEST = the first by preference that takes them.

        Raises NOT_FOUND for an unknown model or version, UNAVAILABLE for one that does not serve, with the reason.
        """
        tracked = self._models.get(name)
        if tracked is not None:
            if version == LATEST:
                for copy in tracked.preferred:
                    model = copy.model
                    if model is not None and model.accepting:
                        copy.leases += 1
                        return model
            else:
                found = tracked.serving.get(version)
                if found is not None and (model := found.model) is not None and model.accepting:
                    found.leases += 1
                    return model
        raise self._refusal(name, version)

    def acquire_where(self, name: str, version: int, fits: Callable[[M], bool]) -> M | None:
        """Lease a copy of a model that `fits`, be it one that only waits for its last requests; None = there is none."""
        tracked = self._models.get(name)
        for copy in tracked.loaded() if tracked is not None else ():
            if version in (LATEST, copy.version) and copy.served.accepting and fits(copy.served):
                copy.leases += 1
                return copy.served
        return None

    def hold(self, model: M) -> None:
        """Lease a model once more; `release` must follow. Whoever asks has a lease on it."""
        copy = self._copies.get(id(model))
        if copy is not None:
            copy.leases += 1

    def leases(self, model: M) -> int:
        """Return how many leases on a model there are: requests in it, and what else holds it."""
        copy = self._copies.get(id(model))
        return 0 if copy is None else copy.leases

    def release(self, model: M) -> None:
        """Give a lease back. An unload that waits for it goes on."""
        copy = self._copies.get(id(model))
        if copy is None:
            assert self._closing, f"a lease on {model.name!r} outlived the model"
            return
        if copy.draining:
            copy.owner.release(copy)
        else:
            copy.leases -= 1
            assert copy.leases >= 0, f"a lease on {model.name!r} was released twice"

    # What is

    def get(self, name: str, version: int = LATEST) -> M:
        """Return a model without a lease, for what is answered at once; its backend may be dead (see `ready`).

        Raises like `acquire`.
        """
        tracked = self._models.get(name)
        if tracked is not None and tracked.serving:
            if version == LATEST:
                models = [copy.served for copy in tracked.preferred]
                return next((model for model in models if model.accepting), models[0])
            copy = tracked.serving.get(version)
            if copy is not None:
                return copy.served
        raise self._refusal(name, version)

    def prefer(self, name: str, preference: Preference | None) -> None:
        """Have requests to a model that name no version tried in this order, from now on; None = the highest first."""
        if preference is None:
            self._preferences.pop(name, None)
        else:
            self._preferences[name] = preference
        tracked = self._models.get(name)
        if tracked is not None:
            tracked.prefer(preference or Preference())
            self._note_change(tracked)

    def versions(self, name: str) -> tuple[int, ...]:
        """Return the versions of a model that serve, be they ready or not, lowest first."""
        tracked = self._models.get(name)
        return () if tracked is None else tuple(copy.version for copy in reversed(tracked.newest_first))

    def ready_versions(self, name: str) -> tuple[int, ...]:
        """Return the versions of a model that are ready, lowest first."""
        tracked = self._models.get(name)
        copies = reversed(tracked.newest_first) if tracked is not None else ()
        return tuple(copy.version for copy in copies if copy.served.ready)

    def model_ready(self, name: str, version: int = LATEST) -> bool:
        """Return whether a request to this model would be served now. Raises NOT_FOUND if it or the version is unknown."""
        try:
            return self.get(name, version).ready
        except InferError as error:
            if error.code is ErrorCode.UNAVAILABLE:
                return False
            raise

    def served(self) -> list[M]:
        """Return every model that serves, by name and version."""
        return [copy.served for _, tracked in sorted(self._models.items()) for copy in reversed(tracked.newest_first)]

    def models_of(self, name: str) -> list[M]:
        """Return the versions of a model that serve, in the order in which a request that names none tries them."""
        tracked = self._models.get(name)
        return [] if tracked is None else [copy.served for copy in tracked.preferred]

    def copies_left(self, name: str) -> bool:
        """Return whether anything of a model serves, loads, or is being taken down."""
        tracked = self._models.get(name)
        return tracked is not None and not tracked.lifecycle.idle

    def stands(self, name: str) -> bool:
        """Return whether a model that is to serve does what it should."""
        tracked = self._models.get(name)
        return tracked is not None and stands(tracked)

    def index(self, *, ready_only: bool = False) -> list[IndexEntry]:
        """Return a line for every version of every model that was loaded or tried, and for every other folder."""
        if self._on_demand:
            self._known = layouts.list_names(self._repositories)
        entries = [
            entry
            for name in sorted(self._known.keys() | self._models.keys())
            for entry in index_entries(name, self._models.get(name), twice=self._known.get(name, False))
        ]
        return [entry for entry in entries if entry.state == VersionState.READY.value or not ready_only]

    def ready(self, *, strict: bool = True) -> bool:
        """Return whether what should be loaded is: False until the initial load is over.

        Strict: every model that was loaded, or tried, does what it should (see `stands`).
        """
        if not self._started or self._closing:
            return False
        return not strict or all(map(stands, self._models.values()))

    @property
    def repositories(self) -> Sequence[Path]:
        """The folders of models."""
        return self._repositories

    @property
    def snapshot(self) -> RepositorySnapshot | None:
        """What was last applied; None before the first scan and where models are loaded on demand."""
        return self._snapshot

    # Operations

    async def start(self, load_models: Sequence[str] | None = None) -> dict[str, str]:
        """Do the initial load: every model (None), or those named (on demand; "*" alone = all).

        Returns the models that failed, with the reasons.
        """
        self._on_demand = load_models is not None
        if load_models is not None and ALL_MODELS in load_models and len(load_models) > 1:
            raise invalid(f"{ALL_MODELS!r} loads every model, so no other may be named beside it: {list(load_models)}")
        try:
            if load_models is None:
                snapshot = await asyncio.to_thread(layouts.scan, self._repositories)
                self._scanned = True
                log_warnings("model repositories", snapshot.warnings)
                tasks = self.apply(snapshot)
            else:
                self._known = await asyncio.to_thread(layouts.list_names, self._repositories)
                self._scanned = True
                names = sorted(self._known) if ALL_MODELS in load_models else dict.fromkeys(load_models)
                tasks = {name: self._submit(name, self._load_named(name, None, keep_failure=True)) for name in names}
                for name in names:
                    self._models[name].asked_for = True
            await asyncio.wait(tasks.values()) if tasks else None
        finally:
            self._started = True
        return {
            name: str(error)
            for name, task in tasks.items()
            if not task.cancelled() and (error := task.exception()) is not None
        }

    def apply(self, snapshot: RepositorySnapshot) -> dict[str, asyncio.Task[None]]:
        """Begin to make the models what the repositories hold: load what is new or changed, unload what is gone.

        Returns the operations begun; they go on by themselves, and failures are logged and kept for the index.
        """
        self._refuse_if_closing()
        self._snapshot = snapshot
        self._known = dict.fromkeys(snapshot.models, False)
        begun: dict[str, asyncio.Task[None]] = {}
        if self.takes_over is not None:
            self.takes_over(snapshot)
        for name, found in snapshot.models.items() if self.takes_over is None else ():
            tracked = self._models.get(name)
            if tracked is None or tracked.gone or tracked.layout != found:
                begun[name] = self._submit(name, self._load_found(name, found))
                self._models[name].layout = found
        for name, tracked in list(self._models.items()):
            if name not in snapshot.models and not tracked.gone:
                begun[name] = self._submit(name, self._unload(name, gone=True))
        return begun

    async def load(self, name: str, override: LoadOverride | None = None) -> None:
        """Load or reload one model from the repository, or from the override; return once it serves.

        A caller that stops waiting does not stop the load. Raises NOT_FOUND where there is no such folder, INVALID_ARG
        with the reason where it does not load (what served before goes on), UNAVAILABLE where a newer operation came.
        """
        self._refuse_if_closing()
        task = self._submit(name, self._load_named(name, override))
        self._models[name].asked_for = True
        await self._outcome(task)

    async def load_seen(self, found: ModelLayout) -> None:
        """Load or reload one model from what a scan has seen; return once it serves. Raises as `load` does."""
        self._refuse_if_closing()
        task = self._submit(found.name, self._load_found(found.name, found))
        self._models[found.name].layout = found
        await self._outcome(task)

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Stop serving a model and return; its last requests end in peace. A name that is not loaded is no error.

        `unload_dependents` takes along the members of an ensemble that were loaded for it alone.
        """
        self._refuse_if_closing()
        tracked = self._models.get(name)
        if tracked is None:
            return
        members = tracked.members
        await self._outcome(self._submit(name, self._unload(name, gone=False)))
        for member in self._ensembles.leave(name, members):
            if unload_dependents:
                await self.unload(member, unload_dependents=True)

    async def load_version(self, name: str, version: int) -> None:
        """Load or reload one version from the repository beside those that serve, which stay as they are.

        What the version policy says does not count. Raises as `load` does.
        """
        self._refuse_if_closing()
        await self._outcome(self._submit(name, self._load_one(name, version)))
        self._models[name].asked_for = True

    async def unload_version(self, name: str, version: int) -> None:
        """Stop serving one version beside others and return; its last requests end in peace.

        Raises NOT_FOUND where it does not serve, INVALID_ARG where no other does.
        """
        self._refuse_if_closing()
        self.get(name, version)
        await self._outcome(self._submit(name, self._unload_one(name, version)))

    async def close(self, timeout: float) -> None:
        """Unload everything: wait that long for requests to end, then take the models down under them."""
        self._closing = True
        loop = asyncio.get_running_loop()
        for operation in self._operations:
            operation.cancel()
        for tracked in list(self._models.values()):
            tracked.unload()
        await self._until_idle(loop.time() + timeout)
        for tracked in list(self._models.values()):
            tracked.abandon_leases()
        await self._until_idle(loop.time() + _FREE_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*list(self._tasks), return_exceptions=True)

    # How

    def _submit(self, name: str, operation: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        tracked = self._models.get(name)
        if tracked is None:
            tracked = self._models[name] = TrackedModel(
                name, self._loader, self._spawn, self._copies, self._note_change
            )
            if name in self._preferences:
                tracked.prefer(self._preferences[name])
        tracked.pending += 1
        task: asyncio.Task[None] = self._spawn(operation, f"operation on {name!r}")
        tracked.latest_operation = task
        self._operations.add(task)
        task.add_done_callback(lambda over: self._operation_over(tracked, over))
        return task

    async def _outcome(self, operation: asyncio.Task[None]) -> None:
        """Wait for an operation without tying its fate to the caller's."""
        try:
            await asyncio.shield(operation)
        except asyncio.CancelledError:
            if operation.cancelled():
                raise unavailable("the server is stopping and has given the operation up") from None
            raise

    def _operation_over(self, tracked: TrackedModel[M], task: asyncio.Task[None]) -> None:
        tracked.pending -= 1
        self._operations.discard(task)
        self._note_change(tracked)
        if not self._on_demand and not task.cancelled() and task.exception() is None:
            self._try_dependents(tracked)
        if self._on_demand and tracked.name not in self._known:
            self._forget_strangers()

    def _try_dependents(self, member: TrackedModel[M]) -> None:
        """Load the ensembles once more that could not be, for want of what a member has become perhaps."""
        for name in self._ensembles.failed_dependents(member):
            tried = self._models[name].tried
            if tried is not None and not self._closing:
                self._submit(name, self._load_found(name, tried))

    def _forget_strangers(self) -> None:
        """Forget the oldest models that only uploads gave a name: names cost nothing, so there could be any number."""
        strangers = [tracked for tracked in self._models.values() if tracked.name not in self._known and tracked.over]
        for tracked in strangers[:-MOST_STRANGERS]:
            del self._models[tracked.name]

    def _note_change(self, tracked: TrackedModel[M]) -> None:
        if tracked.removable and self._models.get(tracked.name) is tracked:
            del self._models[tracked.name]
        self.generation += 1
        self._changed.set()
        if self.on_change is not None:
            self.on_change(tracked.name)

    async def _load_named(self, name: str, override: LoadOverride | None, *, keep_failure: bool = False) -> None:
        """Load from what the repositories hold now. keep_failure: a missing folder is the model's failure."""
        tracked = self._models[name]
        async with tracked.order:
            if override is not None and override.directory is not None:
                found = await asyncio.to_thread(layouts.scan_directory, name, override.directory)
            else:
                seen = await asyncio.to_thread(layouts.scan_model, self._repositories, name)
                if seen is None:
                    self._known.pop(name, None)
                    reason = f"model {name!r} has no folder in the model repositories"
                    if keep_failure:
                        tracked.refuse(reason)
                    raise not_found(reason)
                self._known.setdefault(name, False)
                found = seen
            settled, source = await self._prepare(tracked, found, override)
        await self._carry_out(tracked, found, override, settled, source)

    async def _load_one(self, name: str, version: int) -> None:
        tracked = self._models[name]
        async with tracked.order:
            found = await asyncio.to_thread(layouts.scan_model, self._repositories, name)
            if found is None:
                raise not_found(f"model {name!r} has no folder in the model repositories")
            if version not in found.versions:
                has = shown_versions(found.versions)
                raise not_found(f"model {name!r} has no folder of version {version} in its repository; it has {has}")
            self._known.setdefault(name, False)
            settled, _ = await self._prepare(tracked, found, None, only=version)
        await settled

    async def _unload_one(self, name: str, version: int) -> None:
        tracked = self._models[name]
        async with tracked.order:
            others = tracked.serving.keys() - {version}
            if not others:
                raise invalid(f"version {version} is the only one of model {name!r} that serves: unload the model")
            settled = tracked.keep(others)
        await settled

    async def _load_found(self, name: str, found: ModelLayout) -> None:
        """Load from what a scan has seen."""
        tracked = self._models[name]
        async with tracked.order:
            settled, source = await self._prepare(tracked, found, None)
        await self._carry_out(tracked, found, None, settled, source)

    async def _carry_out(
        self,
        tracked: TrackedModel[M],
        found: ModelLayout,
        override: LoadOverride | None,
        settled: asyncio.Future[None],
        source: ModelSource,
    ) -> None:
        """Wait for what was begun, then change in place what serves and differs in that alone."""
        await settled
        async with tracked.order:
            if tracked.latest_operation is not asyncio.current_task() or await self._resize(tracked, source):
                return
            tracked.resizable = False
            settled, _ = await self._prepare(tracked, found, override)
        await settled

    async def _resize(self, tracked: TrackedModel[M], source: ModelSource) -> bool:
        """Return whether all versions that serve have the instances that they should have now."""
        for copy in list(tracked.serving.values()):
            if same_in_place(copy.source.config.proto, source.config.proto):
                continue
            try:
                if not await self._loader.resize(copy.served, source):
                    return False
            except (InferError, ConfigError) as error:
                tracked.refuse(sentence(error))
                raise invalid(f"model {tracked.name!r} failed to load: {sentence(error)}") from error
            copy.source = source
        return True

    async def _prepare(
        self, tracked: TrackedModel[M], found: ModelLayout, override: LoadOverride | None, only: int | None = None
    ) -> tuple[asyncio.Future[None], ModelSource]:
        """Decide what to load and begin to; what stands against it is noted and raised.

        `only`: this version is loaded beside those that serve, whatever the version policy says.
        """
        tracked.gone = False
        tracked.tried = found
        source = ModelSource(
            found.name,
            found.directory,
            found.versions,
            temporary=override.temporary if override is not None else None,
        )
        log_warnings(repr(found.name), found.warnings)
        try:
            config, traffic = await self._preparer.config_of(found, override)
            source = dataclasses.replace(source, config=config, members=members_of(config.proto))
            self._begin_members(source)
            wanted = await self._preparer.contents(
                found, config, only, from_call=override is not None, resizable=tracked.resizable
            )
            if self._traffic is not None:
                self._traffic.adopt(found.name, traffic)
            others: dict[int, Hashable] = {} if only is None else tracked.lifecycle.identities()
            return tracked.desire(source, {**others, **wanted}), source
        except Exception as error:
            tracked.refuse(sentence(error))
            tracked.dispose(source)
            raise invalid(f"model {found.name!r} failed to load: {sentence(error)}") from error

    async def _unload(self, name: str, *, gone: bool) -> None:
        tracked = self._models[name]
        async with tracked.order:
            tracked.asked_for = False
            tracked.gone = gone
            tracked.unload()

    def _begin_members(self, source: ModelSource) -> None:
        """Have the members of an ensemble loaded where models are loaded on demand."""
        self._ensembles.adopt(source)
        if not self._on_demand:
            return
        for member in self._ensembles.absent(source):
            self._submit(member, self._load_named(member, None))
        for member in source.members:
            self._models[member].loaded_for.add(source.name)

    def _refusal(self, name: str, version: int) -> InferError:
        """Return why a model cannot be used."""
        tracked = self._models.get(name)
        if tracked is None or tracked.gone:
            return refusal_of_absent(name, scanned=self._scanned, known=name in self._known)
        return refusal(tracked, version)

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise unavailable("the server is stopping and takes no operation on models")

    def _spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_over)
        return task

    def _task_over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            known = isinstance(error, InferError | ConfigError)
            _log.error("%s: %s", task.get_name(), error, exc_info=None if known else error)

    async def _until_idle(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        while self._copies_left() and (left := deadline - loop.time()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return

    def _copies_left(self) -> bool:
        return any(not tracked.lifecycle.idle for tracked in self._models.values())
