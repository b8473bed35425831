"""Where a generation stands in its grammar: ends, guesses, reasoning in front, and what a step's masks say."""

import re

import numpy as np
import pytest

from headrace_backends.llm.grammar import GrammarError, GrammarState, ReasoningMarks, last_index
from headrace_backends.llm.grammar_masks import MaskFiller

THINK, END_THINK, EOS, STOP = 40, 41, 42, 43
VOCAB = 44
MARKS = ReasoningMarks((THINK,), (END_THINK,))


class Letters:
    """A matcher of a regular expression over letters a to z, tokens 0 to 25; knows prefixes by trying."""

    def __init__(self, pattern: str, longest: int = 6) -> None:
        self.pattern, self.longest, self.text = re.compile(pattern), longest, ""
        self.broken = False

    def _reaches(self, text: str) -> bool:
        if self.pattern.fullmatch(text):
            return True
        return len(text) < self.longest and any(self._reaches(text + letter) for letter in "abc")

    def accept(self, token_id: int) -> None:
        if self.broken or token_id > 25 or not self._reaches(self.text + chr(97 + token_id)):
            self.broken = True
            raise GrammarError(f"not {token_id}")
        self.text += chr(97 + token_id)

    def validate(self, token_ids) -> int:
        text = self.text
        for at, token in enumerate(token_ids):
            text += chr(97 + token)
            if token > 25 or not self._reaches(text):
                return at
        return len(token_ids)

    def rollback(self, count: int) -> None:
        self.text = self.text[: len(self.text) - count]

    def fill(self, row) -> None:
        if self.broken:
            raise GrammarError("it broke")
        row[:] = 0
        for token in range(3):
            if self._reaches(self.text + chr(97 + token)):
                row[token // 32] |= np.uint32(1 << token % 32)
        if self.may_end:
            row[EOS // 32] |= np.uint32(1 << EOS % 32)

    def forced(self):
        return [0] if self.text == "" else []

    @property
    def may_end(self) -> bool:
        return self.pattern.fullmatch(self.text) is not None

    @property
    def complete(self) -> bool:
        return self.may_end and not any(self._reaches(self.text + letter) for letter in "abc")


def state(pattern: str = "ab*c", *, marks: ReasoningMarks | None = None, prompt=(), ends=(EOS, STOP)) -> GrammarState:
    return GrammarState(Letters(pattern), frozenset(ends), marks, prompt)


def masks(of: GrammarState, drafts=()) -> list[set[int]]:
    rows = np.full((1 + len(drafts), -(-VOCAB // 32)), 0xFFFFFFFF, np.uint32)
    assert of.fill(rows, drafts) is None
    bits = np.unpackbits(rows.view(np.uint8), axis=1, count=VOCAB, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def test_a_mask_lets_through_what_the_grammar_allows():
    assert masks(state()) == [{0}]


def test_tokens_that_end_the_text_come_only_where_it_may_end():
    text = state("a|ab")
    assert masks(text) == [{0}]
    text.accept(0)
    assert masks(text) == [{1, EOS, STOP}]
    text.accept(1)
    assert masks(text) == [{EOS, STOP}]
    assert text.complete


def test_masks_behind_drafts_assume_the_drafts_and_leave_the_state_as_it_was():
    text = state()
    assert masks(text, [0, 1, 2]) == [{0}, {1, 2}, {1, 2}, {EOS, STOP}]
    assert masks(text) == [{0}]


def test_guesses_go_as_far_as_the_grammar_and_end_nothing():
    text = state()
    assert text.validate([0, 1, 5, 2]) == 2
    assert text.validate([0, 1, EOS, 2]) == 2
    assert text.validate([STOP]) == 0
    assert masks(text) == [{0}]


def test_a_token_that_is_not_allowed_is_an_error_and_every_mask_after_it_too():
    text = state()
    with pytest.raises(GrammarError):
        text.accept(2)
    assert text.fill(np.zeros((1, 2), np.uint32), ()) == "it broke"


def test_the_constraint_begins_behind_the_end_of_reasoning():
    text = state(marks=MARKS, prompt=(1, THINK, 5))
    everything = set(range(VOCAB))
    assert masks(text)[0] >= everything
    assert text.forced() == ()
    for token in (7, 9, EOS - 10, END_THINK):
        text.accept(token)
    assert masks(text) == [{0}]
    assert text.forced() == [0]


def test_a_model_may_open_its_reasoning_or_begin_at_once():
    assert masks(state(marks=MARKS)) == [{0, THINK}]
    thinks, answers = state(marks=MARKS), state(marks=MARKS)
    thinks.accept(THINK)
    thinks.accept(30)
    thinks.accept(END_THINK)
    answers.accept(0)
    assert masks(thinks) == [{0}]
    assert masks(answers) == [{1, 2}]


def test_reasoning_that_the_prompt_has_closed_is_not_opened_again():
    assert masks(state(marks=MARKS, prompt=(THINK, END_THINK, 3))) == [{0}]
    assert masks(state(marks=MARKS, prompt=(THINK, END_THINK, *range(9)))) == [{0, THINK}], (
        "it was that of a turn before"
    )


def test_drafts_may_lead_out_of_the_reasoning():
    text = state(marks=MARKS, prompt=(THINK,))
    drafts = [3, END_THINK, 0, 2]
    assert text.validate([*drafts, 5]) == 4
    first, second, *rest = masks(text, drafts)
    assert first >= set(range(VOCAB))
    assert second >= set(range(VOCAB))
    assert rest == [{0}, {1, 2}, {EOS, STOP}]


def test_the_end_of_reasoning_may_be_several_tokens():
    text = state(marks=ReasoningMarks((THINK, 3), (7, 8)), prompt=(THINK, 3))
    for token in (7, 7, 8):
        text.accept(token)
    assert masks(text) == [{0}]


def test_a_text_is_not_complete_while_the_model_reasons():
    text = state("", marks=MARKS, prompt=(THINK,))
    assert not text.complete
    text.accept(END_THINK)
    assert text.complete


def test_the_last_of_several_places_is_found():
    assert last_index([1, 2, 1, 2, 3], (1, 2)) == 2
    assert last_index([1], (1, 2)) == -1


def test_a_step_fills_the_masks_of_all_its_generations():
    filler = MaskFiller(VOCAB)
    broken = state()
    with pytest.raises(GrammarError):
        broken.accept(9)
    filler.begin({"a": (state(), (0, 1)), "b": (state("b"), ()), "c": (broken, ())})
    told = filler.masks()
    assert {name: len(rows) for name, rows in told.items()} == {"a": 3, "b": 1, "c": 1}
    assert [int(row.words[0]) for row in told["a"]] == [1, 0b110, 0b110]
    assert int(told["b"][0].words[0]) == 0b10
    assert told["c"][0].problem == "it broke"
    filler.begin({})
    assert filler.masks() == {}
