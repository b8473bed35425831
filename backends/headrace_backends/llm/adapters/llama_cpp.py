"""llama.cpp as an engine: GGUF files in any of its quantisations, under our own scheduler and sampler.

Only the forward is llama.cpp's: requests are batched, preempted, sampled and stopped as by our own engine, by the same code.
Puts the parts together. Implements `engine.Engine`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from headrace_backends.llm.adapters.llama_cpp_model import LlamaContext, LlamaModel, most_sequences
from headrace_backends.llm.adapters.llama_cpp_runner import LlamaCppRunner
from headrace_backends.llm.adapters.llama_cpp_text import GgufTokenizer, LlamaCppText
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.cache_size import cache_size
from headrace_backends.llm.chat_formats import chosen_format, reasoning_format_of, tool_format_of
from headrace_backends.llm.core import EngineCore
from headrace_backends.llm.draft_setup import ngram_drafter
from headrace_backends.llm.engine import EngineCall, Listener
from headrace_backends.llm.engine_loop import EngineLoop
from headrace_backends.llm.engine_setup import cache_config_of, limits_of, lora_modules_of
from headrace_backends.llm.grammar_source import grammars_of, marks_of
from headrace_backends.llm.loop_engine import LoopEngine
from headrace_backends.llm.model_card import sampling_defaults
from headrace_backends.llm.ngram import Drafter
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.scheduler import Scheduler
from headrace_backends.llm.settings import Settings, parse
from headrace_protocol.errors import invalid, unsupported
from headrace_protocol.generation import AdapterCard, ModelCard, Task

_OPTIONS: Final[Mapping[str, str]] = {"n_ubatch": "n_ubatch", "flash_attn": "flash_attn_type"}
"""Settings that are llama.cpp's own, and its names for them."""
_LAYERS: Final = "n_gpu_layers"
_ALL_LAYERS: Final = -1
_SAMPLING: Final = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
"""Where a GGUF file has what its makers recommend."""


