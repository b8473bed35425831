"""A model's tokens are the same whatever they are computed with: batches, chunks, blocks found, preemption, drafts."""

import random

import pytest
import torch
import transformers

from headrace_backends.llm.runner import TorchRunner, cached_shapes
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.errors import ErrorCode, InferError
from language_models import GREEDY, Engine, generated_by_transformers, request, tiny

KINDS = ["llama", "qwen3", "gemma2", "gemma3", "mistral", "phi3"]
SEEDED = SamplingParams(temperature=1.3, top_p=0.95, max_tokens=24, ignore_eos=True, repetition_penalty=1.1, seed=1)


def _prompts(count, longest=70, seed=0):
    numbers = random.Random(seed)
    return [[numbers.randrange(3, 512) for _ in range(numbers.randrange(1, longest))] for _ in range(count)]


def _requests(prompts, params=GREEDY, **more):
    return [request(str(at), prompt, params, seed=100 + at, **more) for at, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def llama():
    return tiny()


@pytest.fixture(scope="module")
def alone(llama):
    """What eight prompts give one at a time, greedy and seeded."""
    engine = Engine(llama, max_num_seqs=1)
    return {params.temperature: engine.run(_requests(_prompts(8), params)) for params in (GREEDY, SEEDED)}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers_generate(kind):
    model = tiny(kind)
    expected = [generated_by_transformers(model, prompt, 24) for prompt in _prompts(4)]
    assert len({tuple(each) for each in expected}) == 4
    assert Engine(model).run(_requests(_prompts(4))) == expected
    assert Engine(model, max_num_batched_tokens=32).run(_requests(_prompts(4))) == expected, "in chunks"


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
class TestTheSameTokens:
    def test_in_one_batch(self, llama, alone, params):
        assert Engine(llama).run(_requests(_prompts(8), params)) == alone[params.temperature]

    @pytest.mark.parametrize("budget", [8, 13, 33])
    def test_in_chunks(self, llama, alone, params, budget):
        engine = Engine(llama, max_num_batched_tokens=budget, max_num_seqs=8)
        assert engine.run(_requests(_prompts(8), params)) == alone[params.temperature]

    def test_after_preemption(self, llama, alone, params):
        engine = Engine(llama, blocks=12, max_model_len=100)
        requests = _requests(_prompts(8), params)
        assert engine.run(requests) == alone[params.temperature]
        assert sum(each.num_preemptions for each in requests) > 0

    def test_with_a_prefix_cache(self, llama, alone, params):
        prompts = _prompts(8)
        prompts += [prompts[0], (prompts[1] * 4)[:64], (prompts[1] * 4)[:64], (prompts[1] * 4)[:48]]
        plain = Engine(llama).run(_requests(prompts, params))
        engine = Engine(llama, prefix_caching=True, max_num_seqs=4)
        requests = _requests(prompts, params)
        assert engine.run(requests) == plain
        assert sum(each.num_cached_tokens for each in requests) > 0
        assert plain[:8] == alone[params.temperature]

    def test_with_drafts_right_and_wrong(self, llama, alone, params):
        known = {str(at): tokens for at, tokens in enumerate(alone[params.temperature])}
        numbers = random.Random(5)

        def drafts(running):
            right = known[running.id][running.num_output_tokens :][: numbers.randrange(5)]
            return [token if numbers.random() < 0.8 else (token + 1) % 512 for token in right]

        engine = Engine(llama)
        assert engine.run(_requests(_prompts(8), params), drafts) == alone[params.temperature]
        assert len(engine.steps) < 24


def test_logprobs_are_those_of_a_plain_forward(llama):
    engine = Engine(llama, max_num_batched_tokens=32)
    prompt = _prompts(1, 60)[0] + [5] * 40
    (told,) = [
        request(
            "a", prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
        )
    ]
    (tokens,) = engine.run([told])
    logits = _plain_logits(llama, [*prompt, *tokens])
    expected = torch.log_softmax(logits, -1)
    output = [each for result in engine.results["a"] for each in result.logprobs or ()]
    assert [each.chosen.token_id for each in output] == tokens
    for at, each in enumerate(output):
        assert each.chosen.logprob == pytest.approx(float(expected[len(prompt) - 1 + at, tokens[at]]), abs=1e-3)
        assert len(each.top) == 3
    of_prompt = [each for result in engine.results["a"] for each in result.prompt_logprobs]
    assert [each.chosen.token_id for each in of_prompt] == prompt[1:]
    for at, each in enumerate(of_prompt):
        assert each.chosen.logprob == pytest.approx(float(expected[at, prompt[at + 1]]), abs=1e-3)


def _plain_logits(model, tokens):
    kept = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0]
    finally:
        model.set_attn_implementation(kept)


def test_a_request_whose_masks_leave_no_token_ends_alone(llama):
    engine = Engine(llama)
    good, bad = _requests(_prompts(2))
    expected = Engine(llama).run(_requests(_prompts(1)))
    bad = request("bad", [3, 4], SamplingParams(max_tokens=4, allowed_token_ids=(9,)), bad_word_ids=((9,),))
    assert engine.run([good, bad]) == [expected[0], []]
    assert bad.error.startswith("no token may be chosen")


def test_a_cache_too_small_for_one_request_is_refused(llama):
    with pytest.raises(InferError, match="has 10 blocks of 16 tokens; one request of max_model_len 512 needs 33"):
        TorchRunner(llama, 10, 16, 512)


def test_a_model_with_attention_of_its_own_is_refused_by_name():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8)
    model = transformers.MambaForCausalLM(config).eval()
    with pytest.raises(InferError, match="MambaForCausalLM cannot run with paged attention") as refused:
        cached_shapes(model)
    assert refused.value.code is ErrorCode.UNSUPPORTED


def test_attention_sinks_are_refused():
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_local_experts=2, num_experts_per_tok=1, intermediate_size=32, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(InferError, match="attention sinks"):
        cached_shapes(transformers.GptOssForCausalLM(config).eval())
