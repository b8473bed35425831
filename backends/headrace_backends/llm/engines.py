"""Which engines there are, by the word that `model.json` has for them. Imports one only when a model asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from headrace_backends.llm.engine import Engine, EngineMaker
from headrace_backends.llm.settings import DEFAULT_ENGINE, read_model_json
from headrace_protocol.errors import invalid

_PACKAGE: Final = "headrace_backends.llm"
_MAKERS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "headrace": (f"{_PACKAGE}.native", "NativeEngine"),
        "vllm": (f"{_PACKAGE}.adapters.vllm", "VllmEngine"),
        "llama_cpp": (f"{_PACKAGE}.adapters.llama_cpp", "LlamaCppEngine"),
    }
)
"""Of each engine the module and the name of its `EngineMaker` there."""


def make_engine(
    source: Path,
    *,
    threads: int,
    device: str,
    engine: str | None = None,
    defaults: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Engine:
    """Return the engine of the model in a version directory, not open.

    `engine` stands for what model.json says; `device` is cpu or cuda:N; `defaults` has settings by engine, for what
    model.json does not say. Raises InferError where the settings are wrong.
    """
    settings = read_model_json(source)
    name = engine or settings.get("engine", DEFAULT_ENGINE)
    make = maker(name)
    settings = {**defaults.get(name, {}), **settings}
    return make(source if source.is_dir() else source.parent, settings, threads=threads, device=device)


def maker(name: Any) -> EngineMaker:
    """Return what makes engines of that name. Raises INVALID_ARG where there is none."""
    if not isinstance(name, str) or name not in _MAKERS:
        near = get_close_matches(str(name), _MAKERS, 1)
        hint = f"; is {near[0]} meant?" if near else ""
        raise invalid(f"engine: expected one of {', '.join(_MAKERS)}, got {name!r}{hint}")
    module, attribute = _MAKERS[name]
    return cast("EngineMaker", getattr(import_module(module), attribute))
