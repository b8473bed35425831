"""A GGUF file's tokenizer and chat template, by llama.cpp's vocabulary; for any number of threads.

It looks to `text_codec` like a tokenizer of transformers, so that conversations are checked and rendered as they are for
every engine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import llama_cpp
import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from headrace_backends.llm.adapters.llama_cpp_model import LlamaModel
from headrace_backends.llm.text_codec import HfTextCodec
from headrace_protocol.errors import invalid

_PIECE: Final = 256
"""Bytes that a token has at most; where it has more, the buffer is made larger."""


class GgufTokenizer:
    """A model's vocabulary."""

    def __init__(self, model: LlamaModel) -> None:
        self._model: Final = model  # keeps the vocabulary alive
        self._vocab: Final = model.vocab
        self._size: Final = model.vocab_size
        self.chat_template: Final = _templates(model)
        self.special_ids: Final = frozenset(
            token for token in range(self._size) if llama_cpp.llama_vocab_is_control(self._vocab, token)
        )
        self.eos_token_ids: Final = frozenset(
            token for token in range(self._size) if llama_cpp.llama_vocab_is_eog(self._vocab, token)
        )
        self.added_tokens_decoder: Final = {
            token: SimpleNamespace(content=self.piece(token, special=True).decode(errors="replace"), special=True)
            for token in self.special_ids
        }
        self._marks: Final = {
            name: self.piece(token, special=True).decode(errors="replace")
            for name, token in (
                ("bos_token", llama_cpp.llama_vocab_bos(self._vocab)),
                ("eos_token", llama_cpp.llama_vocab_eos(self._vocab)),
                ("pad_token", llama_cpp.llama_vocab_pad(self._vocab)),
            )
            if token >= 0
        }

    def __len__(self) -> int:
        return self._size

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        data = text.encode()
        room = len(data) + 16
        while True:
            tokens = np.empty(room, np.int32)
            pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            # special tokens are read as such within the text too, as transformers' tokenizers do
            count = llama_cpp.llama_tokenize(self._vocab, data, len(data), pointer, room, add_special_tokens, True)
            if count >= 0:
                return {"input_ids": tokens[:count].tolist()}
            if -count <= room:
                raise invalid("llama.cpp cannot make tokens of the text")
            room = -count

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, **_: Any) -> str:
        """Return the text of tokens; incomplete characters are U+FFFD."""
        tokens = np.array(token_ids, np.int32)
        pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        room = 8 * len(tokens) + 16
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = llama_cpp.llama_detokenize(
                self._vocab, pointer, len(tokens), buffer, room, False, not skip_special_tokens
            )
            if count >= 0:
                return buffer.raw[:count].decode(errors="replace")
            room = -count

    def piece(self, token_id: int, *, special: bool) -> bytes:
        """Return a token's bytes; of a special token none, unless they are wanted."""
        room = _PIECE
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = llama_cpp.llama_token_to_piece(self._vocab, token_id, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any,
        documents: Any,
        chat_template: str,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tokenize: bool,
        **kwargs: Any,
    ) -> str:
        """Return what a template makes of a conversation, in transformers' sandbox."""
        assert not tokenize
        texts, _ = render_jinja_template(
            conversations=[list(messages)],
            tools=tools,
            documents=documents,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self._marks, **kwargs},
        )
        return str(texts[0])

    def llg_tokenizer(self, vocab_size: int, eos_token_ids: Sequence[int]) -> Any:
        """Return it as llguidance has it, for grammars."""
        from llguidance.llamacpp import lltokenizer_from_vocab

        return lltokenizer_from_vocab(self._vocab, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)

    @property
    def all_special_ids(self) -> Sequence[int]:
        return sorted(self.special_ids)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.piece(token_id, special=True).decode(errors="replace")


class LlamaCppText(HfTextCodec):
    """Implements `engine.TextCodec` over a GGUF file's vocabulary."""

    def __init__(
        self, tokenizer: GgufTokenizer, *, chat_template: str | None = None, trust_request_template: bool = False
    ) -> None:
        super().__init__(
            tokenizer, len(tokenizer), chat_template=chat_template, trust_request_template=trust_request_template
        )
        self._gguf: Final = tokenizer

    def token_bytes(self, token_id: int) -> bytes | None:
        if not 0 <= token_id < len(self._gguf) or token_id in self._gguf.special_ids:
            return None
        return self._gguf.piece(token_id, special=False)


def _templates(model: LlamaModel) -> Mapping[str, str] | None:
    """Return the file's chat templates by the names that transformers has for them."""
    found = {"default": model.template(), "tool_use": model.template("tool_use")}
    templates = {name: template for name, template in found.items() if template}
    return templates or None
