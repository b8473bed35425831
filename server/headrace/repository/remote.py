"""Repositories in object stores: mirrored into a folder of this machine, from which models are served as from any other.

One listing tells what is there. A model is taken once its objects have stayed as they are for a settling time, so that one
that is being uploaded is not taken in halves; one with an object named `.uploading` waits until that is gone. What is new
is fetched beside what is there and put in its place in one step. A version's folder that has not changed stays the very
same, with its dates, so that the version is not loaded again: a model's folder is links to such parts. Blocking: used in a thread, by one thread at a time. fsspec knows the
stores; what is a model is the layout's matter.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Final

from headrace.repository.addresses import SCHEMES, parse_address
from headrace.repository.layout import MAX_DEPTH, is_model_name

_log: Final = logging.getLogger(__name__)

SETTLE_S: Final = 5.0
_LEAST_WAIT_S: Final = 0.2
MAX_OBJECTS: Final = 1_000_000
_FIRST_TRIES: Final = 12
UPLOADING: Final = ".uploading"
_SIGNATURES: Final = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "checksum",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)
"""What stores tell of an object's content, the best first."""
_TIMES: Final = ("LastModified", "last_modified", "mtime", "updated", "created")
_CURRENT: Final = "models"
_TREES: Final = "trees"
_CONTENT: Final = "content"
_MANIFESTS: Final = "manifests"
_NEW: Final = "new-"
Files = Mapping[str, tuple[int, str]]
"""Path in a model's folder -> size, and what tells one content from another."""


class RemoteError(Exception):
    """A store that cannot be read; the message names it, without its secrets."""


class Mirrors:
    """All repositories of a server that are elsewhere. Blocking: used in a thread, by one thread at a time."""

    def __init__(self, repositories: Sequence[RemoteRepository]) -> None:
        self.repositories: Final = tuple(repositories)
        self._turn: Final = Lock()
        self._failing: set[str] = set()

    @property
    def moving(self) -> bool:
        return any(repository.moving for repository in self.repositories)

    def fetch(self, name: str) -> None:
        """Take one model as it is now, for who says that it is whole. Raises RemoteError."""
        with self._turn:
            for repository in self.repositories:
                repository.sync((name,), at_once=True)

    def sync(self, only: Collection[str] | None = None) -> None:
        """Take what has settled everywhere. A store that cannot be read is told once, and what is there of it stays."""
        with self._turn:
            for repository in self.repositories:
                try:
                    repository.sync(only)
                except RemoteError as error:
                    if repository.address not in self._failing:
                        _log.error("%s", error)
                    self._failing.add(repository.address)
                else:
                    self._failing.discard(repository.address)

    def first(self, only: Collection[str] | None, wait: Callable[[float], bool]) -> None:
        """Take what is there, before models are loaded: waits for what is being uploaded, for a while.

        `wait` sleeps so many seconds and says whether to go on. Raises RemoteError where a store cannot be read and
        nothing of it is there from an earlier start.
        """
        for repository in self.repositories:
            try:
                repository.sync(only)
                for _ in range(_FIRST_TRIES):
                    if not repository.moving or not wait(max(repository.settle_s / 2, _LEAST_WAIT_S)):
                        break
                    repository.sync(only)
            except RemoteError as error:
                if not any(repository.folder.iterdir()):
                    raise
                _log.error("%s; what was fetched before is served", error)
                self._failing.add(repository.address)


