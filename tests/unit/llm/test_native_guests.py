"""Our engine with guests: LoRA adapters and draft models that the settings name. The tokens are the model's own."""

from __future__ import annotations

import json
import threading
import warnings

import peft
import pytest
import torch

from headrace_backends.llm.beam import BeamRules
from headrace_backends.llm.engine import EngineCall
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.errors import ErrorCode, InferError
from language_models import generated_by_transformers, save_tiny, tiny
from native_engines import opened, run

PROMPT = [5, 6, 7, 5, 6, 8, 9, 30, 31]
COUNT = 12


@pytest.fixture(scope="module")
def version(tmp_path_factory):
    """A version directory with a model, two draft models and two adapters in it."""
    folder = tmp_path_factory.mktemp("version")
    save_tiny(folder / "base")
    save_tiny(folder / "small", num_hidden_layers=1)
    save_tiny(folder / "other_words", words=509)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(5)
        for name in ("one", "two"):
            config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
            peft.get_peft_model(tiny(), config).save_pretrained(folder / name)
    (folder / "multi_lora.json").write_text(json.dumps({"two": "two"}))
    return folder


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return generated_by_transformers(tiny(), PROMPT, COUNT)


def test_adapters_of_the_settings_and_of_their_file_are_served_beside_the_model(version, plain) -> None:
    settings = {"enable_lora": "true", "lora_modules": [{"name": "one", "path": "one"}]}
    tokens, engine = run(version, settings, PROMPT, COUNT, [None, "one", "two", None])
    assert tokens[0] == tokens[3] == plain
    assert len({*map(tuple, tokens)}) == 3
    assert [(adapter.name, adapter.rank) for adapter in engine.card.adapters] == [("one", 4), ("two", 4)]


def test_without_enable_lora_there_are_no_adapters(version, plain) -> None:
    tokens, engine = run(version, {}, PROMPT, COUNT, [None])
    assert tokens == [plain]
    assert engine.card.adapters == ()


def test_an_adapter_of_too_high_a_rank_keeps_the_model_from_loading(version) -> None:
    with pytest.raises(InferError, match="'two' has rank 4; max_lora_rank is 2"):
        run(version, {"enable_lora": True, "max_lora_rank": 2}, PROMPT, COUNT, [])


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("draft", ["base", "small", None])
def test_guesses_change_no_token(version, draft, temperature) -> None:
    plain, _ = run(version, {}, PROMPT, COUNT, [None, None], temperature)
    rule = {"num_speculative_tokens": 3} | ({} if draft is None else {"model": draft})
    tokens, engine = run(version, {"speculative_config": rule}, PROMPT, COUNT, [None, None], temperature)
    assert tokens == plain
    totals = engine.final_stats.totals
    assert totals["draft_tokens"] > 0 or (draft is None and temperature), "drawn tokens repeat nothing"
    if draft == "base" and not temperature:
        assert totals["accepted_tokens"] == totals["draft_tokens"], "it guesses for itself"
    if draft == "small":
        assert totals["accepted_tokens"] < totals["draft_tokens"]


def test_a_draft_model_of_other_tokens_is_refused(version) -> None:
    with pytest.raises(InferError, match="token 509 is None for the first and 'w509' for the second") as caught:
        run(version, {"speculative_config": {"model": "other_words"}}, PROMPT, COUNT, [])
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_a_beam_search_is_told_once_at_its_end(version, plain) -> None:
    engine, heard = opened(version, {"enable_lora": True})
    try:
        params = SamplingParams(n=2, max_tokens=COUNT, ignore_eos=True)
        heard.ended[0] = threading.Event()
        engine.submit(EngineCall(0, (PROMPT,), params, 0, beam=BeamRules(3)))
        assert heard.ended[0].wait(60)
    finally:
        engine.close()
    assert len(heard.news) == 1, heard.news
    (news,) = heard.news
    assert [(output.index, len(output.token_ids)) for output in news.outputs] == [(0, COUNT), (1, COUNT)]
    assert news.scheduled_ns is not None and news.first_token_ns is not None


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"enable_lora": True}, "not with enable_lora:"),
        ({"load_format": "dummy"}, "not with load_format dummy:"),
        ({"model": "small/model.safetensors"}, "not with a GGUF file:"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_before_anything_is_loaded(version, settings, told) -> None:
    with pytest.raises(InferError, match=f"tensor_parallel_size: {told}") as caught:
        opened(version, {"tensor_parallel_size": 2} | settings)
    assert caught.value.code is ErrorCode.UNSUPPORTED
