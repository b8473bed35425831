"""Parts what a model thinks from what it says: the text between <think> and </think>, which comes in pieces. Pure.

Only the beginning of a text is thinking. The markers, and white space around them, belong to neither part. A text whose
thinking never ends is thinking to its end.
"""

from __future__ import annotations

import enum
from typing import Any, Final

from headrace.gateway.http.json_text import describe
from headrace.gateway.http.openai.errors import refusal
from headrace.gateway.http.openai.tools.watch import MAX_SPACE, MarkerWatch

BEGIN: Final = "<think>"
END: Final = "</think>"
FORMATS: Final = ("think_tags",)
"""What ModelCard.reasoning_format may be for the text to be split."""
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class _Place(enum.Enum):
    START = 1
    """Nothing but white space has come, and maybe a part of the first marker."""
    LEAD = 2
    """Before the first character of the thinking."""
    THINKING = 3
    GAP = 4
    """Before the first character of the answer."""
    ANSWER = 5


class ReasoningSplitter:
    """Splits the text of one choice.

    `inside`: the prompt has opened the thinking already (PromptTold.in_reasoning); the model may repeat the marker.
    """

    __slots__ = ("_held", "_place", "_thinks", "_told", "_undecided", "_watch", "tokens")

    def __init__(self, *, inside: bool) -> None:
        self._thinks = inside
        self._place = _Place.START
        self._held = ""
        self._watch = MarkerWatch(END)
        self._told = 0
        self._undecided = 0
        """Tokens of pieces of which it is not known yet what they are."""
        self.tokens = 0
        """Tokens that were spent on thinking so far, markers included."""

    def feed(self, text: str, num_tokens: int | None = None) -> tuple[str, str]:
        """Return what a piece adds to the thinking and to the answer.

        `num_tokens`: generated so far. Where a piece is both, its tokens are parted as its characters are: exact where
        each step is a piece of its own, an estimate where a whole text is one piece.
        """
        before = self._place
        reasoning, answer = self._split(text)
        if num_tokens is not None:
            new, self._told = num_tokens - self._told, num_tokens
            if self._place is _Place.START:
                self._undecided += new
            elif self._thinks and before not in (_Place.GAP, _Place.ANSWER):
                self.tokens += self._undecided + round(new * (1 - len(answer) / max(len(text), 1)))
                self._undecided = 0
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """Return what was held back: the text has ended."""
        if self._place is _Place.THINKING:
            return self._watch.finish(), ""
        held, self._held = self._held, ""
        if not self._thinks:
            return "", held
        self.tokens += self._undecided
        return held.strip(), ""

    def _split(self, text: str) -> tuple[str, str]:
        if self._place is _Place.START:
            text = self._begin(text)
        if self._place is _Place.LEAD:
            text = text.lstrip()
            if text:
                self._place = _Place.THINKING
        reasoning = ""
        if self._place is _Place.THINKING:
            reasoning, marker, text = self._watch.feed(text)
            if marker is not None:
                self._place = _Place.GAP
        if self._place is _Place.GAP:
            text = text.lstrip()
            if text:
                self._place = _Place.ANSWER
        return reasoning, text

    def _begin(self, text: str) -> str:
        """Decide whether the text begins with thinking; return what comes behind the marker, "" while undecided."""
        text = self._held + text
        self._held = ""
        bare = text.lstrip()
        near = len(text) - len(bare) <= MAX_SPACE
        if near and bare.startswith(BEGIN):
            self._thinks = True
            self._place = _Place.LEAD
            return bare[len(BEGIN) :]
        if near and BEGIN.startswith(bare):
            self._held = text
            return ""
        self._place = _Place.LEAD if self._thinks else _Place.ANSWER
        return text


def template_options(effort: object) -> dict[str, Any]:
    """Return what a chat template is told of the request's reasoning_effort; the request's own options go before it.

    Raises HttpError for what is none of EFFORTS.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise refusal(f"expected one of {', '.join(EFFORTS)}, got {describe(effort)}", "reasoning_effort")
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
