"""TLS of a door: certificate, key and the authority that clients' certificates must come from, read again as they change.

A connection keeps what it was opened with; the next one gets the new certificate. Files that cannot be used leave what is
in force in place, and are told once. Knows files and contexts, not doors.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import ssl
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.gateway.tls_settings import TlsSettings

_log: Final = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""Seconds between two looks at the files."""
HANDSHAKE_S: Final = 10.0
"""Seconds that a client may take to agree on keys."""
_Signature = tuple[tuple[int, int, int], ...]


class Pem(NamedTuple):
    """What the files hold."""

    certificate: bytes
    key: bytes
    client_authority: bytes | None


class TlsError(OSError):
    """A certificate that cannot be used; the message names the file."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EINVAL, message)

    def __str__(self) -> str:
        return str(self.strerror)


class Certificates:
    """The certificate of one door. Thread-safe to read; `refresh` is called by one thread."""

    def __init__(self, settings: TlsSettings) -> None:
        """Read the files. Raises TlsError."""
        self._settings: Final = settings
        self._signature = _signature(settings.files)
        self._told: _Signature | None = None
        self._pem, self._context = _read(settings)
        self.context: Final = self._entrance()
        """What a listening socket is given; connections get the newest certificate."""

    @property
    def pem(self) -> Pem:
        """The contents in force."""
        return self._pem

    @property
    def mutual(self) -> bool:
        return bool(self._settings.client_authority)

    def refresh(self) -> bool:
        """Read the files again where they have changed; return whether what is in force did."""
        signature = _signature(self._settings.files)
        if signature in (self._signature, self._told):
            return False
        try:
            pem, context = _read(self._settings)
        except TlsError as error:
            self._told = signature
            _log.error("the TLS certificate in force stays: %s", error)
            return False
        self._signature, self._told = signature, None
        self._pem, self._context = pem, context
        _log.info("TLS certificate %s taken anew", self._settings.certificate)
        return True

    def _entrance(self) -> ssl.SSLContext:
        _, context = _read(self._settings)

        def choose(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._context

        context.sni_callback = choose
        return context


@contextlib.asynccontextmanager
async def refreshing(doors: Iterable[Certificates]) -> AsyncIterator[None]:
    """Look at the files of `doors` every second while this is open."""
    watched = tuple(doors)
    if not watched:
        yield
        return

    async def look() -> None:
        while True:
            await asyncio.sleep(POLL_S)
            for door in watched:
                await asyncio.to_thread(door.refresh)

    task = asyncio.ensure_future(look())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _signature(files: Iterable[str]) -> _Signature:
    found = []
    for name in files:
        try:
            status = Path(name).stat()
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def _read(settings: TlsSettings) -> tuple[Pem, ssl.SSLContext]:
    """Return contents and a context. The context is made of the very files, in one go with the contents."""
    contents = {}
    for name in settings.files:
        try:
            contents[name] = Path(name).read_bytes()
        except OSError as error:
            raise TlsError(f"{name}: {error.strerror or error}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.certificate, settings.key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise TlsError(
            f"{settings.certificate} and {settings.key} are no certificate and its key: {_why(error)}"
        ) from error
    if settings.client_authority:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(settings.client_authority)
        except (ssl.SSLError, OSError) as error:
            raise TlsError(f"{settings.client_authority} holds no certificates: {_why(error)}") from error
    authority = contents.get(settings.client_authority)
    return Pem(contents[settings.certificate], contents[settings.key], authority), context


def _no_password() -> str:
    raise ValueError("the key is encrypted, and there is nobody to ask for the password")


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).replace("_", " ").lower()
