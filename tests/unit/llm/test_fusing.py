"""Fused layers give what transformers' own give, and those that do not are not used."""

import logging

import pytest
import torch

from headrace_backends.llm import fusing
from headrace_backends.llm.fusing import fused
from headrace_backends.llm.packed_linears import multiplies_bf16, packed
from headrace_backends.llm.runner import TorchRunner, probed
from headrace_backends.llm.sampling_params import SamplingParams
from language_models import BLOCK, GREEDY, Engine, generated_by_transformers, request, tiny

KINDS = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "phi3"]
PROMPTS = [[5, 9, 300, 17] * count for count in (1, 4, 14)]


def _requests(params=GREEDY):
    return [request(str(at), prompt, params, seed=at) for at, prompt in enumerate(PROMPTS)]


def _engine(model, **more):
    runner = TorchRunner(model, 200, BLOCK, 512, fuse=True, **more)
    assert runner._fused is not None
    return Engine(None, runner=runner, max_num_batched_tokens=48)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers_generate(kind, caplog):
    caplog.set_level(logging.INFO)
    model = tiny(kind)
    expected = [generated_by_transformers(model, prompt, 24) for prompt in PROMPTS]
    engine = _engine(model)
    assert "2 of 2 layers are fused" in caplog.text
    assert engine.run(_requests()) == expected


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_in_bf16_logits_are_those_of_transformers_but_for_rounding(kind):
    model = tiny(kind).to(torch.bfloat16)
    told = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    plain = Engine(model)
    plain.run(_requests(told))
    by_parts = _engine(tiny(kind).to(torch.bfloat16))
    by_parts.run(_requests(told))
    for name in map(str, range(len(PROMPTS))):
        one, other = (
            [each.chosen.logprob for result in engine.results[name] for each in result.prompt_logprobs]
            for engine in (plain, by_parts)
        )
        assert one == pytest.approx(other, abs=0.35)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seeded_text_has_the_same_bits_alone_and_among_others(kind, dtype, quantization):
    if dtype == torch.bfloat16 and multiplies_bf16():
        pytest.skip("this processor multiplies bf16 by oneDNN, which rounds prompts otherwise than single rows")
    drawn = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, logprobs=0)
    prompts = [[5 + at, 9, 300, 17] * (at + 1) for at in range(9)]

    def ran(chosen):
        runner = TorchRunner(tiny(kind).to(dtype), 200, BLOCK, 512, fuse=True, quantization=quantization)
        engine = Engine(None, runner=runner, max_num_batched_tokens=2048)
        engine.run([request(str(at), prompts[at], drawn, seed=at) for at in chosen])
        return {
            at: [each.chosen for result in engine.results[str(at)] for each in result.logprobs or ()] for at in chosen
        }

    together = ran(range(len(prompts)))
    for at in (0, 3, 8):
        assert ran([at])[at] == together[at]


def test_biases_and_heads_that_are_not_tied_are_taken_over():
    model = tiny("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    expected = [generated_by_transformers(model, prompt, 8) for prompt in PROMPTS]
    short = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert _engine(model).run(_requests(short)) == expected


@pytest.mark.parametrize("depth", [64, 1536])
def test_a_packed_product_of_a_row_has_the_same_bits_alone_and_among_others(depth):
    numbers = torch.Generator().manual_seed(1)
    product = packed(torch.randn(576, depth, generator=numbers).to(torch.bfloat16))
    rows = torch.randn(32, depth, generator=numbers).to(torch.bfloat16)
    assert torch.equal(torch.cat([product(row[None]) for row in rows]), product(rows))


def test_weights_that_were_taken_over_are_not_kept_twice():
    model = tiny()
    before = sum(each.numel() for each in model.model.layers.parameters())
    assert fused(model, probed(model)) is not None
    assert before > 0
    assert sum(each.numel() for each in model.model.layers.parameters()) == 0


def test_a_layer_that_gives_something_else_stays_as_it_was(caplog):
    """Its residual is not added: what no architecture in the table does."""
    model = tiny()
    layer = model.model.layers[1]
    whole = type(layer).forward

    def without_residual(self, hidden_states, **more):
        return whole(self, hidden_states, **more) - hidden_states

    layer.forward = without_residual.__get__(layer)
    expected = [generated_by_transformers(model, prompt, 24) for prompt in PROMPTS]
    engine = _engine(model)
    assert "layer 1 of LlamaForCausalLM stays as it is: fused it differs by" in caplog.text
    assert engine.run(_requests()) == expected


def test_a_model_whose_head_does_something_else_stays_as_it_was(caplog):
    model = tiny()
    head = model.lm_head
    head.forward = lambda rows: torch.nn.functional.linear(rows, head.weight) * 2
    expected = [generated_by_transformers(model, prompt, 24) for prompt in PROMPTS]
    engine = Engine(None, runner=TorchRunner(model, 200, BLOCK, 512, fuse=True))
    assert "logits differ by" in caplog.text
    assert engine.run(_requests()) == expected


def test_architectures_that_are_not_in_the_table_run_as_they_are(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(fusing, "_ARCHITECTURES", {})
    model = tiny()
    assert fused(model, probed(model)) is None
    assert "runs as transformers has it" in caplog.text


def test_vectors_of_prompts_are_the_same():
    model = tiny()
    plain = Engine(model)
    pooled = [request("a", PROMPTS[2], SamplingParams(temperature=0, max_tokens=1), pooling=how) for how in ("mean",)]
    plain.run(pooled)
    again = [request("a", PROMPTS[2], SamplingParams(temperature=0, max_tokens=1), pooling=how) for how in ("mean",)]
    by_parts = _engine(tiny())
    by_parts.run(again)
    one, other = (
        torch.tensor(sum(result.pooled for result in engine.results["a"] if result.pooled is not None))
        for engine in (plain, by_parts)
    )
    torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_a_cache_of_8_bits_gives_nearly_the_same_logits():
    told = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    outs = []
    for kind in ("auto", "int8"):
        engine = _engine(tiny(), kv_cache_dtype=kind)
        engine.run(_requests(told))
        outs.append([each.chosen.logprob for result in engine.results["2"] for each in result.prompt_logprobs])
    assert outs[0] != outs[1]
    assert torch.nn.functional.cosine_similarity(*map(torch.tensor, outs), dim=0) > 0.999
