"""A started HTTP gateway over planes that echo, with a client that decodes nothing by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp

from echo_planes import EchoDataPlane, NotingControlPlane
from headrace.gateway.http.app import HttpGateway, HttpSettings

HEADER_LENGTH = "Inference-Header-Content-Length"
SETTINGS = HttpSettings(
    address="127.0.0.1",
    port=0,
    max_input_size=1 << 19,
    max_body_size=1 << 20,
    body_idle_timeout=0.3,
    header_forward_pattern="^x-",
)
GOOD = {"inputs": [{"name": "INPUT0", "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4.5]}]}


class Door:
    """A started gateway, what lies behind it, and a client that decodes nothing by itself."""

    def __init__(self, settings: HttpSettings, data: EchoDataPlane | None = None) -> None:
        self.data = EchoDataPlane() if data is None else data
        self.control = NotingControlPlane()
        self.gateway = HttpGateway(self.data, self.control, settings)
        self.port = 0
        self.client: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict, bytes]:
        if isinstance(body, (dict, list)):
            body = json.dumps(body).encode()
        fields = {"Accept-Encoding": "identity"} | {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.request(method, path, data=body, headers=fields) as response:
            return response.status, dict(response.headers), await response.read()

    async def infer(self, body: object, model: str = "echo", **headers: str) -> tuple[int, dict, bytes]:
        return await self.ask("POST", f"/v2/models/{model}/infer", body, **headers)

    async def raw(self, *parts: bytes) -> bytes:
        """Send bytes as they are; return everything until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()

    async def is_well(self) -> bool:
        return (await self.infer(GOOD))[0] == 200


@contextlib.asynccontextmanager
async def opened(settings: HttpSettings = SETTINGS) -> AsyncIterator[Door]:
    """Start a door; stop it when the block ends."""
    door = Door(settings)
    door.port = await door.gateway.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{door.port}", auto_decompress=False) as door.client:
            yield door
    finally:
        await door.gateway.stop(1)


def error_of(body: bytes) -> str:
    decoded = json.loads(body)
    assert list(decoded) == ["error"]
    return decoded["error"]
