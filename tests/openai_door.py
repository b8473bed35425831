"""An HTTP door over language models whose every event the test sends, and what its answers are made of.

`chatty` is a model with an adapter `poet` and an alias `talker`; `embedder` makes no text; `echo` is no language model;
`loading` is not ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from echo_planes import EchoDataPlane
from headrace.gateway.http.settings import HttpSettings
from headrace.planes import Cancellable, Outcome
from headrace.types import LATEST, InferenceRequest, InferenceResponse, OutputTensor
from headrace_protocol import datatype as dt
from headrace_protocol._generated import model_config_pb2
from headrace_protocol.errors import InferError, not_found
from headrace_protocol.generation import (
    CALL_DECODER,
    CALL_INPUT,
    CARD_PARAMETER,
    ENCODER,
    EVENT_OUTPUT,
    AdapterCard,
    ChoiceDelta,
    GenerationCall,
    GenerationEvent,
    ModelCard,
    PromptTold,
    TokenChance,
    TokenLogprob,
)
from http_door import SETTINGS, Door

CARDS = {
    "chatty": ModelCard(
        max_model_len=256,
        vocab_size=1000,
        has_chat_template=True,
        adapters=(AdapterCard("poet", 8),),
        aliases=("talker", "org/talker"),
        sampling_defaults={"top_k": 20},
        tool_format="hermes",
    ),
    "embedder": ModelCard(max_model_len=64, vocab_size=100, tasks=("embed", "tokenize"), embedding_width=4),
}


class Call:
    """A call that reached the model; the test answers it."""

    def __init__(self, request: InferenceRequest, on_outcome: Callable[[Outcome], None]) -> None:
        self.request = request
        (tensor,) = request.inputs
        assert (tensor.name, tensor.datatype, tensor.shape) == (CALL_INPUT, dt.BYTES, (1,))
        self.call: GenerationCall = CALL_DECODER.decode(bytes(tensor.data)[4:])
        self.cancelled = asyncio.Event()
        self.unread = 0
        self._on_outcome = on_outcome

    def tell(self, *choices: ChoiceDelta, prompts: tuple[PromptTold, ...] = (), final: bool = False) -> None:
        """Send one event."""
        self.respond(GenerationEvent(prompts=prompts, choices=choices), final=final)

    def say(self, *texts: str, finish: str = "stop", prompt_tokens: int = 3, index: int = 0) -> None:
        """Send a whole answer of one choice, an event for each text."""
        prompts = (PromptTold(prompt_tokens),)
        for number, text in enumerate(texts):
            last = number == len(texts) - 1
            delta = ChoiceDelta(index, text, num_tokens=number + 1, finish_reason=finish if last else None)  # type: ignore[arg-type]
            self.tell(delta, prompts=prompts, final=last)
            prompts = ()

    def respond(self, event: GenerationEvent | None, *, final: bool = False) -> None:
        """Send a response; without an event it only ends the call."""
        outputs = []
        if event is not None:
            payload = ENCODER.encode(event)
            outputs.append(OutputTensor(EVENT_OUTPUT, dt.BYTES, (1,), len(payload).to_bytes(4, "little") + payload))
        response = InferenceResponse(self.request.model_name, 1, outputs, release=self._released)
        response.final = final or event is None
        response.empty = event is None
        self.unread += 1
        self._on_outcome(response)

    def fail(self, error: InferError) -> None:
        """Send a failure, the last outcome."""
        self._on_outcome(error)

    def cancel(self) -> None:
        self.cancelled.set()

    def _released(self) -> None:
        self.unread -= 1


class LanguagePlane(EchoDataPlane):
    """A planes.DataPlane with language models in it."""

    def __init__(self) -> None:
        super().__init__()
        self.cards = dict(CARDS)
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self.refusal: InferError | None = None

    def models(self) -> list[tuple[str, int]]:
        return [("echo", 1), *((name, 1) for name in sorted(self.cards))]

    def model_config(self, name: str, version: int) -> model_config_pb2.ModelConfig:
        if name not in self.cards:
            return super().model_config(name, version)
        if version not in (LATEST, 1):
            raise not_found(f"model '{name}' has no version {version}")
        card = ENCODER.encode(self.cards[name]).decode()
        parameters = {CARD_PARAMETER: model_config_pb2.ModelParameter(string_value=card)}
        return model_config_pb2.ModelConfig(name=name, backend="llm", parameters=parameters)

    def stream(self, request: InferenceRequest, on_outcome: Callable[[Outcome], None]) -> Cancellable:
        if request.model_name not in self.cards:
            return super().stream(request, on_outcome)
        if self.refusal is not None:
            raise self.refusal
        call = Call(request, on_outcome)
        self.calls.put_nowait(call)
        return call


class OpenAIDoor(Door):
    """A started door and a client of it."""

    data: LanguagePlane

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, str], Any]:
        """Ask for JSON; return status, headers and the decoded answer."""
        status, fields, answer = await self.ask("POST", path, body, Content_Type="application/json", **headers)
        return status, {name.lower(): value for name, value in fields.items()}, json.loads(answer)

    async def call(self) -> Call:
        """Return the next call that reached a model."""
        return await asyncio.wait_for(self.data.calls.get(), 5)

    async def asked(self, path: str, body: dict[str, Any], **headers: str) -> tuple[asyncio.Task[Any], Call]:
        """Ask; return the task of the answer and the call behind it."""
        task = asyncio.create_task(self.post(path, body, **headers))
        return task, await self.call()

    async def asked_raw(self, path: str, body: dict[str, Any]) -> tuple[asyncio.Task[Any], Call]:
        """Ask; return the task of the answer as bytes, and the call behind it."""
        task = asyncio.create_task(self.ask("POST", path, body, Content_Type="application/json"))
        return task, await self.call()

    async def streamed(self, path: str, body: dict[str, Any]) -> tuple[asyncio.Task[Any], Call]:
        """Ask for a stream; the task's result is the chunks, the mark of the end left out but checked."""

        async def read() -> list[Any]:
            answer = await self.ask("POST", path, {**body, "stream": True}, Content_Type="application/json")
            return chunks(answer)

        task = asyncio.create_task(read())
        return task, await self.call()


def chunks(answer: tuple[int, dict[str, str], bytes]) -> list[Any]:
    """Return the chunks of a whole stream."""
    status, headers, body = answer
    assert (status, headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8"), answer
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@contextlib.asynccontextmanager
async def opened(settings: HttpSettings = SETTINGS) -> AsyncIterator[OpenAIDoor]:
    """Start a door; stop it when the block ends."""
    door = OpenAIDoor(settings, LanguagePlane())
    door.port = await door.gateway.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{door.port}", auto_decompress=False) as door.client:
            yield door
    finally:
        await door.gateway.stop(1)


def likely(text: str, logprob: float | None = -0.5, *others: tuple[str, float | None], id_: int = 1) -> TokenLogprob:
    """Return a chosen token with the likeliest ones at its place."""
    top = [
        TokenChance(id_ + rank, one, tuple(one.encode()), chance, rank + 1) for rank, (one, chance) in enumerate(others)
    ]
    return TokenLogprob(TokenChance(id_, text, tuple(text.encode()), logprob, 1), tuple(top))
