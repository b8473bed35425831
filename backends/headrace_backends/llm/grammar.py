"""A generation under a grammar: which tokens may come next, and how far it has come. Pure; knows no grammar library.

What a library offers for one text is a `Matcher`. `GrammarState` puts around it what belongs to a generation: the tokens
that end it, guesses that are tried and taken back, and reasoning, behind which the constraint begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import Any, Final, NamedTuple, Protocol

from headrace_protocol.generation import StructuredOutput

_NEAR: Final = 8
"""Tokens behind the end of reasoning within which a prompt says that there is none to come; others are of turns before."""


class GrammarError(Exception):
    """A generation cannot go on under its grammar; says why."""


class Matcher(Protocol):
    """One text as a grammar sees it. For one thread at a time. Once something failed it stays failed."""

    def accept(self, token_id: int) -> None:
        """Take the next token. Raises GrammarError where the grammar does not allow it, or it became too costly."""

    def validate(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens could be accepted, one after another; changes nothing."""

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""

    def fill(self, row: Any) -> None:
        """Write which tokens may come: `row` is a writable array of 32-bit words, token t's bit is t % 32 of word t // 32.

        Tokens that end a text are among them where the text may end. Raises GrammarError where that is too costly.
        """

    def forced(self) -> Sequence[int]:
        """Return the tokens that can only come next, as the tokenizer would write them; often none."""

    @property
    def may_end(self) -> bool:
        """Whether the text is whole as it is."""

    @property
    def complete(self) -> bool:
        """Whether it is, and nothing can follow any more."""


class Grammar(Protocol):
    """Something compiled, to be used by any number of generations."""

    @property
    def spoiled(self) -> bool:
        """Whether it has become too large to be used again; a new one of the same description would not be."""

    def matcher(self) -> Matcher:
        """Return a new text's beginning."""


class GrammarSource(Protocol):
    """Compiles away from the engine's thread. Thread-safe."""

    @property
    def reasoning(self) -> ReasoningMarks | None:
        """How the model sets its reasoning apart; None if it does not."""

    def compile(self, structured: StructuredOutput) -> Future[Grammar]:
        """Begin to compile; never raises. The future fails with an InferError that names what is wrong."""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The tokens around a model's reasoning; none of the two is empty."""

    start: tuple[int, ...]
    end: tuple[int, ...]


def last_index(tokens: Sequence[int], wanted: tuple[int, ...]) -> int:
    """Return where `wanted` last begins, or -1."""
    for at in range(len(tokens) - len(wanted), -1, -1):
        if tokens[at] == wanted[0] and tuple(tokens[at : at + len(wanted)]) == wanted:
            return at
    return -1


class _Phase(Enum):
    """Where a generation is that may reason first."""

    BEFORE = 1
    """The next token may open the reasoning, or begin the constrained text."""
    REASONING = 2
    BEHIND = 3


class _Gate(NamedTuple):
    """How far the reasoning has come; `last` are its newest tokens."""

    phase: _Phase = _Phase.BEHIND
    last: tuple[int, ...] = ()

    def after(self, token_id: int, marks: ReasoningMarks | None) -> tuple[_Gate, bool]:
        """Return the gate behind a token, and whether the token is one of the constrained text."""
        if self.phase is _Phase.BEHIND or marks is None:
            return self, True
        if self.phase is _Phase.BEFORE:
            return (_Gate(_Phase.REASONING), False) if (token_id,) == marks.start else (_Gate(), True)
        last = (*self.last, token_id)[-len(marks.end) :]
        return (_Gate() if last == marks.end else _Gate(_Phase.REASONING, last)), False


class GrammarState:
    """Where one generation stands. Owned by the engine's thread; lent to the runner while a step is computed."""

    def __init__(
        self,
        matcher: Matcher,
        ends: frozenset[int] = frozenset(),
        marks: ReasoningMarks | None = None,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """Take the tokens that end this generation, and the marks of reasoning where the constraint begins behind it.

        Where the prompt does not end in reasoning, nor with its end, the first token may open it, if one token does that.
        """
        self._matcher = matcher
        self._ends = ends
        self._marks = marks
        self._gate = _Gate()
        if marks is not None:
            opened, closed = last_index(prompt_token_ids, marks.start), last_index(prompt_token_ids, marks.end)
            if opened > closed:
                self._gate = _Gate(_Phase.REASONING)
            elif len(marks.start) == 1 and (closed < 0 or len(prompt_token_ids) - closed > _NEAR + len(marks.end)):
                self._gate = _Gate(_Phase.BEFORE)

    @property
    def complete(self) -> bool:
        """Whether the text is whole and nothing can follow."""
        return self._gate.phase is not _Phase.REASONING and self._matcher.complete

    def accept(self, token_id: int) -> None:
        """Take the next token, which ends nothing. Raises GrammarError where the grammar does not allow it."""
        gate, constrained = self._gate.after(token_id, self._marks)
        if constrained:
            self._matcher.accept(token_id)
        self._gate = gate

    def validate(self, token_ids: Sequence[int]) -> int:
        """Return how many guesses may come to be, one after another. None of them ends the text."""
        guesses = list(takewhile(lambda token: token not in self._ends, token_ids))
        gate = self._gate
        for at, token in enumerate(guesses):
            gate, constrained = gate.after(token, self._marks)
            if constrained:
                return at + self._matcher.validate(guesses[at:])
        return len(guesses)

    def forced(self) -> Sequence[int]:
        """Return the tokens that the grammar leaves no choice about."""
        return self._matcher.forced() if self._gate.phase is _Phase.BEHIND else ()

    def fill(self, rows: Any, draft_token_ids: Sequence[int]) -> str | None:
        """Write the masks of the next token and of those behind each draft, one row of `rows` [1 + drafts, words] each.

        All bits are set before; afterwards the state is as it was. Drafts are as `validate` left them. Returns why it
        could not be done.
        """
        gate, fed = self._gate, 0
        try:
            for at, row in enumerate(rows):
                if gate.phase is not _Phase.REASONING:
                    self._fill(row, gate)
                if at < len(draft_token_ids):
                    gate, constrained = gate.after(draft_token_ids[at], self._marks)
                    if constrained:
                        self._matcher.accept(draft_token_ids[at])
                        fed += 1
            if fed:
                self._matcher.rollback(fed)
        except GrammarError as error:
            return str(error)
        return None

    def _fill(self, row: Any, gate: _Gate) -> None:
        self._matcher.fill(row)
        allowed = set(self._ends) if self._matcher.may_end else set()
        if gate.phase is _Phase.BEFORE and self._marks is not None:
            allowed.add(self._marks.start[0])
        for token in allowed:
            if 0 <= token < 32 * len(row):
                row[token // 32] |= row.dtype.type(1 << token % 32)
