"""A grammar's mask at a token's choice, rows of 16 bits that are not unpacked, and the same draws on every device."""

import numpy as np
import pytest
import torch

from headrace_backends.llm import sampler
from headrace_backends.llm.grammar_masks import RowMask
from headrace_backends.llm.sampler import sample
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.sampling_row import SamplingRow

VOCAB = 1501


def _logits(rows, scale=3.0, seed=3):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def _mask(tokens, problem=None) -> RowMask:
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return RowMask(np.packbits(bits, bitorder="little").view(np.uint32), problem)


def _row(seed=0, mask=None, output=(), **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, (), output, frozenset({1500}), (), mask)


PARAMS = [
    {"temperature": 0.0}, {}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"temperature": 0.0, "repetition_penalty": 1.2},
    {"presence_penalty": 1.0, "logit_bias": {3: 5.0, 900: -100.0}}, {"allowed_token_ids": tuple(range(0, 1500, 7))},
]  # fmt: skip
SETS = [(3,), (0, 700, 1500), range(0, VOCAB, 7), range(1, VOCAB)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_tokens_of_the_mask_come_and_they_as_if_there_were_no_others(dtype):
    logits = _logits(1).to(dtype)
    for params in PARAMS:
        for allowed in SETS:
            banned = logits.float().clone()
            banned[0, sorted(set(range(VOCAB)) - set(allowed))] = float("-inf")
            for seed in range(6):
                (token,) = sample(logits, [_row(seed, _mask(allowed), output=(5,), **params)])
                (other,) = sample(banned, [_row(seed, output=(5,), **params)])
                assert token.token_id == other.token_id
                assert token.token_id in {-1, *allowed}


def test_rows_without_a_mask_are_not_touched_by_those_with_one():
    logits = _logits(3)
    plain = sample(logits, [_row(seed) for seed in range(3)])
    mixed = sample(logits, [_row(0), _row(1, _mask((9,))), _row(2)])
    assert [each.token_id for each in mixed] == [plain[0].token_id, 9, plain[2].token_id]


def test_a_row_that_its_grammar_leaves_nothing_fails_alone_and_says_why():
    rows = [
        _row(0, _mask(())),
        _row(0, _mask((3,), "it became too costly")),
        _row(0, _mask((3,)), allowed_token_ids=(4,)),
        _row(0, _mask((1500,)), min_tokens=2, temperature=0.0),
        _row(0, _mask((3,))),
    ]
    errors = [each.error for each in sample(_logits(5), rows)]
    assert errors[:2] == ["the grammar allows no token of the vocabulary here", "it became too costly"]
    assert all(error.startswith("no token may be chosen: the grammar, ") for error in errors[2:4])
    assert errors[4] is None


def test_log_probabilities_are_of_the_logits_without_the_mask():
    logits = _logits(1)
    (each,) = sample(logits, [_row(0, _mask((9,)), logprobs=2)])
    assert each.logprobs.chosen.logprob == pytest.approx(float(logits.log_softmax(-1)[0, 9]), abs=1e-4)


NAN, INF = float("nan"), float("inf")
ROWS = [
    ([1.0, 3.0, 3.0, -5.0], 1),
    ([-1.0, -3.0, -0.5, -0.5], 2),
    ([-1.0, -0.0, 0.0, -2.0], 1),
    ([0.0, -0.0, 0.0, -2.0], 0),
    ([-INF, -INF, 2.0, -INF], 2),
    ([-INF, -INF, -2.0, -INF], 2),
    ([1.0, NAN, 2.0, 3.0], None),
    ([1.0, -NAN, 2.0, 3.0], None),
    ([1.0, INF, 2.0, 3.0], None),
    ([-INF] * 4, None),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_likeliest_is_the_first_of_equals_and_broken_rows_are_found(dtype):
    logits = torch.tensor([values for values, _ in ROWS]).to(dtype)
    if dtype is torch.bfloat16:
        logits.view(torch.int16)[7, 1] = -1  # a NaN of negative sign, as x86 makes them
    answers = sample(logits, [_row(temperature=0.0) for _ in ROWS])
    assert [None if each.error else each.token_id for each in answers] == [best for _, best in ROWS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_accelerator_draws_what_the_processor_draws(dtype):
    logits = _logits(len(PARAMS) * 12, seed=4).to(dtype)
    sets = [None, *map(_mask, SETS[1:])]
    rows = [_row(at, sets[at % 4], output=(7,), **PARAMS[at % len(PARAMS)]) for at in range(len(PARAMS) * 12)]
    assert sampler._on_device(logits, rows) == sampler._in_memory(logits, rows)
