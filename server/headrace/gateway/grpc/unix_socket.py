"""The file of a Unix domain socket that a server listens on: whether it may be made, who may use it, its removal.

Both gRPC libraries replace whatever file is in the way; here a file that is no socket, or one that somebody serves, is
an error, and one that a killed server has left is removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from typing import Final

from headrace.gateway.grpc.settings import GrpcSettings

MAX_PATH: Final = 107
"""Bytes of a path that the system takes."""
_MASK: Final = 0o117
"""Owner and group may connect: the file's mode becomes 0660."""


class UnixSocket:
    """The file at `path`, before, while and after a server listens on it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._identity: tuple[int, int] | None = None

    def make_room(self) -> None:
        """Remove the file of a server that is no more. Raises OSError where the path cannot be had."""
        path = self._path
        if not path or len(os.fsencode(path)) > MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, f"the path of a socket has 1 to {MAX_PATH} bytes")
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise OSError(errno.EEXIST, "there is a file of this name that is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            with contextlib.suppress(FileNotFoundError):
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)  # noqa: PTH108 - nobody listens any more
                    return
                raise OSError(errno.EADDRINUSE, "Address already in use")

    def bound(self) -> None:
        """Note that the file is ours now."""
        status = os.lstat(self._path)
        self._identity = status.st_dev, status.st_ino

    def remove(self) -> None:
        """Remove the file, unless it is gone or another server's by now."""
        identity, self._identity = self._identity, None
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(self._path)
            if identity == (status.st_dev, status.st_ino):
                os.unlink(self._path)  # noqa: PTH108 - a path as text, as all here


@contextlib.contextmanager
def restricted_socket(settings: GrpcSettings) -> Iterator[None]:
    """Within, a socket's file is made for owner and group alone. Not to be awaited in: the mask is the process's."""
    if settings.unix_path is None:
        yield
        return
    mask = os.umask(_MASK)
    try:
        yield
    finally:
        os.umask(mask)
