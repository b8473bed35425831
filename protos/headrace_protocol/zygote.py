"""Messages between the server and a zygote: the process that forks backend processes of one kind.

One SEQPACKET datagram a message, MessagePack. The zygote says Hello once its imports are done; after that the server
sends Fork (with one descriptor, the child's end of its channel) and the zygote tells Forked and, later, Exited.
"""

from __future__ import annotations

import msgspec

MAX_MESSAGE = 4096
"""Bytes; every message is far smaller."""


class Hello(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """The zygote is ready to fork, or cannot serve this backend: `refusal` says why ("" = ready)."""

    refusal: str = ""


class Fork(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Fork a process that serves the channel whose descriptor comes with this message."""

    serial: int


class Forked(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """The child of Fork `serial` runs as `pid`; pid 0 = the fork failed for the reason `error`."""

    serial: int
    pid: int
    error: str = ""


class Exited(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """A child ended and was reaped. `status` as subprocess gives it: exit code, or minus the signal."""

    pid: int
    status: int


ToZygote = Fork
FromZygote = Hello | Forked | Exited
