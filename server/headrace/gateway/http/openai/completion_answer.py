"""The answer to a completion, as a whole and in chunks. Chunks are made by joining bytes: there is one for each token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace.gateway.http.openai.call import DONE
from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.envelope import NULL, encode, envelope, optional
from headrace.gateway.http.openai.exchange import Exchange
from headrace.gateway.http.openai.gathering import GatheredChoice, Gathering, check, unfinished
from headrace.gateway.http.openai.logprobs import CompletionLogprobs, joined, nothing, prompt_logprobs
from headrace.gateway.http.openai.usage import Usage
from headrace.types import InferenceResponse
from headrace_protocol.generation import ChoiceDelta, GenerationEvent, PromptTold, TokenLogprob


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """How a completion is to be told."""

    prompts: int
    n: int
    echo: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    as_ids: bool = False
    """Whether tokens are told as `token_id:<id>`."""
    special: bool = False
    """Whether special tokens are part of the text."""
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def count(self) -> int:
        """Choices of all prompts."""
        return self.prompts * self.n

    def offsets(self) -> CompletionLogprobs:
        """Return the maker of one choice's log probabilities."""
        return CompletionLogprobs(as_ids=self.as_ids, special=self.special)


class CompletionAnswer:
    """Implements call.AnswerMaker."""

    def __init__(self, form: CompletionForm, exchange: Exchange, model: LanguageModel) -> None:
        self._form = form
        self._head = envelope("cmpl", "text_completion", exchange, model)
        self._gathered = Gathering()

    def take(self, event: GenerationEvent, response: InferenceResponse) -> None:
        """Take the next event."""
        del response
        self._gathered.take(event)

    def answer(self) -> bytes:
        """Return the JSON."""
        gathered = self._gathered
        choices = b",".join([encode(self._choice(choice)) for choice in gathered.choices()])
        return b'%b%b],"usage":%b}' % (self._head, choices, gathered.usage.encode())

    def _choice(self, choice: GatheredChoice) -> dict[str, Any]:
        form = self._form
        prompt = self._gathered.prompt(choice.index, form.n)
        text = choice.text
        offsets = form.offsets()
        logprobs = nothing() if form.logprobs else None
        if form.echo and prompt is not None:
            text = (prompt.text or "") + text
            if logprobs is not None:
                logprobs = offsets.prompt(prompt)
        if logprobs is not None:
            logprobs = joined(logprobs, offsets.output(choice.logprobs))
        told: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if form.token_ids:
            told["token_ids"] = choice.token_ids
            told["prompt_token_ids"] = None if prompt is None else prompt.token_ids
        if form.prompt_logprobs and prompt is not None:
            told["prompt_logprobs"] = prompt_logprobs(prompt)
        return told


@dataclass(slots=True)
class _Choice:
    """A choice that is being streamed."""

    offsets: CompletionLogprobs
    begun: bool = False
    ended: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of tokens whose text is held back."""
    token_ids: list[int] = field(default_factory=list)


class CompletionChunks:
    """Implements call.ChunkMaker."""

    def __init__(self, form: CompletionForm, exchange: Exchange, model: LanguageModel) -> None:
        self._form = form
        self._head = b"data: " + envelope("cmpl", "text_completion", exchange, model)
        self._tail = b',"usage":null}\n\n' if form.include_usage else b"}\n\n"
        self._choices = [_Choice(form.offsets()) for _ in range(form.count)]
        self._prompts: tuple[PromptTold, ...] = ()
        self._usage = Usage()
        self._plain = not (form.echo or form.logprobs or form.token_ids or form.continuous_usage)

    def take(self, event: GenerationEvent) -> bytes:
        """Return the chunks of an event."""
        self._usage.take(event)
        if event.prompts:
            self._prompts = event.prompts
        return b"".join([self._delta(delta) for delta in event.choices])

    def _delta(self, delta: ChoiceDelta) -> bytes:
        if delta.finish_reason is None and self._plain:
            if not delta.text:
                return b""
            return b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}]%b' % (
                *(self._head, delta.index, encode(delta.text)),
                self._tail,
            )
        check(delta)
        choice = self._choices[delta.index]
        choice.logprobs += delta.logprobs
        choice.token_ids += delta.token_ids
        text, logprobs, more = delta.text, NULL, b""
        echoed = None
        if not choice.begun and self._form.echo:
            echoed = self._prompt(delta.index)
            text = (echoed.text or "") + text
        if not text and delta.finish_reason is None:
            return b""
        if self._form.logprobs:
            lists = choice.offsets.output(choice.logprobs) if echoed is None else self._with_prompt(choice, echoed)
            logprobs = encode(lists)
        if self._form.token_ids:
            ids = b"" if choice.begun else b',"prompt_token_ids":%b' % encode(self._prompt(delta.index).token_ids)
            more += b',"token_ids":%b%b' % (encode(choice.token_ids), ids)
        if delta.finish_reason is not None:
            choice.ended = True
            more += b',"stop_reason":%b' % optional(delta.stop_reason)
        choice.begun = True
        choice.logprobs, choice.token_ids = [], []
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}]%b' % (
            *(self._head, delta.index, encode(text), logprobs, optional(delta.finish_reason), more),
            self._end_of_chunk(),
        )

    def _end_of_chunk(self) -> bytes:
        return b',"usage":%b}\n\n' % self._usage.encode() if self._form.continuous_usage else self._tail

    def _prompt(self, index: int) -> PromptTold:
        number = index // self._form.n
        if number >= len(self._prompts):
            raise unfinished()
        return self._prompts[number]

    def _with_prompt(self, choice: _Choice, prompt: PromptTold) -> dict[str, list[Any]]:
        first = choice.offsets.prompt(prompt)
        return joined(first, choice.offsets.output(choice.logprobs))

    def end(self) -> bytes:
        """Return the usage, where it was asked for, and the mark of the end."""
        if not all(choice.ended for choice in self._choices):
            raise unfinished()
        if not self._form.include_usage:
            return DONE
        return b'%b],"usage":%b}\n\n' % (self._head, self._usage.encode()) + DONE
