"""Where uploaded model files lie until nothing uses them: a folder of this process alone, of bounded size.

What a file may be called is checked before (overrides.py); here it is written, all of a call's files or none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from headrace.repository.overrides import OverrideRequest
from headrace.repository.sources import LoadOverride
from headrace_protocol.errors import invalid, unavailable

_STORE_PREFIX: Final = "headrace-uploads-"
_LOCK_NAME: Final = "lock"
_BYTES_A_FILE: Final = 4096
"""What a file takes beside its content: the rest of its last block, an entry in a folder."""
_TRIES: Final = 100


class Upload:
    """The files of one load call. Implements sources.TemporaryFiles."""

    def __init__(self, store: UploadStore, directory: Path, nbytes: int) -> None:
        self.directory = directory
        self._store = store
        self._nbytes = nbytes

    def remove(self) -> None:
        """Remove the files and give back the room they took. Blocking, idempotent."""
        _remove_tree(self.directory)
        nbytes, self._nbytes = self._nbytes, 0
        self._store._give_back(nbytes)


class UploadStore:
    """Owns the folder that uploaded files are written under; it comes with the first upload and goes at `close`.

    A locked file in it says that its process lives; what a killed process left is removed by the next one that starts.
    """

    def __init__(self, limit_bytes: int, parent: Path | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._parent = parent if parent is not None else Path(tempfile.gettempdir())
        self._root: Path | None = None
        self._lock = -1
        self._closed = False
        self._used = 0
        self._writing = 0
        self._state = threading.Condition()
        """Held to read or change the fields above: uploads are written, and removed, by several threads."""

    @property
    def used(self) -> int:
        """Bytes that uploads take, those being written included."""
        return self._used

    def write(self, name: str, request: OverrideRequest) -> LoadOverride:
        """Write the request's files, all or none, into a model folder of their own. Blocking.

        Raises INVALID_ARG where they can never fit, UNAVAILABLE where there is no room for them now.
        """
        nbytes = sum(len(content) + _BYTES_A_FILE for content in request.files.values())
        with self._room(nbytes):
            try:
                upload = Upload(self, Path(tempfile.mkdtemp(dir=self._open())), nbytes)
                directory = upload.directory / name
                try:
                    _write_files(directory, request)
                except BaseException:
                    _remove_tree(upload.directory)
                    raise
            except OSError as error:
                reason = error.strerror or type(error).__name__
                raise unavailable(f"the uploaded files of model {name!r} cannot be stored: {reason}") from None
        return LoadOverride(request.config, directory, upload)

    def remove_leftovers(self) -> None:
        """Remove what processes of this user left that were killed. Blocking; called at start."""
        for root in self._parent.glob(f"{_STORE_PREFIX}*"):
            try:
                if root.is_symlink() or root.stat().st_uid != os.getuid():
                    continue
                lock = os.open(root / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                with contextlib.suppress(OSError):  # killed before it had made its lock, or about to make it
                    root.rmdir()
                continue
            except OSError:
                continue
            with contextlib.closing(os.fdopen(lock, "rb")), contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_tree(root)

    def close(self) -> None:
        """Remove everything and take no more; waits for files that are being written. Blocking, idempotent."""
        with self._state:
            self._closed = True
            self._state.wait_for(lambda: not self._writing)
            root, self._root = self._root, None
            if root is not None:
                _remove_tree(root)
                os.close(self._lock)

    @contextlib.contextmanager
    def _room(self, nbytes: int) -> Iterator[None]:
        """Take room for a block that writes; it stays taken unless the block fails."""
        limit = self._limit_bytes
        if nbytes > limit:
            raise invalid(f"the uploaded files take {nbytes} bytes, --model-upload-byte-size allows {limit} in all")
        with self._state:
            if self._closed:
                raise unavailable("the server is stopping and takes no files")
            if nbytes > limit - self._used:
                raise unavailable(
                    f"the uploaded files take {nbytes} bytes, and of --model-upload-byte-size={limit} no more than "
                    f"{limit - self._used} are free: unload models that were uploaded"
                )
            self._used += nbytes
            self._writing += 1
        try:
            yield
        except BaseException:
            self._give_back(nbytes)
            raise
        finally:
            with self._state:
                self._writing -= 1
                self._state.notify_all()

    def _give_back(self, nbytes: int) -> None:
        with self._state:
            self._used -= nbytes

    def _open(self) -> Path:
        with self._state:
            for _ in range(_TRIES):
                if self._root is None:
                    self._make_root()
            assert self._root is not None, "another process keeps removing our folder"
            return self._root

    def _make_root(self) -> None:
        root = Path(tempfile.mkdtemp(prefix=_STORE_PREFIX, dir=self._parent))
        try:
            lock = os.open(root / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # a server that starts took it for a leftover
            return
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink == 0:
            os.close(lock)
            return
        self._root, self._lock = root, lock


def _write_files(directory: Path, request: OverrideRequest) -> None:
    directory.mkdir(mode=0o700)
    for path, content in request.files.items():
        target = directory / path
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with target.open("xb") as file:
            file.write(content)


def _remove_tree(directory: Path) -> None:
    """Remove a folder and all in it, as far as that goes; links are removed, not followed."""
    shutil.rmtree(directory, ignore_errors=True)
