"""The answer to a chat, as a whole and in chunks. Chunks are made by joining bytes: there is one for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.gateway.http.openai.call import DONE
from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.envelope import NULL, encode, envelope, optional
from headrace.gateway.http.openai.exchange import Exchange
from headrace.gateway.http.openai.gathering import GatheredChoice, Gathering, check, unfinished
from headrace.gateway.http.openai.logprobs import chat_logprobs, prompt_logprobs
from headrace.gateway.http.openai.message import (
    CallArguments,
    CallBegun,
    Content,
    MessagePlan,
    MessageReader,
    Part,
    Reasoning,
)
from headrace.gateway.http.openai.usage import Usage
from headrace.types import InferenceResponse
from headrace_protocol.generation import ChoiceDelta, GenerationEvent, TokenLogprob

_ROLE: Final = b'{"role":"assistant","content":""}'


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How a chat is to be told."""

    n: int
    plan: MessagePlan
    stream: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    as_ids: bool = False
    """Whether tokens are told as `token_id:<id>`."""
    prefix: str = ""
    """What the content begins with: the last message of the request, where it is continued and echoed."""
    include_usage: bool = False
    continuous_usage: bool = False


class Message:
    """An assistant's message, put together of its parts."""

    __slots__ = ("_calls", "_legacy", "content", "reasoning")

    def __init__(self, content: str = "", *, legacy: bool = False) -> None:
        """Begin with `content`; `legacy` has the first call told as `function_call`."""
        self.content = content
        self._legacy = legacy
        self.reasoning = ""
        self._calls: list[dict[str, Any]] = []

    def take(self, parts: Sequence[Part]) -> None:
        """Take the next parts."""
        for part in parts:
            match part:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegun(_, identifier, name):
                    function = {"name": name, "arguments": ""}
                    self._calls.append({"id": identifier, "type": "function", "function": function})
                case CallArguments(index, text):
                    self._calls[index]["function"]["arguments"] += text

    def encode(self) -> dict[str, Any]:
        """Return the message as JSON has it; what a model did not say besides its calls or its reasoning is null."""
        empty = not self.content and bool(self._calls or self.reasoning)
        told: dict[str, Any] = {
            "role": "assistant",
            "content": None if empty else self.content,
            "refusal": None,
            "annotations": [],
        }
        if self.reasoning:
            told["reasoning_content"] = told["reasoning"] = self.reasoning
        if self._calls and self._legacy:
            told["function_call"] = self._calls[0]["function"]
        elif self._calls:
            told["tool_calls"] = self._calls
        return told


class ChatAnswer:
    """Implements call.AnswerMaker."""

    def __init__(self, form: ChatForm, exchange: Exchange, model: LanguageModel) -> None:
        self._form = form
        self._head = envelope("chatcmpl", "chat.completion", exchange, model)
        self._gathered = Gathering()
        self._readers: dict[int, MessageReader | None] = {}
        self._messages: dict[int, Message] = {}
        self._tokens: dict[int, int] = {}
        """Of each choice so far."""

    def take(self, event: GenerationEvent, response: InferenceResponse) -> None:
        """Take the next event."""
        del response
        gathered = self._gathered
        gathered.take(event)
        for delta in event.choices:
            index = delta.index
            if index not in self._messages:
                prompt = gathered.prompt(index, self._form.n)
                in_reasoning = prompt is not None and prompt.in_reasoning
                plan = self._form.plan
                self._readers[index] = plan.reader(in_reasoning=in_reasoning)
                self._messages[index] = Message(self._form.prefix, legacy=plan.legacy)
            reader = self._readers[index]
            if reader is None:
                self._messages[index].content += delta.text
            else:
                self._messages[index].take(reader.feed(delta.text))
                if reader.reasoning:
                    gathered.usage.reasoning_tokens += delta.num_tokens - self._tokens.get(index, 0)
                self._tokens[index] = delta.num_tokens

    def answer(self) -> bytes:
        """Return the JSON."""
        gathered, form = self._gathered, self._form
        choices = b",".join([encode(self._choice(choice)) for choice in gathered.choices()])
        more = b""
        prompt = gathered.prompts[0] if gathered.prompts else None
        if form.prompt_logprobs and prompt is not None:
            more += b',"prompt_logprobs":%b' % encode(prompt_logprobs(prompt))
        if form.token_ids and prompt is not None:
            more += b',"prompt_token_ids":%b' % encode(prompt.token_ids)
        return b'%b%b],"service_tier":null,"usage":%b%b}' % (self._head, choices, gathered.usage.encode(), more)

    def _choice(self, choice: GatheredChoice) -> dict[str, Any]:
        form = self._form
        finish = choice.finish_reason or "stop"
        message = self._messages[choice.index]
        reader = self._readers[choice.index]
        if reader is not None:
            parts, finish = reader.end(finish)
            message.take(parts)
        told: dict[str, Any] = {
            "index": choice.index,
            "message": message.encode(),
            "logprobs": chat_logprobs(choice.logprobs, as_ids=form.as_ids) if form.logprobs else None,
            "finish_reason": finish,
            "stop_reason": choice.stop_reason,
        }
        if form.token_ids:
            told["token_ids"] = choice.token_ids
        return told


