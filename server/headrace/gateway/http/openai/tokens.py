"""POST /tokenize and /detokenize: text to a model's tokens, and back."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.gateway.http.openai.call import CallAnswer, begin
from headrace.gateway.http.openai.chat import read_chat
from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.endpoint import CallEndpoint
from headrace.gateway.http.openai.errors import missing, refusal
from headrace.gateway.http.openai.exchange import Exchange
from headrace.gateway.http.openai.fields import Fields, read_body
from headrace.gateway.http.request import Outlet, Streaming
from headrace.types import InferenceResponse
from headrace_protocol.errors import internal
from headrace_protocol.generation import GenerationCall, GenerationEvent, PromptTold


class Tokenize(CallEndpoint):
    """POST /tokenize, as vLLM has it: of a prompt, or of messages."""

    def begin(self, exchange: Exchange, outlet: Outlet) -> Streaming:
        """Read the request and ask the model."""
        fields = read_body(exchange.http)
        model = self._directory.find(fields.text("model"), "tokenize")
        model.check_task("tokenize", "tokens")
        exchange.names = {"prompts": "prompt", "chat": "messages", "adapter": "model"}
        call = _read_tokenize(fields, model)
        answer = CallAnswer(_TokensAnswer(model, strings=call.return_token_strings), exchange, outlet.answer)
        answer.under_way = begin(self._data, model, call, exchange, answer.take)
        return answer


class Detokenize(CallEndpoint):
    """POST /detokenize."""

    def begin(self, exchange: Exchange, outlet: Outlet) -> Streaming:
        """Read the request and ask the model."""
        fields = read_body(exchange.http)
        model = self._directory.find(fields.text("model"), "detokenize")
        model.check_task("detokenize", "text of tokens")
        exchange.names = {"prompts": "tokens", "prompts[0]": "tokens", "adapter": "model"}
        call = GenerationCall("detokenize", prompts=[_read_tokens(fields, model)], adapter=model.adapter)
        answer = CallAnswer(_TextAnswer(), exchange, outlet.answer)
        answer.under_way = begin(self._data, model, call, exchange, answer.take)
        return answer


def _read_tokenize(fields: Fields, model: LanguageModel) -> GenerationCall:
    special = fields.flag("add_special_tokens") if fields.has("add_special_tokens") else None
    strings = fields.flag("return_token_strs")
    if fields.has("messages"):
        if fields.has("prompt"):
            raise refusal("'prompt' and 'messages' cannot both be there", "prompt")
        chat = read_chat(fields, model)[0].chat
        return GenerationCall(
            "tokenize", chat=chat, add_special_tokens=special, adapter=model.adapter, return_token_strings=strings
        )
    prompt = fields.text("prompt")
    if prompt is None:
        raise missing("prompt")
    return GenerationCall(
        "tokenize", prompts=[prompt], add_special_tokens=special, adapter=model.adapter, return_token_strings=strings
    )


def _read_tokens(fields: Fields, model: LanguageModel) -> list[int]:
    tokens = fields.items("tokens", max(model.card.max_model_len, 1), "tokens")
    if tokens is None:
        raise missing("tokens")
    size = model.card.vocab_size
    for number, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < size:
            raise fields.wrong(f"tokens[{number}]", f"an integer from 0 to {size - 1}", token)
    return list(tokens)


class _TokensAnswer:
    """Implements call.AnswerMaker for tokenize."""

    def __init__(self, model: LanguageModel, *, strings: bool) -> None:
        self._model = model
        self._strings = strings
        self._told: PromptTold | None = None

    def take(self, event: GenerationEvent, response: InferenceResponse) -> None:
        """Take what the model tells of the prompt."""
        del response
        if event.prompts:
            self._told = event.prompts[0]

    def answer(self) -> bytes:
        """Return the JSON."""
        told = self._told
        if told is None or told.token_ids is None:
            raise internal("the model told no tokens")
        answer: dict[str, Any] = {
            "count": told.num_tokens,
            "max_model_len": self._model.card.max_model_len,
            "tokens": told.token_ids,
            "token_strs": told.token_strings if self._strings else None,
        }
        return msgspec.json.encode(answer)


class _TextAnswer:
    """Implements call.AnswerMaker for detokenize."""

    def __init__(self) -> None:
        self._text: str | None = None

    def take(self, event: GenerationEvent, response: InferenceResponse) -> None:
        """Take the text."""
        del response
        if event.text is not None:
            self._text = event.text

    def answer(self) -> bytes:
        """Return the JSON."""
        if self._text is None:
            raise internal("the model told no text")
        return msgspec.json.encode({"prompt": self._text})
