"""Adapters in one batch: what PEFT computes with each of them alone, and nothing where there is none."""

from __future__ import annotations

import copy
import json
import random
import warnings
from pathlib import Path

import peft
import pytest
import torch

from headrace_backends.llm.lora import LoraAdapters, LoraRunner
from headrace_backends.llm.runner import TorchRunner
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.errors import ErrorCode, InferError
from language_models import BLOCK, Engine, generated_by_transformers, request, tiny

NUMBERS = random.Random(3)
PROMPTS = [[NUMBERS.randrange(512) for _ in range(length)] for length in (5, 23, 40, 9, 17, 31)]
COUNT = 16
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
KINDS = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear"},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["o_proj", "down_proj"]},
    "patterns": {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"up_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 16},
    },
}  # fmt: skip


def tuned_by_peft(model, **config):
    """PEFT's own module around a copy of the model. PEFT asks transformers for what it is to call otherwise soon."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**config))


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory) -> dict[str, Path]:
    """Folders as PEFT saves them, with weights that change the output."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, kind) in enumerate(KINDS.items()):
        tuned = tuned_by_peft(model, **kind)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for parameter_name, parameter in tuned.named_parameters():
                if "lora_" in parameter_name:
                    torch.nn.init.normal_(parameter, std=0.2)
        tuned.save_pretrained(folder / name)
    return {name: folder / name for name in KINDS}


@pytest.fixture(scope="module")
def expected(model, adapters) -> dict[str | None, list[list[int]]]:
    """What transformers continues each prompt with, with each adapter merged into the weights by PEFT."""
    found = {None: [generated_by_transformers(model, prompt, COUNT) for prompt in PROMPTS]}
    for name, path in adapters.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            merged = peft.PeftModel.from_pretrained(copy.deepcopy(model), path).merge_and_unload()
        found[name] = [generated_by_transformers(merged, prompt, COUNT) for prompt in PROMPTS]
    return found


@pytest.fixture(scope="module")
def runner(model, adapters) -> LoraRunner:
    tuned = copy.deepcopy(model)
    return LoraRunner(TorchRunner(tuned, 200, BLOCK, 512), LoraAdapters(tuned, adapters, 64))


def engine(runner: LoraRunner, **more) -> Engine:
    return Engine(None, runner=runner, **more)


@pytest.mark.parametrize("name", [None, *KINDS])
def test_an_adapter_gives_the_tokens_of_merged_weights(runner, expected, name) -> None:
    assert len({str(tokens) for tokens in expected.values()}) == len(expected), "an adapter changes nothing"
    requests = [request(str(at), prompt, GREEDY, lora=name) for at, prompt in enumerate(PROMPTS)]
    assert engine(runner).run(requests) == expected[name]


def test_adapters_share_a_batch_with_each_other_and_with_none(runner, expected) -> None:
    names = [None, *KINDS]
    requests = [
        request(f"{name}/{at}", prompt, GREEDY, lora=name) for at, prompt in enumerate(PROMPTS) for name in names
    ]
    ran = engine(runner, max_num_seqs=40, blocks=200)
    assert ran.run(requests) == [expected[name][at] for at in range(len(PROMPTS)) for name in names]
    assert any(len({entry.request.lora for entry in step.scheduled}) == len(names) for step in ran.steps)


def test_chunks_drafts_and_preemption_change_no_adapters_tokens(runner, expected) -> None:
    names = [*KINDS, None, "all"]
    requests = [request(str(at), prompt, GREEDY, lora=names[at]) for at, prompt in enumerate(PROMPTS)]
    ran = Engine(None, runner=runner, max_num_seqs=6, max_num_batched_tokens=24)
    drafts = ran.run(requests, drafts=lambda one: list(one.token_ids[-3:]))
    assert drafts == [expected[name][at] for at, name in enumerate(names)]


