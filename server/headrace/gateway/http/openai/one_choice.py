"""The text of a generation that has one choice, taken apart: for doors that know no other."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.http.openai.gathering import check
from headrace.gateway.http.openai.message import CallBegun, Content, MessagePlan, MessageReader, Part
from headrace.gateway.http.openai.usage import Usage
from headrace_protocol.generation import ChoiceDelta, GenerationEvent


class OneChoice:
    """What was told so far."""

    def __init__(self, plan: MessagePlan) -> None:
        self._plan = plan
        self._reader: MessageReader | None = None
        self._begun = False
        self.calls = 0
        self.usage = Usage()
        self.finish: str | None = None
        """The finish reason, as chats have it; None while it goes on."""
        self.stop_reason: int | str | None = None

    def take(self, event: GenerationEvent) -> Sequence[Part]:
        """Return the parts that an event tells. Raises InferError where the generation broke off."""
        in_reasoning = False
        if event.prompts:
            self.usage.take_prompts(event.prompts)
            in_reasoning = event.prompts[0].in_reasoning
        if not self._begun:
            self._begun = True
            self._reader = self._plan.reader(in_reasoning=in_reasoning)
        parts: list[Part] = []
        for delta in event.choices:
            parts += self._parts(delta)
        return parts

    def _parts(self, delta: ChoiceDelta) -> Sequence[Part]:
        check(delta)
        new = self.usage.take_choice(delta)
        reader, finish = self._reader, delta.finish_reason
        parts: Sequence[Part]
        ending: str | None = finish
        if reader is None:
            parts = (Content(delta.text),) if delta.text else ()
        else:
            parts = reader.feed(delta.text) if delta.text else ()
            if reader.reasoning:
                self.usage.reasoning_tokens += new
            if finish is not None:
                rest, ending = reader.end(finish)
                parts = (*parts, *rest)
        self.calls += sum(isinstance(part, CallBegun) for part in parts)
        self.finish, self.stop_reason = ending, delta.stop_reason
        return parts
