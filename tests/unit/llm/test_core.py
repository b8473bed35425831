"""The engine with a model that is a hash: outputs are the same however they come about."""

from __future__ import annotations

import pytest

from headrace_backends.llm.admission import SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.core import EngineCore, bad_word_ids, choices_of
from headrace_backends.llm.ngram import Drafter, NgramConfig, NgramDrafter
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason, GenerationRequest
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.scheduler import Scheduler
from llm_fakes import VOCAB, ByteTokenizer, Guesser, PagedRunner

PROMPT = [0, 1, 2, 0, 1, 3, 4, 0, 1, 2, 2, 1, 0]


class Engine:
    def __init__(
        self,
        *,
        num_blocks: int = 200,
        block_size: int = 4,
        caching: bool = True,
        drafter: Drafter | None = None,
        **config: int,
    ) -> None:
        settings = SchedulerConfig(**{"max_model_len": 64, "max_num_batched_tokens": 512, "vocab_size": VOCAB} | config)
        self.scheduler = Scheduler(settings, BlockManager(num_blocks, block_size, prefix_caching=caching))
        self.core = EngineCore(self.scheduler, ByteTokenizer(), drafter)
        self.runner = PagedRunner(num_blocks, block_size)
        self.told: dict[str, GenerationOutput] = {}
        self.outputs: list[GenerationOutput] = []

    def step(self) -> None:
        step = self.core.schedule(0)
        outputs = self.core.update(step, self.runner.execute(step), 0)
        self.core.check_integrity()
        for output in outputs:
            before = self.told.get(output.request_id)
            self.told[output.request_id] = output if before is None else before.followed_by(output)
        self.outputs += outputs

    def run(self, *requests: GenerationRequest) -> dict[str, tuple[tuple[int, ...], str]]:
        for request in requests:
            assert self.core.add(request) is None
        while len(self.core):
            self.step()
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_usable
        return {name: (told.token_ids, told.text) for name, told in self.told.items()}


def requests(count: int = 8) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            f"r{at}",
            [*PROMPT[: 3 + at], at % VOCAB],
            SamplingParams(max_tokens=20, temperature=at % 2, stop=("é", "ba")[: at % 3], logprobs=0),
            seed=at,
        )
        for at in range(count)
    ]


def alone() -> dict[str, tuple[tuple[int, ...], str]]:
    results = {}
    for request in requests():
        results |= Engine(caching=False).run(request)
    return results


def test_batched_is_as_alone() -> None:
    assert Engine(max_num_seqs=8).run(*requests()) == alone()


@pytest.mark.parametrize("budget", [8, 9, 16, 33])
def test_in_chunks_is_as_whole(budget: int) -> None:
    engine = Engine(max_num_seqs=8, max_num_batched_tokens=budget)
    assert engine.run(*requests()) == alone()


def test_preempted_is_as_never_preempted() -> None:
    engine = Engine(num_blocks=12, max_num_seqs=8, max_model_len=40)
    assert engine.run(*requests()) == alone()
    assert engine.scheduler.stats.num_preemptions > 0


def test_from_the_prefix_cache_is_as_computed() -> None:
    engine = Engine()
    engine.run(*requests())
    engine.told.clear()
    computed = engine.runner.num_tokens
    assert engine.run(*requests()) == alone()
    assert engine.scheduler.stats.prefix_cache_hits > 0
    assert engine.runner.num_tokens - computed < computed


@pytest.mark.parametrize(
    "drafter", [NgramDrafter(NgramConfig(prompt_lookup_min=1)), Guesser(1, 4), Guesser(0.5, 4), Guesser(0, 4)]
)
def test_speculated_is_as_plain(drafter: Drafter) -> None:
    engine = Engine(drafter=drafter, num_blocks=40)
    assert engine.run(*requests()) == alone()
    assert engine.scheduler.stats.num_draft_tokens > 0


def test_right_guesses_take_fewer_steps() -> None:
    plain, guessed = Engine(), Engine(drafter=Guesser(1, 4))
    plain.run(*requests(1))
    guessed.run(*requests(1))
    assert guessed.runner.num_steps < plain.runner.num_steps / 2


