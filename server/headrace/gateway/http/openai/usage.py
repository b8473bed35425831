"""How many tokens a request took: prompts once each, whatever is made of them, and the tokens of all choices together."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_protocol.generation import ChoiceDelta, GenerationEvent, PromptTold


class Usage:
    """The count of one request, moved by each event."""

    __slots__ = ("_choices", "cached_tokens", "prompt_tokens", "reasoning_tokens")

    def __init__(self) -> None:
        self._choices: dict[int, int] = {}
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.reasoning_tokens = 0

    def take(self, event: GenerationEvent) -> None:
        """Count an event in."""
        if event.prompts:
            self.take_prompts(event.prompts)
        for choice in event.choices:
            self.take_choice(choice)

    def take_prompts(self, prompts: Iterable[PromptTold]) -> None:
        """Count prompts in."""
        for prompt in prompts:
            self.prompt_tokens += prompt.num_tokens
            self.cached_tokens += prompt.num_cached_tokens

    def take_choice(self, choice: ChoiceDelta) -> int:
        """Count what is new of a choice in; return how many tokens that is."""
        before = self._choices.get(choice.index, 0)
        self._choices[choice.index] = max(before, choice.num_tokens)
        return choice.num_tokens - before

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all choices."""
        return sum(self._choices.values())

    def encode(self) -> bytes:
        """Return the usage as JSON."""
        completion = self.completion_tokens
        return (
            b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
            b'"prompt_tokens_details":{"cached_tokens":%d},"completion_tokens_details":{"reasoning_tokens":%d}}'
            % (
                self.prompt_tokens,
                completion,
                self.prompt_tokens + completion,
                self.cached_tokens,
                self.reasoning_tokens,
            )
        )
