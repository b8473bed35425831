"""Parts what a model thinks from what it says: the text between <think> and </think>, which comes in pieces. Pure.

Only the beginning of a text is thinking. The markers, and white space around them, belong to neither part. A text whose
thinking never ends is thinking to its end.
"""

from __future__ import annotations

import enum
from typing import Any, Final

from headrace.gateway.http.openai.fields import Fields
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

    __slots__ = ("_held", "_place", "_thinks", "_watch")

    def __init__(self, *, inside: bool) -> None:
        self._thinks = inside
        self._place = _Place.START
        self._held = ""
        self._watch = MarkerWatch(END)

    @property
    def inside(self) -> bool:
        """Whether what was read so far ends within the thinking, or within the marker that begins it."""
        if self._place is _Place.START:
            return self._thinks or bool(self._held.strip())
        return self._place in (_Place.LEAD, _Place.THINKING)

    def feed(self, text: str) -> tuple[str, str]:
        """Return what a piece adds to the thinking and to the answer."""
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

    def finish(self) -> tuple[str, str]:
        """Return what was held back: the text has ended."""
        if self._place is _Place.THINKING:
            return self._watch.finish(), ""
        held, self._held = self._held, ""
        return (held.strip(), "") if self._thinks else ("", held)

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


def template_arguments(fields: Fields) -> dict[str, Any] | None:
    """Return what a chat template is told of `reasoning_effort`. Raises HttpError 400 for what is none of EFFORTS."""
    effort = fields.choice("reasoning_effort", EFFORTS)
    if effort is None:
        return None
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
