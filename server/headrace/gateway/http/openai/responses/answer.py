"""A response, as a whole and as events: items of reasoning, text and calls, one after another, each told to its end."""

from __future__ import annotations

from typing import Any, Final

from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.envelope import encode
from headrace.gateway.http.openai.exchange import Exchange
from headrace.gateway.http.openai.fields import Fields
from headrace.gateway.http.openai.gathering import unfinished
from headrace.gateway.http.openai.message import CallArguments, CallBegun, Content, MessagePlan, Part, Reasoning
from headrace.gateway.http.openai.one_choice import OneChoice
from headrace.types import InferenceResponse
from headrace_protocol.generation import GenerationEvent

_TOLD_BACK: Final[dict[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""What a response says of its request, where that says nothing."""


class Items:
    """The output of a response, which grows."""

    def __init__(self, exchange: Exchange, model: LanguageModel, fields: Fields, plan: MessagePlan) -> None:
        self._id = exchange.request_id
        self._created = exchange.created
        self._model = model.id
        self._request = {name: fields.any(name) if fields.has(name) else value for name, value in _TOLD_BACK.items()}
        self.choice = OneChoice(plan)
        self.output: list[dict[str, Any]] = []

    def begun(self, kind: str, **members: Any) -> dict[str, Any]:
        """Begin a new item and return it."""
        prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}[kind]
        item = {"id": f"{prefix}_{self._id}_{len(self.output)}", "type": kind, "status": "in_progress", **members}
        self.output.append(item)
        return item

    def end(self) -> None:
        """Note that the last item is whole, or cut short."""
        if self.output:
            self.output[-1]["status"] = "incomplete" if self.choice.finish == "length" else "completed"

    def response(self) -> dict[str, Any]:
        """Return the response as it is now."""
        finish = self.choice.finish
        status = "in_progress" if finish is None else "incomplete" if finish == "length" else "completed"
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": self.output,
            "store": False,
            **self._request,
            "usage": None if finish is None else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.choice.usage
        output = usage.completion_tokens
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + output,
        }


def _text(kind: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": ""}


class ResponseEvents:
    """Implements call.ChunkMaker. Every event has a number."""

    def __init__(self, exchange: Exchange, model: LanguageModel, fields: Fields, plan: MessagePlan) -> None:
        self._items = Items(exchange, model, fields, plan)
        self._number = 0
        self._open: dict[str, Any] | None = None
        """The item that grows."""

    def take(self, event: GenerationEvent) -> bytes:
        """Return what an event tells."""
        parts = self._items.choice.take(event)
        pieces: list[bytes] = []
        if not self._number and event.choices:
            begun = {**self._items.response(), "status": "in_progress", "incomplete_details": None, "usage": None}
            pieces += [self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")]
        for part in parts:
            pieces += self._part(part)
        return b"".join(pieces)

    def _part(self, part: Part) -> list[bytes]:
        match part:
            case Content(text):
                return self._more("message", text)
            case Reasoning(text):
                return self._more("reasoning", text)
            case CallBegun(_, identifier, name):
                ended = self._close()
                self._open = item = self._items.begun("function_call", call_id=identifier, name=name, arguments="")
                return [*ended, self._of_item("output_item.added", item=item)]
            case CallArguments(_, text):
                assert self._open is not None
                self._open["arguments"] += text
                return [self._of_item("function_call_arguments.delta", item_id=self._open["id"], delta=text)]

    def _more(self, kind: str, text: str) -> list[bytes]:
        pieces: list[bytes] = []
        if self._open is None or self._open["type"] != kind:
            pieces = self._close()
            role: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            self._open = item = self._items.begun(kind, content=[], **role)
            pieces.append(self._of_item("output_item.added", item=item))
            item["content"].append(_text(kind))
            pieces.append(self._of_content("content_part.added", part=_text(kind)))
        self._open["content"][0]["text"] += text
        name = "output_text.delta" if kind == "message" else "reasoning_text.delta"
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return [*pieces, self._of_content(name, delta=text, **more)]

    def _close(self) -> list[bytes]:
        """Return what tells that the open item is whole."""
        item = self._open
        if item is None:
            return []
        self._items.end()
        pieces: list[bytes] = []
        if item["type"] == "function_call":
            told = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
            pieces.append(self._of_item("function_call_arguments.done", **told))
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            name = "output_text.done" if item["type"] == "message" else "reasoning_text.done"
            pieces.append(self._of_content(name, text=part["text"], **more))
            pieces.append(self._of_content("content_part.done", part=part))
        self._open = None
        return [*pieces, self._of_item("output_item.done", item=item)]

    def _of_content(self, name: str, /, **members: Any) -> bytes:
        assert self._open is not None
        return self._of_item(name, item_id=self._open["id"], content_index=0, **members)

    def _of_item(self, name: str, /, **members: Any) -> bytes:
        return self._event(f"response.{name}", output_index=len(self._items.output) - 1, **members)

    def _event(self, kind: str, /, **members: Any) -> bytes:
        body = encode({"type": kind, "sequence_number": self._number, **members})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)

    def response(self) -> dict[str, Any]:
        """Return the response as it is now."""
        return self._items.response()

    def end(self) -> bytes:
        """Return what ends the stream. Raises InferError where the generation has no end."""
        if self._items.choice.finish is None:
            raise unfinished()
        ended = b"".join(self._close())
        response = self._items.response()
        return ended + self._event(f"response.{response['status']}", response=response)


class ResponseAnswer:
    """Implements call.AnswerMaker: the same, told at its end alone."""

    def __init__(self, exchange: Exchange, model: LanguageModel, fields: Fields, plan: MessagePlan) -> None:
        self._events = ResponseEvents(exchange, model, fields, plan)

    def take(self, event: GenerationEvent, response: InferenceResponse) -> None:
        """Take the next event."""
        del response
        self._events.take(event)

    def answer(self) -> bytes:
        """Return the JSON. Raises InferError where the generation has no end."""
        self._events.end()
        return encode(self._events.response())


def failed(body: bytes) -> bytes:
    """Return the event that tells of a failure in the middle of a stream."""
    return b'event: error\ndata: {"type":"error",%b\n\n' % body[1:]
