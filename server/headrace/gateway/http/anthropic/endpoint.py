"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, as chats of a language model."""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.gateway.http.anthropic.answer import MessageAnswer, MessageEvents, failed
from headrace.gateway.http.anthropic.request import chat_of
from headrace.gateway.http.openai.call import CallAnswer, CallStream, begin
from headrace.gateway.http.openai.chat import read_chat
from headrace.gateway.http.openai.endpoint import CallEndpoint
from headrace.gateway.http.openai.exchange import Exchange
from headrace.gateway.http.openai.fields import Fields, read_body
from headrace.gateway.http.request import Outlet, Streaming
from headrace.types import InferenceResponse
from headrace_protocol.errors import internal
from headrace_protocol.generation import GenerationCall, GenerationEvent

_NAMES: Final = {"chat": "messages", "prompts": "messages", "structured": "tools", "adapter": "model"}
"""What a backend names of a call, as the client named it."""


class Messages(CallEndpoint):
    """The next message of a conversation."""

    def begin(self, exchange: Exchange, outlet: Outlet) -> Streaming:
        """Read the request and begin its call."""
        exchange.names = _NAMES
        fields = read_body(exchange.http)
        model = self._directory.find(fields.text("model"))
        model.check_task("generate", "messages")
        call, form = read_chat(Fields(chat_of(fields)), model)
        under_way: CallStream | CallAnswer
        if form.stream:
            under_way = CallStream(MessageEvents(form.plan, exchange, model), exchange, outlet, failed)
        else:
            under_way = CallAnswer(MessageAnswer(form.plan, exchange, model), exchange, outlet.answer)
        under_way.under_way = begin(self._data, model, call, exchange, under_way.take)
        return under_way


class CountTokens(CallEndpoint):
    """How many tokens a conversation has."""

    def begin(self, exchange: Exchange, outlet: Outlet) -> Streaming:
        """Read the request and have its tokens counted."""
        exchange.names = _NAMES
        fields = read_body(exchange.http)
        model = self._directory.find(fields.text("model"), "tokenize")
        model.check_task("tokenize", "tokens")
        chat = read_chat(Fields(chat_of(fields, counts=True)), model)[0].chat
        call = GenerationCall("tokenize", chat=chat, adapter=model.adapter)
        answer = CallAnswer(_Count(), exchange, outlet.answer)
        answer.under_way = begin(self._data, model, call, exchange, answer.take)
        return answer


class _Count:
    """Implements call.AnswerMaker."""

    def __init__(self) -> None:
        self._tokens: int | None = None

    def take(self, event: GenerationEvent, response: InferenceResponse) -> None:
        """Take the event."""
        del response
        if event.prompts:
            self._tokens = event.prompts[0].num_tokens

    def answer(self) -> bytes:
        """Return the JSON. Raises InferError where there was nothing to count."""
        if self._tokens is None:
            raise internal("the model told no tokens")
        return msgspec.json.encode({"input_tokens": self._tokens})
