"""A raw connection to a started HTTP gateway over planes that echo, for tests of what happens on it over time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from echo_planes import EchoDataPlane, NotingControlPlane
from headrace.gateway.http.app import HttpGateway, HttpSettings

SETTINGS = HttpSettings(address="127.0.0.1", port=0)
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [2], "datatype": "INT8", "data": [1, 2]}]}).encode()
READY = b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = READY.replace(b"Host: x", b"Connection: close")
SECONDS = 10


def infer(*headers: str, model: str = "echo", body: bytes = BODY) -> bytes:
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def generate(
    *headers: str, model: str = "stream", stream: bool = True, version: str = "1.1", **members: object
) -> bytes:
    """Return a request whose answer the test sends; `id` is what the data plane knows it by."""
    body = json.dumps({"id": "1", "text": "x"} | members).encode()
    path = f"/v2/models/{model}/generate{'_stream' if stream else ''}"
    lines = [f"POST {path} HTTP/{version}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Client:
    """A raw connection to the door."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(SECONDS):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            status, *lines = head.rstrip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            return int(status.split()[1]), headers, await self.reader.readexactly(int(headers["Content-Length"]))

    async def head(self) -> tuple[int, dict[str, str]]:
        """Return status and headers of an answer that comes in chunks."""
        async with asyncio.timeout(SECONDS):
            status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
            return int(status.split()[1]), dict(line.split(": ", 1) for line in lines)

    async def chunk(self) -> bytes:
        """Return the next chunk, empty at the end of the answer."""
        async with asyncio.timeout(SECONDS):
            size = int((await self.reader.readuntil(b"\r\n"))[:-2], 16)
            piece = await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
            return piece

    async def event(self) -> dict:
        """Return the next event of a stream of them."""
        piece = await self.chunk()
        assert piece.startswith(b"data: ")
        assert piece.endswith(b"\n\n")
        return json.loads(piece[6:])

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), SECONDS)


class Door:
    def __init__(self, settings: HttpSettings) -> None:
        self.data = EchoDataPlane()
        self.gateway = HttpGateway(self.data, NotingControlPlane(), settings)
        self.port = 0
        self.clients: list[Client] = []

    async def connect(self, **options: int) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, **options))
        self.clients.append(client)
        return client


Scenario = Callable[[Door], Awaitable[None]]
OnDoor = Callable[..., None]


async def play(scenario: Scenario, settings: dict[str, Any]) -> None:
    """Run a scenario with a door of its own."""
    door = Door(replace(SETTINGS, **settings))
    door.port = await door.gateway.start()
    try:
        async with asyncio.timeout(60):
            await scenario(door)
    finally:
        for client in door.clients:
            client.writer.close()
        await door.gateway.stop(1)
