"""One model name at work: obeys its lifecycle, holds its copies and counts the leases on them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Mapping
from typing import Any, Generic

from headrace.repository.layout import ModelLayout
from headrace.repository.lifecycle import (
    CancelLoad,
    Decision,
    Free,
    ModelLifecycle,
    Promote,
    Settled,
    StartDrain,
    StartLoad,
    VersionState,
    VersionStatus,
)
from headrace.repository.model_config import ConfigError
from headrace.repository.sources import M, ModelLoader, ModelSource, Preference
from headrace_protocol.errors import InferError, invalid, unavailable

_log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]


class Copy(Generic[M]):
    """A loaded (or loading) instance of a version. `leases` counts the requests that use it."""

    __slots__ = ("draining", "leases", "model", "owner", "source", "task", "token", "version")

    def __init__(self, owner: TrackedModel[M], token: int, version: int, source: ModelSource) -> None:
        self.owner = owner
        self.token = token
        self.version = version
        self.source = source
        self.model: M | None = None
        self.task: asyncio.Task[M] | None = None
        self.leases = 0
        self.draining = False

    @property
    def served(self) -> M:
        """The model, once loaded."""
        assert self.model is not None
        return self.model


class TrackedModel(Generic[M]):
    """A model name that was loaded, or tried, at least once. Its methods never wait: they start tasks by `spawn`."""

    def __init__(
        self,
        name: str,
        loader: ModelLoader[M],
        spawn: Spawn,
        copies_by_model: dict[int, Copy[M]],
        on_change: Callable[[TrackedModel[M]], None],
    ) -> None:
        self.name = name
        self.lifecycle = ModelLifecycle()
        self.order = asyncio.Lock()
        """Held while an operation is prepared, so that operations begin in the order they were asked for."""
        self.pending = 0
        """Operations asked for and not over."""
        self.latest_operation: asyncio.Task[None] | None = None
        self.tried: ModelLayout | None = None
        """What was loaded last, or tried."""
        self.layout: ModelLayout | None = None
        """What the last operation from the repository was about; the same again is not news."""
        self.gone = False
        """The folder was taken away: forget the name once its last copy is freed."""
        self.resizable = True
        """Whether what serves may be changed in place; a loader that cannot has said so otherwise."""
        self.members: frozenset[str] = frozenset()
        self.asked_for = False
        """Loaded by its own name, not only as a member of ensembles."""
        self.loaded_for: set[str] = set()
        self.serving: dict[int, Copy[M]] = {}
        self.newest_first: tuple[Copy[M], ...] = ()
        self.preferred: tuple[Copy[M], ...] = ()
        """The same copies in the order in which they are tried for a request that names no version."""
        self._preference = Preference()
        self._loader = loader
        self._spawn = spawn
        self._copies: dict[int, Copy[M]] = {}
        self._copies_by_model = copies_by_model
        self._on_change = on_change
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}

    # Operations. Each returns a future that ends with the operation.

    def desire(self, source: ModelSource, wanted: Mapping[int, Hashable]) -> asyncio.Future[None]:
        """Serve these versions of the source, given by what identifies their content."""
        self.members = source.members
        lost = [copy.token for copy in self.serving.values() if not copy.served.accepting]
        future = self._begin(self.lifecycle.desire(wanted, lost), source)
        self.dispose(source)
        return future

    def refuse(self, reason: str) -> None:
        """Note that the model cannot be loaded; what serves stays."""
        self._begin(self.lifecycle.refuse(reason), None).exception()

    def unload(self) -> None:
        """Stop serving; copies are freed when their last request has ended."""
        self._begin(self.lifecycle.unload(), None)

    def keep(self, versions: Collection[int]) -> asyncio.Future[None]:
        """Serve those versions alone of the ones that serve, as they are."""
        wanted = {version: identity for version, identity in self.lifecycle.identities().items() if version in versions}
        return self._begin(self.lifecycle.desire(wanted), None)

    def prefer(self, preference: Preference) -> None:
        """Note which version goes first, and which last, where a request names none."""
        self._preference = preference
        self.preferred = tuple(sorted(self.newest_first, key=lambda copy: preference.rank(copy.version)))

    def release(self, copy: Copy[M]) -> None:
        """Give one lease back."""
        copy.leases -= 1
        assert copy.leases >= 0, f"a lease on {self.name!r} was released twice"
        if copy.draining and copy.leases == 0:
            self._obey(self.lifecycle.drained(copy.token))

    def abandon_leases(self) -> None:
        """Free what drains though requests still use it: the server stops and will not wait any longer."""
        for copy in list(self._copies.values()):
            if copy.draining and copy.leases:
                _log.warning("%r version %d: taken down with %d requests in it", self.name, copy.version, copy.leases)
                copy.served.abort()  # requests that hear of it at once give their leases back, the last frees the copy
                if copy.leases:
                    copy.leases = 0
                    self._copies_by_model.pop(id(copy.model), None)
                    self._obey(self.lifecycle.drained(copy.token))

    # What is

    def loaded(self) -> Iterable[Copy[M]]:
        """Return the copies that serve, or wait for their last requests."""
        return [copy for copy in self._copies.values() if copy.model is not None and (copy.leases or not copy.draining)]

    def status(self, version: int) -> VersionStatus | None:
        """Return a version's state as a request would meet it now; None if the model has no such version."""
        copy = self.serving.get(version)
        if copy is not None and not copy.served.ready:
            return VersionStatus(VersionState.UNAVAILABLE, copy.served.not_ready_reason)
        return self.lifecycle.status(version)

    def statuses(self) -> dict[int, VersionStatus]:
        """Return every version's state, lowest version first; those that drain are still listed."""
        return {version: self.status(version) or status for version, status in self.lifecycle.statuses().items()}

    @property
    def removable(self) -> bool:
        """Whether nothing is lost by forgetting the name."""
        blank = self.gone or (not self.lifecycle.failure and not self.lifecycle.statuses())
        return blank and self.over

    @property
    def over(self) -> bool:
        """Whether nothing of it serves, loads or drains, and nothing was asked for."""
        return self.pending == 0 and self.lifecycle.idle

    # How

    def _begin(self, started: tuple[int, list[Decision]], source: ModelSource | None) -> asyncio.Future[None]:
        operation, decisions = started
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(operation, []).append(future)
        self._obey(decisions, source)
        return future

    def _obey(self, decisions: Iterable[Decision], source: ModelSource | None = None) -> None:
        """Carry decisions out, and those that follow from them, without a pause in which a request could come between."""
        todo = deque(decisions)
        while todo:
            decision = todo.popleft()
            match decision:
                case StartLoad(token, version):
                    assert source is not None
                    self._start_load(token, version, source)
                case CancelLoad(token):
                    task = self._copies[token].task
                    assert task is not None
                    task.cancel()
                case Promote(token, version):
                    self.serving[version] = self._copies[token]
                    _log.info("%r version %d: serves", self.name, version)
                case StartDrain(token):
                    todo.extend(self._start_drain(self._copies[token]))
                case Free(token):
                    self._spawn(self._free(self._copies[token]), f"unload {self.name!r}")
                case Settled():
                    self._settle(decision)
        self.newest_first = tuple(self.serving[version] for version in sorted(self.serving, reverse=True))
        self.prefer(self._preference)
        self._on_change(self)

    def _start_load(self, token: int, version: int, source: ModelSource) -> None:
        copy = self._copies[token] = Copy(self, token, version, source)
        copy.task = self._spawn(self._loader.load(source, version), f"load {self.name!r} version {version}")
        copy.task.add_done_callback(lambda task: self._load_ended(copy, task))

    def _load_ended(self, copy: Copy[M], task: asyncio.Task[M]) -> None:
        if task.cancelled():
            reason = "the load was cancelled"
        elif (error := task.exception()) is not None:
            reason = sentence(error)
            _log.error("%r version %d: failed to load: %s", self.name, copy.version, reason)
        else:
            copy.task = None
            copy.model = task.result()
            assert id(copy.model) not in self._copies_by_model, "a loader returns a new model for every load"
            self._copies_by_model[id(copy.model)] = copy
            self._obey(self.lifecycle.load_succeeded(copy.token))
            return
        self._forget(copy)
        self._obey(self.lifecycle.load_failed(copy.token, reason))

    def _start_drain(self, copy: Copy[M]) -> list[Decision]:
        if self.serving.get(copy.version) is copy:
            del self.serving[copy.version]
        copy.draining = True
        return self.lifecycle.drained(copy.token) if copy.leases == 0 else []

    async def _free(self, copy: Copy[M]) -> None:
        try:
            await self._loader.unload(copy.served)
        except Exception:
            _log.exception("%r version %d: failed to unload cleanly", self.name, copy.version)
        finally:
            self._copies_by_model.pop(id(copy.model), None)
            self._forget(copy)
            self._obey(self.lifecycle.freed(copy.token))

    def _forget(self, copy: Copy[M]) -> None:
        del self._copies[copy.token]
        self.dispose(copy.source)

    def dispose(self, source: ModelSource) -> None:
        """Remove uploaded files that no copy uses."""
        used = any(copy.source is source for copy in self._copies.values())
        if source.temporary is not None and not used:
            self._spawn(asyncio.to_thread(source.temporary.remove), f"remove files of {self.name!r}")

    def _settle(self, settled: Settled) -> None:
        for future in self._waiting.pop(settled.operation, []):
            if future.done():
                continue
            if settled.superseded:
                future.set_exception(
                    unavailable(f"a newer operation on model {self.name!r} took the place of this one")
                )
            elif settled.reason:
                future.set_exception(invalid(f"model {self.name!r} failed to load: {settled.reason}"))
            else:
                future.set_result(None)


def sentence(error: BaseException) -> str:
    """Return what to tell of a failed load. Errors that nobody foresaw are logged whole."""
    match error:
        case InferError():
            return error.message
        case ConfigError():
            return str(error)
    _log.error("unexpected error in a load", exc_info=error)
    return f"unexpected {type(error).__name__}: {error}"
