"""llama.cpp as an engine gives what transformers gives for the same weights, in any batch and out of the prefix cache."""

import importlib.util
import random

import pytest
import torch

from engine_contract import Heard, tokens_of
from gguf_models import tiny_gguf
from headrace_backends.llm.engine import EngineCall
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.errors import InferError
from language_models import tiny

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NEAR = 0.1  # of logits from -10 to 10: llama.cpp attends in half precision


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def made(file, **settings):
    from headrace_backends.llm.adapters.llama_cpp import LlamaCppEngine

    return LlamaCppEngine(file.parent, {"model": str(file), **settings}, threads=1, device="cpu")


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 32, "max_num_seqs": 4}, {"num_gpu_blocks_override": 12, "max_model_len": 128}],
)
def test_each_token_is_a_likeliest_one_of_transformers(file, settings):
    numbers = random.Random(3)
    shared = [numbers.randrange(258) for _ in range(33)]
    prompts = [shared + [numbers.randrange(258) for _ in range(numbers.randint(1, 30))] for _ in range(6)]
    engine, heard, threads = made(file, **{"num_gpu_blocks_override": 60, **settings}), Heard(), torch.get_num_threads()
    engine.open(heard)
    try:
        for number in (1, 2):
            engine.submit(EngineCall(number, tuple(prompts), GREEDY, 0))
            news = heard.answer(number, 6)
            for at, prompt in enumerate(prompts):
                tokens = tokens_of(news, at)
                with torch.inference_mode():
                    logits = tiny()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
                chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                assert bool((chosen > logits.amax(dim=1) - NEAR).all())
        assert engine.stats().totals["prefix_cache_hits"] > 0
        core = engine._loop._core
        assert core.scheduler.blocks.num_free == core.scheduler.blocks.num_usable
        core.check_integrity()
    finally:
        engine.close()
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"n_gpu_layers": "all"}, "n_gpu_layers: expected a whole number"),
        ({"kv_cache_dtype": "q9"}, "kv_cache_dtype: expected one of auto"),
        ({"max_model_len": 4096}, "more than the model was made for, 512"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"quantization": "awq"}, "quantization"),
        ({"no_such": 1}, "no_such: no such setting"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused_at_load(file, settings, part):
    with pytest.raises(InferError, match=part):
        made(file, **settings).open(Heard())


def test_a_file_that_is_no_model_is_refused(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(InferError, match="cannot load"):
        made(broken).open(Heard())
    with pytest.raises(InferError, match="takes a GGUF file"):
        made(tmp_path.parent)