@dataclass(slots=True)
class _Choice:
    """A choice that is being streamed."""

    reader: MessageReader | None = None
    begun: bool = False
    ended: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of tokens whose text is held back."""
    token_ids: list[int] = field(default_factory=list)


class ChatChunks:
    """Implements call.ChunkMaker."""

    def __init__(self, form: ChatForm, exchange: Exchange, model: LanguageModel) -> None:
        self._form = form
        self._head = b"data: " + envelope("chatcmpl", "chat.completion.chunk", exchange, model)
        self._tail = b',"usage":null}\n\n' if form.include_usage else b"}\n\n"
        self._choices = [_Choice() for _ in range(form.n)]
        self._usage = Usage()
        self._prompt_ids: tuple[int, ...] | None = None
        self._in_reasoning = False
        self._plain = not (form.logprobs or form.token_ids or form.continuous_usage)

    def take(self, event: GenerationEvent) -> bytes:
        """Return the chunks of an event."""
        if event.prompts:
            self._usage.take_prompts(event.prompts)
            self._in_reasoning = event.prompts[0].in_reasoning
            self._prompt_ids = event.prompts[0].token_ids
        choices = event.choices
        if len(choices) == 1:
            return self._delta(choices[0])
        return b"".join([self._delta(delta) for delta in choices])

    def _delta(self, delta: ChoiceDelta) -> bytes:
        new = self._usage.take_choice(delta)
        choice = self._choices[delta.index]
        last = delta.finish_reason is not None
        if choice.begun and choice.reader is None and self._plain and not last:
            if not delta.text:
                return b""
            return b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]%b' % (
                *(self._head, delta.index, encode(delta.text)),
                self._tail,
            )
        check(delta)
        begin = b"" if choice.begun else self._begin(choice, delta.index)
        choice.logprobs += delta.logprobs
        choice.token_ids += delta.token_ids
        reader = choice.reader
        finish: str | None = delta.finish_reason
        parts: Sequence[Part]
        if reader is None:
            parts = (Content(delta.text),) if delta.text else ()
        else:
            parts = reader.feed(delta.text) if delta.text else ()
            if reader.reasoning:
                self._usage.reasoning_tokens += new
            if finish is not None:
                rest, finish = reader.end(finish)
                parts = (*parts, *rest)
        told = _told_of_old if self._form.plan.legacy else _told
        pieces = [self._chunk(delta.index, choice, told(part)) for part in parts]
        if finish is not None:
            choice.ended = True
            pieces.append(self._chunk(delta.index, choice, b"{}", finish, delta.stop_reason))
        return begin + b"".join(pieces)

    def _begin(self, choice: _Choice, index: int) -> bytes:
        choice.begun = True
        choice.reader = self._form.plan.reader(in_reasoning=self._in_reasoning)
        ids = b',"prompt_token_ids":%b' % optional(self._prompt_ids) if self._form.token_ids else b""
        first = b'%b{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}]%b%b' % (
            *(self._head, index, _ROLE),
            *(ids, self._end_of_chunk()),
        )
        prefix = self._form.prefix
        return first + self._chunk(index, choice, _told(Content(prefix))) if prefix else first

    def _chunk(
        self,
        index: int,
        choice: _Choice,
        delta: bytes,
        finish: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bytes:
        """Return one chunk; it takes the log probabilities and tokens that have not been told yet along."""
        form = self._form
        logprobs, more = NULL, b""
        if form.logprobs and choice.logprobs:
            logprobs = encode(chat_logprobs(choice.logprobs, as_ids=form.as_ids))
            choice.logprobs = []
        if form.token_ids:
            more = b',"token_ids":%b' % encode(choice.token_ids)
            choice.token_ids = []
        if finish is not None:
            more += b',"stop_reason":%b' % optional(stop_reason)
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}]%b' % (
            *(self._head, index, delta, logprobs, optional(finish), more),
            self._end_of_chunk(),
        )

    def _end_of_chunk(self) -> bytes:
        return b',"usage":%b}\n\n' % self._usage.encode() if self._form.continuous_usage else self._tail

    def end(self) -> bytes:
        """Return the usage, where it was asked for, and the mark of the end."""
        if not all(choice.ended for choice in self._choices):
            raise unfinished()
        if not self._form.include_usage:
            return DONE
        return b'%b],"usage":%b}\n\n' % (self._head, self._usage.encode()) + DONE


def _told(part: Part) -> bytes:
    """Return the delta that tells a part."""
    match part:
        case Content(text):
            return b'{"content":%b}' % encode(text)
        case Reasoning(text):
            thought = encode(text)
            return b'{"reasoning_content":%b,"reasoning":%b}' % (thought, thought)
        case CallBegun(index, identifier, name):
            head = b'{"tool_calls":[{"index":%d,"id":%b,"type":"function",' % (index, encode(identifier))
            return head + b'"function":{"name":%b,"arguments":""}}]}' % encode(name)
        case CallArguments(index, text):
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, encode(text))


def _told_of_old(part: Part) -> bytes:
    """Return the delta that tells a part, a call as `function_call`."""
    match part:
        case CallBegun(_, _, name):
            return b'{"function_call":{"name":%b,"arguments":""}}' % encode(name)
        case CallArguments(_, text):
            return b'{"function_call":{"arguments":%b}}' % encode(text)
    return _told(part)
