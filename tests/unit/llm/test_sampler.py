"""How a token is chosen: each filter against a plain reference, seeds, penalties, masks and log probabilities."""

import collections
import math

import numpy as np
import pytest
import torch

from headrace_backends.llm.sampler import sample
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.sampling_row import SamplingRow
from headrace_backends.llm.uniform import uniform

VOCAB = 1500


def _logits(rows, vocabulary=VOCAB, seed=3, scale=3.0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def _row(seed=0, prompt=(), output=(), eos=frozenset(), bad=(), **params):
    return SamplingRow(SamplingParams(**params), seed, prompt, output, eos, bad)


def _tokens(logits, rows):
    return [each.token_id for each in sample(logits, rows)]


def _plain(logits, row):
    """One row written plainly, in fp64: temperature, min_p, top_k, top_p, and the uniform's place among what is left."""
    params = row.params
    values = np.float64(np.float32(logits.float().numpy()) / np.float32(params.temperature))
    keep = np.ones(len(values), bool)
    if params.min_p:
        keep &= values >= values.max() + math.log(params.min_p)
    if 0 < params.top_k < len(values):
        keep &= values >= np.sort(values)[::-1][params.top_k - 1]
    weights = np.exp(values - values.max()) * keep
    if params.top_p < 1:
        order = np.argsort(-values, kind="stable")
        sums = np.cumsum(weights[order])
        needed = int(np.searchsorted(sums, params.top_p * sums[-1])) + 1
        keep &= values >= values[order][: min(needed, int(keep.sum()))][-1]
        weights *= keep
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, uniform(row.seed, len(row.output_token_ids)) * sums[-1], side="right"))


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 300},
    {"top_k": 1400},
    {"top_p": 0.3},
    {"top_p": 0.95, "temperature": 2.0},
    {"top_p": 0.9999, "temperature": 2.0},
    {"min_p": 0.1},
    {"min_p": 0.0001, "temperature": 2.0},
    {"top_k": 20, "top_p": 0.7},
    {"min_p": 0.05, "top_p": 0.8},
    {"min_p": 0.02, "top_p": 0.8, "top_k": 40, "temperature": 0.8},
    {"min_p": 0.0001, "top_p": 0.99, "top_k": 1300, "temperature": 2.0},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_each_filter_equals_its_plain_form(params):
    logits = _logits(40)
    rows = [_row(seed, output=range(seed % 7), **params) for seed in range(40)]
    assert _tokens(logits, rows) == [_plain(logits[at], row) for at, row in enumerate(rows)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_token_in_any_batch(dtype):
    logits = _logits(len(FILTERS) * 3, 2000).to(dtype)
    rows = [_row(seed, **FILTERS[seed % len(FILTERS)]) for seed in range(len(FILTERS) * 3)]
    together = _tokens(logits, rows)
    assert [_tokens(logits[at : at + 1], [row])[0] for at, row in enumerate(rows)] == together
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    assert _tokens(logits[order], [rows[at] for at in order]) == [together[at] for at in order]


def test_equal_logits_are_never_parted():
    logits = torch.zeros(1, 600)
    logits[0, 300:] = -9
    drawn = {_tokens(logits, [_row(seed, top_k=2)])[0] for seed in range(3000)}
    assert drawn == set(range(300))


def test_tokens_come_as_often_as_they_are_likely():
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]))
    for params in ({}, {"top_k": 5, "top_p": 0.999999}):
        counts = collections.Counter(_tokens(logits.expand(20000, 5), [_row(seed, **params) for seed in range(20000)]))
        expected = [10000, 4000, 3000, 2000, 1000]
        assert sum((counts[t] - e) ** 2 / e for t, e in enumerate(expected)) < 18.5  # chi-square, 4 degrees, 0.1 %


def test_uniforms_differ_by_seed_and_by_count_and_lie_in_the_interval():
    drawn = [uniform(seed, count) for seed in range(100) for count in range(100)]
    assert len(set(drawn)) == 10000
    assert all(0 <= number < 1 for number in drawn)
    assert abs(sum(drawn) / 10000 - 0.5) < 0.01
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_what_leaves_one_token_is_greedy(params):
    logits = _logits(20)
    assert _tokens(logits, [_row(seed, **params) for seed in range(20)]) == logits.argmax(-1).tolist()


def test_a_temperature_near_zero_does_not_overflow():
    assert _tokens(_logits(4) * 30, [_row(s, temperature=0.0001) for s in range(4)]) == _logits(4).argmax(-1).tolist()


