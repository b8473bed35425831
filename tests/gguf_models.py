"""Tiny models as GGUF files: the weights and the tokenizer of `language_models`, as llama.cpp wants them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from language_models import CHAT_TEMPLATE, byte_tokenizer, tiny

_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tiny_gguf(file: Path, **changed) -> Path:
    """Write `tiny("llama")` with `byte_tokenizer` in fp32."""
    model = tiny("llama", **changed)
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, config.vocab_size)
    for name, weights in model.state_dict().items():
        array = weights.numpy().astype(np.float32)
        part, _, kind = name.rpartition(".")
        if part in _WHOLE:
            writer.add_tensor(f"{_WHOLE[part]}.{kind}", array)
            continue
        _, _, layer, rest = part.split(".", 3)
        if rest.endswith(("q_proj", "k_proj")):
            array = _interleaved(array, config.head_dim)
        writer.add_tensor(f"blk.{layer}.{_LAYER[rest]}.{kind}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _interleaved(weights: np.ndarray, head_dim: int) -> np.ndarray:
    """Turn transformers' order of a head's rows, one half after the other, into GGUF's, where they take turns."""
    rows, columns = weights.shape
    return np.ascontiguousarray(
        weights.reshape(rows // head_dim, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    tokenizer = byte_tokenizer()
    vocabulary = {number: piece for piece, number in tokenizer.get_vocab().items()}
    special = set(tokenizer.added_tokens_decoder)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([vocabulary.get(number, f"[unused{number}]") for number in range(size)])
    writer.add_token_types(
        [
            kinds.CONTROL if number in special else kinds.NORMAL if number in vocabulary else kinds.UNUSED
            for number in range(size)
        ]
    )
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
