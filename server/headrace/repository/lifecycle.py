"""The life of one model name, decided: which versions to load, promote, drain and free, as events come in.

Pure: no I/O, no time. The shell (tracked.py) reports what happened and obeys the decisions it gets back, in order and
without pause between them. A *copy* is one loaded instance of a version, named by its token; a version may have an old
copy that drains beside the new one that serves.

Rules: what serves goes on serving until everything that shall replace it is loaded; if one version of an operation
fails, all that it loaded is dropped and the reason is kept; an operation ends the one before it; a version whose
content has not changed is not touched.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final

UNLOADED: Final = "unloaded"
"""Reason of a version that was unloaded on purpose; readiness tolerates it."""


class VersionState(enum.Enum):
    """What the repository index says of a version."""

    UNKNOWN = "UNKNOWN"
    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    UNLOADING = "UNLOADING"


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """A version's state and, unless all is well, the reason."""

    state: VersionState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Load this version; report load_succeeded or load_failed with the token, once."""

    token: int
    version: int


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """Stop a load whose result nobody wants; its end is to be reported all the same."""

    token: int


@dataclass(frozen=True, slots=True)
class Promote:
    """Serve this copy from now on, in place of any other of its version."""

    token: int
    version: int


@dataclass(frozen=True, slots=True)
class StartDrain:
    """Give this copy no new request; report drained when the last one has left it."""

    token: int


@dataclass(frozen=True, slots=True)
class Free:
    """Take this copy down; report freed when it is gone. Nobody uses it."""

    token: int


@dataclass(frozen=True, slots=True)
class Settled:
    """An operation is over: done, failed with a reason, or superseded by a newer one."""

    operation: int
    reason: str = ""
    superseded: bool = False


Decision = StartLoad | CancelLoad | Promote | StartDrain | Free | Settled


class _Stage(enum.Enum):
    LOADING = enum.auto()
    ABANDONED = enum.auto()
    """Loading still, for nobody."""
    STAGED = enum.auto()
    """Loaded; waits for the other versions of its operation."""
    SERVING = enum.auto()
    DRAINING = enum.auto()
    FREEING = enum.auto()


@dataclass(slots=True)
class _Copy:
    token: int
    version: int
    identity: Hashable
    stage: _Stage = _Stage.LOADING


@dataclass(slots=True)
class _Attempt:
    """An operation that loads. `fresh` are its copies by version; wanted versions beside them are kept as they serve."""

    operation: int
    wanted: dict[int, Hashable]
    fresh: dict[int, _Copy] = field(default_factory=dict)


class ModelLifecycle:
    """The state of one model name. Every event returns the decisions that follow from it."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}
        self._serving: dict[int, _Copy] = {}
        self._attempt: _Attempt | None = None
        self._reasons: dict[int, str] = {}
        """Versions of the last operation, if it failed or was an unload, and why they do not serve (its content)."""
        self._failure = ""
        self._unloaded = False
        self._last_token = 0
        self._last_operation = 0

    # What is

    @property
    def failure(self) -> str:
        """Why the last operation failed; empty if it did not."""
        return self._failure

    @property
    def unloaded(self) -> bool:
        """Whether the last operation was an unload."""
        return self._unloaded

    @property
    def loading(self) -> bool:
        """Whether an operation is under way."""
        return self._attempt is not None

    @property
    def untouched(self) -> bool:
        """Whether no operation has reached the model yet."""
        return self._last_operation == 0

    @property
    def idle(self) -> bool:
        """Whether no copy is left, in whatever stage."""
        return not self._copies

    def serving(self) -> dict[int, int]:
        """Return the tokens of the copies that serve, by version."""
        return {version: copy.token for version, copy in self._serving.items()}

    def identities(self) -> dict[int, Hashable]:
        """Return what identifies the content of the copies that serve, by version."""
        return {version: copy.identity for version, copy in self._serving.items()}

    def status(self, version: int) -> VersionStatus | None:
        """Return what is to be said of a version; None if the model does not have it (any more)."""
        reason = self._reasons.get(version)
        if version in self._serving:
            kept = f"serves what was loaded before, since the last load failed: {reason}" if reason else ""
            return VersionStatus(VersionState.READY, kept)
        if self._attempt is not None and version in self._attempt.fresh:
            return VersionStatus(VersionState.LOADING)
        if reason is None:
            return None
        if reason == UNLOADED and any(copy.version == version for copy in self._leaving()):
            return VersionStatus(VersionState.UNLOADING, reason)
        return VersionStatus(VersionState.UNAVAILABLE, reason)

    def statuses(self) -> dict[int, VersionStatus]:
        """Return every version there is something to say of, lowest first; versions that drain are still listed."""
        fresh = self._attempt.fresh if self._attempt is not None else {}
        found: dict[int, VersionStatus] = {}
        for version in sorted({*self._serving, *fresh, *self._reasons, *(copy.version for copy in self._leaving())}):
            found[version] = self.status(version) or VersionStatus(VersionState.UNLOADING, "replaced")
        return found

    # Operations

    def desire(self, wanted: Mapping[int, Hashable], lost: Collection[int] = ()) -> tuple[int, list[Decision]]:
        """Begin to serve exactly these versions; a version's value identifies the content it is to have.

        `lost` are tokens of serving copies that cannot serve any more: they are loaded anew though nothing changed.
        Returns the operation's number, which a later Settled names; the number of the one under way if it wants the same.
        """
        assert wanted, "an operation without a version is refused, not desired"
        if self._attempt is not None and self._attempt.wanted == dict(wanted):
            return self._attempt.operation, []
        carried, decisions = self._supersede(wanted)
        attempt = _Attempt(self._next_operation(), dict(wanted), carried)
        self._attempt = attempt
        self._unloaded = False
        for version, identity in sorted(wanted.items()):
            current = self._serving.get(version)
            unchanged = current is not None and current.identity == identity and current.token not in lost
            if unchanged or version in attempt.fresh:
                continue
            copy = self._new_copy(version, identity)
            attempt.fresh[version] = copy
            decisions.append(StartLoad(copy.token, version))
        return attempt.operation, decisions + self._conclude()

    def refuse(self, reason: str) -> tuple[int, list[Decision]]:
        """Note an operation that cannot begin: its configuration is wrong, it has no version. What serves stays."""
        _, decisions = self._supersede({})
        operation = self._next_operation()
        self._failure = reason
        self._unloaded = False
        self._reasons = dict.fromkeys(self._serving, reason)
        return operation, [*decisions, Settled(operation, reason)]

    def unload(self) -> tuple[int, list[Decision]]:
        """Stop serving every version. The operation settles at once; the copies drain."""
        known = [version for version in self.statuses() if self.status(version) is not None]
        _, decisions = self._supersede({})
        operation = self._next_operation()
        self._failure = ""
        self._unloaded = True
        self._reasons = dict.fromkeys(known, UNLOADED)
        for version in list(self._serving):
            decisions.append(self._retire(version))
        return operation, [*decisions, Settled(operation)]

    # Events

    def load_succeeded(self, token: int) -> list[Decision]:
        """Note that a copy is loaded."""
        copy = self._copies[token]
        if copy.stage is _Stage.ABANDONED:
            return [self._free(copy)]
        assert copy.stage is _Stage.LOADING, copy
        copy.stage = _Stage.STAGED
        return self._conclude()

    def load_failed(self, token: int, reason: str) -> list[Decision]:
        """Note that a copy did not load: its operation fails as a whole."""
        copy = self._copies.pop(token)
        if copy.stage is _Stage.ABANDONED:
            return []
        attempt = self._attempt
        assert copy.stage is _Stage.LOADING, copy
        assert attempt is not None, copy
        self._attempt = None
        self._reasons = {}
        decisions: list[Decision] = []
        for version, fresh in attempt.fresh.items():
            if fresh is copy:
                self._reasons[version] = reason
            else:
                self._reasons[version] = f"not loaded, because version {copy.version} failed to load"
                decisions.append(self._drop(fresh))
        self._failure = f"version {copy.version}: {reason}"
        return [*decisions, Settled(attempt.operation, self._failure)]

    def drained(self, token: int) -> list[Decision]:
        """Note that the last request has left a copy that drains."""
        copy = self._copies[token]
        assert copy.stage is _Stage.DRAINING, copy
        return [self._free(copy)]

    def freed(self, token: int) -> list[Decision]:
        """Note that a copy is gone."""
        copy = self._copies.pop(token)
        assert copy.stage is _Stage.FREEING, copy
        return []

    # How

    def _leaving(self) -> list[_Copy]:
        return [copy for copy in self._copies.values() if copy.stage in {_Stage.DRAINING, _Stage.FREEING}]

    def _next_operation(self) -> int:
        self._last_operation += 1
        return self._last_operation

    def _new_copy(self, version: int, identity: Hashable) -> _Copy:
        self._last_token += 1
        copy = self._copies[self._last_token] = _Copy(self._last_token, version, identity)
        return copy

    def _supersede(self, wanted: Mapping[int, Hashable]) -> tuple[dict[int, _Copy], list[Decision]]:
        """End the operation under way; return its copies that the next one wants just so, and the decisions."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return {}, []
        carried: dict[int, _Copy] = {}
        decisions: list[Decision] = []
        for version, copy in attempt.fresh.items():
            if version in wanted and wanted[version] == copy.identity:
                carried[version] = copy
            else:
                decisions.append(self._drop(copy))
        return carried, [*decisions, Settled(attempt.operation, superseded=True)]

    def _conclude(self) -> list[Decision]:
        """If all is loaded: replace what serves by what is wanted, in one stroke."""
        attempt = self._attempt
        if attempt is None or any(copy.stage is not _Stage.STAGED for copy in attempt.fresh.values()):
            return []
        self._attempt = None
        self._reasons = {}
        self._failure = ""
        decisions: list[Decision] = []
        retired: list[Decision] = []
        for version, copy in sorted(attempt.fresh.items()):
            if version in self._serving:
                retired.append(self._retire(version))
            copy.stage = _Stage.SERVING
            self._serving[version] = copy
            decisions.append(Promote(copy.token, version))
        retired.extend([self._retire(version) for version in set(self._serving) - set(attempt.wanted)])
        return [*decisions, *retired, Settled(attempt.operation)]

    def _retire(self, version: int) -> Decision:
        copy = self._serving.pop(version)
        copy.stage = _Stage.DRAINING
        return StartDrain(copy.token)

    def _drop(self, copy: _Copy) -> Decision:
        if copy.stage is _Stage.LOADING:
            copy.stage = _Stage.ABANDONED
            return CancelLoad(copy.token)
        return self._free(copy)

    def _free(self, copy: _Copy) -> Decision:
        copy.stage = _Stage.FREEING
        return Free(copy.token)

    def check_integrity(self) -> None:
        """Assert what holds between events."""
        for token, copy in self._copies.items():
            assert copy.token == token
            in_attempt = self._attempt is not None and self._attempt.fresh.get(copy.version) is copy
            assert in_attempt == (copy.stage in {_Stage.LOADING, _Stage.STAGED}), copy
            assert (self._serving.get(copy.version) is copy) == (copy.stage is _Stage.SERVING), copy
        assert all(self._copies.get(copy.token) is copy for copy in self._serving.values())
        if self._attempt is not None:
            assert not self._unloaded
            assert self._attempt.fresh.keys() <= self._attempt.wanted.keys()
            assert any(copy.stage is _Stage.LOADING for copy in self._attempt.fresh.values())
            for version, identity in self._attempt.wanted.items():
                copy = self._attempt.fresh.get(version) or self._serving[version]
                assert copy.identity == identity, copy
        if self._unloaded:
            assert not self._serving
            assert not self._failure
