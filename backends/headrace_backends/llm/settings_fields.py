"""How each setting of a language model is read: its type, its range, and what it is told where it is wrong.

Looks whether paths exist, and opens nothing but a chat template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from headrace_backends.llm.settings_ignored import IGNORED, UNSUPPORTED

Reader = Callable[[Any, Path], Any]
_GGUF: Final = ".gguf"
_TOOL_FORMATS: Final = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
}
_REASONING_FORMATS: Final = {"deepseek_r1": "think_tags", "deepseek-r1": "think_tags", "qwen3": "think_tags"}


class WrongSettingError(Exception):
    """What is wrong with a setting: texts that go behind its name, `: ...` or `.field: ...`."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def near_name(name: str) -> str:
    """Return the question whether a name was meant that is near this one, or nothing."""
    near = get_close_matches(name, [*READERS, *IGNORED, *UNSUPPORTED, "engine"], 1)
    return f"; is {near[0]} meant?" if near else ""


def _expected(what: str, value: Any) -> WrongSettingError:
    shown = repr(value)
    return WrongSettingError(f": expected {what}, got {shown if len(shown) <= 60 else shown[:57] + '...'}")


def _integer(least: int, *, most: int | None = None) -> Reader:
    def read(value: Any, _: Path) -> int:
        text = f"a whole number of {least} at least" + ("" if most is None else f" and {most} at most")
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or value < least
            or (most is not None and value > most)
        ):
            raise _expected(text, value)
        return value

    return read


def _number(text: str, holds: Callable[[float], bool]) -> Reader:
    def read(value: Any, _: Path) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not holds(value)
        ):
            raise _expected(text, value)
        return float(value)

    return read


def _one_of(*names: str, also: Mapping[str, str] | None = None) -> Reader:
    """Read one of some words; `also` has other spellings of them."""

    def read(value: Any, _: Path) -> str:
        word = (also or {}).get(value, value) if isinstance(value, str) else None
        if word not in names:
            raise _expected("one of " + ", ".join(names), value)
        return str(word)

    return read


def _boolean(value: Any, _: Path) -> bool:
    """Read a truth value; the examples of Triton's vLLM backend have it as text in places."""
    if value in ("true", "false"):
        return bool(value == "true")
    if not isinstance(value, bool):
        raise _expected("true or false", value)
    return value


def _text(value: Any, _: Path) -> str:
    if not isinstance(value, str) or not value:
        raise _expected("a text", value)
    return value


def _length(value: Any, source: Path) -> int | None:
    """Read max_model_len: vLLM's -1 and "auto" are as much as the model and the memory allow."""
    if value in (-1, "auto"):
        return None
    return int(_integer(2)(value, source))


def _path(value: Any, source: Path) -> Path:
    """Read where something lies: a path, absolute or from the version directory."""
    name = _text(value, source)
    try:
        path = source / Path(name).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # too long a name, or a home that there is not
        raise WrongSettingError(f": {error}") from error
    if not Path(name).is_absolute() and not name.startswith(".") and name.count("/") == 1 and not name.endswith(_GGUF):
        raise WrongSettingError(
            f": nothing lies at {path}; '{name}' reads like the name of a model on a hub, and nothing is fetched from "
            "there: give the path of a folder or of a *.gguf file"
        )
    raise WrongSettingError(f": nothing lies at {path}")


def _names(value: Any, _: Path) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise _expected("a name or a list of names", value)
    return tuple(dict.fromkeys(names))


