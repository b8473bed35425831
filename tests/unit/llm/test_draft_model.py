"""Guesses of a smaller model: the same output, whatever it guesses; and no block is lost."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from headrace_backends.llm.admission import SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.core import EngineCore
from headrace_backends.llm.draft_model import DraftModelConfig, DraftModelDrafter
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.scheduler import Scheduler
from headrace_backends.llm.step import StepResult
from llm_fakes import VOCAB, ByteTokenizer, PagedRunner

CONFIG = DraftModelConfig(max_model_len=64, vocab_size=VOCAB, num_speculative_tokens=4)
GREEDY = SamplingParams(temperature=0, max_tokens=20)


class WrongRunner(PagedRunner):
    """Gives other tokens than the model would."""

    def execute(self, step):
        results = super().execute(step)
        return [StepResult([(token + 1) % VOCAB for token in result.token_ids]) for result in results]


class Engine:
    def __init__(self, config=CONFIG, *, drafts: PagedRunner | None = None, draft_blocks=200, blocks=200, **limits):
        scheduler = Scheduler(SchedulerConfig(max_model_len=64, **limits), BlockManager(blocks, 4))
        self.draft_runner = drafts or PagedRunner(draft_blocks, 4)
        self.draft_blocks = BlockManager(draft_blocks, 4)
        self.drafter = DraftModelDrafter(config, self.draft_runner, self.draft_blocks)
        self.core = EngineCore(scheduler, ByteTokenizer(), self.drafter)
        self.runner = PagedRunner(blocks, 4)
        self.stats = scheduler.stats

    def step(self) -> None:
        step = self.core.schedule(0)
        self.core.update(step, self.runner.execute(step), 0)
        self.core.check_integrity()
        self.drafter.check_integrity()
        assert self.draft_runner.poisoned or not self.drafter._failures, "the draft model failed"

    def run(self, *requests: GenerationRequest) -> list[list[int]]:
        for request in requests:
            assert self.core.add(request) is None
        while len(self.core):
            self.step()
        assert self.draft_blocks.num_free == self.draft_blocks.num_usable, "the draft model kept blocks"
        return [request.output_token_ids for request in requests]


def asked(count: int = 6, params: SamplingParams = GREEDY) -> list[GenerationRequest]:
    return [GenerationRequest(f"r{at}", [*range(at + 5), 0, 3], params, seed=at) for at in range(count)]


def plainly(requests: list[GenerationRequest]) -> list[list[int]]:
    core = EngineCore(Scheduler(SchedulerConfig(max_model_len=64), BlockManager(200, 4)), ByteTokenizer())
    runner = PagedRunner(200, 4)
    for request in requests:
        core.add(request)
    while len(core):
        step = core.schedule(0)
        core.update(step, runner.execute(step), 0)
    return [request.output_token_ids for request in requests]


def test_a_draft_model_that_is_the_model_is_always_right() -> None:
    engine = Engine()
    assert engine.run(*asked()) == plainly(asked())
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 60
    assert engine.runner.num_steps < 8, "four guesses and a gift a step"


def test_one_that_is_always_wrong_changes_nothing_and_pauses() -> None:
    engine = Engine(drafts=WrongRunner(200, 4))
    assert engine.run(*asked()) == plainly(asked())
    assert engine.stats.num_accepted_tokens == 0
    assert 0 < engine.stats.num_drafts <= 6 * 6, "three misses, then a pause of 16 tokens"


def test_drawn_tokens_are_the_same_with_greedy_guesses() -> None:
    drawn = replace_temperature(1.0)
    engine = Engine()
    assert engine.run(*asked(params=drawn)) == plainly(asked(params=drawn))
    assert 0 <= engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


def replace_temperature(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=GREEDY.max_tokens)


def test_preempted_requests_come_back_to_the_same_output() -> None:
    engine = Engine(blocks=22)
    assert engine.run(*asked()) == plainly(asked())
    assert engine.stats.num_preemptions > 0


def test_where_the_draft_cache_is_too_small_there_are_fewer_guesses() -> None:
    engine = Engine(draft_blocks=12)
    assert engine.run(*asked()) == plainly(asked())
    assert 0 < engine.stats.num_draft_tokens < 60


def test_a_long_prompt_is_taken_in_over_several_rounds() -> None:
    engine = Engine(replace(CONFIG, max_num_batched_tokens=3))
    engine.core.add(GenerationRequest("long", [*range(13), *range(13)], GREEDY, 0))
    sizes = []
    while len(engine.core):
        before = engine.draft_runner.num_tokens
        engine.step()
        sizes.append(engine.draft_runner.num_tokens - before)
    assert max(sizes) <= 3 + 3
    assert engine.stats.num_accepted_tokens > 0


def test_a_second_request_finds_the_prompt_in_the_draft_cache() -> None:
    engine = Engine()
    prompt = [*range(12), 1, 2]
    engine.run(GenerationRequest("one", prompt, GREEDY, 0))
    before = engine.draft_runner.num_tokens
    engine.run(GenerationRequest("two", prompt, SamplingParams(temperature=0, max_tokens=3), 0))
    assert engine.draft_runner.num_tokens - before < 12


def test_aborted_requests_give_their_draft_blocks_back() -> None:
    engine = Engine()
    for request in asked(3):
        engine.core.add(request)
    engine.step()
    engine.step()
    for name in ("r0", "r1", "r2"):
        engine.core.abort(name, 0)
    assert engine.draft_blocks.num_free == engine.draft_blocks.num_usable


def test_tokens_that_the_large_model_does_not_have_end_a_guess() -> None:
    engine = Engine(replace(CONFIG, vocab_size=4))
    assert engine.run(*asked()) == plainly(asked())
    assert engine.stats.num_draft_tokens < 60


def test_beyond_the_length_of_the_draft_model_nothing_is_guessed() -> None:
    engine = Engine(replace(CONFIG, max_model_len=12))
    assert engine.run(*asked()) == plainly(asked())


def test_a_draft_model_that_fails_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.draft_runner.poisoned = {"r1"}
    with caplog.at_level(logging.CRITICAL):
        assert engine.run(*asked()) == plainly(asked())
    assert engine.stats.num_draft_tokens == 0


@pytest.mark.parametrize("name", ["num_speculative_tokens", "disable_above", "max_model_len"])
def test_settings_that_make_no_sense_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected 1"):
        Engine(replace(CONFIG, **{name: 0}))
