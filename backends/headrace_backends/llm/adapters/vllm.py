"""vLLM as an engine: in a process of its own, in the Python where it is installed. Does not import it.

Which Python that is: the setting `vllm_environment` (a venv's folder), else the variable HEADRACE_VLLM_ENVIRONMENT, else
this process's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

import headrace_backends
import headrace_protocol
from headrace_backends import foreign
from headrace_backends.llm.adapters.hosted import HostedEngine
from headrace_backends.llm.adapters.hosted_wire import Opened, Opening
from headrace_backends.llm.chat_formats import chosen_format, reasoning_format_of, tool_format_of
from headrace_backends.llm.engine import TextCodec
from headrace_backends.llm.settings import ADAPTERS_FILE, has_weights
from headrace_backends.llm.settings_fields import READERS, WrongSettingError
from headrace_protocol.errors import invalid, unavailable
from headrace_protocol.generation import ModelCard

ENVIRONMENT: Final = "vllm_environment"
VARIABLE: Final = "HEADRACE_VLLM_ENVIRONMENT"
_OURS_READ: Final = ("chat_template", "trust_request_chat_template", "tool_call_parser", "served_model_name")
_OURS: Final = frozenset({"engine", ENVIRONMENT, "lora_modules", *_OURS_READ})
"""Settings that are no arguments of vLLM's engine."""
_PATHS: Final = ("model", "tokenizer", "hf_config_path")
_OLDEST_PYTHON: Final = (3, 11)
_PROBE_S: Final = 60
_HOST: Final = "headrace_backends.llm.adapters.engine_host"
_SERVES: Final = "headrace_backends.llm.adapters.vllm_host"
_BOOTSTRAP: Final = Path(foreign.__file__)
_NEEDED: Final = ("vllm", "msgspec", "numpy")
_NOT_INHERITED: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV")
"""Variables that speak of this process's own Python."""
_MOST_CACHE: Final = 4 << 30
"""Bytes of KV cache on a CPU, where vLLM would take nearly all memory for itself."""


