"""POST /v1/responses: OpenAI's newer API, as chats of a language model."""

from __future__ import annotations

from typing import Final

from headrace.gateway.http.openai.call import CallAnswer, CallStream, begin
from headrace.gateway.http.openai.chat import read_chat
from headrace.gateway.http.openai.endpoint import CallEndpoint
from headrace.gateway.http.openai.exchange import Exchange
from headrace.gateway.http.openai.fields import Fields, read_body
from headrace.gateway.http.openai.responses.answer import ResponseAnswer, ResponseEvents, failed
from headrace.gateway.http.openai.responses.request import chat_of
from headrace.gateway.http.openai.sampling import read_timeout
from headrace.gateway.http.request import Outlet, Streaming

_NAMES: Final = {
    "chat": "input",
    "prompts": "input",
    "structured": "text",
    "adapter": "model",
    "max_tokens": "max_output_tokens",
}
"""What a backend names of a call, as the client named it."""


class Responses(CallEndpoint):
    """The endpoint."""

    def begin(self, exchange: Exchange, outlet: Outlet) -> Streaming:
        """Read the request and begin its call."""
        exchange.names = _NAMES
        fields = read_body(exchange.http)
        model = self._directory.find(fields.text("model"))
        model.check_task("generate", "responses")
        call, form = read_chat(Fields(chat_of(fields)), model)
        timeout_us = read_timeout(fields)
        under_way: CallStream | CallAnswer
        if form.stream:
            under_way = CallStream(ResponseEvents(exchange, model, fields, form.plan), exchange, outlet, failed)
        else:
            under_way = CallAnswer(ResponseAnswer(exchange, model, fields, form.plan), exchange, outlet.answer)
        under_way.under_way = begin(self._data, model, call, exchange, under_way.take, timeout_us)
        return under_way
