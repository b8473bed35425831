"""Whatever is asked, aborted and broken in any order: each generation's output is what it would be alone, and no block is lost."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace_backends.llm.admission import RefusalReason, SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.core import EngineCore
from headrace_backends.llm.draft_model import DraftModelConfig, DraftModelDrafter
from headrace_backends.llm.ngram import NgramConfig, NgramDrafter
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason, GenerationRequest, Status
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.scheduler import Scheduler
from headrace_backends.llm.waiting import Policy
from headrace_protocol.generation import StructuredOutput
from llm_fakes import EOS, VOCAB, ByteTokenizer, Compiles, Guesser, PagedRunner, expected, vector_of

SHARED = [0, 1, 2, 0, 1, 3, 4, 0, 1, 2, 2, 1, 0, 4, 5, 0]
PROMPTS = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), max_size=14),
    st.integers(1, len(SHARED)).map(lambda length: SHARED[:length]),
    st.sampled_from([SHARED, [*SHARED, 6, 7, 8]]),
).map(lambda tokens: [*tokens, 0])
STOPS = st.lists(st.sampled_from(["a", "ab", "b a", "é", "€a", "bab", " c"]), max_size=3, unique=True).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 3),
    temperature=st.sampled_from([0.0, 1.0]),
    stop=STOPS,
    stop_token_ids=st.sampled_from([(), (12,), (2, 6)]),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 4),
    max_tokens=st.none() | st.integers(0, 12),
    logprobs=st.none() | st.just(0),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
    skip_reading_prefix_cache=st.sampled_from([False, False, False, True]),
)


def draft_model(num_blocks: int, block_size: int) -> DraftModelDrafter:
    """One that is right where the large model is greedy, over a cache that may be too small."""
    config = DraftModelConfig(max_model_len=24, vocab_size=VOCAB - 1, disable_above=3, max_num_batched_tokens=9)
    return DraftModelDrafter(config, PagedRunner(num_blocks, block_size), BlockManager(num_blocks, block_size))


@st.composite
def engines(draw: st.DrawFn) -> tuple[EngineCore, PagedRunner]:
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.sampled_from([40, 30, 24, 20]) | st.integers(2, 40))
    least = -(-max_model_len // block_size) + 1
    max_num_seqs = draw(st.integers(1, 5))
    chunked = draw(st.booleans())
    config = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs if chunked else max(max_num_seqs, max_model_len), 40)),
        policy=draw(st.sampled_from(Policy)),
        chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 1, 3])),
        reserve_full_prompt=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.2])),
        max_num_queued_reqs=draw(st.sampled_from([None, 6])),
        max_num_queued_tokens=draw(st.sampled_from([None, 40])),
        vocab_size=VOCAB,
    )
    num_blocks = draw(st.integers(least, least + 12))
    blocks = BlockManager(num_blocks, block_size, prefix_caching=draw(st.sampled_from([True, True, False])))
    drafters = [None, NgramDrafter(NgramConfig(3, 1, 3)), Guesser(1.0, 3), Guesser(0.6, 4), Guesser(0.0, 2)]
    drafter = draw(st.sampled_from([*drafters, draft_model(draw(st.integers(2, num_blocks)), block_size)]))
    core = EngineCore(Scheduler(config, blocks), ByteTokenizer(), drafter, Compiles())
    return core, PagedRunner(num_blocks, block_size)


class Asked:
    """One generation and what has been told of it."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.told: GenerationOutput | None = None

    def take(self, output: GenerationOutput) -> None:
        assert self.told is None or not self.told.finished, "told more after the end"
        self.told = output if self.told is None else self.told.followed_by(output)


