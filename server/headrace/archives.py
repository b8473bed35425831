"""Unpacks archives that nobody vouches for: what comes out lies below one folder, is of known kinds, and has a bound.

Regular files and folders alone; of tar archives links too where they are asked for, as long as none leads out of the
folder. Nothing is ever written through a link. Knows nothing of what the archives are for.
"""

from __future__ import annotations

import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final, NoReturn, Protocol, Self

_CHUNK: Final = 1 << 20
_MAX_NAME: Final = 4096
_MAX_TAR_EXTENSION: Final = 1 << 20
_TAR_EXTENSIONS: Final = frozenset(
    (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
)
"""Headers whose contents tarfile reads into memory."""
_EXECUTABLE: Final = 0o111
_NOT_OPENED: Final = (OSError, zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, RuntimeError)
"""What the modules of the standard library raise for a file that is no archive, or a broken one."""


class ArchiveError(Exception):
    """An archive that cannot be unpacked; the text names the member and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may come out of an archive."""

    members: int = 100_000
    nbytes: int = 64 << 30


PLENTY: Final = Limits()


class _Readable(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


class _TarHeader(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.type in _TAR_EXTENSIONS and header.size > _MAX_TAR_EXTENSION:
            raise tarfile.ReadError(f"a header has {header.size} bytes")
        return header


class _Target:
    """The folder that an archive is unpacked into, which is empty at first. Counts what it takes."""

    def __init__(self, root: Path, limits: Limits) -> None:
        self.root: Final = root
        self._limits: Final = limits
        self._members = 0
        self._nbytes = 0
        self._folders: set[PurePosixPath] = {PurePosixPath()}
        """Folders made here: none of them is a link."""
        self.links: list[tuple[str, Path]] = []

    def place(self, name: str) -> tuple[PurePosixPath, Path]:
        """Return where a member goes; its parents are there. Raises ArchiveError for a name that leads elsewhere."""
        self._members += 1
        if self._members > self._limits.members:
            raise ArchiveError(f"has more than {self._limits.members} members")
        path = member_path(name)
        for parent in reversed(path.parents):
            self.folder(name, parent)
        return path, self.root / path

    def folder(self, name: str, path: PurePosixPath) -> None:
        """Make a folder, unless it was made before."""
        if path in self._folders:
            return
        try:
            (self.root / path).mkdir()
        except FileExistsError:
            raise ArchiveError(f"member {name!r} lies below {str(path)!r}, which is no folder") from None
        self._folders.add(path)

    def file(self, name: str, source: _Readable, mode: int) -> None:
        """Write a file, which must be new. Raises ArchiveError where the archive grows beyond its limit."""
        _, place = self.place(name)
        try:
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            raise ArchiveError(f"member {name!r} is there twice") from None
        with os.fdopen(descriptor, "wb") as target:
            while data := source.read(_CHUNK):
                self._nbytes += len(data)
                if self._nbytes > self._limits.nbytes:
                    raise ArchiveError(f"has more than {self._limits.nbytes} bytes when it is unpacked")
                target.write(data)
            if mode & _EXECUTABLE:
                os.fchmod(target.fileno(), 0o755)

    def symlink(self, name: str, leads_to: str) -> None:
        """Make a link that does not lead out."""
        path, place = self.place(name)
        if leads_to.startswith("/") or "\0" in leads_to or _is_outside(path.parent, leads_to):
            raise ArchiveError(f"member {name!r} is a link to {leads_to!r}, outside of the archive")
        try:
            place.symlink_to(leads_to)
        except FileExistsError:
            raise ArchiveError(f"member {name!r} is there twice") from None
        self.links.append((name, place))

    def hardlink(self, name: str, leads_to: str) -> None:
        """Make another name for a file that was unpacked before."""
        _, place = self.place(name)
        source = self.root / member_path(leads_to)
        if any(parent not in self._folders for parent in member_path(leads_to).parents) or not _is_file(source):
            raise ArchiveError(f"member {name!r} is a link to {leads_to!r}, which is no file of the archive")
        try:
            os.link(source, place, follow_symlinks=False)
        except FileExistsError:
            raise ArchiveError(f"member {name!r} is there twice") from None

    def check_links(self) -> None:
        """Raise ArchiveError where a link leads out after all, over other links."""
        root = os.path.realpath(self.root)
        for name, place in self.links:
            real = os.path.realpath(place)
            if real != root and not real.startswith(root + os.sep):
                raise ArchiveError(f"member {name!r} is a link that leads outside of the archive")


def unpack(archive: Path, target: Path, limits: Limits = PLENTY, *, links: bool = False) -> None:
    """Unpack a zip or tar archive (of any compression that Python reads) into the folder `target`, which is empty.

    Raises ArchiveError, and leaves what it has unpacked until then to the caller. Times and owners are not taken over;
    files are readable for all, and executable where the archive says so for anybody.
    """
    into = _Target(target, limits)
    with open_regular(archive) as file, _explained():
        if zipfile.is_zipfile(file):
            file.seek(0)
            _unpack_zip(file, into)
        else:
            file.seek(0)
            _unpack_tar(file, into, links=links)
    into.check_links()


def member_path(name: str) -> PurePosixPath:
    """Return a member's path in the archive. Raises ArchiveError where it is absolute, leads up, or is no path."""
    path = PurePosixPath(name)
    if not path.parts or len(name) > _MAX_NAME or not name.isprintable() or "\\" in name:
        raise ArchiveError(f"has a member with the name {name[:100]!r}, which is not one of a file")
    if path.is_absolute() or ".." in path.parts:
        raise ArchiveError(f"member {name!r} lies outside of the archive")
    return path


@contextmanager
def open_regular(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file for a block, without waiting where it is a pipe. Raises ArchiveError where it cannot be."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ArchiveError(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ArchiveError(f"cannot be read: {error}") from None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ArchiveError("is not a regular file")
        yield file


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except _NOT_OPENED as error:
        raise ArchiveError(f"cannot be unpacked: {error}") from error


def _unpack_zip(file: IO[bytes], into: _Target) -> None:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            name = info.filename
            mode = info.external_attr >> 16
            kind = stat.S_IFMT(mode)
            if info.is_dir():
                into.folder(name, into.place(name)[0])
            elif kind not in (0, stat.S_IFREG):
                _refuse_kind(name)
            else:
                with archive.open(info) as source:
                    into.file(name, source, mode)


def _unpack_tar(file: IO[bytes], into: _Target, *, links: bool) -> None:
    with tarfile.open(fileobj=file, mode="r|*", tarinfo=_TarHeader) as archive:
        for member in archive:
            name = member.name
            if member.isdir():
                if PurePosixPath(name).parts:  # "./" is the archive itself
                    into.folder(name, into.place(name)[0])
            elif member.isreg() and not member.issparse():
                source = archive.extractfile(member)
                assert source is not None, "a regular file has contents"
                into.file(name, source, member.mode)
            elif links and member.issym():
                into.symlink(name, member.linkname)
            elif links and member.islnk():
                into.hardlink(name, member.linkname)
            else:
                _refuse_kind(name)


def _refuse_kind(name: str) -> NoReturn:
    raise ArchiveError(f"member {name!r} is neither a file nor a folder")


def _is_outside(folder: PurePosixPath, leads_to: str) -> bool:
    """Return whether a path, followed from `folder` without looking at links, leaves the archive or is its root."""
    depth: list[str] = list(folder.parts)
    for part in PurePosixPath(leads_to).parts:
        if part != "..":
            depth.append(part)
        elif not depth:
            return True
        else:
            depth.pop()
    return not depth


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(os.lstat(path).st_mode) if os.path.lexists(path) else False
