"""The vector of a prompt: the same in one step, in chunks, after a failed step and after preemption."""

import pytest

from headrace_backends.llm.admission import SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.core import EngineCore
from headrace_backends.llm.request import FinishReason, GenerationRequest
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.scheduler import Scheduler
from headrace_backends.llm.step import StepResult
from llm_fakes import ByteTokenizer, PagedRunner, vector_of

PROMPT = [1, 4, 2, 8, 5, 7, 1, 4, 2, 8, 5, 7, 3]


class Core:
    def __init__(self, *, blocks: int = 40, **config) -> None:
        limits = {"max_model_len": 30, "max_num_seqs": 4, "max_num_batched_tokens": 30} | config
        self.core = EngineCore(Scheduler(SchedulerConfig(**limits), BlockManager(blocks, 2)), ByteTokenizer())
        self.runner = PagedRunner(blocks, 2)
        self.told = {}

    def add(self, name: str, pooling: str | None = None, prompt=PROMPT, **params) -> GenerationRequest:
        params = {"max_tokens": 0, "detokenize": False} | params
        request = GenerationRequest(name, prompt, SamplingParams(**params), 0, pooling=pooling)
        assert self.core.add(request) is None
        return request

    def step(self, *, fails: bool = False) -> None:
        step = self.core.schedule(0)
        self.runner.fail_next = fails
        try:
            outputs = self.core.update(step, self.runner.execute(step), 0)
        except RuntimeError as error:
            outputs = self.core.fail(step, str(error), 0)
        self.core.check_integrity()
        self.told |= {output.request_id: output for output in outputs if output.finished}

    def finish(self) -> None:
        while len(self.core):
            self.step()

    def is_right(self, request: GenerationRequest) -> bool:
        told = self.told[request.id]
        return told.finish_reason is FinishReason.LENGTH and list(told.pooled) == pytest.approx(vector_of(request))


BOTH = pytest.mark.parametrize("pooling", ["last", "mean"])


@BOTH
@pytest.mark.parametrize("budget", [4, 7, 30])
def test_in_one_step_or_in_chunks(pooling, budget):
    core = Core(max_num_batched_tokens=budget)
    asked = [core.add(name, pooling) for name in "abc"]
    core.finish()
    assert all(map(core.is_right, asked))


@BOTH
def test_after_a_step_that_failed_in_the_middle(pooling):
    core = Core(max_num_batched_tokens=7)
    core.add("other", max_tokens=9)
    asked = core.add("a", pooling, prompt=PROMPT[::-1])
    for _ in range(3):
        core.step()
    assert 0 < asked.num_computed_tokens < len(PROMPT)
    core.step(fails=True)
    assert asked.num_preemptions == 1
    core.finish()
    assert core.is_right(asked)


@BOTH
def test_after_preemption(pooling):
    core = Core(blocks=16, max_num_batched_tokens=5, reserve_full_prompt=False, long_prefill_token_threshold=3)
    core.add("first", max_tokens=17, ignore_eos=True)
    asked = core.add("a", pooling, prompt=PROMPT[::-1] * 2)
    core.finish()
    assert asked.num_preemptions > 0
    assert core.is_right(asked)


def test_a_mean_reads_no_cache_and_the_last_does():
    core = Core()
    core.add("warm")
    core.finish()
    mean, last = core.add("mean", "mean"), core.add("last", "last")
    core.finish()
    assert (mean.num_cached_tokens, last.num_cached_tokens) == (0, 12)
    assert core.is_right(mean)
    assert core.is_right(last)


@BOTH
def test_a_runner_that_gives_no_vector_ends_the_request_alone(pooling):
    core = Core()
    asked, other = core.add("a", pooling), core.add("other", max_tokens=1)
    step = core.core.schedule(0)
    results = [StepResult([1] if entry.num_sampled_rows else ()) for entry in step.scheduled]
    reasons = {output.request_id: output.finish_reason for output in core.core.update(step, results, 0)}
    assert reasons == {"a": FinishReason.ERROR, "other": FinishReason.LENGTH}
    assert asked.error == "the model gave no vector"
    assert other.error is None
