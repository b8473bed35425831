"""One stream of responses from a running server, the same over each door, with every way in which a client leaves it.

Over HTTP it is a generate_stream on a connection of its own, over gRPC a ModelStreamInfer call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc.aio
import numpy as np

from harness import RunningServer
from headrace_protocol._generated import grpc_service_pb2 as pb

Parameters = Mapping[str, str | int | bool | float]
SERVICE = "/inference.GRPCInferenceService/"


class Stream(ABC):
    """A stream under way. `next` gives OUTPUT0 of the next response, None at the end; an error is raised."""

    @abstractmethod
    async def next(self) -> np.ndarray | None: ...

    @abstractmethod
    async def cancel(self) -> None:
        """Go away as a client does that does not want any more."""

    @abstractmethod
    async def cut(self) -> None:
        """Go away as a client does that is killed: the connection is reset."""

    @abstractmethod
    async def half_close(self) -> None:
        """Say that nothing more will be sent."""


class HttpStream(Stream):
    """generate_stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._head = False

    @classmethod
    async def open(cls, server: RunningServer, model: str, array: np.ndarray, parameters: Parameters) -> HttpStream:
        host, port = server.http.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
        body = json.dumps({"INPUT0": array.ravel().tolist(), **parameters}).encode()
        head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return cls(reader, writer)

    async def next(self) -> np.ndarray | None:
        if not self._head:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
            if not head.startswith("HTTP/1.1 200"):
                (length,) = re.findall(r"(?i)content-length: (\d+)", head)
                raise AssertionError(head + (await self._reader.readexactly(int(length))).decode())
            self._head = True
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        chunk = await self._reader.readexactly(size + 2)
        if not size:
            self._writer.close()
            return None
        event: dict[str, Any] = json.loads(chunk.decode().removeprefix("data: "))
        assert "error" not in event, event
        return np.atleast_1d(np.array(event["OUTPUT0"], np.float32))

    async def cancel(self) -> None:
        self._writer.close()

    async def cut(self) -> None:
        self._writer.transport.abort()

    async def half_close(self) -> None:
        self._writer.write_eof()


class GrpcStream(Stream):
    """ModelStreamInfer. One that is to be cut needs a channel of its own, whose link is `link`."""

    def __init__(self, call: grpc.aio.StreamStreamCall, channel: grpc.aio.Channel | None, link: Link | None) -> None:
        self._call = call
        self._channel = channel
        self._link = link

    @classmethod
    async def open(
        cls,
        channel: grpc.aio.Channel,
        model: str,
        array: np.ndarray,
        parameters: Parameters,
        *,
        timeout: float | None = None,
        link: Link | None = None,
    ) -> GrpcStream:
        call = channel.stream_stream(
            f"{SERVICE}ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )(timeout=timeout)
        request = pb.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
        request.inputs.add(name="INPUT0", datatype="FP32", shape=array.shape)
        for key, value in parameters.items():
            kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
            setattr(request.parameters[key], kind, value)
        await call.write(request)
        return cls(call, channel if link else None, link)

    async def next(self) -> np.ndarray | None:
        response = await self._call.read()
        if response is grpc.aio.EOF:
            return None
        assert not response.error_message, response.error_message
        return np.frombuffer(response.infer_response.raw_output_contents[0], np.float32)

    async def cancel(self) -> None:
        self._call.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def cut(self) -> None:
        assert self._link is not None
        assert self._channel is not None
        self._link.cut()
        await self._channel.close()

    async def half_close(self) -> None:
        await self._call.done_writing()


class Link:
    """A TCP relay to a port of this machine, whose connections can be reset: what a killed client leaves."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._pipes: set[asyncio.Task[None]] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, address: str) -> AsyncIterator[tuple[Link, str]]:
        """Relay for the length of a block; yields the link and the address to connect to."""
        link = cls(int(address.rsplit(":", 1)[1]))
        server = await asyncio.start_server(link._accept, "127.0.0.1", 0)
        try:
            yield link, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            link.cut()
            server.close()
            await asyncio.gather(*link._pipes, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, up_writer]
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.create_task(_pipe(source, sink))
            self._pipes.add(task)


async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    sink.close()
