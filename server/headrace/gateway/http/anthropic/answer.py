"""The answer of a message, as a whole and as events: blocks of text, thinking and calls of tools, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.envelope import encode
from headrace.gateway.http.openai.exchange import Exchange
from headrace.gateway.http.openai.gathering import unfinished
from headrace.gateway.http.openai.message import CallArguments, CallBegun, Content, MessagePlan, Part, Reasoning
from headrace.gateway.http.openai.one_choice import OneChoice
from headrace.gateway.http.openai.usage import Usage
from headrace.types import InferenceResponse
from headrace_protocol.generation import GenerationEvent

_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}
_KINDS: Final[Mapping[type[Part], str]] = {
    Content: "text",
    Reasoning: "thinking",
    CallBegun: "tool_use",
    CallArguments: "tool_use",
}


def _end(choice: OneChoice) -> tuple[str | None, str | None]:
    """Return `stop_reason` and `stop_sequence`."""
    if choice.finish == "stop" and choice.calls:  # the one that had to be called
        return "tool_use", None
    if choice.finish == "stop" and isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return None if choice.finish is None else _REASONS.get(choice.finish, "end_turn"), None


def _counts(usage: Usage) -> dict[str, int]:
    """Return the usage; what was found in the prefix cache is not part of `input_tokens`."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _message(exchange: Exchange, model: LanguageModel, content: list[Any], choice: OneChoice) -> dict[str, Any]:
    reason, sequence = _end(choice)
    return {
        "id": f"msg_{exchange.request_id}",
        "type": "message",
        "role": "assistant",
        "model": model.id,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _counts(choice.usage),
    }


class MessageAnswer:
    """Implements call.AnswerMaker."""

    def __init__(self, plan: MessagePlan, exchange: Exchange, model: LanguageModel) -> None:
        self._exchange = exchange
        self._model = model
        self._choice = OneChoice(plan)
        self._blocks: list[dict[str, Any]] = []

    def take(self, event: GenerationEvent, response: InferenceResponse) -> None:
        """Take the next event."""
        del response
        for part in self._choice.take(event):
            self._add(part)

    def _add(self, part: Part) -> None:
        blocks = self._blocks
        kind = _KINDS[type(part)]
        match part:
            case CallBegun(_, identifier, name):
                blocks.append({"type": kind, "id": identifier, "name": name, "input": ""})
            case CallArguments(_, text):
                blocks[-1]["input"] += text
            case Content(text) | Reasoning(text):
                if not blocks or blocks[-1]["type"] != kind:
                    blocks.append(_empty(kind))
                blocks[-1][kind] += text

    def answer(self) -> bytes:
        """Return the JSON. Raises InferError where the generation has no end."""
        if self._choice.finish is None:
            raise unfinished()
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = _object(block["input"])
        return encode(_message(self._exchange, self._model, self._blocks, self._choice))


def _empty(kind: str) -> dict[str, Any]:
    """Return a block of text or thinking that has just begun. Nobody signs thoughts here."""
    return {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}


def _object(text: str) -> Any:
    """Return the arguments of a call; of those that the limit of tokens cut short nothing, as nobody may act on them."""
    try:
        return msgspec.json.decode(text) if text else {}
    except (msgspec.MsgspecError, RecursionError):
        return {}


class MessageEvents:
    """Implements call.ChunkMaker."""

    def __init__(self, plan: MessagePlan, exchange: Exchange, model: LanguageModel) -> None:
        self._exchange = exchange
        self._model = model
        self._choice = OneChoice(plan)
        self._begun = False
        self._number = -1
        """Of the block that is open, or was last."""
        self._open: str | None = None

    def take(self, event: GenerationEvent) -> bytes:
        """Return what an event tells."""
        parts = self._choice.take(event)
        pieces: list[bytes] = []
        if not self._begun and event.choices:
            self._begun = True
            message = _message(self._exchange, self._model, [], self._choice)
            message["stop_reason"] = message["stop_sequence"] = None
            pieces.append(_event("message_start", {"message": message}))
        pieces += [self._part(part) for part in parts]
        return b"".join(pieces)

    def _part(self, part: Part) -> bytes:
        kind = _KINDS[type(part)]
        match part:
            case CallBegun(_, identifier, name):
                return self._block({"type": kind, "id": identifier, "name": name, "input": {}})
            case CallArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case Content(text) | Reasoning(text):
                begun = b"" if self._open == kind else self._block(_empty(kind))
                return begun + self._delta({"type": f"{kind}_delta", kind: text})

    def _block(self, block: dict[str, Any]) -> bytes:
        """Return the beginning of a block, and the end of the one before it."""
        ended = self._end_of_block()
        self._number += 1
        self._open = block["type"]
        return ended + _event("content_block_start", {"index": self._number, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._number, "delta": delta})

    def _end_of_block(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", {"index": self._number})

    def end(self) -> bytes:
        """Return what ends the stream. Raises InferError where the generation has no end."""
        reason, sequence = _end(self._choice)
        if reason is None:
            raise unfinished()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        last = _event("message_delta", {"delta": delta, "usage": _counts(self._choice.usage)})
        return self._end_of_block() + last + _event("message_stop", {})


def failed(body: bytes) -> bytes:
    """Return the event that tells of a failure in the middle of a stream."""
    return b"event: error\ndata: %b\n\n" % body


def _event(kind: str, members: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **members}))
