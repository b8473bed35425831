"""What an assistant's message is made of, and who takes a model's text apart into that: the seam to tools and reasoning.

A chat endpoint asks a MessagePlan, made of its request, for what goes to the model besides messages and sampling, and
for a reader of each choice. Without tools and reasoning there is no reader: the text is the content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from headrace_protocol.generation import StructuredOutput


class Content(NamedTuple):
    """More of the text that is for the user."""

    text: str


class Reasoning(NamedTuple):
    """More of what the model thinks."""

    text: str


class CallBegun(NamedTuple):
    """A call of a tool begins."""

    number: int
    """Counts the calls of one message from 0."""
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of the JSON text that is the arguments of a call that has begun."""

    number: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


class MessageReader(Protocol):
    """Takes the text of one choice apart, as it comes. What it gives is never empty text."""

    @property
    def reasoning(self) -> bool:
        """Whether the text read so far ends inside of the model's reasoning: its tokens are counted as such."""
        ...

    def feed(self, text: str) -> Sequence[Part]:
        """Take more text; return what is certain now. Text that may be the beginning of a mark is held back."""
        ...

    def end(self, finish_reason: str) -> tuple[Sequence[Part], str]:
        """Return what was held back, and the finish reason that the client gets ("tool_calls" where there are some)."""
        ...


class MessagePlan(Protocol):
    """What a request says of tools and reasoning, for a model: read once, checked."""

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools that the chat template shows to the model."""
        ...

    @property
    def structured(self) -> StructuredOutput | None:
        """What the text has to be, where a call of a tool is required; None leaves it to response_format."""
        ...

    @property
    def template_arguments(self) -> dict[str, Any] | None:
        """More arguments of the chat template; those of the request itself win."""
        ...

    @property
    def skip_special_tokens(self) -> bool:
        """Whether special tokens may be left out of the text: not where they are the marks of a call."""
        ...

    @property
    def tells_steps(self) -> bool:
        """Whether the model has to tell each step, though the answer comes as a whole: to count what it thought."""
        ...

    @property
    def legacy(self) -> bool:
        """Whether a call of a tool is told as the `function_call` of old."""
        ...

    def reader(self, *, in_reasoning: bool) -> MessageReader | None:
        """Return the reader of one choice; `in_reasoning` where its prompt ends inside of the model's reasoning."""
        ...
