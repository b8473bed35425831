"""Loads a causal language model with its tokenizer: a folder of safetensors, or a GGUF file, through transformers.

Nothing is fetched and no code of the model's is run: what is not on the disk is an error that names it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from headrace_backends.llm.gguf_header import read_numbers
from headrace_backends.llm.gguf_reading import read_once
from headrace_protocol.errors import invalid, not_found

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BF16_FLAGS: Final = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""As /proc/cpuinfo calls them, on x86 and on Arm."""
_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_ENDS: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Of the text, of a turn and of a message."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run, on the device it was asked for."""

    model: Any
    """transformers' module, in evaluation mode."""
    tokenizer: Any
    """transformers' tokenizer, with the chat template if the model has one."""
    eos_token_ids: frozenset[int]
    """All tokens that end a text or a turn."""
    max_model_len: int
    """Tokens that the model was made for."""
    vocab_size: int
    """Width of the logits; may be more than the tokenizer knows."""
    sampling_defaults: Mapping[str, float]
    """What the model's makers recommend, by the names of `SamplingParams`."""

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype


def load(path: Path, dtype: str = "auto", *, device: str = "cpu", dummy: bool = False, ranks: int = 1) -> LoadedModel:
    """Load what lies at `path`: a folder with config.json and safetensors, a GGUF file, or a folder with one.

    `dummy` takes random weights, the same at each start, for a folder that has none. With several `ranks`, which are of
    torch.distributed's group already, this process loads its part of the weights. Raises NOT_FOUND where there is no
    model at `path`, INVALID_ARG where it cannot be loaded or `dtype` is unknown.
    """
    wanted = chosen_dtype(dtype, device)
    folder, gguf = _find(path)
    source: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    described: Mapping[str, Any] = {}
    if gguf is not None:
        described = read_numbers(folder / gguf)
        source["gguf_file"] = gguf
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with contextlib.nullcontext() if gguf is None else read_once():
            config = AutoConfig.from_pretrained(folder, **source)
            tokenizer = AutoTokenizer.from_pretrained(folder, config=config, **source)
            if ranks > 1:
                source["distributed_config"] = DistributedConfig(tp_size=ranks)
            model = _dummy(config, wanted) if dummy else _weights(folder, config, wanted, source)
    except Exception as error:
        raise invalid(f"cannot load the language model at {path}: {type(error).__name__}: {error}") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    generation: Any = getattr(model, "generation_config", None) or GenerationConfig()
    text = model.config.get_text_config()
    ends = [generation.eos_token_id, text.eos_token_id, tokenizer.eos_token_id, *map(described.get, _GGUF_ENDS)]
    return LoadedModel(
        model=model.to(device).eval(),
        tokenizer=tokenizer,
        eos_token_ids=_token_ids(ends, text.vocab_size),
        max_model_len=int(text.max_position_embeddings),
        vocab_size=int(text.vocab_size),
        sampling_defaults=_defaults(generation),
    )


def chosen_dtype(name: str, device: str = "cpu") -> torch.dtype:
    """Return the dtype called `name`; "auto" is bf16 where the device multiplies in it, else fp32."""
    if name == "auto":
        return torch.bfloat16 if device != "cpu" or _cpu_flags() & _BF16_FLAGS else torch.float32
    if name not in _DTYPES:
        raise invalid(f"dtype: expected auto, {', '.join(_DTYPES)}, got '{name}'")
    return _DTYPES[name]


def _find(path: Path) -> tuple[Path, str | None]:
    """Return the folder of a model, and the name of its GGUF file if it is one."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise invalid(f"{path}: expected a folder with config.json or a file *.gguf")
        return path.parent, path.name
    if not path.is_dir():
        raise not_found(f"no language model at {path}: there is neither a folder nor a file of that name")
    if (path / "config.json").is_file():
        return path, None
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        found = f"{len(files)} GGUF files" if files else "neither config.json nor a GGUF file"
        raise not_found(f"no language model at {path}: it has {found}; name one file")
    return path, files[0].name


def _weights(folder: Path, config: Any, dtype: torch.dtype, source: Mapping[str, Any]) -> Any:
    """Load the weights: of pickles none, since they can run code; of GGUF files all, unpacked."""
    options = {"quantization_config": GgufConfig(dequantize=True)} if "gguf_file" in source else {}
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, use_safetensors=True, **options, **source
    )


def _dummy(config: Any, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _token_ids(found: Iterable[Any], vocab_size: int) -> frozenset[int]:
    """Return the ids among numbers, lists of numbers and nothing at all."""
    ids: set[int] = set()
    for each in found:
        ids.update([each] if isinstance(each, int) else each or ())
    return frozenset(token for token in ids if 0 <= token < vocab_size)


def _defaults(generation: Any) -> dict[str, float]:
    values = {name: getattr(generation, name, None) for name in _DEFAULTS}
    return {name: value for name, value in values.items() if value is not None}


def _cpu_flags() -> frozenset[str]:
    """Return what the processor can do, as Linux names it; nothing where that cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        flag
        for line in lines
        if line.lower().startswith(("flags", "features"))
        for flag in line.partition(":")[2].split()
    )
