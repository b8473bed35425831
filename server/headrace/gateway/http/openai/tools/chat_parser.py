"""The text of one choice of a chat, in pieces, as what is new of its message: reasoning, content, calls of tools. Pure.

A whole text is fed as one piece, so that a message is the same whether it is streamed or not.
"""

from __future__ import annotations

from headrace.gateway.http.openai.reasoning import ReasoningSplitter
from headrace.gateway.http.openai.tools.deltas import CallBegun, ContentDelta, Delta, ReasoningDelta, ToolParser


class ChatParser:
    """One for each choice. `tools` is None where the text calls none, `reasoning` where nothing is parted from it."""

    __slots__ = ("_include_reasoning", "_reasoning", "_tools", "calls", "reasoning_tokens")

    def __init__(
        self, tools: ToolParser | None, reasoning: ReasoningSplitter | None, *, include_reasoning: bool = True
    ) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self._include_reasoning = include_reasoning
        self.calls = 0
        """Calls of tools that the message has so far."""
        self.reasoning_tokens = 0

    def feed(self, text: str, num_tokens: int | None = None) -> list[Delta]:
        """Return what a piece of text tells. `num_tokens` is ChoiceDelta.num_tokens, for `reasoning_tokens`."""
        if self._reasoning is None:
            return self._answer(text)
        reasoning, answer = self._reasoning.feed(text, num_tokens)
        self.reasoning_tokens = self._reasoning.tokens
        return self._thought(reasoning) + self._answer(answer)

    def finish(self) -> list[Delta]:
        """Return what was held back: the choice has ended. Once, after the last piece."""
        deltas: list[Delta] = []
        if self._reasoning is not None:
            reasoning, answer = self._reasoning.finish()
            self.reasoning_tokens = self._reasoning.tokens
            deltas = self._thought(reasoning) + self._answer(answer)
        return deltas + self._counted(self._tools.finish()) if self._tools is not None else deltas

    def _thought(self, text: str) -> list[Delta]:
        return [ReasoningDelta(text)] if text and self._include_reasoning else []

    def _answer(self, text: str) -> list[Delta]:
        if not text:
            return []
        return [ContentDelta(text)] if self._tools is None else self._counted(self._tools.feed(text))

    def _counted(self, deltas: list[Delta]) -> list[Delta]:
        self.calls += sum(isinstance(delta, CallBegun) for delta in deltas)
        return deltas
