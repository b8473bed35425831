"""What a model tells of one call, gathered for an answer that comes as a whole."""

from __future__ import annotations

from headrace.gateway.http.openai.usage import Usage
from headrace_protocol.errors import FailureReason, InferError, internal, unavailable
from headrace_protocol.generation import ChoiceDelta, GenerationEvent, PromptTold, TokenLogprob


def check(choice: ChoiceDelta) -> None:
    """Raise InferError where a choice broke off: an answer that lacks its end must not look like a whole one."""
    if choice.finish_reason == "error":
        raise internal(choice.error or "the model failed while it generated", FailureReason.BACKEND)
    if choice.finish_reason == "abort":
        raise unavailable(choice.error or "the generation was broken off")


def unfinished() -> InferError:
    """Return the error of a call that ended before all of its choices did."""
    return internal("the model ended before its answer did", FailureReason.BACKEND)


class GatheredChoice:
    """One choice, whole once it has a finish reason."""

    __slots__ = (
        "cumulative_logprob",
        "finish_reason",
        "index",
        "logprobs",
        "num_tokens",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.num_tokens = 0
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob: float | None = None

    def take(self, delta: ChoiceDelta) -> None:
        """Take what is new. Raises InferError where the choice broke off."""
        check(delta)
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.num_tokens = delta.num_tokens
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.cumulative_logprob = delta.cumulative_logprob


class Gathering:
    """All that was told of a call."""

    __slots__ = ("_choices", "prompts", "usage")

    def __init__(self) -> None:
        self._choices: dict[int, GatheredChoice] = {}
        self.prompts: list[PromptTold] = []
        self.usage = Usage()

    def take(self, event: GenerationEvent) -> None:
        """Take the next event. Raises InferError where a choice broke off."""
        self.usage.take(event)
        self.prompts += event.prompts
        for delta in event.choices:
            choice = self._choices.get(delta.index)
            if choice is None:
                choice = self._choices[delta.index] = GatheredChoice(delta.index)
            choice.take(delta)

    def choices(self) -> list[GatheredChoice]:
        """Return the choices in order. Raises InferError where one has no end, or there is none."""
        found = [self._choices[index] for index in sorted(self._choices)]
        if not found or any(choice.finish_reason is None for choice in found):
            raise unfinished()
        return found

    def prompt(self, index: int, n: int) -> PromptTold | None:
        """Return what was told of the prompt of a choice."""
        number = index // n
        return self.prompts[number] if number < len(self.prompts) else None
