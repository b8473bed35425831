"""Products with weights of few bits: near those of the weights they were made from, and the same for any number of rows."""

import pytest
import torch
import torch.nn.functional as F

from headrace_backends.llm.kernels.linears import MOST_ROWS
from headrace_backends.llm.quantised_linears import maker
from headrace_backends.llm.runner import TorchRunner
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.errors import ErrorCode, InferError
from language_models import BLOCK, Engine, request, tiny

LEAST = {"int8": 0.9999, "int4": 0.99}
KINDS = pytest.mark.parametrize("kind", ["int8", "int4"])


def _weight(outputs=96, depth=64, dtype=torch.float32):
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(outputs, depth, generator=numbers).to(dtype), torch.randn(outputs, generator=numbers).to(dtype)


def _rows(count, depth=64, dtype=torch.float32):
    return torch.randn(count, depth, generator=torch.Generator().manual_seed(2)).to(dtype)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_they_are_near_the_product_with_the_weights_as_they_were(kind, dtype, biased):
    weight, bias = _weight(dtype=dtype)
    product = maker(kind)(weight, bias if biased else None)
    for count in (1, 2, 3, 4, 5, 40):
        exact = F.linear(_rows(count, dtype=dtype), weight, bias if biased else None)
        found = product(_rows(count, dtype=dtype))
        assert found.dtype == dtype
        assert F.cosine_similarity(found.float().flatten(), exact.float().flatten(), dim=0) > LEAST[kind]


@KINDS
@pytest.mark.parametrize(("dtype", "room"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_many_rows_have_the_weights_that_few_rows_have(kind, dtype, room):
    product = maker(kind)(_weight(dtype=dtype)[0], None)
    many = product(_rows(MOST_ROWS + 3, dtype=dtype))
    for count in range(1, MOST_ROWS + 1):
        few = product(_rows(MOST_ROWS + 3, dtype=dtype)[:count])
        assert (few - many[:count]).float().norm() / many[:count].float().norm() < room


def test_weights_on_a_grid_of_16_steps_are_kept_as_they_are():
    """As those of a file of 4 bits are, once they are unpacked."""
    steps = torch.randint(16, (96, 2, 32), generator=torch.Generator().manual_seed(3)).float()
    steps[..., 0], steps[..., 1] = 0, 15
    weight = (steps * 0.25 - 1.5).view(96, 64)
    product = maker("int4")(weight, None)
    for count in (1, 8):
        torch.testing.assert_close(product(_rows(count)), F.linear(_rows(count), weight), atol=1e-4, rtol=1e-4)


@KINDS
def test_weights_that_are_all_zero_give_zero(kind):
    product = maker(kind)(torch.zeros(32, 64), None)
    assert not product(_rows(1)).any()
    assert not product(_rows(8)).any()


@KINDS
@pytest.mark.parametrize("shape", [(90, 64), (96, 40), (97, 64)])
def test_shapes_that_do_not_divide_are_computed_too(kind, shape):
    weight, bias = _weight(*shape)
    for count in (1, 8):
        exact = F.linear(_rows(count, shape[1]), weight, bias)
        found = maker(kind)(weight, bias)(_rows(count, shape[1]))
        assert F.cosine_similarity(found.flatten(), exact.flatten(), dim=0) > LEAST[kind]


@KINDS
def test_threads_share_the_outputs_out(kind, monkeypatch):
    weight, _ = _weight(512)
    alone = maker(kind)(weight, None)(_rows(2))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(maker(kind)(weight, None)(_rows(2)), alone)


@pytest.mark.parametrize(("kind", "least"), [("int8", 0.999), ("int4", 0.8)])
def test_a_model_of_few_bits_gives_nearly_the_same_log_probabilities(kind, least):
    told = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=-1)
    outs = []
    for quantization in (None, kind):
        engine = Engine(None, runner=TorchRunner(tiny(), 200, BLOCK, 512, fuse=True, quantization=quantization))
        engine.run([request("a", [5, 9, 300, 17] * 9, told)])
        top = engine.results["a"][0].logprobs[0].top
        outs.append([each.logprob for each in sorted(top, key=lambda each: each.token_id)])
    assert outs[0] != outs[1]
    assert F.cosine_similarity(*map(torch.tensor, outs), dim=0) > least


def test_a_quantisation_that_is_not_known_is_refused():
    with pytest.raises(InferError, match="quantization: expected int8 or int4, got 'awq'") as refused:
        TorchRunner(tiny(), 200, BLOCK, 512, fuse=True, quantization="awq")
    assert refused.value.code is ErrorCode.INVALID_ARG


def test_a_model_that_cannot_be_fused_has_none():
    with pytest.raises(InferError, match="quantization: LlamaForCausalLM cannot be had in int8 here") as refused:
        TorchRunner(tiny(), 200, BLOCK, 512, quantization="int8")
    assert refused.value.code is ErrorCode.UNSUPPORTED
