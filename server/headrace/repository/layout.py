"""What lies in the model repositories now: one walk of the folders, frozen into a snapshot that pure code compares.

Nothing is opened. A file counts as changed when its name, size, modification time, status-change time or inode differs:
the status-change time catches a file restored with an old date, and bytes rewritten under the same size and date
(within the few milliseconds of a file system's clock tick the two are one). Loading reads the files later; what changes
in between is seen at the next look.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Final

MAX_FILES: Final = 100_000
"""Files of one model that are looked at; a folder with more is refused rather than walked for ever."""
MAX_DEPTH: Final = 32
MAX_MODELS: Final = 100_000
MAX_VERSION: Final = 2**63 - 1

TWICE: Final = "the model has a folder in two or more repositories"

_IGNORED_NAMES: Final = frozenset({"lost+found", "__pycache__"})
_TEMPORARY_SUFFIXES: Final = ("~", ".tmp", ".partial", ".swp")
_CONFIG_NAMES: Final = frozenset({"config.pbtxt", "configs"})
_KNOWN_FOLDERS: Final = frozenset({"warmup", "initial_state", "configs"})
_VERSION: Final = re.compile(r"0|[1-9][0-9]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """One model's folder. Two equal layouts hold the same content, as far as names, sizes, times and inodes tell."""

    name: str
    directory: Path
    problem: str = ""
    """Why the folder cannot be loaded, whatever its content; empty = it can be tried."""
    warnings: tuple[str, ...] = ()
    versions: Mapping[int, Path] = field(default_factory=dict)
    version_fingerprints: Mapping[int, bytes] = field(default_factory=dict)
    config_fingerprint: bytes = b""
    shared_fingerprint: bytes = b""
    """Of everything else in the folder: labels, warm-up data, libraries; every version may read it."""


@dataclass(frozen=True, slots=True)
class RepositorySnapshot:
    """Every model folder of every repository at one moment."""

    models: Mapping[str, ModelLayout] = field(default_factory=dict)
    unreadable: frozenset[Path] = frozenset()
    """Repositories that could not be listed: what they held is unknown, not gone."""
    warnings: tuple[str, ...] = ()


def name_problem(name: str) -> str:
    """Return why a model cannot have this name, or nothing."""
    if not name.strip():
        return "a model's name must not be empty"
    if "/" in name or "\\" in name or name in {".", ".."} or ".." in name:
        return f"a model's name must be one folder name without path parts, got {name!r}"
    if not name.isprintable():
        return f"a model's name must consist of printable characters, got {name!r}"
    if len(name.encode()) > 255:
        return f"a model's name must have at most 255 bytes, got {len(name.encode())}"
    return ""


def is_model_name(name: str) -> bool:
    """Whether a folder of this name is taken for a model: not hidden, not temporary, a valid name."""
    return not (
        name.startswith(".")
        or name.endswith(_TEMPORARY_SUFFIXES)
        or name in _IGNORED_NAMES
        or name != name.strip()
        or name_problem(name)
    )


def list_names(repositories: Sequence[Path]) -> dict[str, bool]:
    """Return the names of all model folders; a single listing of each repository, for the index.

    True = folders in several repositories, so that the model cannot be loaded.
    """
    names: dict[str, bool] = {}
    for repository in _distinct(repositories):
        with contextlib.suppress(OSError):
            for name in _model_names(repository, []):
                names[name] = name in names
    return names


def scan(repositories: Sequence[Path]) -> RepositorySnapshot:
    """Walk every model of every repository. Blocking: a thread's work where the disk may be slow."""
    models: dict[str, ModelLayout] = {}
    unreadable: set[Path] = set()
    warnings: list[str] = []
    for repository in _distinct(repositories):
        try:
            names = list(_model_names(repository, warnings))
        except OSError as error:
            unreadable.add(repository)
            warnings.append(f"model repository {str(repository)!r} cannot be listed: {_reason(error)}")
            continue
        for name in names:
            layout = scan_directory(name, repository / name)
            models[name] = _twice(models[name], layout) if name in models else layout
    return RepositorySnapshot(models, frozenset(unreadable), tuple(warnings))


def scan_model(repositories: Sequence[Path], name: str) -> ModelLayout | None:
    """Walk one model; None if no repository has a folder of that name. Blocking."""
    found: ModelLayout | None = None
    if not is_model_name(name):
        return None
    for repository in _distinct(repositories):
        directory = repository / name
        if directory.is_dir():
            layout = scan_directory(name, directory)
            found = layout if found is None else _twice(found, layout)
    return found


def _distinct(repositories: Sequence[Path]) -> list[Path]:
    """Return the repositories, each once: a folder given twice does not make every model a duplicate."""
    by_place: dict[str, Path] = {}
    for repository in repositories:
        by_place.setdefault(os.path.realpath(repository), repository)
    return list(by_place.values())


