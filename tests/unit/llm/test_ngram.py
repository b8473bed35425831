"""Guesses from what was said before."""

from __future__ import annotations

import pytest

from headrace_backends.llm.ngram import NgramConfig, NgramDrafter
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.step import verified


def a_request(tokens: list[int], name: str = "r") -> GenerationRequest:
    return GenerationRequest(name, tokens, SamplingParams(), 0)


def guess(tokens: list[int], **config: int) -> list[int]:
    (tokens,) = NgramDrafter(NgramConfig(**config)).propose([a_request(tokens)])
    return tokens


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 9, 1, 2, 4, 8, 7, 1, 2], [4, 8, 7, 1]),  # the latest of equal matches
        ([7, 1, 2, 3, 0, 0, 1, 2, 4, 0, 7, 1, 2], [3, 0, 0, 1]),  # a longer match before a later one
        ([1, 2, 1, 2], [1, 2, 1, 2]),  # what reaches the end goes on with itself
        ([5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 3, 4], []),
        ([1], []),
        ([], []),
    ],
)
def test_a_guess_is_what_followed_the_same_tokens(tokens: list[int], expected: list[int]) -> None:
    assert guess(tokens) == expected


def test_the_index_grows_with_the_request() -> None:
    drafter = NgramDrafter(NgramConfig(num_speculative_tokens=2))
    request = a_request([1, 2, 3])
    assert drafter.propose([request]) == [[]]
    for token in (9, 1, 2):
        request.append(token)
    assert drafter.propose([request]) == [[3, 9]]
    assert drafter.propose([request]) == [[3, 9]], "asked twice is answered twice"


def test_guesses_that_are_always_wrong_pause() -> None:
    drafter = NgramDrafter(NgramConfig(prompt_lookup_min=1, patience=2, pause=3))
    request = a_request([1, 1])
    proposed = []
    for at in range(9):
        (tokens,) = drafter.propose([request])
        proposed.append(bool(tokens))
        request.append(1 if at % 2 else 2)
    assert proposed[0]
    assert not all(proposed)
    assert any(proposed[4:]), "a pause has no end"


def test_large_batches_are_not_guessed_for() -> None:
    drafter = NgramDrafter(NgramConfig(disable_above=1))
    two = [a_request([5, 5, 5], "a"), a_request([5, 5, 5], "b")]
    assert drafter.propose(two) == [[], []]
    assert drafter.propose(two[:1]) != [[]]


def test_nothing_is_kept_of_forgotten_requests() -> None:
    drafter = NgramDrafter(NgramConfig())
    drafter.propose([a_request([5, 5, 5])])
    drafter.forget("r")
    drafter.forget("r")
    assert not drafter._indexes


@pytest.mark.parametrize("config", [{"num_speculative_tokens": 0}, {"prompt_lookup_min": 5}, {"pause": 0}])
def test_settings_that_make_no_sense_are_refused(config: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected|less"):
        NgramDrafter(NgramConfig(**config))


@pytest.mark.parametrize(
    ("drafts", "sampled", "stand"),
    [([], [4], [4]), ([4], [4, 5], [4, 5]), ([4, 5], [4, 6, 7], [4, 6]), ([4, 5], [6, 5, 7], [6])],
)
def test_drafts_stand_up_to_the_first_wrong_one(drafts: list[int], sampled: list[int], stand: list[int]) -> None:
    assert verified(drafts, sampled) == stand
