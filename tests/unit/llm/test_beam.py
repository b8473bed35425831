"""Beam search: what transformers finds, in any batch; and what is given back when it ends early."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

from headrace_backends.llm.admission import RefusalReason, SchedulerConfig
from headrace_backends.llm.beam import BeamRules, BeamSearch
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.core import EngineCore
from headrace_backends.llm.logprobs import TokenLogprob
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason, GenerationRequest
from headrace_backends.llm.runner import TorchRunner
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.scheduler import Scheduler
from language_models import BLOCK, tiny

NUMBERS = random.Random(4)
PROMPTS = [[NUMBERS.randrange(512) for _ in range(length)] for length in (3, 20, 41)]
ENDS = frozenset(range(0, 512, 9))
"""So many tokens end a text that some do within a few steps."""


class Letters:
    """A tokenizer whose tokens are letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def decode(self, token_ids, *, skip_special_tokens: bool) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


class Engine:
    def __init__(self, model, *, blocks=300, caching=True, runner=None, **limits) -> None:
        self.runner = runner or TorchRunner(model, blocks, BLOCK, 512)
        manager = BlockManager(blocks, BLOCK, prefix_caching=caching)
        self.core = EngineCore(Scheduler(SchedulerConfig(max_model_len=512, **limits), manager), Letters())
        self.outputs: dict[str, list[GenerationOutput]] = {}
        self.ended: list[str] = []

    def step(self) -> None:
        step = self.core.schedule(0)
        assert step
        for output in self.core.update(step, self.runner.execute(step), 0):
            assert "@" not in output.request_id, "a step of a search was told"
            self.outputs.setdefault(output.request_id, []).append(output)
            if output.finished:
                self.ended.append(output.request_id)
        self.core.check_integrity()

    def run(self, *requests: GenerationRequest) -> dict[str, list[GenerationOutput]]:
        for request in requests:
            assert self.core.add(request) is None
        while len(self.core):
            self.step()
        assert self.core.scheduler.blocks.num_free == self.core.scheduler.blocks.num_usable
        assert not len(self.core._searches)
        return self.outputs


def searching(
    name: str, prompt, width: int, *, rules=None, n=1, eos=ENDS, max_tokens=10, **params
) -> GenerationRequest:
    params = SamplingParams(n=n, max_tokens=max_tokens, **params)
    rules = BeamRules(width) if rules is None else rules
    return GenerationRequest(name, tuple(prompt), params, 0, eos_token_ids=eos, beam=rules)


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def runner(model):
    return TorchRunner(tiny(), 300, BLOCK, 512)