def test_choices_have_seeds_of_their_own_and_compute_the_prompt_once() -> None:
    params = SamplingParams(n=4, max_tokens=8)
    engine = Engine()
    told = engine.run(GenerationRequest("r", [*PROMPT, 0, 0, 0, 0], params, 7))
    assert set(told) == {"r", "r/1", "r/2", "r/3"}
    assert len({tokens for tokens, _ in told.values()}) == 4
    assert (
        told["r"] == Engine().run(GenerationRequest("r", [*PROMPT, 0, 0, 0, 0], SamplingParams(max_tokens=8), 7))["r"]
    )
    assert [engine.told[name].num_cached_tokens for name in sorted(told)] == [0, 16, 16, 16]


def test_a_negative_seed_is_a_seed() -> None:
    request = GenerationRequest("r", PROMPT, SamplingParams(n=2), -7)
    first, second = choices_of(request)
    assert first.seed == (1 << 64) - 7
    assert 0 <= second.seed < 1 << 64
    assert first.token_ids is not second.token_ids


def test_choices_enter_together_or_not_at_all() -> None:
    engine = Engine(max_num_queued_reqs=2)
    refused = engine.core.add(GenerationRequest("r", PROMPT, SamplingParams(n=3), 7))
    assert refused is not None
    assert len(engine.core) == 0


def test_an_aborted_generation_tells_the_text_it_has() -> None:
    engine = Engine()
    engine.core.add(GenerationRequest("r", PROMPT, SamplingParams(max_tokens=20, stop=("zzz",)), 0))
    for _ in range(6):
        engine.step()
    output = engine.core.abort("r", 0)
    assert output is not None
    assert output.finish_reason is FinishReason.ABORT
    assert output.num_output_tokens == 6
    assert engine.core.abort("r", 0) is None


def test_prompt_logprobs_are_told_once_and_whole() -> None:
    engine = Engine(max_num_batched_tokens=32, max_num_seqs=4)
    engine.run(GenerationRequest("r", PROMPT * 3, SamplingParams(max_tokens=4, prompt_logprobs=0), 0))
    (told,) = [output.prompt_logprobs for output in engine.outputs if output.prompt_logprobs is not None]
    assert told[0] is None
    assert [entry.chosen.token_id for entry in told[1:]] == (PROMPT * 3)[1:]


def test_each_token_has_its_logprob_though_its_text_is_held_back() -> None:
    engine = Engine()
    engine.run(GenerationRequest("r", PROMPT, SamplingParams(max_tokens=20, logprobs=0, stop=("ab €",)), 0))
    assert all(len(output.logprobs or ()) == len(output.token_ids) for output in engine.outputs)
    assert engine.told["r"].cumulative_logprob == -20.0


def test_a_tokenizer_that_fails_ends_its_request_alone() -> None:
    class Picky(ByteTokenizer):
        def decode(self, token_ids, *, skip_special_tokens: bool) -> str:
            if 12 in token_ids:
                raise ValueError("no such token")
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    engine = Engine()
    engine.core = EngineCore(engine.scheduler, Picky())
    engine.run(
        GenerationRequest("bad", [12], SamplingParams(), 0),
        GenerationRequest("good", [0], SamplingParams(max_tokens=3, detokenize=False), 0),
    )
    assert engine.told["bad"].error == "ValueError: no such token"
    assert engine.told["good"].num_output_tokens == 3


def test_bad_words_are_banned_at_the_start_and_after_a_space() -> None:
    assert bad_word_ids(("ab", "c"), ByteTokenizer()) == ((0, 1), (4, 0, 1), (12,), (4, 12))


def test_only_so_many_adapters_run_at_once_and_each_request_ends() -> None:
    engine = Engine(max_num_seqs=8, max_loras=2)
    asked = [
        GenerationRequest(f"r{at}", PROMPT, SamplingParams(max_tokens=4), at, lora="abcd"[at // 2]) for at in range(8)
    ]
    asked.append(GenerationRequest("none", PROMPT, SamplingParams(max_tokens=4), 9))
    for request in asked:
        assert engine.core.add(request) is None
    seen = set()
    while len(engine.core):
        engine.step()
        seen.add(len({request.lora for request in engine.scheduler.running} - {None}))
    assert max(seen) == 2
    assert all(request.finish_reason is FinishReason.LENGTH for request in asked)
