"""A repository with one language model that hostile requests go to, and what is to be left when they have gone."""

from __future__ import annotations

import json
from pathlib import Path

from figures import wait_until
from harness import RunningServer
from llm_doors import figure


def repository_of(repository: Path, model: Path, **more: object) -> Path:
    """Write a repository with the model `tiny`; return it."""
    (repository / "tiny" / "1").mkdir(parents=True)
    settings = {"model": str(model), "max_model_len": 128, "num_gpu_blocks_override": 64, "max_num_seqs": 16}
    settings |= {"enable_prefix_caching": False, "tool_call_parser": "hermes", "dtype": "float32", **more}
    (repository / "tiny" / "1" / "model.json").write_text(json.dumps(settings))
    return repository


def idle(server: RunningServer) -> str | None:
    """Return what is left in the engine although nobody asks any more, or nothing."""
    names = (
        "headrace_llm_kv_cache_usage_perc",
        "headrace_llm_num_requests_running",
        "headrace_llm_num_requests_waiting",
    )
    try:
        wait_until("nothing is left", lambda: all(figure(server, name, "tiny") == 0 for name in names), 20)
    except AssertionError:
        return "left behind: " + ", ".join(f"{name} {figure(server, name, 'tiny')}" for name in names)
    starts = [line for line in server.lines if "the backend process ended" in line]
    return f"the engine ended: {starts}" if starts else None