def by_transformers(
    model, prompt, rules: BeamRules, n: int, max_tokens: int = 10, ends=ENDS
) -> list[tuple[list[int], float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            num_beams=rules.width, num_return_sequences=n, max_new_tokens=max_tokens, length_penalty=rules.length_penalty,
            early_stopping=rules.early_stopping, eos_token_id=sorted(ends), pad_token_id=511, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    found = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
        found.append((row[:end], score))
    return found


RULES = [
    BeamRules(2), BeamRules(4), BeamRules(4, 0.0), BeamRules(4, 2.0), BeamRules(4, -1.0), BeamRules(3, early_stopping=True),
]  # fmt: skip


@pytest.mark.parametrize("rules", RULES)
def test_it_finds_what_transformers_finds(model, runner, rules) -> None:
    n = rules.width
    requests = [searching(f"{at}", prompt, n, rules=rules, n=n, logprobs=0) for at, prompt in enumerate(PROMPTS)]
    outputs = Engine(None, runner=runner).run(*requests)
    assert FinishReason.STOP in {outputs[f"{at}"][0].finish_reason for at in range(len(PROMPTS))}
    for at, prompt in enumerate(PROMPTS):
        told = [outputs[f"{at}"], *(outputs[f"{at}/{choice}"] for choice in range(1, n))]
        expected = by_transformers(model, prompt, rules, n)
        assert [list(only.token_ids) for (only,) in told] == [tokens for tokens, _ in expected]
        for (only,), (tokens, score) in zip(told, expected, strict=True):
            assert only.cumulative_logprob / len(tokens) ** rules.length_penalty == pytest.approx(score, rel=1e-4)
            assert sum(entry.chosen.logprob for entry in only.logprobs) == pytest.approx(only.cumulative_logprob)
            assert only.finish_reason is (FinishReason.STOP if tokens[-1] in ENDS else FinishReason.LENGTH)


def test_a_search_of_width_one_is_greedy(runner) -> None:
    found = Engine(None, runner=runner).run(
        searching("beam", PROMPTS[1], 1), GenerationRequest("greedy", PROMPTS[1], SamplingParams(temperature=0, max_tokens=10), 0, ENDS)
    )  # fmt: skip
    greedy = tuple(token for output in found["greedy"] for token in output.token_ids)
    assert found["beam"][0].token_ids == greedy
    assert found["beam"][0].text == "".join(output.text for output in found["greedy"])


@pytest.mark.parametrize(
    "changed", [{"caching": False}, {"max_num_batched_tokens": 8, "max_num_seqs": 3}, {"blocks": 40}]
)
def test_limits_and_the_cache_change_no_result(runner, changed) -> None:
    requests = lambda: [searching(str(at), prompt, 4, n=2) for at, prompt in enumerate(PROMPTS)]  # noqa: E731
    told = {name: outputs[0].token_ids for name, outputs in Engine(None, runner=runner).run(*requests()).items()}
    other = Engine(None, runner=runner, **changed).run(*requests())
    assert {name: outputs[0].token_ids for name, outputs in other.items()} == told


def test_the_prompt_is_computed_once(runner) -> None:
    engine = Engine(None, runner=runner)
    computed = []
    engine.core.add(searching("a", [*PROMPTS[2], *PROMPTS[1]], 4, eos=frozenset()))
    while len(engine.core):
        step = engine.core.schedule(0)
        computed.append(step.num_tokens)
        engine.core.update(step, runner.execute(step), 0)
    assert computed[0] == 61
    assert max(computed[1:]) <= 4 * BLOCK


def test_a_search_keeps_its_place_before_those_that_came_later(runner) -> None:
    engine = Engine(None, runner=runner, max_num_seqs=2)
    later = [
        GenerationRequest(f"later{at}", PROMPTS[0], SamplingParams(temperature=0, max_tokens=10), at) for at in range(6)
    ]
    engine.run(searching("first", PROMPTS[1], 2, eos=frozenset()), *later)
    assert engine.ended[0] in {"first", "later0"}
    assert "first" in engine.ended[:2]


def test_an_aborted_search_gives_everything_back(runner) -> None:
    engine = Engine(None, runner=runner)
    engine.core.add(searching("a", PROMPTS[1], 4, n=3))
    for _ in range(3):
        engine.step()
    told = engine.core.abort("a/1", 0)
    assert told.finish_reason is FinishReason.ABORT
    assert told.request_id == "a/1"
    engine.core.check_integrity()
    assert not len(engine.core)
    assert engine.core.get("a") is None
    assert engine.core.abort("a", 0) is None
    assert engine.core.scheduler.blocks.num_free == engine.core.scheduler.blocks.num_usable


def test_a_search_may_be_aborted_while_its_step_is_computed(runner) -> None:
    engine = Engine(None, runner=runner)
    engine.core.add(searching("a", PROMPTS[1], 4))
    engine.step()
    step = engine.core.schedule(0)
    engine.core.abort("a", 0)
    assert engine.core.update(step, runner.execute(step), 0) == []
    engine.core.check_integrity()
    assert not len(engine.core)


def test_a_step_that_always_fails_ends_the_search_with_an_error(runner) -> None:
    engine = Engine(None, runner=runner)
    engine.core.add(searching("a", PROMPTS[1], 3, n=2))
    engine.step()
    told = []
    while len(engine.core):
        told.extend(engine.core.fail(engine.core.schedule(0), "the model broke", 0))
        engine.core.check_integrity()
    assert [(output.request_id, output.finish_reason, output.error) for output in told] == [
        ("a", FinishReason.ERROR, "the model broke"), ("a/1", FinishReason.ERROR, "the model broke"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"width": 0}, "beam_width: expected 1 to 32, got 0"),
        ({"width": 33}, "beam_width: expected 1 to 32, got 33"),
        ({"width": 2, "n": 3}, "n: 3 texts of a beam search of width 2"),
        ({"width": 2, "max_tokens": 0}, "beam_width: a search wants tokens"),
        ({"width": 2, "stop": ("a",), "frequency_penalty": 1.0}, "beam search does not take stop, frequency_penalty"),
    ],
)
def test_what_cannot_be_searched_for_is_refused(runner, given, told) -> None:
    engine = Engine(None, runner=runner)
    refused = engine.core.add(searching("a", PROMPTS[0], **given))
    assert refused.reason is RefusalReason.INVALID
    assert told in refused.message
    assert not len(engine.core) and not len(engine.core._searches)


def test_a_search_that_may_not_enter_leaves_nothing(runner) -> None:
    engine = Engine(None, runner=runner)
    refused = engine.core.add(searching("a", [1] * 512, 2))
    assert refused.reason is RefusalReason.TOO_LONG
    assert not len(engine.core._searches)


def test_min_tokens_keeps_the_ends_away() -> None:
    search = BeamSearch(BeamRules(1), frozenset({0}), max_tokens=5, min_tokens=2)
    tops = [[TokenLogprob(0, -0.1, 1), TokenLogprob(1, -2.0, 2), TokenLogprob(2, -3.0, 3)]]
    while search.alive:
        search.take(tops)
    (best,) = search.best(1)
    assert best.token_ids == (1, 1, 0)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_meanwhile_nothing_is_lost(runner, seed) -> None:
    """Searches and plain requests in too few blocks, aborted and failing at any time: each ends, and all blocks come back."""
    numbers = random.Random(seed)
    engine = Engine(None, runner=runner, blocks=34, max_num_seqs=5, max_num_batched_tokens=40)
    core, ended, asked = engine.core, [], []
    for at in range(8):
        prompt = numbers.choice(PROMPTS)
        width = numbers.randint(1, 5)
        plain = GenerationRequest(f"{at}", prompt, SamplingParams(max_tokens=8), at, ENDS)
        asked.append(numbers.choice([plain, searching(f"{at}", prompt, width, n=numbers.randint(1, width))]))
    waiting = list(asked)
    while waiting or len(core):
        if waiting:
            assert core.add(waiting.pop()) is None
        step = core.schedule(0)
        if numbers.random() < 0.15:
            told = core.fail(step, "the model broke", 0)
        else:
            results = runner.execute(step)
            name = f"{numbers.randrange(8)}"
            told = [output] if numbers.random() < 0.1 and (output := core.abort(name, 0)) is not None else []
            told += core.update(step, results, 0)
        core.check_integrity()
        ended.extend(output.request_id for output in told if output.finished)
    assert {name.partition("/")[0] for name in ended} == {request.id for request in asked}
    assert len(set(ended)) == len(ended)
    assert not len(core._searches)
    assert core.scheduler.blocks.num_free == core.scheduler.blocks.num_usable
