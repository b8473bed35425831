"""The file of a Unix domain socket that a door listens on: whether it may be made, who may use it, its removal.

A socket that a dead server left behind is removed; a file of another kind, or a socket that somebody serves, is an
error. Servers that start at the same time take turns, by a lock on the folder, so that none removes another's socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MAX_PATH: Final = 107
"""Bytes of a path that the system takes."""
MODE: Final = 0o660
"""Owner and group may connect."""

_TURN_S: Final = 5.0
_LOOK_S: Final = 0.01


class UnixSocket:
    """The file at `path`, before, while and after a server listens on it."""

    def __init__(self, path: str) -> None:
        self.path: Final = path
        self._identity: tuple[int, int, int] | None = None

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Within, nothing is in the way and a server may bind; at the end the file is ours and has its mode.

        Raises OSError where the path cannot be had.
        """
        with self._turn():
            self.make_room()
            yield
            Path(self.path).chmod(MODE)
            self.bound()

    def listen(self, backlog: int) -> socket.socket:
        """Return a socket that listens here. Raises OSError where the path cannot be had."""
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            with self.claimed():
                os.fchmod(listener.fileno(), 0o600)  # what the file is made with, whatever the umask
                listener.bind(self.path)
            listener.listen(backlog)
            listener.setblocking(False)
            stack.pop_all()
            return listener

    def make_room(self) -> None:
        """Remove the socket of a server that is no more. Raises OSError where the path cannot be had."""
        if not self.path or len(os.fsencode(self.path)) > MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, f"the path of a socket has 1 to {MAX_PATH} bytes")
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise OSError(errno.EEXIST, "there is a file of this name that is no socket")
        if _served(self.path):
            raise OSError(errno.EADDRINUSE, "a server listens there already")
        Path(self.path).unlink(missing_ok=True)

    def bound(self) -> None:
        """Note that the file is ours now."""
        self._identity = _identity(self.path)

    def remove(self) -> None:
        """Remove the file, unless it is gone or another server's by now."""
        identity, self._identity = self._identity, None
        with contextlib.suppress(OSError), self._turn():
            if identity == _identity(self.path):
                Path(self.path).unlink()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the folder's lock, which other servers wait for, too."""
        folder = os.open(Path(self.path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            end = time.monotonic() + _TURN_S
            while not _locked(folder):
                if time.monotonic() > end:
                    raise OSError(errno.EAGAIN, "another process keeps the folder locked")
                time.sleep(_LOOK_S)
            yield
        finally:
            os.close(folder)  # and with it the lock


def _identity(path: str) -> tuple[int, int, int]:
    """Return what tells a file from one that is made later, perhaps with the same number."""
    status = os.lstat(path)
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _locked(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _served(path: str) -> bool:
    """Return whether somebody listens at `path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except PermissionError:
            return True  # whose it is cannot be found out
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return True  # it listens, with more in its queue than it takes
            raise
    return True
