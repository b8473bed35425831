"""A server of completions over another engine, for `llm_servers.py` to ask: what transformers or OpenVINO GenAI make of a model.

    python tests/bench/llm_peer.py transformers FOLDER --port 8100 --dtype bfloat16 [--static]
    python tests/bench/llm_peer.py openvino GGUF_OR_EXPORTED_FOLDER --port 8101

`POST /v1/completions` takes a prompt as token ids and streams a greedy answer of exactly `max_tokens`; everything else is
refused, so that no figure is of something that was not done. The port opens once the model is loaded. The engine has a process
of its own, which the server's work does not hold up. An answer's text is its tokens' ids, which spares peers to make words.

transformers runs its continuous batches; with `--static` a batch is what waits when the one before has ended. What must be
installed are aiohttp, and torch and transformers or openvino-genai.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

ROWS, LENGTH = 32, 2048
"""Requests at once, and tokens of each at most."""
GATHER_S = 0.01
"""How long a static batch waits for others after its first."""


class Request(NamedTuple):
    """What goes to an engine's process, which answers with lists of (number, next tokens); an empty one says it is ready."""

    number: int
    prompt: list[int]
    tokens: int


def continuous_transformers(path: Path, dtype: str, server: Connection) -> None:
    """Run transformers' continuous batches."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    page, most = 256, 1024  # of a step's tokens: memory is taken for the logits of all
    batching = ContinuousBatchingConfig(
        page_size=page, num_blocks=ROWS * LENGTH // page, max_batch_tokens=most, max_requests_per_batch=ROWS,
        max_memory_percent=0.9, allow_block_sharing=False,
    )  # fmt: skip
    no_end = GenerationConfig(do_sample=False, eos_token_id=-1)
    manager = _transformers_model(path, dtype).init_continuous_batching(no_end, batching)
    told: dict[str, int] = {}

    def take() -> None:
        while True:
            request: Request = server.recv()
            told[str(request.number)] = 0
            manager.add_request(request.prompt, str(request.number), max_new_tokens=request.tokens, streaming=True)

    manager.start()
    server.send([])
    threading.Thread(target=take, daemon=True).start()
    while manager.is_running():
        output = manager.get_result(timeout=1)
        if output is None:
            continue
        if output.error is not None:
            raise RuntimeError(output.error)
        name, ids = output.request_id, output.generated_tokens
        server.send([(int(name), ids[told[name] :])])
        told[name] = len(ids)


def static_transformers(path: Path, dtype: str, server: Connection) -> None:
    """Run transformers' `generate` over what waits: a batch ends when the longest of its answers is there."""
    model = _transformers_model(path, dtype)
    model.generation_config.eos_token_id = None
    server.send([])
    while True:
        requests: list[Request] = [server.recv()]
        while len(requests) < ROWS and server.poll(GATHER_S):
            requests.append(server.recv())
        _generate(model, requests, server.send)


def _generate(model: Any, requests: list[Request], tell: Callable[[list[tuple[int, list[int]]]], None]) -> None:
    import torch

    width = max(len(request.prompt) for request in requests)
    ids = torch.zeros(len(requests), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
        mask[row, width - len(request.prompt) :] = 1

    def see(sequences: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        made = sequences.shape[1] - width
        last = zip(requests, sequences[:, -1].tolist(), strict=True)
        tell([(request.number, [token]) for request, token in last if request.tokens >= made])
        return torch.tensor([request.tokens <= made for request in requests])

    longest = max(request.tokens for request in requests)
    model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=longest, pad_token_id=0, stopping_criteria=[see]
    )


def _transformers_model(path: Path, dtype: str) -> Any:
    """Return the model; the weights of a GGUF file stay packed."""
    from transformers import AutoModelForCausalLM

    folder, source = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **source).eval()


