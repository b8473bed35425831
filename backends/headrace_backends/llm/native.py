"""Our own engine: a model of transformers under our scheduler, in a thread of its own.

Puts the parts together; what they do is theirs. Implements `engine.Engine`.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.cache_size import cache_size
from headrace_backends.llm.core import EngineCore
from headrace_backends.llm.draft_setup import Drafting
from headrace_backends.llm.engine import Listener
from headrace_backends.llm.engine_loop import EngineLoop
from headrace_backends.llm.engine_setup import cache_config_of, limits_of, lora_modules_of
from headrace_backends.llm.grammar_source import grammars_of, marks_of
from headrace_backends.llm.kv_cache import bytes_per_block, takes_eight_bits
from headrace_backends.llm.loading import LoadedModel, load
from headrace_backends.llm.loop_engine import LoopEngine
from headrace_backends.llm.lora import LoraAdapters, LoraRunner
from headrace_backends.llm.model_card import card_of
from headrace_backends.llm.runner import TorchRunner, cached_shapes
from headrace_backends.llm.scheduler import Scheduler
from headrace_backends.llm.settings import Settings, parse
from headrace_backends.llm.step import ModelRunner
from headrace_backends.llm.tensor_parallel import CacheSetup, TensorParallel, refuse_beside_ranks
from headrace_backends.llm.text_codec import HfTextCodec
from headrace_protocol.errors import invalid, unsupported

_LOG: Final = logging.getLogger(__name__)


class NativeEngine(LoopEngine[HfTextCodec]):
    """One language model of ours. An `EngineMaker`: constructing checks the settings and loads nothing."""

    def __init__(self, source: Path, settings: Mapping[str, Any], *, threads: int, device: str) -> None:
        super().__init__(parse(settings, source))
        self._threads = max(1, threads // self._settings.tensor_parallel_size)
        self._device = device
        self._ranks: TensorParallel | None = None
        _refuse_what_is_not_here(self._settings, device)
        if self._settings.ignored:
            _LOG.info("settings of vLLM that mean nothing here: %s", ", ".join(self._settings.ignored))

    def _open(self, listener: Listener) -> None:
        torch.set_num_threads(self._threads)
        settings = self._settings
        loaded = self._load()
        if settings.max_model_len is not None and settings.max_model_len > loaded.max_model_len:
            raise invalid(
                f"max_model_len: {settings.max_model_len} tokens are more than the model was made for, {loaded.max_model_len}"
            )
        drafting = Drafting(settings.speculative_config, loaded, settings.block_size, self._device)
        adapters = LoraAdapters(loaded.model, lora_modules_of(settings), settings.max_lora_rank)
        block_bytes = bytes_per_block(
            cached_shapes(loaded.model),
            settings.block_size,
            loaded.dtype,
            eight_bits=takes_eight_bits(settings.kv_cache_dtype),
        )
        block_bytes = block_bytes * settings.tensor_parallel_size + drafting.block_bytes
        blocks, length = cache_size(settings, block_bytes, loaded.max_model_len, self._device)
        self._know(loaded, length, adapters)
        if self._ranks is not None:
            self._ranks.tell(CacheSetup(blocks, settings.block_size, length, settings.kv_cache_dtype))
        runner: ModelRunner = TorchRunner(
            loaded.model,
            blocks,
            settings.block_size,
            length,
            fuse=not adapters.ranks and self._ranks is None,  # adapters and ranks hook the model's own modules
            quantization=settings.quantization,
            kv_cache_dtype=settings.kv_cache_dtype,
        )
        if self._ranks is not None:
            runner = self._ranks.run(runner)
        elif adapters.ranks:
            runner = LoraRunner(runner, adapters)
        try:
            scheduler = Scheduler(
                limits_of(settings, length, loaded.vocab_size),
                BlockManager(blocks, settings.block_size, prefix_caching=settings.enable_prefix_caching),
            )
            drafter = drafting.drafter(blocks, length)
        except ValueError as error:
            raise invalid(f"model.json: {error}") from error
        self._loop = EngineLoop(
            EngineCore(scheduler, self.text, drafter, self._grammars),
            runner,
            listener,
            self._requests,
            prepare=lambda: torch.set_num_threads(self._threads),  # a setting of each thread's own
            cache_config=cache_config_of(settings, blocks),
        )
        self._loop.start()
        gc.freeze()  # half a million objects of the libraries': looking through them would hold a step up for most of a second

    def _load(self) -> LoadedModel:
        settings = self._settings
        if settings.tensor_parallel_size == 1:
            return load(settings.model, settings.dtype, device=self._device, dummy=settings.load_format == "dummy")
        self._ranks = TensorParallel(
            settings.model,
            settings.dtype,
            settings.tensor_parallel_size,
            self._threads,
        )
        return self._ranks.load()

    def _know(self, loaded: LoadedModel, length: int, adapters: LoraAdapters) -> None:
        """Take note of what the model is, and of what there is around it."""
        settings = self._settings
        self._text = HfTextCodec(
            loaded.tokenizer,
            loaded.vocab_size,
            chat_template=settings.chat_template,
            trust_request_template=settings.trust_request_chat_template,
        )
        self._eos = loaded.eos_token_ids
        self._card = card_of(settings, loaded, self._text, length, adapters.ranks)
        self._reasoning = marks_of(self._card.reasoning_format, self._text)
        self._grammars = grammars_of(
            loaded.tokenizer,
            loaded.eos_token_ids,
            loaded.vocab_size,
            reasoning=self._reasoning,
            ahead="generate" in self._card.tasks,
        )

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None
            gc.unfreeze()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        if self._grammars is not None:
            self._grammars.close()


def _refuse_what_is_not_here(settings: Settings, device: str) -> None:
    if settings.tensor_parallel_size > 1:
        refuse_beside_ranks(settings, device)
    if settings.quantization not in {None, "int8", "int4"}:
        raise unsupported(f"quantization: '{settings.quantization}' is not among what this engine does: int8, int4")
    takes_eight_bits(settings.kv_cache_dtype)
