"""What `model.json` says of a language model: vLLM's names, so that a folder made for Triton's vLLM backend is read as it is.

Read once; all that is wrong is told at once, each with its field. Loads nothing and knows no tensor library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from headrace_backends.llm.settings_fields import READERS, WrongSettingError, near_name
from headrace_backends.llm.settings_ignored import IGNORED, UNSUPPORTED
from headrace_protocol.errors import invalid, not_found

FILE: Final = "model.json"
ADAPTERS_FILE: Final = "multi_lora.json"
DEFAULT_ENGINE: Final = "headrace"


@dataclass(frozen=True, slots=True)
class Speculation:
    """How the next tokens are guessed, for the model to check several at once."""

    method: str
    """ngram or draft_model."""
    model: Path | None = None
    num_speculative_tokens: int | None = None
    """None, here and below: as the way of guessing has it."""
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    disable_by_batch_size: int | None = None
    """With more running requests than this nothing is guessed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One language model's settings, checked. None: chosen at load, or no limit."""

    model: Path
    tokenizer: Path | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    """The part of the memory that this process takes with its KV cache."""
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    max_num_queued_reqs: int | None = 2048
    max_num_queued_tokens: int | None = None
    seed: int | None = None
    max_logprobs: int = 20
    speculative_config: Speculation | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    enable_lora: bool = False
    max_loras: int | None = None
    """Adapters in one step at most."""
    max_lora_rank: int = 16
    lora_modules: Mapping[str, Path] = field(default_factory=dict)
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    """The template itself."""
    trust_request_chat_template: bool = False
    generation_config: str = "auto"
    """auto: the model's makers' defaults for sampling; vllm: none; else a folder with a generation_config.json."""
    override_generation_config: Mapping[str, float] = field(default_factory=dict)
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    pooling: str = "last"
    task: str = "auto"
    ignored: tuple[str, ...] = ()
    """Of vLLM's arguments those that were given and mean nothing here."""


def read_model_json(source: Path) -> dict[str, Any]:
    """Return what a version directory says of its model, unchecked; where it has no model.json, that its model is in it.

    `source` is the directory, or a model.json itself. Raises INVALID_ARG for JSON that is not one object.
    """
    path = source if source.suffix == ".json" else source / FILE
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        if has_weights(path.parent):
            return {}
        raise not_found(f"{path.parent}: no {FILE}, and no model beside it: config.json or one *.gguf") from None
    except (OSError, ValueError) as error:
        raise invalid(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise invalid(f"{path}: expected one JSON object, got {type(found).__name__}")
    return found


def has_weights(folder: Path) -> bool:
    """Say whether a folder is a model itself."""
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))


def parse(given: Mapping[str, Any], source: Path) -> Settings:
    """Check what `model.json` has; relative paths begin at `source`, the version directory.

    Raises INVALID_ARG with everything that is wrong. A null is a setting that was not given.
    """
    problems: list[str] = []
    read: dict[str, Any] = {}
    ignored = []
    for name, value in _spelled_out(given).items():
        if name == "engine" or value is None:
            continue
        if name in IGNORED:
            ignored.append(name)
        elif name in UNSUPPORTED:
            if value not in UNSUPPORTED[name]:
                problems.append(f"{name}: this engine does not have it; the engine vllm does")
        elif name not in READERS:
            problems.append(f"{name}: no such setting{near_name(name)}")
        else:
            try:
                read[name] = READERS[name](value, source)
            except WrongSettingError as error:
                problems.extend(f"{name}{problem}" for problem in error.problems)
    if "model" not in read and not any(problem.startswith("model:") for problem in problems):
        if has_weights(source):
            read["model"] = source
        else:
            problems.append(f"model: not given, and {source} has neither config.json nor a *.gguf file")
    read["lora_modules"] = _adapters(read.get("lora_modules", {}), source, problems)
    if isinstance(speculation := read.get("speculative_config"), dict):
        read["speculative_config"] = Speculation(**speculation)
    if problems:
        raise invalid(f"{FILE}: " + "; ".join(problems))
    return Settings(**read, ignored=tuple(ignored))


def _spelled_out(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with vLLM's other ways of saying some of them in the words that are read here."""
    found = {name: value for name, value in given.items() if value is not None}
    short = {name: found.pop(f"spec_{name}", None) for name in ("method", "model", "tokens")}
    if any(value is not None for value in short.values()):
        short["num_speculative_tokens"] = short.pop("tokens")
        found.setdefault("speculative_config", short)
    pooler = found.pop("pooler_config", None)
    if isinstance(pooler, Mapping) and isinstance(kind := pooler.get("pooling_type"), str):
        found.setdefault("pooling", kind.lower())
    runner, convert = found.pop("runner", None), found.pop("convert", None)
    if runner == "pooling" or convert == "embed":
        found.setdefault("task", "embed")
    return found


def _adapters(given: Mapping[str, Path], source: Path, problems: list[str]) -> dict[str, Path]:
    """Return the LoRA adapters of the settings and of the file beside them."""
    found = dict(given)
    path = source / ADAPTERS_FILE
    if path.is_file():
        try:
            found |= READERS["lora_modules"](json.loads(path.read_bytes()), source)
        except (OSError, ValueError) as error:
            problems.append(f"{ADAPTERS_FILE}: {error}")
        except WrongSettingError as error:
            problems.extend(f"{ADAPTERS_FILE}{problem}" for problem in error.problems)
    return found