class RemoteRepository:
    """One repository in a store, and its mirror. `folder` is what the registry is given."""

    def __init__(self, address: str, cache: Path, now_s: Callable[[], float], settle_s: float = SETTLE_S) -> None:
        """Make the mirror's folders. Raises RemoteError where the store's client is missing."""
        self.address: Final = address
        self._now_s: Final = now_s
        self.settle_s: Final = settle_s
        self._root: Final = cache / hashlib.sha256(address.encode()).hexdigest()[:16]
        self.folder: Final = self._root / _CURRENT
        for folder in (_CURRENT, _TREES, _CONTENT, _MANIFESTS):
            (self._root / folder).mkdir(parents=True, exist_ok=True)
        parsed = parse_address(address)
        try:
            from fsspec.core import url_to_fs

            self._store, self._prefix = url_to_fs(parsed.url, **parsed.options)
        except ImportError as error:
            extra = SCHEMES[address.partition("://")[0]]
            raise RemoteError(
                f"{address}: {error.name or error} is missing: pip install 'headrace[{extra}]'"
            ) from error
        self._taken: Final = self._taken_before()
        self._seen: dict[str, tuple[Files, float]] = {}
        """Models that differ from what was taken: how they look, and since when."""
        self._newest: dict[str, float] = {}
        """When a model's newest object was written, by the store's clock, where that tells."""

    @property
    def moving(self) -> bool:
        """Whether some model has not settled yet."""
        return bool(self._seen)

    def sync(self, only: Collection[str] | None = None, *, at_once: bool = False) -> None:
        """Take what has settled, or `at_once` what is there, of the models in `only`, or of all.

        Raises RemoteError; what is there then stays.
        """
        listing = self._list()
        now = self._now_s()
        for name in sorted(listing.keys() | self._taken.keys()):
            if only is not None and name not in only:
                continue
            looks = listing.get(name)
            if looks == self._taken.get(name):
                self._seen.pop(name, None)
            elif looks is None:
                self._remove(name)
            elif UPLOADING in looks or not (at_once or self._settled(name, looks, now)):
                continue
            else:
                self._take(name, looks)

    def _settled(self, name: str, looks: Files, now: float) -> bool:
        before = self._seen.get(name)
        if before is None or before[0] != looks:
            self._seen[name] = (looks, now)
            return now - self._newest.get(name, now) > 2 * self.settle_s or self.settle_s <= 0
        return now - before[1] >= self.settle_s

    def _list(self) -> Mapping[str, Files]:
        try:
            self._store.invalidate_cache()
            found = self._store.find(self._prefix, detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise RemoteError(f"{self.address} cannot be listed: {type(error).__name__}: {error}") from error
        if len(found) > MAX_OBJECTS:
            raise RemoteError(f"{self.address} has more than {MAX_OBJECTS} objects")
        models: dict[str, dict[str, tuple[int, str]]] = {}
        self._newest = {}
        for path, info in found.items():
            relative = path[len(self._prefix) :].lstrip("/")
            name, _, inside = relative.partition("/")
            if not is_model_name(name) or not inside or inside.endswith("/"):
                continue
            parts = inside.split("/")
            if len(parts) > MAX_DEPTH or any(part in {"", ".", ".."} or "\0" in part or "\\" in part for part in parts):
                _log.warning(
                    "%s: an object of model %r has a path that no file can have, and is left out", self.address, name
                )
                continue
            signature = next((str(info[key]) for key in _SIGNATURES if info.get(key)), "")
            models.setdefault(name, {})[inside] = (int(info.get("size") or 0), signature)
            written = next((info[key] for key in _TIMES if isinstance(info.get(key), datetime)), None)
            if written is not None:
                self._newest[name] = max(self._newest.get(name, 0.0), written.timestamp())
        return models

    def _take(self, name: str, looks: Files) -> None:
        """Fetch what is new of a model, and let its name lead to it in one step."""
        parts: dict[str, dict[str, tuple[int, str]]] = {}
        for path, known in looks.items():
            parts.setdefault(path.partition("/")[0], {})[path] = known
        fetched = sum(self._fetch(name, part, files) for part, files in parts.items())
        tree = Path(tempfile.mkdtemp(dir=self._root / _TREES))
        try:
            for part, files in parts.items():
                (tree / part).symlink_to(Path("..", "..", _CONTENT, _identity(name, part, files), part))
            self._manifest(name).write_text(json.dumps(looks))
            link = Path(f"{tree}.link")
            link.symlink_to(Path("..", _TREES, tree.name))
            link.replace(self.folder / name)
        except BaseException:
            shutil.rmtree(tree, ignore_errors=True)
            raise
        self._taken[name] = looks
        self._seen.pop(name, None)
        self._sweep()
        _log.info("model %s taken from %s: %d files, %d bytes fetched", name, self.address, len(looks), fetched)

    def _fetch(self, name: str, part: str, files: Files) -> int:
        """Fetch a file or folder of a model's, unless it is there as it should be; return how many bytes came."""
        place = self._root / _CONTENT / _identity(name, part, files)
        if place.is_dir():
            if all(_is_whole(place / path, size) for path, (size, _) in files.items()):
                return 0
            shutil.rmtree(place)
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=self._root / _CONTENT))
        try:
            for path, (size, _) in files.items():
                target = new / path
                target.parent.mkdir(parents=True, exist_ok=True)
                self._store.get_file(f"{self._prefix}/{name}/{path}", str(target))
                if not _is_whole(target, size):  # it was replaced meanwhile; the next look takes it
                    raise RemoteError(f"{self.address}/{name}/{path} changed while it was fetched")
            new.rename(place)
        except RemoteError:
            shutil.rmtree(new, ignore_errors=True)
            raise
        except Exception as error:
            shutil.rmtree(new, ignore_errors=True)
            raise RemoteError(f"{self.address}/{name} cannot be fetched: {type(error).__name__}: {error}") from error
        return sum(size for size, _ in files.values())

    def _remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        self._manifest(name).unlink(missing_ok=True)
        self._taken.pop(name, None)
        self._sweep()
        _log.info("model %s is gone from %s", name, self.address)

    def _sweep(self) -> None:
        """Remove what no model leads to any more."""
        trees = {entry.readlink().name for entry in self.folder.iterdir() if entry.is_symlink()}
        used = set()
        for tree in (self._root / _TREES).iterdir():
            if tree.name in trees:
                used |= {part.readlink().parent.name for part in tree.iterdir()}
            elif tree.is_dir() and not tree.is_symlink():
                shutil.rmtree(tree, ignore_errors=True)
        for content in (self._root / _CONTENT).iterdir():
            if content.name not in used:
                shutil.rmtree(content, ignore_errors=True)

    def _manifest(self, name: str) -> Path:
        return self._root / _MANIFESTS / f"{name}.json"

    def _taken_before(self) -> dict[str, Files]:
        """Return what an earlier server took, as far as it is all there."""
        found: dict[str, Files] = {}
        for entry in self.folder.iterdir():
            try:
                written = json.loads(self._manifest(entry.name).read_text())
                looks = {path: (int(size), str(signature)) for path, (size, signature) in written.items()}
            except (OSError, ValueError, TypeError, AttributeError):
                continue
            if all(_is_whole(entry / path, size) for path, (size, _) in looks.items()):
                found[entry.name] = looks
        return found


def _identity(name: str, part: str, files: Files) -> str:
    """Return the name of a folder for just this content."""
    return hashlib.sha256(json.dumps([name, part, sorted(files.items())]).encode()).hexdigest()[:32]


def _is_whole(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
