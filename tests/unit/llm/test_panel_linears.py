"""Products with weights as narrow as they are known: exact where that is said, and the same for any number of rows."""

import pytest
import torch
import torch.nn.functional as F

from headrace_backends.llm import packed_linears, panel_linears
from headrace_backends.llm.kernels import panels
from headrace_backends.llm.kernels.panels import FEW_ROWS, INT4
from headrace_backends.llm.kernels.products import BF16, FP32, INT8
from headrace_backends.llm.panel_linears import ByRows, PanelLinear, maker
from headrace_backends.llm.runner import TorchRunner
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.errors import ErrorCode, InferError
from language_models import BLOCK, Engine, request, tiny

LEAST = {"int8": 0.9999, "int4": 0.99}
KINDS = pytest.mark.parametrize("kind", ["int8", "int4"])
COUNTS = (1, 2, 3, 4, 5, 6, 7, 12, 64, 65, 131)


def _weight(outputs=96, depth=64, dtype=torch.float32):
    numbers = torch.Generator().manual_seed(1)
    return torch.randn(outputs, depth, generator=numbers).to(dtype), torch.randn(outputs, generator=numbers).to(dtype)


def _rows(count, depth=64, dtype=torch.float32):
    return torch.randn(count, depth, generator=torch.Generator().manual_seed(2)).to(dtype)


def _steps(most, shape, factor, least=0.0):
    """Return weights that are `factor` times 0 to `most`, and `least` more; the ends are among each 32."""
    outputs, depth = shape
    steps = torch.randint(most + 1, (outputs, depth // 32, 32), generator=torch.Generator().manual_seed(3)).float()
    steps[..., 0], steps[..., 1] = 0, most
    return (steps * factor + least).view(outputs, depth)


EXACT = {
    FP32: _weight(90, 576)[0],
    BF16: _weight(90, 576, torch.bfloat16)[0].float(),
    INT8: _steps(254, (90, 576), 3e-3, 0.0).sub_(127 * 3e-3),
    INT4: _steps(15, (90, 576), 0.0037, -0.021),
}
# Factors of fp16, so that products with integers are exact.
EXACT[INT8] = (EXACT[INT8] / 3e-3).round() * torch.tensor(3e-3).half().float()
EXACT[INT4] = _steps(15, (90, 576), float(torch.tensor(0.0037).half()), float(torch.tensor(-0.021).half()))


@pytest.mark.parametrize("kind", EXACT)
def test_weights_are_kept_as_narrow_as_they_are_exact(kind):
    weight, bias = EXACT[kind], _weight(90)[1]
    linear = maker(None)(weight, bias)
    assert isinstance(linear, PanelLinear)
    assert linear.kind == kind
    for count in COUNTS:
        rows = _rows(count, 576)
        exact = F.linear(rows.double(), weight.double(), bias.double())
        torch.testing.assert_close(linear(rows).double(), exact, atol=1e-4, rtol=1e-4)


def test_weights_of_q4_0_whose_largest_is_not_on_the_other_side_are_exact_in_4_bits():
    steps = torch.randint(-8, 5, (64, 2, 32), generator=torch.Generator().manual_seed(3)).float()
    steps[..., 0] = -8
    signs = torch.where(torch.arange(2) == 0, 1.0, -1.0)[None, :, None]
    weight = (steps * signs * float(torch.tensor(0.11).half())).view(64, 64)
    linear = maker(None)(weight, None)
    assert linear.kind == INT4
    torch.testing.assert_close(linear(torch.eye(64)), weight.T, atol=0, rtol=0)


@pytest.mark.parametrize("kind", EXACT)
def test_a_single_weight_comes_out_as_it_went_in(kind):
    """So no weight is rounded: each product of a unit vector is one weight."""
    linear = maker(None)(EXACT[kind], None)
    for count in (1, 6, 576):
        assert torch.equal(linear(torch.eye(576)[:count]), EXACT[kind].T[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", EXACT)
def test_a_rows_products_have_the_same_bits_alone_and_among_others(kind, dtype):
    if dtype == torch.bfloat16 and packed_linears.multiplies_bf16():
        pytest.skip("this processor multiplies bf16 by oneDNN: see test_fusing")
    linear = maker(None)(EXACT[kind].to(dtype), None)
    rows = _rows(131, 576, dtype)
    alone = torch.cat([linear(row[None]) for row in rows])
    for count in COUNTS:
        assert torch.equal(linear(rows[:count]), alone[:count])


@pytest.mark.parametrize("kind", EXACT)
def test_the_bits_do_not_depend_on_how_many_registers_there_are(kind, monkeypatch):
    """More of them have more outputs summed at once: what a processor with AVX-512 does, as another runs it."""
    rows = _rows(70, 576)
    outs = []
    for wide in (False, True):
        monkeypatch.setattr(panels, "wide_registers", lambda wide=wide: wide)
        panels.product.cache_clear()
        linear = maker(None)(EXACT[kind], None)
        outs.append([linear(rows[:count]) for count in COUNTS[:-1]])
    panels.product.cache_clear()
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one, other)


def test_more_weights_than_are_widened_at_a_time_are_summed_in_one_order():
    weight, _ = _weight(64, 1536 + 32)
    linear = maker(None)(weight, None)
    rows = _rows(9, 1536 + 32)
    assert torch.equal(linear(rows), torch.cat([linear(row[None]) for row in rows]))
    torch.testing.assert_close(linear(rows), F.linear(rows, weight), atol=1e-3, rtol=1e-3)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_few_bits_are_near_the_product_with_the_weights_as_they_were(kind, dtype, biased):
    weight, bias = _weight(dtype=dtype)
    product = maker(kind)(weight, bias if biased else None)
    for count in (1, 2, 3, 4, 5, 40):
        exact = F.linear(_rows(count, dtype=dtype), weight, bias if biased else None)
        found = product(_rows(count, dtype=dtype))
        assert found.dtype == dtype
        assert F.cosine_similarity(found.float().flatten(), exact.float().flatten(), dim=0) > LEAST[kind]


@KINDS
def test_where_bf16_is_multiplied_as_it_is_many_rows_have_the_weights_that_few_have(kind, monkeypatch):
    monkeypatch.setattr(panel_linears, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(panel_linears, "packed", packed_linears._PlainLinear)
    linear = maker(kind)(_weight(dtype=torch.bfloat16)[0], None)
    assert isinstance(linear, ByRows)
    many = linear(_rows(FEW_ROWS + 3, dtype=torch.bfloat16))
    for count in range(1, FEW_ROWS + 1):
        few = linear(_rows(FEW_ROWS + 3, dtype=torch.bfloat16)[:count])
        assert (few - many[:count]).float().norm() / many[:count].float().norm() < 2e-2


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
@pytest.mark.parametrize("count", [2, 100])
def test_threads_share_the_outputs_out(kind, count, monkeypatch):
    weight, _ = _weight(1024)
    alone = maker(kind)(weight, None)(_rows(count))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(maker(kind)(weight, None)(_rows(count)), alone)


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
