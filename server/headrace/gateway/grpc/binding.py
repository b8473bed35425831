"""What surrounds the moment in which a transport binds: both gRPC libraries make the file of a Unix socket themselves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from headrace.gateway.unix_socket import MODE, UnixSocket

_MASK: Final = 0o777 & ~MODE


@contextlib.contextmanager
def claimed(file: UnixSocket | None) -> Iterator[None]:
    """Within, a transport may bind to `file`, which is made for owner and group alone; None = to a port.

    Not to be awaited in: the mask of new files is the whole process's. Raises OSError where the file cannot be had.
    """
    if file is None:
        yield
        return
    with file.claimed():
        mask = os.umask(_MASK)
        try:
            yield
        finally:
            os.umask(mask)
