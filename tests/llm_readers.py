"""Clients that read streams of a scripted language model over every door, each at its own pace, and what hung where one does not end.

The model says as many characters as its prompt asks for, which of them at which place is known, so that one that is lost, told
twice or out of order is seen. A client that reads slowly over HTTP takes small segments into a small buffer: the kernel
keeps little for it, and the server has to.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from figures import wait_until
from harness import RunningServer
from headrace_protocol._generated import grpc_service_pb2 as pb
from llm_doors import figure
from scripted_engine import script

MODEL = "talker"
DOORS = ("chat", "completion", "generate_stream", "grpc")
WAYS = ("fast", "slow", "stops", "late", "leaves")
LIMIT_S = 60.0
"""No round takes as long, on a busy machine too; whoever hangs would do so for ever."""
_SAYS = "abcdefghij"
_SEGMENT = 536
_BUFFER = 4096
_LENGTH_BYTES = 4
"""Of each string in a tensor."""


@dataclass(frozen=True)
class Plan:
    """What one client does."""

    door: str
    way: str
    tokens: int
    """A multiple of ten."""
    per_step: int
    at: int
    """How much of the text it reads before it stops or leaves."""
    pause_s: float

    @classmethod
    def of(cls, chance: random.Random, tokens: int, per_step: int, ways: Sequence[str] = WAYS) -> Plan:
        door, way = chance.choice(DOORS), chance.choice(ways)
        return cls(door, way, tokens, per_step, chance.randrange(tokens), chance.random() / 2)

    @property
    def text(self) -> str:
        return _SAYS * (self.tokens // len(_SAYS))

    @property
    def prompt(self) -> str:
        return script(say=_SAYS, repeat=self.tokens // len(_SAYS), per_step=self.per_step)


class Follower:
    """One client: the plan, and how far it is."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pieces = self.length = 0
        self.ended = False

    def __str__(self) -> str:
        return f"{self.plan}: {self.length} characters in {self.pieces} pieces{', and its end' if self.ended else ''}"

    async def follow(self, pieces: AsyncGenerator[str, None], late: asyncio.Event) -> None:
        """Read in the way that is planned; who is late begins at `late`. Raises AssertionError where the text is another."""
        plan, text, stopped = self.plan, "", False
        async with contextlib.aclosing(pieces):
            await anext(pieces)
            if plan.way == "late":
                await late.wait()
            async for piece in pieces:
                text += piece
                self.pieces += 1
                self.length = len(text)
                if plan.way == "slow" and not self.pieces % 32:
                    await asyncio.sleep(0.01)
                if plan.way == "stops" and not stopped and self.length > plan.at:
                    stopped = True
                    await asyncio.sleep(plan.pause_s)
                if plan.way == "leaves" and self.length > plan.at:
                    return
        self.ended = True
        assert text == plan.text, f"{plan}: {len(text)} characters, {text[-40:]!r}"


