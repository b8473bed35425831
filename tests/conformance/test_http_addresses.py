"""Where the HTTP door listens: Unix domain sockets, IPv6, both IPs at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from echo_planes import EchoDataPlane, NotingControlPlane
from headrace.gateway.http.app import HttpGateway, HttpSettings

READY = b"GET /v2/health/ready HTTP/1.1\r\nConnection: close\r\n\r\n"
INTERFACES = Path("/proc/net/if_inet6")
needs_ipv6 = pytest.mark.skipif(
    not (INTERFACES.exists() and " lo" in INTERFACES.read_text()), reason="this machine has no IPv6 loopback"
)


def gateway(address: str) -> HttpGateway:
    return HttpGateway(EchoDataPlane(), NotingControlPlane(), HttpSettings(address=address, port=0))


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(READY)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "http.sock")


@pytest_asyncio.fixture
async def on_socket(path) -> AsyncIterator[HttpGateway]:
    door = gateway(f"unix:{path}")
    assert await door.start() == 0
    yield door
    await door.stop(1)


async def test_a_unix_socket_is_served_and_removed_at_the_stop(on_socket, path):
    assert (await answer(*await asyncio.open_unix_connection(path))).startswith(b"HTTP/1.1 200 OK")
    await on_socket.stop(1)
    with pytest.raises(FileNotFoundError):
        await asyncio.open_unix_connection(path)


async def test_a_socket_that_is_served_is_an_error_that_names_it(on_socket, path):
    with pytest.raises(OSError, match=f"cannot serve HTTP on unix:{path}: .*listens there already"):
        await gateway(f"unix:{path}").start()
    assert (await answer(*await asyncio.open_unix_connection(path))).startswith(b"HTTP/1.1 200 OK")


async def test_what_a_killed_server_left_is_replaced(path):
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(path)
    dead.close()
    door = gateway(f"unix://{path}")
    await door.start()
    assert (await answer(*await asyncio.open_unix_connection(path))).startswith(b"HTTP/1.1 200 OK")
    await door.stop(1)


@needs_ipv6
@pytest.mark.parametrize("address", ["::1", "[::1]"])
async def test_ipv6_is_served(address):
    door = gateway(address)
    port = await door.start()
    assert (await answer(*await asyncio.open_connection("::1", port))).startswith(b"HTTP/1.1 200 OK")
    await door.stop(1)


@needs_ipv6
@pytest.mark.parametrize("address", ["::", "[::]"])
async def test_the_unspecified_ipv6_address_takes_ipv4_too(address):
    door = gateway(address)
    port = await door.start()
    for host in ("::1", "127.0.0.1"):
        assert (await answer(*await asyncio.open_connection(host, port))).startswith(b"HTTP/1.1 200 OK")
    await door.stop(1)


@needs_ipv6
async def test_a_taken_port_is_named_with_its_address():
    door = gateway("::")
    port = await door.start()
    second = HttpGateway(EchoDataPlane(), NotingControlPlane(), HttpSettings(address="::", port=port))
    with pytest.raises(OSError, match=rf"cannot serve HTTP on \[::\]:{port}"):
        await second.start()
    await door.stop(1)


async def test_an_address_that_is_not_of_this_machine_is_an_error():
    with pytest.raises(OSError, match="cannot serve HTTP on 192.0.2.1:0"):
        await gateway("192.0.2.1").start()