def _model_names(repository: Path, warnings: list[str]) -> Iterator[str]:
    with os.scandir(repository) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_MODELS:
                warnings.append(
                    f"model repository {str(repository)!r} has more than {MAX_MODELS} entries; the rest is ignored"
                )
                return
            if not is_model_name(entry.name):
                continue
            try:
                is_directory = entry.is_dir()
            except OSError as error:
                warnings.append(f"{entry.path!r} is not taken for a model: {_reason(error)}")
                continue
            if is_directory:
                yield entry.name


def _twice(first: ModelLayout, second: ModelLayout) -> ModelLayout:
    return ModelLayout(
        first.name,
        first.directory,
        problem=TWICE,
        warnings=(f"folders of the same name: {str(first.directory)!r} and {str(second.directory)!r}",),
    )


def scan_directory(name: str, directory: Path) -> ModelLayout:
    """Walk one model's folder, wherever it lies. Blocking."""
    walk = _Walk()
    versions: dict[int, Path] = {}
    fingerprints: dict[int, bytes] = {}
    warnings: list[str] = []
    config = _Fingerprint()
    shared = _Fingerprint()
    try:
        for entry in _sorted_entries(directory):
            if entry.name.startswith(".") or entry.name.endswith(_TEMPORARY_SUFFIXES):
                continue
            if entry.name in _CONFIG_NAMES:
                walk.add(config, entry, entry.name)
            elif (version := _version_number(entry, warnings)) is not None:
                versions[version] = directory / entry.name
                fingerprint = _Fingerprint()
                walk.add(fingerprint, entry, "")
                fingerprints[version] = fingerprint.value()
            else:
                walk.add(shared, entry, entry.name)
    except _TooManyFilesError:
        return ModelLayout(name, directory, problem=f"the model's folder has more than {MAX_FILES} files")
    except OSError as error:
        return ModelLayout(name, directory, problem=f"the model's folder cannot be read: {_reason(error)}")
    return ModelLayout(name, directory, "", tuple(warnings), versions, fingerprints, config.value(), shared.value())


def _sorted_entries(directory: Path | str) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        # a Python backend writes its byte code beside the model when it loads it: no change of the model
        return sorted((entry for entry in entries if entry.name not in _IGNORED_NAMES), key=attrgetter("name"))


def _version_number(entry: os.DirEntry[str], warnings: list[str]) -> int | None:
    """Return the version that a folder holds, or None if it is other content; strange names get a warning."""
    name = entry.name
    if name in _KNOWN_FOLDERS:
        return None
    numeric = _VERSION.fullmatch(name) is not None
    try:
        is_directory = entry.is_dir()
    except OSError:  # a link in a circle is as good as none
        is_directory = False
    if not is_directory:
        if numeric:
            warnings.append(f"version {name[:32]}: ignored, since it is not a folder")
        return None
    if not numeric:
        warnings.append(f"folder {name!r}: not a version, since its name is not a number without leading zeros")
        return None
    if len(name) > 19 or int(name) > MAX_VERSION:
        warnings.append(f"version {name[:32]}: ignored, since it is above {MAX_VERSION}")
        return None
    return int(name)


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


class _TooManyFilesError(Exception):
    """The walk met its limit."""


class _Fingerprint:
    """A digest over what the walk saw."""

    __slots__ = ("_hash",)

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def note(self, relative: str, what: str) -> None:
        self._hash.update(f"{relative}\0{what}\n".encode(errors="surrogateescape"))

    def value(self) -> bytes:
        return self._hash.digest()


class _Walk:
    """A bounded walk that follows links, but not in circles and not into the kernel's file systems."""

    def __init__(self) -> None:
        self._files_left = MAX_FILES
        self._kernel_devices = _kernel_devices()

    def add(
        self, fingerprint: _Fingerprint, entry: os.DirEntry[str], relative: str, above: tuple[tuple[int, int], ...] = ()
    ) -> None:
        self._files_left -= 1
        if self._files_left < 0:
            raise _TooManyFilesError
        try:
            found = entry.stat()
            if not stat.S_ISDIR(found.st_mode):
                fingerprint.note(relative, _describe(found))
                return
            here = (found.st_dev, found.st_ino)
            if here in above or found.st_dev in self._kernel_devices or len(above) >= MAX_DEPTH:
                fingerprint.note(relative, "not entered")
                return
            children = _sorted_entries(entry.path)
        except OSError as error:
            fingerprint.note(relative, f"error {error.errno}")
            return
        fingerprint.note(relative, "folder")
        for child in children:
            self.add(fingerprint, child, f"{relative}/{child.name}", (*above, here))


def _describe(found: os.stat_result) -> str:
    if not stat.S_ISREG(found.st_mode):
        return f"special {stat.S_IFMT(found.st_mode)}"
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_dev} {found.st_ino}"


def _kernel_devices() -> frozenset[int]:
    """Return the devices of /proc, /sys and /dev where they are mounts of their own."""
    devices: set[int] = set()
    root = Path("/").stat().st_dev
    for place in ("/proc", "/sys", "/dev"):
        try:
            devices.add(Path(place).stat().st_dev)
        except OSError:
            continue
    return frozenset(devices - {root})
