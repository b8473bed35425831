"""A model in two processes gives the tokens that it gives in one, and its other process never stays behind."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist

from headrace_backends.llm.runner import TorchRunner, cached_shapes
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.tensor_parallel import CacheSetup, TensorParallel
from headrace_protocol.errors import InferError
from language_models import BLOCK, Engine, generated_by_transformers, request, save_tiny, tiny
from native_engines import run

NUMBERS = random.Random(6)
PROMPTS = [[NUMBERS.randrange(512) for _ in range(length)] for length in (5, 40, 19, 70)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1, max_tokens=16, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, frequency_penalty=1.0),
]


def requests():
    return [request(str(at), prompt, PARAMS[at], seed=at) for at, prompt in enumerate(PROMPTS)]


def test_two_ranks_give_the_tokens_of_one(tmp_path) -> None:
    ranks = TensorParallel(save_tiny(tmp_path / "model"), "float32", 2, threads=1)
    try:
        model = ranks.load().model
        assert [shape.kv_heads for shape in cached_shapes(model).values()] == [1, 1], "each has a half of the heads"
        ranks.tell(CacheSetup(100, BLOCK, 512, "auto"))
        runner = ranks.run(TorchRunner(model, 100, BLOCK, 512))
        limits = {"max_num_batched_tokens": 64, "prefix_caching": True}
        drafts = lambda one: list(one.token_ids[-2:])  # noqa: E731
        tokens = Engine(None, runner=runner, **limits).run(requests(), drafts=drafts)
        assert tokens == Engine(tiny(), **limits).run(requests())
        (child,) = ranks._children
    finally:
        ranks.close()
    assert child.returncode == 0


def test_a_rank_that_dies_breaks_the_step_and_every_later_one(tmp_path) -> None:
    ranks = TensorParallel(save_tiny(tmp_path / "model"), "float32", 2, threads=1)
    try:
        model = ranks.load().model
        cached_shapes(model)
        ranks.tell(CacheSetup(100, BLOCK, 512, "auto"))
        runner = ranks.run(TorchRunner(model, 100, BLOCK, 512))
        (child,) = ranks._children
        child.kill()
        child.wait()
        engine = Engine(None, runner=runner)
        with pytest.raises((InferError, RuntimeError)):
            engine.run(requests())
        with pytest.raises(RuntimeError, match="not in step any more"):
            runner.execute(engine.scheduler._step)
    finally:
        ranks.close()


def test_the_engine_runs_in_as_many_processes_as_its_settings_say(tmp_path) -> None:
    save_tiny(tmp_path / "base")
    prompt, count = PROMPTS[1], 12
    settings = {"tensor_parallel_size": 2, "speculative_config": {"method": "ngram"}}
    tokens, _ = run(tmp_path, settings, prompt, count, [None, None])
    assert tokens == [generated_by_transformers(tiny(), prompt, count)] * 2
    assert not dist.is_initialized()
