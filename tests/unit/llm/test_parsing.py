"""Sampling parameters as clients write them."""

from __future__ import annotations

import pytest

from headrace_backends.llm.parsing import ParamLimits, parse
from headrace_backends.llm.sampling_params import RepetitionDetection, SamplingParams, truncated


def problems(given: dict[str, object], **limits: object) -> list[str]:
    read = parse(given, ParamLimits(**limits))
    assert isinstance(read, list), f"{given} was taken"
    return [str(problem) for problem in read]


def params(given: dict[str, object], **limits: object) -> SamplingParams:
    read = parse(given, ParamLimits(**limits))
    assert isinstance(read, SamplingParams), read
    return read


def test_all_problems_are_told_at_once() -> None:
    assert problems({"temperature": 3, "top_p": 0, "nn": 1}) == [
        "temperature: expected a number from 0 to 2, got 3",
        "top_p: expected a number above 0, 1 at most, got 0",
        "nn: no such parameter; is n meant?",
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": -7}, {"seed": -7}),
        ({"temperature": 0.001}, {"temperature": 0.01}),
        ({"temperature": 1e-6}, {"temperature": 0.0}),
        ({"stop": "end"}, {"stop": ("end",)}),
        ({"max_tokens": None}, {}),
        ({"max_tokens": 5.0}, {"max_tokens": 5}),
        ({"logit_bias": {"7": -100, "3": 2}}, {"logit_bias": {7: -100.0, 3: 2.0}}),
        ({"allowed_token_ids": [3, 3, 1]}, {"allowed_token_ids": (3, 1)}),
        ({"thinking_token_budget": -1}, {"thinking_token_budget": None}),
        (
            {"truncate_prompt_tokens": -1, "truncation_side": "right"},
            {"truncate_prompt_tokens": -1, "truncation_side": "right"},
        ),
        ({"logprobs": 0, "prompt_logprobs": 20}, {"logprobs": 0, "prompt_logprobs": 20}),
        (
            {"repetition_detection": {"max_pattern_size": 4}},
            {"repetition_detection": RepetitionDetection(max_pattern_size=4)},
        ),
    ],
)
def test_a_right_value_is_taken(given: dict[str, object], expected: dict[str, object]) -> None:
    assert params(given, vocab_size=10) == SamplingParams(**expected)


@pytest.mark.parametrize(
    "given",
    [
        {"n": 0},
        {"n": 129},
        {"n": True},
        {"temperature": float("nan")},
        {"temperature": 10**400},
        {"temperature": "hot"},
        {"top_k": -2},
        {"min_p": 1.1},
        {"repetition_penalty": 0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": float("inf")},
        {"logit_bias": {"10": 1}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"1": 101}},
        {"logit_bias": [1]},
        {"seed": 1 << 63},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"stop": [""]},
        {"stop": ["a" * 1025]},
        {"stop": 5},
        {"stop_token_ids": [10]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": "12"},
        {"ignore_eos": 1},
        {"min_tokens": 17},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1 << 70},
        {"bad_words": ["x"] * 129},
        {"allowed_token_ids": []},
        {"logprobs": 21},
        {"logprobs": -1},
        {"truncate_prompt_tokens": 0},
        {"truncation_side": "up"},
        {"detokenize": False, "stop": "a"},
        {"repetition_detection": {"min_count": 2}},
        {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3}},
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 1}},
        {"repetition_detection": {"max_pattern_size": 1000000}},
        {"guided_json": {}},
    ],
)
def test_a_wrong_value_is_named(given: dict[str, object]) -> None:
    (told,) = problems(given, vocab_size=10)
    assert told.partition(":")[0] in given


def test_texts_are_numbers_only_where_the_door_takes_them_so() -> None:
    given = {"temperature": "0", "max_tokens": "7", "ignore_eos": "True", "stop": "5"}
    assert params(given, texts=True) == SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, stop=("5",))
    assert len(problems(given)) == 3


def test_a_door_may_ask_for_no_tokens() -> None:
    assert params({"max_tokens": 0}, allow_no_tokens=True).max_tokens == 0


def test_what_the_model_cannot_honour_is_refused_unless_it_asks_for_nothing() -> None:
    unsupported = frozenset({"thinking_token_budget"})
    assert problems({"thinking_token_budget": 5}, unsupported=unsupported) == [
        "thinking_token_budget: this model does not support it"
    ]
    assert params({"thinking_token_budget": -1}, unsupported=unsupported) == SamplingParams()


def test_a_long_value_is_not_told_whole() -> None:
    (told,) = problems({"n": "x" * 10000})
    assert len(told) < 150


@pytest.mark.parametrize(
    ("keep", "side", "kept"),
    [
        (None, "left", [1, 2, 3, 4]),
        (2, "left", [3, 4]),
        (2, "right", [1, 2]),
        (9, "left", [1, 2, 3, 4]),
        (-1, "left", [2, 3, 4]),
    ],
)
def test_a_prompt_is_cut_on_the_side_that_was_asked(keep: int | None, side: str, kept: list[int]) -> None:
    asked = SamplingParams(truncate_prompt_tokens=keep, truncation_side=side)
    assert list(truncated([1, 2, 3, 4], asked, 4)) == kept
