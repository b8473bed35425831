"""The text of one choice of a chat as parts of its message: reasoning, content, calls of tools. Pure."""

from __future__ import annotations

from collections.abc import Callable

from headrace.gateway.http.openai.message import CallBegun, Content, Part, Reasoning
from headrace.gateway.http.openai.reasoning import ReasoningSplitter
from headrace.gateway.http.openai.tools.parts import ToolParser


class ChatReader:
    """Implements MessageReader. `tools` is None where the text calls none, `splitter` where it has no reasoning.

    `ending` gives the finish reason from that of the engine and the number of calls.
    """

    __slots__ = ("_calls", "_ending", "_splitter", "_tells_reasoning", "_tools")

    def __init__(
        self,
        tools: ToolParser | None,
        splitter: ReasoningSplitter | None,
        ending: Callable[[str, int], str],
        *,
        tells_reasoning: bool = True,
    ) -> None:
        self._tools = tools
        self._splitter = splitter
        self._ending = ending
        self._tells_reasoning = tells_reasoning
        self._calls = 0

    @property
    def reasoning(self) -> bool:
        return self._splitter is not None and self._splitter.inside

    def feed(self, text: str) -> list[Part]:
        if self._splitter is None:
            return self._answer(text)
        reasoning, answer = self._splitter.feed(text)
        return self._thought(reasoning) + self._answer(answer)

    def end(self, finish_reason: str) -> tuple[list[Part], str]:
        parts: list[Part] = []
        if self._splitter is not None:
            reasoning, answer = self._splitter.finish()
            parts = self._thought(reasoning) + self._answer(answer)
        if self._tools is not None:
            parts += self._counted(self._tools.finish())
        return parts, self._ending(finish_reason, self._calls)

    def _thought(self, text: str) -> list[Part]:
        return [Reasoning(text)] if text and self._tells_reasoning else []

    def _answer(self, text: str) -> list[Part]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._counted(self._tools.feed(text))

    def _counted(self, parts: list[Part]) -> list[Part]:
        self._calls += sum(isinstance(part, CallBegun) for part in parts)
        return parts
