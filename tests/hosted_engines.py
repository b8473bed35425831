"""The scripted engine in a process of its own, as `HostedEngine` has vLLM."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headrace_backends.llm.adapters.hosted import HostedEngine
from headrace_backends.llm.adapters.hosted_wire import Opening
from scripted_engine import ByteText


def hosted_script(module: str = "hosted_script", **arguments) -> HostedEngine:
    """The engine of `tests/hosted_script.py`, not open; `arguments` are fields of its card."""

    def argv(descriptor: int) -> list[str]:
        return [sys.executable, "-m", "headrace_backends.llm.adapters.engine_host", module, str(descriptor)]

    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return HostedEngine(
        "the script's process",
        argv,
        {**os.environ, "PYTHONPATH": path},
        Opening(arguments, {}),
        lambda told: (told.card, ByteText()),
    )
