"""Guesses over a real forward: the same tokens, whoever guesses and however a request wants its tokens chosen."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from headrace_backends.llm.admission import SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.core import EngineCore
from headrace_backends.llm.ngram import NgramConfig, NgramDrafter
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.runner import TorchRunner
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.scheduler import Scheduler
from language_models import BLOCK, tiny

NUMBERS = random.Random(8)
PROMPTS = [[NUMBERS.randrange(512) for _ in range(length)] * 2 for length in (4, 9, 17)]
WANTED = {
    "greedy": SamplingParams(temperature=0, max_tokens=24),
    "seeded": SamplingParams(temperature=0.8, max_tokens=24),
    "filtered": SamplingParams(temperature=1.2, top_p=0.9, top_k=40, min_p=0.01, max_tokens=24),
    "penalties": SamplingParams(
        temperature=0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.5, max_tokens=24
    ),
    "stops": SamplingParams(temperature=0.9, stop=("7", "38 4"), stop_token_ids=(5, 300), min_tokens=6, max_tokens=24),
    "bans": SamplingParams(temperature=0.9, bad_words=("3", "41 7"), logit_bias={9: 4.0, 11: -50.0}, max_tokens=24),
    "logprobs": SamplingParams(temperature=0.9, logprobs=3, prompt_logprobs=1, max_tokens=24),
}


class Numbers:
    """A tokenizer whose tokens are numbers and spaces between them."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids, *, skip_special_tokens: bool) -> str:
        return "".join(f" {token}" for token in token_ids)


class Knowing:
    """Guesses what it was told will come, of which a part is spoilt."""

    def __init__(self, outputs: dict[str, list[int]], wrong: float, most: int = 6) -> None:
        self.outputs, self.wrong, self.most = outputs, wrong, most
        self.numbers = random.Random(1)

    def propose(self, requests):
        return [self._guess(request) for request in requests]

    def forget(self, request_id: str) -> None:
        pass

    def _guess(self, request: GenerationRequest) -> list[int]:
        known = self.outputs[request.id][request.num_output_tokens :][: self.most]
        return [token if self.numbers.random() >= self.wrong else (token + 1) % 512 for token in known]


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    return TorchRunner(tiny(), 100, BLOCK, 512)


def run(runner, params: SamplingParams, drafter=None):
    """Return tokens, text and logprobs of each prompt, and the steps that took."""
    scheduler = Scheduler(SchedulerConfig(max_model_len=512), BlockManager(100, BLOCK))
    core = EngineCore(scheduler, Numbers(), drafter)
    ends = frozenset({2})
    requests = [GenerationRequest(str(at), prompt, params, at, ends) for at, prompt in enumerate(PROMPTS)]
    assert core.add(*requests) is None
    told = {request.id: ([], "", []) for request in requests}
    steps = 0
    while len(core):
        step = core.schedule(0)
        for output in core.update(step, runner.execute(step), 0):
            tokens, text, logprobs = told[output.request_id]
            told[output.request_id] = (
                [*tokens, *output.token_ids],
                text + output.text,
                [*logprobs, *(entry.chosen.token_id for entry in output.logprobs or ())],
            )
        core.check_integrity()
        steps += 1
    assert scheduler.blocks.num_free == scheduler.blocks.num_usable
    return told, steps, scheduler.stats


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_perfect_and_hostile_guesses_change_nothing(runner, name, wrong) -> None:
    plain, plain_steps, _ = run(runner, WANTED[name])
    known = {at: tokens for at, (tokens, _, _) in plain.items()}
    told, steps, stats = run(runner, WANTED[name], Knowing(known, wrong))
    assert told == plain
    assert stats.num_draft_tokens > 0
    if wrong == 0:
        assert stats.num_accepted_tokens == stats.num_draft_tokens
        assert steps < plain_steps / 3
    if wrong == 1:
        assert (stats.num_accepted_tokens, steps) == (0, plain_steps)


@pytest.mark.parametrize("name", WANTED)
def test_guesses_from_what_was_said_change_nothing(runner, name) -> None:
    plain, _, _ = run(runner, WANTED[name])
    told, _, _ = run(runner, WANTED[name], NgramDrafter(NgramConfig(prompt_lookup_min=1)))
    assert told == plain


def test_counts_of_guesses_by_place_never_grow(runner) -> None:
    plain, _, _ = run(runner, WANTED["seeded"])
    known = {at: tokens for at, (tokens, _, _) in plain.items()}
    _, _, stats = run(runner, WANTED["seeded"], Knowing(known, 0.3))
    assert sum(stats.accepted_at) == stats.num_accepted_tokens
    assert all(later <= earlier for earlier, later in pairwise(stats.accepted_at))