def _adapters(value: Any, source: Path) -> dict[str, Path]:
    """Read LoRA adapters: {name: path}, or vLLM's list of {name, path} or of "name=path"."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list):
        for entry in value:
            if isinstance(entry, str) and "=" in entry:
                name, _, path = entry.partition("=")
                pairs.append((name, path))
            elif isinstance(entry, Mapping) and {"name", "path"} <= set(entry):
                pairs.append((entry["name"], entry["path"]))
            else:
                raise _expected("entries with name and path", entry)
    else:
        raise _expected("an object of names and paths", value)
    found: dict[str, Path] = {}
    problems: list[str] = []
    for name, path in pairs:
        try:
            found[_text(name, source)] = _path(path, source)
        except WrongSettingError as error:
            problems.extend(f".{name}{problem}" for problem in error.problems)
    if problems:
        raise WrongSettingError(*problems)
    return found


_SPECULATION: Final[Mapping[str, Reader]] = {
    "method": _one_of("ngram", "draft_model"),
    "model": _path,
    "num_speculative_tokens": _integer(1, most=64),
    "prompt_lookup_min": _integer(1, most=64),
    "prompt_lookup_max": _integer(1, most=64),
    "disable_by_batch_size": _integer(1),
}


def _speculation(value: Any, source: Path) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _expected(f"an object of {', '.join(_SPECULATION)}", value)
    read: dict[str, Any] = {}
    problems = []
    for name, each in value.items():
        if name not in _SPECULATION:
            problems.append(f".{name}: no such setting; there are {', '.join(_SPECULATION)}")
        elif each is not None:
            try:
                read[name] = _SPECULATION[name](each, source)
            except WrongSettingError as error:
                problems.extend(f".{name}{problem}" for problem in error.problems)
    given = {name for name, each in value.items() if each is not None}
    if "method" not in given:
        read["method"] = "draft_model" if "model" in given else "ngram"
    if read.get("method") == "draft_model" and "model" not in given:
        problems.append(".model: the method draft_model needs the path of a model")
    low, high = read.get("prompt_lookup_min"), read.get("prompt_lookup_max")
    if low is not None and high is not None and low > high:
        problems.append(f".prompt_lookup_max: {high} is less than prompt_lookup_min, {low}")
    elif low is not None and high is None:
        read["prompt_lookup_max"] = max(low, 4)
    elif high is not None and low is None:
        read["prompt_lookup_min"] = min(high, 2)
    if problems:
        raise WrongSettingError(*problems)
    return read


def _template(value: Any, source: Path) -> str:
    """Read a chat template: the name of a file, or the template itself."""
    text = _text(value, source)
    if "{" in text or "\n" in text:
        return text
    try:
        return _path(text, source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise WrongSettingError(f": cannot read {text}: {error}") from error


def _generation_config(value: Any, source: Path) -> str:
    return str(value) if value in ("auto", "vllm") else str(_path(value, source))


def _defaults(value: Any, _: Path) -> dict[str, float]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
    if not isinstance(value, Mapping) or not set(value) <= set(names):
        raise _expected(f"an object of {', '.join(names)}", value)
    for name, each in value.items():
        if isinstance(each, bool) or not isinstance(each, int | float):
            raise WrongSettingError(f".{name}: expected a number, got {each!r}")
    return dict(value)


READERS: Final[Mapping[str, Reader]] = {
    "model": _path,
    "tokenizer": _path,
    "dtype": _one_of("auto", "float32", "bfloat16", "float16", also={"half": "float16", "float": "float32"}),
    "load_format": _one_of("auto", "dummy", also={"safetensors": "auto", "gguf": "auto"}),
    "max_model_len": _length,
    "gpu_memory_utilization": _number("a part above 0, 1 at most", lambda part: 0 < part <= 1),
    "kv_cache_memory_bytes": _integer(1),
    "num_gpu_blocks_override": _integer(2),
    "block_size": _integer(1, most=1024),
    "max_num_seqs": _integer(1),
    "max_num_batched_tokens": _integer(1),
    "enable_chunked_prefill": _boolean,
    "long_prefill_token_threshold": _integer(0),
    "scheduler_reserve_full_isl": _boolean,
    "watermark": _number("a part from 0 to below 1", lambda part: 0 <= part < 1),
    "enable_prefix_caching": _boolean,
    "scheduling_policy": _one_of("fcfs", "priority", "lpm"),
    "max_num_queued_reqs": _integer(1),
    "max_num_queued_tokens": _integer(1),
    "seed": _integer(-(1 << 63)),
    "max_logprobs": _integer(-1),
    "speculative_config": _speculation,
    "quantization": _text,
    "kv_cache_dtype": _text,
    "tensor_parallel_size": _integer(1),
    "enable_lora": _boolean,
    "max_loras": _integer(1),
    "max_lora_rank": _integer(1),
    "lora_modules": _adapters,
    "served_model_name": _names,
    "chat_template": _template,
    "trust_request_chat_template": _boolean,
    "generation_config": _generation_config,
    "override_generation_config": _defaults,
    "tool_call_parser": _one_of("hermes", "llama3_json", "mistral", "pythonic", "none", also=_TOOL_FORMATS),
    "reasoning_parser": _one_of("think_tags", "none", also=_REASONING_FORMATS),
    "pooling": _one_of("last", "mean"),
    "task": _one_of("auto", "generate", "embed", also={"embedding": "embed"}),
}
