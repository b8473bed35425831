"""What is told of models that are, or are not, there: refusals, index entries, readiness."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.repository.layout import TWICE
from headrace.repository.lifecycle import VersionState, VersionStatus
from headrace.repository.sources import M
from headrace.repository.tracked import TrackedModel
from headrace.types import LATEST, IndexEntry
from headrace_protocol.errors import InferError, not_found, unavailable

_STATUSES_IN_A_SENTENCE = 8


def stands(tracked: TrackedModel[M]) -> bool:
    """Return whether a model does what it should: it serves with live backends, or was unloaded on purpose.

    One whose reload goes on or has failed serves what it served before; one that has never loaded does not stand.
    """
    if tracked.lifecycle.unloaded or tracked.lifecycle.untouched:
        return True
    return bool(tracked.serving) and all(copy.served.ready for copy in tracked.serving.values())


def index_entries(name: str, tracked: TrackedModel[M] | None, *, twice: bool = False) -> list[IndexEntry]:
    """Return a model's lines of the repository index: one a version, one for all where no version is known.

    `twice`: it has folders in several repositories.
    """
    if tracked is None:
        return [IndexEntry(name, "", VersionState.UNAVAILABLE.value, TWICE) if twice else IndexEntry(name)]
    statuses = tracked.statuses()
    if not statuses and tracked.lifecycle.failure:
        return [IndexEntry(name, "", VersionState.UNAVAILABLE.value, tracked.lifecycle.failure)]
    entries = [IndexEntry(name, str(number), status.state.value, status.reason) for number, status in statuses.items()]
    return entries or [IndexEntry(name)]


def refusal_of_absent(name: str, *, scanned: bool, known: bool) -> InferError:
    """Return why a model that no operation has reached cannot be used."""
    if not scanned:
        return unavailable(f"model {name!r} is not known yet: the server has not read its model repositories")
    if known:
        return unavailable(f"model {name!r} is in a model repository but not loaded")
    return not_found(f"model {name!r} is not in any model repository of this server")


def refusal(tracked: TrackedModel[M], version: int) -> InferError:
    """Return why a version (or LATEST: any) of a model does not serve: NOT_FOUND or UNAVAILABLE."""
    name = tracked.name
    statuses = tracked.statuses()
    if not statuses:
        failure = tracked.lifecycle.failure
        return unavailable(f"model {name!r} " + (f"failed to load: {failure}" if failure else "is about to be loaded"))
    if version == LATEST:
        newest = list(statuses.items())[-_STATUSES_IN_A_SENTENCE:]
        shown = "; ".join(f"version {number} is {_shown(status)}" for number, status in newest)
        return unavailable(f"model {name!r} has no version that is ready: {shown}")
    status = tracked.status(version)
    if status is None:
        versions = [number for number in statuses if tracked.status(number) is not None]
        return not_found(f"model {name!r} has no version {version}; it has {shown_versions(versions)}")
    return unavailable(f"model {name!r} version {version} is {_shown(status)}")


def shown_versions(versions: Iterable[int]) -> str:
    """Return versions as text, in order."""
    return ", ".join(map(str, sorted(versions))) or "none"


def _shown(status: VersionStatus) -> str:
    return f"{status.state.value} ({status.reason})" if status.reason else status.state.value
