"""Asks language models of a running server over KServe v2, in each of the ways that there are."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np

from harness import RunningServer
from headrace_protocol.generation import EVENT_DECODER


def post(server: RunningServer, path: str, body: Any) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{server.http}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generate(server: RunningServer, text: str, model: str = "echoer", **more: Any) -> tuple[int, Any]:
    status, body = post(
        server, f"/v2/models/{model}/generate", {"text_input": text, "exclude_input_in_output": True, **more}
    )
    return status, json.loads(body)


def events(server: RunningServer, model: str = "echoer", **call: Any) -> list[Any]:
    body = {"generation_call": json.dumps({"stream": True, **call})}
    status, text = post(server, f"/v2/models/{model}/generate_stream", body)
    assert status == 200, text
    told = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    return [EVENT_DECODER.decode(each["generation_event"]) if "error" not in each else each["error"] for each in told]


def tensors(text: str, **more: bool) -> dict[str, np.ndarray]:
    flags = {name: np.array([value]) for name, value in more.items()}
    return {"text_input": np.array([text.encode()], np.object_), **flags}


def figure(server: RunningServer, name: str, model: str = "echoer", **labels: str) -> float:
    """Return the value of one line at /metrics."""
    wanted = [f'{key}="{value}"' for key, value in {"model": model, **labels}.items()]
    for line in server.metrics().splitlines():
        if line.startswith(name + "{") and all(each in line for each in wanted):
            return float(line.rpartition(" ")[2])
    return -1.0