def openvino(path: Path, dtype: str, server: Connection) -> None:
    """Run OpenVINO GenAI's continuous batches."""
    import numpy as np
    import openvino_genai
    from openvino import Tensor

    settings = openvino_genai.SchedulerConfig()
    settings.max_num_seqs, settings.max_num_batched_tokens = ROWS, LENGTH
    settings.enable_prefix_caching = False
    precision = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
    properties = {} if dtype == "auto" else {"INFERENCE_PRECISION_HINT": precision[dtype]}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(path), settings, "CPU", properties)
    server.send([])
    running: dict[int, Any] = {}
    while True:
        while not running or server.poll():
            number, prompt, tokens = server.recv()
            config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
            running[number] = pipeline.add_request(number, Tensor(np.array([prompt])), config)
        pipeline.step()
        made = [(number, handle.read()) for number, handle in running.items() if handle.can_read()]
        server.send([(number, output.generated_ids) for number, outputs in made for output in outputs.values()])
        going = openvino_genai.GenerationStatus.RUNNING
        running = {number: handle for number, handle in running.items() if handle.get_status() == going}


class Engine:
    """An engine's process, which this owns, and the requests that it has."""

    def __init__(self, run: Callable[[Path, str, Connection], None], path: Path, dtype: str) -> None:
        """Start it and wait until it is ready."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(path, dtype, theirs), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._connection.recv()
        except EOFError:
            raise SystemExit("the engine could not load the model, as it says above") from None
        self._stopped = False
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Queue[list[int]]] = {}

    async def read(self, _: web.Application) -> None:
        """Begin to pass on what the process tells."""
        threading.Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True).start()

    async def stop(self, _: web.Application) -> None:
        self._stopped = True
        self._process.terminate()
        self._process.join()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(self._deliver, self._connection.recv())
        except EOFError:
            if not self._stopped:
                os._exit(1)  # the engine has told why; clients should not wait for it

    def _deliver(self, told: list[tuple[int, list[int]]]) -> None:
        for number, ids in told:
            if number in self._waiting:
                self._waiting[number].put_nowait(ids)

    async def answer(self, prompt: list[int], tokens: int) -> AsyncIterator[list[int]]:
        """Yield the next tokens as they are made, until there are so many."""
        number, taken = next(self._numbers), 0
        pieces = self._waiting[number] = asyncio.Queue()
        self._connection.send(Request(number, prompt, tokens))
        try:
            while taken < tokens:
                ids = await pieces.get()
                taken += len(ids)
                yield ids
        finally:
            del self._waiting[number]


def application(engine: Engine) -> web.Application:
    """Return the server of one engine."""

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, tokens = body.get("prompt"), body.get("max_tokens", 16)
        if not (isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt)):
            raise web.HTTPBadRequest(text="prompt: expected token ids")
        if not (body.get("stream") and body.get("ignore_eos") and body.get("temperature") == 0):
            raise web.HTTPBadRequest(text="expected stream and ignore_eos to be true, and temperature to be 0")
        if not 0 < tokens <= LENGTH - len(prompt):
            raise web.HTTPBadRequest(text=f"expected {LENGTH} tokens at most, of prompt and answer together")
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        taken = 0
        async for ids in engine.answer(prompt, tokens):
            taken += len(ids)
            ended = "length" if taken == tokens else None
            choice = {"index": 0, "text": "".join(f" {token}" for token in ids), "finish_reason": ended}
            await reply.write(_event(body, [choice]))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": taken, "total_tokens": len(prompt) + taken}
        await reply.write(_event(body, [], usage) + b"data: [DONE]\n\n")
        return reply

    made = web.Application()
    made.router.add_post("/v1/completions", completions)
    made.on_startup.append(engine.read)
    made.on_cleanup.append(engine.stop)
    return made


def _event(body: dict[str, Any], choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
    event = {"id": "cmpl", "object": "text_completion", "created": int(time.time()), "model": body.get("model")}
    return f"data: {json.dumps(event | {'choices': choices, 'usage': usage})}\n\n".encode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["transformers", "openvino"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    parser.add_argument("--static", action="store_true", help="transformers without its continuous batches")
    given = parser.parse_args()
    transformers = static_transformers if given.static else continuous_transformers
    run = openvino if given.engine == "openvino" else transformers
    web.run_app(application(Engine(run, given.model, given.dtype)), host="127.0.0.1", port=given.port)