class Engine(RuleBasedStateMachine):
    @initialize(engine=engines())
    def start(self, engine: tuple[EngineCore, PagedRunner]) -> None:
        self.core, self.runner = engine
        self.config = self.core.scheduler.config
        self.asked: dict[str, Asked] = {}
        self.aborted: set[str] = set()
        self.now = 0
        self.made = 0

    def live(self) -> list[str]:
        return [name for name, asked in self.asked.items() if not asked.request.finished]

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=2),
        params=PARAMS,
        pooling=st.sampled_from([None, None, None, "last", "mean"]),
        seed=st.integers(0, 3),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "x"]),
        lora=st.sampled_from([None, None, "poet"]),
        ladder=st.sampled_from([None, None, "3", "4", "9", "wrong"]),
    )
    def add(
        self, prompts, params: SamplingParams, pooling: str | None, seed, priority: int, salt, lora, ladder
    ) -> None:
        if pooling is not None:
            ladder = None
            params = msgspec.structs.replace(params, n=1, max_tokens=0)
        requests = []
        for at, prompt in enumerate(prompts):
            self.made += 1
            requests.append(
                GenerationRequest(
                    f"r{self.made}",
                    prompt,
                    params,
                    seed,
                    eos_token_ids=frozenset({EOS}),
                    priority=priority if self.config.policy is Policy.PRIORITY else 0,
                    cache_salt=salt,
                    lora=lora,
                    structured=None if ladder is None else StructuredOutput("regex", ladder),
                    index=at * params.n,
                    pooling=pooling,
                )
            )
        before, waiting = len(self.core), self.core.scheduler.num_waiting
        refused = self.core.add(*requests)
        count = len(prompts) * params.n
        if refused is None:
            assert len(self.core) == before + count
            names = [f"{each.id}/{at}" if at else each.id for each in requests for at in range(params.n)]
            for index, name in enumerate(names):
                choice = self.core.scheduler.get(name)
                assert choice is not None and choice.index == index
                self.asked[name] = Asked(choice)
            return
        assert len(self.core) == before
        if refused.reason is RefusalReason.TOO_LONG:
            assert max(map(len, prompts)) + (params.max_tokens != 0) > self.config.max_model_len
        else:
            reqs, tokens = self.config.max_num_queued_reqs, self.config.max_num_queued_tokens
            assert (reqs is not None and waiting + count > reqs) or tokens is not None
            never = (tokens is not None and sum(map(len, prompts)) * params.n > tokens) or (reqs or count) < count
            assert refused.reason is (RefusalReason.INVALID if never else RefusalReason.BUSY)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._abort(data.draw(st.sampled_from(self.live())))

    def _abort(self, name: str) -> None:
        output = self.core.abort(name, self.now)
        assert output is not None and output.finish_reason is FinishReason.ABORT
        self.aborted.add(name)
        self.asked[name].take(output)
        assert self.core.abort(name, self.now) is None

    @precondition(lambda self: self.live())
    @rule(data=st.data(), poisoned=st.booleans())
    def break_one(self, data: st.DataObject, poisoned: bool) -> None:
        """One whose rows fail, or one with which no step can be computed."""
        broken = self.runner.poisoned if poisoned else self.runner.broken
        broken.add(data.draw(st.sampled_from(self.live())))

    @precondition(lambda self: self.core._grammars.pending)
    @rule(which=st.integers(0, 9))
    def compiled(self, which: int) -> None:
        self.core._grammars.finish(which)

    @rule(fails=st.booleans(), aborts=st.just([]) | st.lists(st.integers(0, 9), max_size=2))
    def step(self, fails: bool = False, aborts: list[int] = ()) -> None:
        self.now += 1
        for name, error in self.core.settle(self.now):
            refused = self.asked[name]
            assert refused.told is None and refused.request.structured.spec == "wrong" and "ladder" in error.message
        step = self.core.schedule(self.now)
        self._check(step)
        if not step:
            held = [each for each in self.live() if self.asked[each].request.status is Status.WAITING_FOR_GRAMMAR]
            assert len(self.core) == len(held), "somebody could run"
            return
        self.runner.fail_next = fails
        try:
            results = self.runner.execute(step)
        except RuntimeError as error:
            results = error
        for which in aborts:
            if live := self.live():
                self._abort(live[which % len(live)])
                self.core.check_integrity()
        if isinstance(results, RuntimeError):
            if fails and len(step.scheduled) == 1:
                self.runner.poisoned.add(step.scheduled[0].request.id)
            outputs = self.core.fail(step, str(results), self.now)
        else:
            outputs = self.core.update(step, results, self.now)
        for output in outputs:
            self.asked[output.request_id].take(output)

    def _check(self, step) -> None:
        assert (
            step.num_tokens
            == sum(len(entry.token_ids) for entry in step.scheduled)
            <= self.config.max_num_batched_tokens
        )
        assert len(step.scheduled) <= self.config.max_num_seqs
        ids = [entry.request.id for entry in step.scheduled]
        assert len(set(ids)) == len(ids)
        if not self.config.chunked_prefill:
            assert all(entry.num_sampled_rows or not entry.request.max_tokens for entry in step.scheduled)
        missed = {request.id for request in self.core.scheduler.running} - set(ids)
        assert not missed or len(step.scheduled) == 1

    @rule()
    def reset_cache(self) -> None:
        held = any(asked.request.block_table for asked in self.asked.values())
        assert self.core.scheduler.blocks.reset() is not held

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "core"):
            self.core.check_integrity()
            if isinstance(self.core._drafter, DraftModelDrafter):
                self.core._drafter.check_integrity()
                assert not self.core._drafter._failures, "the draft model failed"

    @invariant()
    def told_what_is_so(self) -> None:
        for name, asked in getattr(self, "asked", {}).items():
            if asked.told is None:
                continue
            request, told = asked.request, asked.told
            if request.structured is not None and request.structured.spec == "wrong":
                assert (told.finish_reason, told.token_ids) == (FinishReason.ABORT, ())
                continue
            tokens, text, reason, stop_reason = expected(request, self.config.max_model_len)
            assert list(told.token_ids) == request.output_token_ids == tokens[: len(told.token_ids)]
            held = {
                FinishReason.ABORT,
                FinishReason.ERROR,
            }  # what was held back is told then, and may be part of a stop
            assert text.startswith(told.text) or request.finish_reason in held
            assert told.num_output_tokens == len(told.token_ids)
            if request.params.logprobs is not None and told.token_ids:
                assert [entry.chosen.token_id for entry in told.logprobs] == list(told.token_ids)
                assert told.cumulative_logprob == -len(told.token_ids)
            if told.token_ids and request.params.prompt_logprobs is not None:
                assert [entry and entry.chosen.logprob for entry in told.prompt_logprobs] == [
                    None,
                    *[-float(at) for at in range(1, request.num_prompt_tokens)],
                ]
            if not told.finished:
                continue
            if request.pooling is not None and told.finish_reason is FinishReason.LENGTH:
                assert list(told.pooled) == pytest.approx(vector_of(request))
            if name in self.aborted:
                assert told.finish_reason is FinishReason.ABORT
            elif told.finish_reason is FinishReason.ERROR:
                assert name in self.runner.broken | self.runner.poisoned
                assert told.error
            else:
                assert (list(told.token_ids), told.text, told.finish_reason.value, told.stop_reason) == (
                    tokens,
                    text,
                    reason,
                    stop_reason,
                )

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        while self.core._grammars.pending:
            self.core._grammars.finish(0)
        left = sum(request.request.num_tokens + self.config.max_model_len for request in self.asked.values())
        for _ in range(20 + 4 * left):
            if not len(self.core):
                break
            self.step(fails=False, aborts=())
            self.whole()
        assert not self.live(), "a request never ends"
        self.told_what_is_so()
        assert self.core.scheduler.blocks.num_free == self.core.scheduler.blocks.num_usable
        forgotten = set(self.core.scheduler._finished_ids)
        assert self.runner.known <= forgotten, "the runner is not told of requests that ended"


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