class VllmEngine(HostedEngine):
    """One language model of vLLM's. An `EngineMaker`: vLLM itself checks its arguments, when it is opened."""

    def __init__(self, source: Path, settings: Mapping[str, Any], *, threads: int, device: str) -> None:
        problems: list[str] = []
        arguments = _arguments(source, settings, problems)
        ours = {name: _read(settings, name, source, problems) for name in _OURS_READ}
        adapters = _adapters(settings, source, problems)
        environment = settings.get(ENVIRONMENT) or os.environ.get(VARIABLE)
        if environment is not None and not (isinstance(environment, str) and Path(environment).is_absolute()):
            problems.append(f"{ENVIRONMENT}: expected the absolute path of an environment, got {environment!r}")
        if problems:
            raise invalid("model.json: " + "; ".join(problems))
        if device == "cpu" and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            arguments.setdefault("kv_cache_memory_bytes", min(_MOST_CACHE, _memory() // 4))
        interpreter = Path(sys.executable) if environment is None else Path(environment) / "bin" / "python"
        ranks = arguments.get("tensor_parallel_size")
        super().__init__(
            "vLLM's process",
            lambda descriptor: command(interpreter, descriptor),
            variables(interpreter, device, threads // ranks if isinstance(ranks, int) and ranks > 0 else threads),
            Opening(arguments, adapters),
            lambda opened: _described(opened, ours),
        )


def command(interpreter: Path, descriptor: int) -> list[str]:
    """Return how the engine's process is started. Raises UNAVAILABLE where the Python cannot run it, with what is to be done."""
    found = _probe(interpreter)
    if tuple(found["version"]) < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        raise unavailable(f"{interpreter} is Python {'.'.join(map(str, found['version']))}; the engine needs {oldest}")
    if missing := found["missing"]:
        raise unavailable(
            f"{interpreter} has no {', '.join(missing)}: install vLLM in an environment of its own (python -m venv DIR; "
            f"DIR/bin/pip install vllm) and name that by {ENVIRONMENT} in model.json, or by the variable {VARIABLE}"
        )
    packages = {
        module.__name__: str(Path(str(module.__file__)).parent) for module in (headrace_backends, headrace_protocol)
    }
    told = {"packages": packages, "lent": {}, "module": _HOST, "arguments": [_SERVES, str(descriptor)]}
    return [str(interpreter), str(_BOOTSTRAP), json.dumps(told)]


def variables(interpreter: Path, device: str, threads: int) -> dict[str, str]:
    """Return the engine's variables: this process's, less what speaks of its Python, and what vLLM is to do by default."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    kept["PATH"] = f"{interpreter.parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    kept["PYTHONNOUSERSITE"] = "1"
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if device == "cpu":
        # pinned threads would share their cores with those of other models
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, threads))}
    else:
        shown = kept.get("CUDA_VISIBLE_DEVICES", "").split(",")
        number = int(device.rpartition(":")[2] or 0) if ":" in device else 0
        kept["CUDA_VISIBLE_DEVICES"] = shown[number] if number < len(shown) and shown[number] else str(number)
    return {**defaults, **kept}


def _probe(interpreter: Path) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [str(interpreter), str(_BOOTSTRAP), json.dumps({"probe": _NEEDED})],
            env={name: value for name, value in os.environ.items() if name not in _NOT_INHERITED},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_S,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise unavailable(f"{interpreter}: this Python for vLLM cannot be asked what it has: {error}") from None
    return found


def _described(opened: Opened, ours: Mapping[str, Any]) -> tuple[ModelCard, TextCodec]:
    """Return what the model is, with what our settings and its chat template say of it, and its tokenizer."""
    from transformers import AutoTokenizer

    from headrace_backends.llm.text_codec import HfTextCodec

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            opened.tokenizer, revision=opened.revision, trust_remote_code=opened.trust_remote_code
        )
    except Exception as error:
        raise invalid(f"tokenizer: {opened.tokenizer} cannot be loaded: {type(error).__name__}: {error}") from error
    text = HfTextCodec(
        tokenizer,
        opened.card.vocab_size,
        chat_template=ours["chat_template"],
        trust_request_template=bool(ours["trust_request_chat_template"]),
    )
    template = text.template_with_tools or ""
    card = replace(
        opened.card,
        has_chat_template=bool(template),
        tool_format=chosen_format(ours["tool_call_parser"], tool_format_of(template)),
        reasoning_format=reasoning_format_of(template),
        aliases=ours["served_model_name"] or (),
    )
    return card, text


def _arguments(source: Path, settings: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return what is vLLM's of the settings; paths begin at `source`, the version directory."""
    arguments = {name: value for name, value in settings.items() if name not in _OURS and value is not None}
    for name in _PATHS:
        if isinstance(given := arguments.get(name), str) and (path := source / Path(given).expanduser()).exists():
            arguments[name] = str(path)
    if "model" not in arguments:
        if has_weights(source):
            arguments["model"] = str(source)
        else:
            problems.append(f"model: not given, and {source} has no config.json")
    return arguments


def _read(settings: Mapping[str, Any], name: str, source: Path, problems: list[str]) -> Any:
    """Return one of the settings that mean the same for every engine, None where it is not given."""
    value = settings.get(name)
    if value is None:
        return None
    try:
        return READERS[name](value, source)
    except WrongSettingError as error:
        problems.extend(f"{name}{problem}" for problem in error.problems)
        return None


def _adapters(settings: Mapping[str, Any], source: Path, problems: list[str]) -> dict[str, str]:
    """Return the LoRA adapters of the settings and of Triton's file beside them."""
    found: dict[str, Path] = dict(_read(settings, "lora_modules", source, problems) or {})
    path = source / ADAPTERS_FILE
    if path.is_file():
        try:
            found |= READERS["lora_modules"](json.loads(path.read_bytes()), source)
        except (OSError, ValueError) as error:
            problems.append(f"{ADAPTERS_FILE}: {error}")
        except WrongSettingError as error:
            problems.extend(f"{ADAPTERS_FILE}{problem}" for problem in error.problems)
    return {name: str(folder.resolve()) for name, folder in found.items()}


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