class LlamaCppEngine(LoopEngine[LlamaCppText]):
    """One language model of llama.cpp's. An `EngineMaker`: constructing checks the settings and loads nothing."""

    def __init__(self, source: Path, settings: Mapping[str, Any], *, threads: int, device: str) -> None:
        self._options, self._layers = _own(settings, device)
        ours = {name: value for name, value in settings.items() if name not in _OPTIONS and name != _LAYERS}
        super().__init__(parse(ours, source))
        self._path: Final = _gguf(self._settings.model)
        self._threads: Final = threads
        self._device: Final = device
        self._model: LlamaModel | None = None
        self._context: LlamaContext | None = None
        _refuse_what_is_not_here(self._settings)

    def close(self) -> None:
        """End the thread, then free what it used."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
        if self._grammars is not None:
            self._grammars.close()
        context, self._context = self._context, None
        if context is not None:
            context.close()
        if self._model is not None:
            self._model.close()

    def _open(self, listener: Listener) -> None:
        settings = self._settings
        number = self._device.rpartition(":")[2]
        model = LlamaModel(self._path, gpu_layers=self._layers, main_gpu=int(number) if number.isdigit() else 0)
        self._model = model
        if not model.generates:
            raise unsupported(f"{self._path}: {model.description} does not predict one token after another")
        if settings.max_model_len is not None and settings.max_model_len > model.max_model_len:
            raise invalid(
                f"max_model_len: {settings.max_model_len} tokens are more than the model was made for, {model.max_model_len}"
            )
        block_bytes = math.ceil(settings.block_size * model.token_bytes(settings.kv_cache_dtype))
        blocks, length = cache_size(settings, block_bytes, model.max_model_len, "cpu")
        limits = limits_of(settings, length, model.vocab_size)
        sequences = min(most_sequences(), 2 * settings.max_num_seqs + 8)
        if settings.max_num_seqs >= sequences:
            raise invalid(f"max_num_seqs: llama.cpp was built for {sequences} sequences, and one is kept free")
        self._context = LlamaContext(
            model,
            cells=blocks * settings.block_size,
            batch=limits.max_num_batched_tokens,
            sequences=sequences,
            threads=self._threads,
            cache=settings.kv_cache_dtype,
            options=self._options,
        )
        caching = settings.enable_prefix_caching and model.can_share
        adapters = {name: model.load_adapter(path) for name, path in lora_modules_of(settings).items()}
        runner = LlamaCppRunner(
            self._context, model.vocab_size, settings.block_size, sequences, adapters, keep_prefixes=caching
        )
        self._describe(model, length, adapters)
        try:
            scheduler = Scheduler(limits, BlockManager(blocks, settings.block_size, prefix_caching=caching))
            core = EngineCore(scheduler, self.text, _drafter(settings, model), self._grammars)
        except ValueError as error:
            raise invalid(f"model.json: {error}") from error
        self._loop = EngineLoop(
            core,
            runner,
            listener,
            self._requests,
            prepare=lambda: torch.set_num_threads(self._threads),  # of the sampler; a setting of each thread's own
            cache_config=cache_config_of(settings, blocks),
        )
        self._loop.start()

    def _describe(self, model: LlamaModel, length: int, adapters: Mapping[str, Any]) -> None:
        settings, tokenizer = self._settings, GgufTokenizer(model)
        text = LlamaCppText(
            tokenizer,
            chat_template=settings.chat_template,
            trust_request_template=settings.trust_request_chat_template,
        )
        template = text.template_with_tools or ""
        tasks: tuple[Task, ...] = ("generate", "embed") if settings.task == "auto" else (settings.task,)  # type: ignore[assignment]
        self._text, self._eos = text, tokenizer.eos_token_ids
        self._card = ModelCard(
            max_model_len=length,
            vocab_size=model.vocab_size,
            tasks=(*tasks, "tokenize", "detokenize"),
            engine="llama_cpp",
            dtype=model.description,
            has_chat_template=bool(template),
            tool_format=chosen_format(settings.tool_call_parser, tool_format_of(template)),
            reasoning_format=chosen_format(settings.reasoning_parser, reasoning_format_of(template)),
            adapters=tuple(AdapterCard(name) for name in adapters),
            aliases=settings.served_model_name,
            sampling_defaults=sampling_defaults(settings, _makers(model)),
            max_logprobs=model.vocab_size if settings.max_logprobs < 0 else settings.max_logprobs,
            embedding_width=model.width,
        )
        self._reasoning = marks_of(self._card.reasoning_format, text)
        self._grammars = grammars_of(
            tokenizer, self._eos, model.vocab_size, reasoning=self._reasoning, ahead="generate" in self._card.tasks
        )

    def _requests(self, call: EngineCall) -> Sequence[GenerationRequest]:
        if call.adapter is not None and call.adapter not in {adapter.name for adapter in self.card.adapters}:
            raise invalid(f"adapter: the model has none of the name '{call.adapter}'")
        return super()._requests(call)


def _own(settings: Mapping[str, Any], device: str) -> tuple[dict[str, int], int]:
    """Return what of the settings is llama.cpp's own: fields of its context, and how many layers go to a GPU."""
    problems, options = [], {}
    for name, field in _OPTIONS.items():
        value = settings.get(name)
        if isinstance(value, int):
            options[field] = int(value)
        elif value is not None:
            problems.append(
                f"{name}: expected {'true or false' if name == 'flash_attn' else 'a whole number'}, got {value!r}"
            )
    layers = settings.get(_LAYERS)
    if layers is None:
        layers = 0 if device == "cpu" else _ALL_LAYERS
    if isinstance(layers, bool) or not isinstance(layers, int):
        problems.append(f"{_LAYERS}: expected a whole number, got {layers!r}")
    if problems:
        raise invalid("model.json: " + "; ".join(problems))
    return options, layers


def _gguf(path: Path) -> Path:
    """Return the GGUF file at a path, or the one in the folder there. Raises INVALID_ARG."""
    if path.is_file() and path.suffix == ".gguf":
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) != 1:
        raise invalid(
            f"model: llama.cpp takes a GGUF file, and {path} {'has ' + str(len(files)) + ' of them' if files else 'is none'}"
        )
    return files[0]


def _refuse_what_is_not_here(settings: Settings) -> None:
    if settings.tensor_parallel_size > 1:
        raise unsupported("tensor_parallel_size: llama.cpp parts a model among GPUs by itself; leave it at 1")
    if settings.quantization is not None:
        raise unsupported("quantization: a GGUF file has its own; give the file in the one that is wanted")
    rule = settings.speculative_config
    if rule is not None and rule.method != "ngram":
        raise unsupported(f"speculative_config.method: with llama.cpp there is ngram, not {rule.method}")


def _drafter(settings: Settings, model: LlamaModel) -> Drafter | None:
    rule = settings.speculative_config
    if rule is None:
        return None
    if not model.can_share:
        raise unsupported("speculative_config: llama.cpp cannot take tokens back of a model that keeps a state")
    return ngram_drafter(rule)


def _makers(model: LlamaModel) -> dict[str, float]:
    """Return what the file's makers recommend for sampling."""
    found = {}
    for name, theirs in _SAMPLING.items():
        try:
            found[name] = float(model.metadata[f"general.sampling.{theirs}"])
        except (KeyError, ValueError):
            continue
    return found
