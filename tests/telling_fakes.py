"""A teller whose thread is the test, and clients that note what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headrace_backends.llm import telling
from headrace_backends.llm.asked_call import AskedCall, AskedPrompt
from headrace_backends.llm.engine import Told
from headrace_backends.llm.events import EventForm, Spelling
from headrace_backends.llm.logprobs import TokenLogprob, TokenLogprobs
from headrace_backends.llm.open_calls import OpenCall
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.telling import Teller, _News
from headrace_protocol.errors import InferError, internal, unavailable
from headrace_protocol.generation import EVENT_DECODER, GenerationEvent
from scripted_engine import ByteText

FORM = EventForm(Spelling(ByteText()))
NO_DESCRIPTOR = unavailable("the response cannot be sent: Too many open files")


class Client:
    """A request, and what it is told."""

    def __init__(self) -> None:
        self.paused = self.cancelled = False
        self.events: list[GenerationEvent] = []
        self.final = False
        self.error: InferError | None = None
        self.failures: list[InferError] = []
        """Raised by as many calls of `fail` first."""

    def fail(self, error: InferError) -> None:
        if self.failures:
            raise self.failures.pop()
        assert self.error is None, "a second end"
        assert not self.final, "an error after the end"
        self.error = error

    def respond(self, outputs: Any) -> None:
        self.tell(outputs)
        self.final = True

    def tell(self, outputs: Any) -> None:
        assert not self.final
        assert self.error is None
        self.events.append(EVENT_DECODER.decode(outputs["generation_event"][0]))

    @property
    def text(self) -> str:
        return "".join(choice.text for event in self.events for choice in event.choices)


class Telling:
    """A teller whose thread is the test, with an engine that notes what it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.aborted: list[int] = []
        self.broken: list[InferError] = []
        self.frames = 0
        self.refuses = False
        self.lacking: list[Client] = []
        """Whose responses find no descriptor."""
        self.now = 100
        self.teller = Teller(self.aborted.append, self.broken.append, clock=lambda: self.now)
        monkeypatch.setattr(telling, "send_many", self.send)

    def send(self, responses: Sequence[Any]) -> None:
        if self.refuses and len(responses) > 1:
            raise internal("one of them cannot be sent")
        if any(response.request in self.lacking for response in responses):
            raise NO_DESCRIPTOR
        self.frames += 1
        for response in responses:
            response.request.tell(response.outputs)
            response.request.final = response.final

    def call(self, number: int, prompts: int = 1, **asked: Any) -> Client:
        client = Client()
        params = asked.pop("params", SamplingParams())
        stream = asked.pop("stream", True)
        decoupled = asked.pop("decoupled", True)
        what = AskedCall(
            (AskedPrompt((1, 2)),) * prompts, params, told_n=asked.pop("told_n", params.n), stream=stream, **asked
        )
        self.teller.add(OpenCall(number, client, what, FORM, 10, decoupled=decoupled))
        return client

    def told(self, *news: Told) -> None:
        self.teller.round([_News(news, self.now)])


def out(
    text: str = "", *, index: int = 0, tokens: int = 1, end: FinishReason | None = None, **more: Any
) -> GenerationOutput:
    return GenerationOutput(
        request_id="", index=index, text=text, token_ids=tuple(range(tokens)), finish_reason=end,
        num_prompt_tokens=2, num_cached_tokens=more.pop("cached", 0), num_output_tokens=more.pop("total", tokens), **more,
    )  # fmt: skip


def chance(token: int, most: int = 0) -> TokenLogprobs:
    return TokenLogprobs(TokenLogprob(token, -1.0, 1), (TokenLogprob(token, -1.0, 1),) * most)