def _greedy(logits, **row):
    return _tokens(torch.tensor([logits]), [_row(temperature=0.0, **row)])[0]


def test_penalties_follow_their_formulas():
    logits = [2.0, 1.9, -1.0, 1.2]
    assert _greedy(logits, prompt=[0], repetition_penalty=1.1) == 1
    assert _greedy(logits, prompt=[0], presence_penalty=2.0, frequency_penalty=2.0) == 0, "they count the output alone"
    assert _greedy(logits, output=[0], presence_penalty=0.2) == 1
    assert _greedy(logits, output=[0, 0, 1], frequency_penalty=0.2) == 1
    assert _greedy(logits, output=[0, 0, 1], frequency_penalty=0.5) == 1
    assert _greedy([-1.0, -1.1], prompt=[0], repetition_penalty=1.2) == 1, "negative logits are multiplied"


def test_a_bias_forces_and_bans():
    logits = _logits(2)
    best = logits.argmax(-1).tolist()
    assert _tokens(logits, [_row(s, logit_bias={7: 100.0}) for s in range(2)]) == [7, 7]
    banned = _tokens(logits, [_row(temperature=0.0, logit_bias={b: -100.0}) for b in best])
    assert all(one != other for one, other in zip(banned, best, strict=True))


def test_only_allowed_tokens_are_drawn():
    rows = [_row(seed, temperature=2.0, allowed_token_ids=(3, 99, 1400, 99999)) for seed in range(64)]
    assert set(_tokens(_logits(1).expand(64, VOCAB) * 0.1, rows)) == {3, 99, 1400}


def test_a_bad_word_is_banned_where_it_would_end():
    logits = [0.0, 3.0, 2.0, 1.0]
    assert _greedy(logits, bad=((1,),)) == 2
    assert _greedy(logits, output=[0, 2], bad=((2, 1),)) == 2
    assert _greedy(logits, output=[2, 0], bad=((2, 1),)) == 1
    assert _greedy(logits, output=[], bad=((2, 1),)) == 1


def test_neither_the_end_nor_a_stop_token_comes_before_min_tokens():
    logits = [0.0, 3.0, 2.0, 1.0]
    ends = {"eos": frozenset({1}), "stop_token_ids": (2,), "min_tokens": 2}
    assert _greedy(logits, output=[0], **ends) == 3
    assert _greedy(logits, output=[0, 0], **ends) == 1
    assert _greedy(logits, output=[0], ignore_eos=True, **ends) == 1, "the end ends nothing there"


def test_the_logits_are_left_as_they_are():
    logits = _logits(2)
    kept = logits.clone()
    sample(logits, [_row(logit_bias={1: 5.0}), _row(repetition_penalty=2.0, output=[1, 2])])
    assert torch.equal(logits, kept)


def test_log_probabilities_are_of_the_logits_before_any_change():
    logits = _logits(3)
    rows = [_row(seed, logprobs=4, temperature=0.7, logit_bias={11: 100.0}) for seed in range(3)]
    expected = torch.log_softmax(logits.double(), -1)
    for at, each in enumerate(sample(logits, rows)):
        assert each.token_id == each.logprobs.chosen.token_id == 11
        assert each.logprobs.chosen.logprob == pytest.approx(float(expected[at, 11]), abs=1e-4)
        assert each.logprobs.chosen.rank == int((logits[at] > logits[at, 11]).sum()) + 1
        top = expected[at].topk(4)
        assert [t.token_id for t in each.logprobs.top] == top.indices.tolist()
        assert [t.logprob for t in each.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert [t.rank for t in each.logprobs.top] == [1, 2, 3, 4]


def test_log_probabilities_of_none_and_of_the_whole_vocabulary():
    none, everything = sample(_logits(2), [_row(logprobs=0), _row(logprobs=-1)])
    assert none.logprobs.top == ()
    assert len(everything.logprobs.top) == VOCAB
    assert sum(math.exp(each.logprob) for each in everything.logprobs.top) == pytest.approx(1, abs=1e-4)


def test_a_row_without_a_token_or_with_broken_logits_fails_alone():
    logits = _logits(4, 10)
    logits[2] = float("nan")
    rows = [_row(seed=5), _row(allowed_token_ids=(99,)), _row(), _row(seed=5, temperature=0.0, logprobs=1)]
    answers = sample(logits, rows)
    assert answers[0] == sample(logits[:1], rows[:1])[0]
    assert answers[1].error.startswith("no token may be chosen: allowed_token_ids")
    assert answers[2].error == "the model's logits are not numbers"
    assert answers[3].error is None