def test_adapters_never_find_each_others_prefixes(runner, expected) -> None:
    ran = engine(runner, prefix_caching=True)
    for name in [None, "all", "attention", "all"]:
        assert ran.run([request(f"{name}{len(ran.steps)}", PROMPTS[2], GREEDY, lora=name)]) == [expected[name][2]]
    assert ran.scheduler.stats.prefix_cache_hits == 32, "the last one alone finds its prefix"


def test_matrices_are_accounted_for(model, adapters) -> None:
    loaded = LoraAdapters(copy.deepcopy(model), {"a": adapters["attention"]}, 64)
    assert loaded.num_bytes == 4 * 2 * (4 * 64 + 64 * 4 + 4 * 64 + 32 * 4)
    assert loaded.ranks == {"a": 4}


def spoiled(adapters, tmp_path, **changed) -> Path:
    """The folder of an adapter whose configuration says something else."""
    for file in adapters["attention"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "code", "told"),
    [
        ({"peft_type": "IA3"}, ErrorCode.UNSUPPORTED, "expected peft_type LORA, got IA3"),
        ({"use_dora": True}, ErrorCode.UNSUPPORTED, "use_dora"),
        ({"bias": "all"}, ErrorCode.UNSUPPORTED, "bias"),
        ({"modules_to_save": ["lm_head"]}, ErrorCode.UNSUPPORTED, "modules_to_save"),
        ({"r": 5}, ErrorCode.INVALID_ARG, "r is 5 in adapter_config.json and 4 in the weights"),
        ({"lora_alpha": "x"}, ErrorCode.INVALID_ARG, "lora_alpha: expected a number"),
        ({"rank_pattern": [1]}, ErrorCode.INVALID_ARG, "rank_pattern: expected an object"),
    ],
)
def test_what_an_adapter_says_and_is_not_computed_is_refused(model, adapters, tmp_path, changed, code, told) -> None:
    with pytest.raises(InferError, match=told) as caught:
        LoraAdapters(model, {"bad": spoiled(adapters, tmp_path, **changed)}, 64)
    assert caught.value.code is code
    assert "'bad'" in str(caught.value)


def test_a_rank_above_the_limit_is_refused(model, adapters) -> None:
    with pytest.raises(InferError, match="'all' has rank 8; max_lora_rank is 4"):
        LoraAdapters(copy.deepcopy(model), {"all": adapters["all"]}, 4)


def test_an_adapter_of_another_model_is_refused(adapters) -> None:
    with pytest.raises(InferError, match=r"q_proj is \[64, 32\] in the model and \[64, 64\] in the adapter"):
        LoraAdapters(tiny(hidden_size=32), {"a": adapters["attention"]}, 64)
    with pytest.raises(InferError, match="which LlamaForCausalLM does not have"):
        LoraAdapters(tiny(num_hidden_layers=1), {"a": adapters["attention"]}, 64)


def test_pickled_weights_are_refused(model, adapters, tmp_path) -> None:
    path = spoiled(adapters, tmp_path)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(InferError, match="pickle, which can run code") as caught:
        LoraAdapters(model, {"a": path}, 64)
    assert caught.value.code is ErrorCode.NOT_FOUND


def test_a_broken_file_is_refused(model, adapters, tmp_path) -> None:
    path = spoiled(adapters, tmp_path)
    whole = (path / "adapter_model.safetensors").read_bytes()
    (path / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InferError, match="adapter_model.safetensors: "):
        LoraAdapters(model, {"a": path}, 64)


def test_a_folder_that_is_not_there_is_not_found(model, tmp_path) -> None:
    with pytest.raises(InferError, match="no adapter_config.json in") as caught:
        LoraAdapters(model, {"a": tmp_path / "none"}, 64)
    assert caught.value.code is ErrorCode.NOT_FOUND


def test_a_tuned_output_layer_is_refused(model, tmp_path) -> None:
    tuned = tuned_by_peft(model, target_modules=["lm_head"])
    tuned.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(InferError, match="lm_head, the output layer, which is not supported"):
        LoraAdapters(model, {"a": tmp_path}, 64)