class Readers:
    """Opens the streams of one server. HTTP connections whose answer was read to its end are used again."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._kept: dict[bool, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {False: [], True: []}

    async def run(self, plans: Sequence[Plan]) -> list[Follower]:
        """Have all of them read at once; those who are late begin once the engine has said everything.

        Raises AssertionError where one does not end, with what the processes do then.
        """
        followers, late = [Follower(plan) for plan in plans], asyncio.Event()
        wanted = self._said() + sum(plan.tokens for plan in plans if plan.way != "leaves")
        async with grpc.aio.insecure_channel(self._server.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            tasks = [asyncio.create_task(each.follow(self._opened(each.plan, channel), late)) for each in followers]
            said = asyncio.create_task(self._tell_late(late, wanted))
            _, hung = await asyncio.wait(tasks, timeout=LIMIT_S)
            report = await asyncio.to_thread(self._report) if hung else ""
            for task in hung:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            said.cancel()
        waiting = [str(each) for each, task in zip(followers, tasks, strict=True) if task in hung]
        assert not waiting, "\n".join(["these streams do not end:", *waiting, report])
        failed = [outcome for outcome in outcomes if outcome is not None]
        assert not failed, failed
        return followers

    def close(self) -> None:
        """Close the connections that are kept."""
        for _, writer in (*self._kept[False], *self._kept[True]):
            writer.close()

    def _opened(self, plan: Plan, channel: grpc.aio.Channel) -> AsyncGenerator[str, None]:
        """Return the pieces of an answer; before the first comes an empty one, once the request is sent."""
        return self._over_grpc(plan, channel) if plan.door == "grpc" else self._over_http(plan)

    # --- the doors --------------------------------------------------------------------------------------------------

    async def _over_http(self, plan: Plan) -> AsyncGenerator[str, None]:
        small = plan.way != "fast"
        reader, writer = self._kept[small].pop() if self._kept[small] else await self._connected(small=small)
        whole = False
        try:
            path, body = _request(plan)
            head = (
                f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            )
            writer.write(head.encode() + b"\r\n" + body)
            yield ""
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            done = plan.door == "generate_stream"
            while size := int(await reader.readuntil(b"\r\n"), 16):
                chunk = await reader.readexactly(size + 2)
                for event in chunk[:-2].decode().removesuffix("\n\n").split("\n\n"):
                    assert event.startswith("data: "), event
                    if event == "data: [DONE]":
                        done = True
                    elif text := _text_of(json.loads(event[6:])):
                        yield text
            await reader.readexactly(2)
            assert done, f"{plan}: the answer ended without the mark of the end"
            whole = True
        finally:
            if whole:
                self._kept[small].append((reader, writer))
            else:
                writer.close()

    async def _connected(self, *, small: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setblocking(False)
        if small:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        host, port = self._server.http.rsplit(":", 1)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        return await asyncio.open_connection(sock=connection, limit=_BUFFER)

    async def _over_grpc(self, plan: Plan, channel: grpc.aio.Channel) -> AsyncGenerator[str, None]:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )()
        given = {
            "text_input": plan.prompt.encode(),
            "sampling_parameters": json.dumps({"max_tokens": plan.tokens + 1}).encode(),
        }
        request = pb.ModelInferRequest(model_name=MODEL)
        for name, value in given.items():
            request.inputs.add(name=name, datatype="BYTES", shape=[1])
            request.raw_input_contents.append(len(value).to_bytes(_LENGTH_BYTES, "little") + value)
        request.inputs.add(name="stream", datatype="BOOL", shape=[1])
        request.raw_input_contents.append(b"\1")
        request.outputs.add(name="text_output")
        try:
            await call.write(request)
            await call.done_writing()
            yield ""
            while (response := await call.read()) is not grpc.aio.EOF:
                assert not response.error_message, response.error_message
                for content in response.infer_response.raw_output_contents:
                    yield content[_LENGTH_BYTES:].decode()
        finally:
            call.cancel()

    # --- what hung, and what is left --------------------------------------------------------------------------------

    def check_nothing_left(self) -> None:
        """Raise AssertionError where the server or the engine is still busy with somebody who has gone."""
        with contextlib.suppress(AssertionError):
            wait_until("nothing is left", lambda: not any(self._left().values()), 20)
        left = self._left()
        assert not any(left.values()), f"left behind: {left}\n{self._report()}"

    async def _tell_late(self, late: asyncio.Event, wanted: float) -> None:
        """Set `late` once the engine has said `wanted` tokens, which it does whether anybody reads or not."""
        await asyncio.to_thread(wait_until, "all is said", lambda: self._said() >= wanted, LIMIT_S)
        late.set()

    def _said(self) -> float:
        return figure(self._server, "headrace_llm_generation_tokens_total", MODEL)

    def _left(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://{self._server.http}/load", timeout=10) as answer:
            left = {"server_load": float(json.load(answer)["server_load"])}
        names = ("headrace_llm_num_requests_running", "headrace_llm_num_requests_waiting")
        return left | {name: figure(self._server, name, MODEL) for name in names}

    def _report(self) -> str:
        """Return what there is to say of processes that hang: their stacks, where py-spy is there, and the log."""
        parts = [str(self._left())]
        tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
        for process in (self._server.process, *self._server.backends()) if tool else ():
            found = subprocess.run(
                [tool, "dump", "--pid", str(process.pid)], capture_output=True, text=True, timeout=30, check=False
            )
            parts.append(found.stdout + found.stderr)
        return "\n".join([*parts, self._server.log()])


def _request(plan: Plan) -> tuple[str, bytes]:
    """Return path and body."""
    sampling = {"max_tokens": plan.tokens + 1}
    body: dict[str, Any] = {"model": MODEL, "stream": True, **sampling}
    if plan.door == "chat":
        return "/v1/chat/completions", _json({**body, "messages": [{"role": "user", "content": plan.prompt}]})
    if plan.door == "completion":
        return "/v1/completions", _json({**body, "prompt": plan.prompt})
    asked = {"text_input": plan.prompt, "stream": True, "sampling_parameters": json.dumps(sampling)}
    return f"/v2/models/{MODEL}/generate_stream", _json(asked)


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


def _text_of(event: dict[str, Any]) -> str:
    """Return what an event of any of the doors says."""
    assert "error" not in event, event
    if "text_output" in event:
        return str(event["text_output"])
    (choice,) = event["choices"]
    return str(choice["delta"].get("content") or "") if "delta" in choice else str(choice["text"])
