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


def lengths_of_guesses(right: list[int], most: int = 8) -> list[int]:
    """How long guesses are, the i-th of which has right[i] right tokens."""
    drafter = NgramDrafter(NgramConfig(num_speculative_tokens=most))
    request = a_request([7] * 20)
    found = []
    for wrong, count in enumerate(right, 100):
        (tokens,) = drafter.propose([request])
        found.append(len(tokens))
        for token in tokens[:count]:
            request.append(token)
        if count < len(tokens):
            for token in (wrong, 7, 7, 7):
                request.append(token)
    return found


def test_guesses_grow_while_they_are_right_and_shrink_when_not() -> None:
    assert lengths_of_guesses([8, 8, 8]) == [4, 8, 8]
    assert lengths_of_guesses([8, 0, 0, 0]) == [4, 8, 4, 2]
    assert lengths_of_guesses([0, 8, 8, 8]) == [4, 2, 4, 8]
    assert lengths_of_guesses([8, 8], most=3) == [3, 3]


def test_a_pause_without_success_before_it_is_longer() -> None:
    drafter = NgramDrafter(NgramConfig(prompt_lookup_min=1, patience=1, pause=4))
    request = a_request([1, 1])
    guessed_at = []
    for at in range(40):
        (tokens,) = drafter.propose([request])
        if tokens:
            guessed_at.append(at)
        request.append(2 if tokens and tokens[0] == 1 else 1)
    gaps = [later - earlier for earlier, later in zip(guessed_at, guessed_at[1:], strict=False)]
    assert gaps[0] >= 4
    assert gaps[1] > gaps[0]
