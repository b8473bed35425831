"""llama.cpp's model and context, as little of them as the engine needs: a thin layer over its C functions.

Knows no request and no text.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace_protocol.errors import internal, invalid, unavailable

# read when the library is loaded: threads that spin while they wait starve each other where models share the cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import llama_cpp

_LOG: Final = logging.getLogger(__name__)
_WARNING: Final = 3
"""llama.cpp's level; errors are 4, and 5 continues the line before."""
_CACHE_TYPES: Final = {"auto": 1, "float16": 1, "float32": 0, "bfloat16": 30, "q8_0": 8, "q4_0": 2}
"""Numbers of ggml's types."""
_BYTES: Final = {0: 4.0, 1: 2.0, 30: 2.0, 8: 34 / 32, 2: 18 / 32}
"""Of an element of each type."""


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _: Any) -> None:
    # that all requests together may have more tokens than one was trained for is no news
    if level in {_WARNING, _WARNING + 1} and b"n_ctx_seq" not in text:
        _LOG.warning("llama.cpp: %s", text.decode(errors="replace").rstrip())


class LlamaModel:
    """A GGUF file's weights, vocabulary and metadata. Immutable; for any number of threads."""

    def __init__(self, path: Path, *, gpu_layers: int, main_gpu: int) -> None:
        """Load a file. Raises INVALID_ARG where llama.cpp cannot."""
        llama_cpp.llama_log_set(_log, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.main_gpu = main_gpu
        self.handle: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise invalid(f"llama.cpp cannot load {path}; what it printed says why")
        self.vocab: Final[Any] = llama_cpp.llama_model_get_vocab(self.handle)
        self.metadata: Final = self._metadata()
        self.vocab_size: Final = int(llama_cpp.llama_vocab_n_tokens(self.vocab))
        self.width: Final = int(llama_cpp.llama_model_n_embd(self.handle))
        self.max_model_len: Final = int(llama_cpp.llama_model_n_ctx_train(self.handle))

    @property
    def can_share(self) -> bool:
        """Whether a sequence can take over another's beginning, and be cut back: not where it is a state and no cells."""
        return not (llama_cpp.llama_model_is_recurrent(self.handle) or llama_cpp.llama_model_is_hybrid(self.handle))

    @property
    def generates(self) -> bool:
        """Whether it predicts one token after the other."""
        causal = self.metadata.get(f"{self.metadata.get('general.architecture')}.attention.causal", "true") == "true"
        decodes = llama_cpp.llama_model_has_decoder(self.handle) and not llama_cpp.llama_model_has_encoder(self.handle)
        return bool(causal and decodes and not llama_cpp.llama_model_is_diffusion(self.handle))

    @property
    def pools(self) -> bool:
        """Whether the file says how one vector is made of a text's."""
        return f"{self.metadata.get('general.architecture')}.pooling_type" in self.metadata

    @property
    def description(self) -> str:
        """Architecture, size and type of the weights, in llama.cpp's words."""
        buffer = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    def template(self, name: str | None = None) -> str | None:
        """Return the chat template of a name, or the default one."""
        found = llama_cpp.llama_model_chat_template(self.handle, None if name is None else name.encode())
        return None if found is None else found.decode(errors="replace")

    def token_bytes(self, kind: str) -> float:
        """Return how much memory a token takes in a KV cache of that type, at most: every layer is taken for a full one."""
        architecture = self.metadata.get("general.architecture", "")
        heads = int(llama_cpp.llama_model_n_head(self.handle))

        def number(name: str, otherwise: int) -> int:
            text = self.metadata.get(f"{architecture}.attention.{name}", "")
            return int(text) if text.isdigit() else otherwise

        key = number("key_length", self.width // max(1, heads))
        values = number("value_length", key)
        layers = int(llama_cpp.llama_model_n_layer(self.handle))
        return layers * int(llama_cpp.llama_model_n_head_kv(self.handle)) * (key + values) * _BYTES[cache_type(kind)]

    def load_adapter(self, path: Path) -> Any:
        """Load a LoRA adapter of this model. Raises INVALID_ARG where it is none."""
        adapter = llama_cpp.llama_adapter_lora_init(self.handle, str(path).encode())
        if not adapter:
            raise invalid(
                f"lora_modules: llama.cpp cannot load the adapter {path}; it takes GGUF files made for this model"
            )
        return adapter

    def close(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            llama_cpp.llama_model_free(handle)

    def _metadata(self) -> dict[str, str]:
        buffer = ctypes.create_string_buffer(1024)
        found = {}
        for at in range(llama_cpp.llama_model_meta_count(self.handle)):
            llama_cpp.llama_model_meta_key_by_index(self.handle, at, buffer, len(buffer))
            key = buffer.value.decode(errors="replace")
            llama_cpp.llama_model_meta_val_str_by_index(self.handle, at, buffer, len(buffer))
            found[key] = buffer.value.decode(errors="replace")
        return found


class LlamaContext:
    """KV memory of one model, and what is computed in it. For one thread. Implements `SequenceMemory`."""

    def __init__(
        self,
        model: LlamaModel,
        *,
        cells: int,
        batch: int,
        sequences: int,
        threads: int,
        cache: str,
        options: dict[str, int],
    ) -> None:
        """Reserve memory for `cells` tokens. Raises UNAVAILABLE where there is not enough.

        `batch` is how many tokens are computed at once; `options` are further fields of llama.cpp's parameters.
        """
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = cells, batch, min(batch, 512)
        params.n_seq_max, params.kv_unified, params.swa_full = sequences, True, True
        params.n_threads = params.n_threads_batch = threads
        if model.pools:
            params.pooling_type = llama_cpp.LLAMA_POOLING_TYPE_NONE
        params.type_k = params.type_v = cache_type(cache)
        params.no_perf = True
        for name, value in options.items():
            setattr(params, name, value)
        self._handle: Any = llama_cpp.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise unavailable(f"llama.cpp cannot make a context for {cells} tokens; what it printed says why")
        self._memory: Final[Any] = llama_cpp.llama_get_memory(self._handle)
        self._vocab_size: Final = model.vocab_size
        self._width: Final = model.width
        self.batch: Final = batch
        self._adapter: Any = None
        self._tokens: Final = np.zeros(batch, np.int32)
        self._positions: Final = np.zeros(batch, np.int32)
        self._sequences: Final = np.zeros(batch, np.int32)
        self._outputs: Final = np.zeros(batch, np.int8)
        self._counts: Final = np.ones(batch, np.int32)
        self._pointers: Final = self._sequences.ctypes.data + 4 * np.arange(batch, dtype=np.uint64)
        self._batch: Final = self._made_batch()

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], outputs: Sequence[bool]
    ) -> int:
        """Compute tokens, `batch` of them at most; return of how many there are outputs. Raises INTERNAL where that fails."""
        count = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._sequences[:count] = sequences
        self._outputs[:count] = outputs
        self._batch.n_tokens = count
        status = llama_cpp.llama_decode(self._handle, self._batch)
        if status:
            why = "there is no room in its KV memory" if status == 1 else f"status {status}"
            raise internal(f"llama.cpp could not compute a batch of {count} tokens: {why}")
        return int(np.count_nonzero(self._outputs[:count]))

    def logits(self, rows: int) -> NDArray[np.float32]:
        """Return the logits of the last batch's outputs, [rows, vocabulary]. Borrowed until the next batch."""
        return self._borrowed(llama_cpp.llama_get_logits(self._handle), rows, self._vocab_size)

    def hidden(self, rows: int) -> NDArray[np.float32]:
        """Return the last hidden states of the last batch's outputs, [rows, width]. Borrowed until the next batch."""
        return self._borrowed(llama_cpp.llama_get_embeddings(self._handle), rows, self._width)

    def want_hidden(self, *, wanted: bool) -> None:
        """Have the next batches give hidden states, or give them no more. All their tokens are outputs then."""
        llama_cpp.llama_set_embeddings(self._handle, wanted)

    def use_adapter(self, adapter: Any) -> None:
        """Compute the next batches with a LoRA adapter, or with none."""
        if adapter is not self._adapter:
            self._adapter = adapter
            count = 0 if adapter is None else 1
            handles = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter) if count else None
            llama_cpp.llama_set_adapters_lora(self._handle, handles, count, (ctypes.c_float * 1)(1.0))

    def remove(self, sequence: int, start: int, end: int) -> None:
        if not llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, end):
            raise internal("llama.cpp cannot take back a part of this model's memory")

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, start, end)

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            llama_cpp.llama_free(handle)

    def _borrowed(self, pointer: Any, rows: int, columns: int) -> NDArray[np.float32]:
        found: NDArray[np.float32] = np.ctypeslib.as_array(pointer, shape=(rows, columns))
        return found

    def _made_batch(self) -> Any:
        """Return llama.cpp's batch over this object's arrays."""
        batch = llama_cpp.llama_batch()
        batch.n_tokens = 0
        batch.embd = None
        for name, array, kind in (
            ("token", self._tokens, ctypes.c_int32),
            ("pos", self._positions, ctypes.c_int32),
            ("n_seq_id", self._counts, ctypes.c_int32),
            ("seq_id", self._pointers, ctypes.POINTER(ctypes.c_int32)),
            ("logits", self._outputs, ctypes.c_int8),
        ):
            setattr(batch, name, ctypes.cast(array.ctypes.data, ctypes.POINTER(kind)))
        return batch


def cache_type(name: str) -> int:
    """Return ggml's number of a KV cache's type. Raises INVALID_ARG."""
    if name not in _CACHE_TYPES:
        raise invalid(f"kv_cache_dtype: expected one of {', '.join(_CACHE_TYPES)}, got '{name}'")
    return _CACHE_TYPES[name]


def most_sequences() -> int:
    """Return how many sequences a context may have."""
    return int(llama_cpp.llama_max_parallel_sequences())
