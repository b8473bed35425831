"""Language models over HTTP: tokens a second and time to the first token by number of streams, beside other servers.

    python tests/bench/llm_servers.py MODEL [--peer NAME=URL ...] [--settings '{"quantization": "int8"}'] [--out FILE]

Starts a server of ours over MODEL (a folder or a GGUF file) and asks it as an OpenAI client would; peers run already, serve the
same model, and are asked the same. Servers take turns, `--rounds` times; only one is asked at a time, so the others rest.
Prompts are random tokens, of which no two share a beginning; lengths are fixed (`ignore_eos`), temperature is 0. Told are
medians over the rounds, and of the rounds' ratios of ours over each peer's. The first line says how busy the machine is.

`--goodput` asks ours at rising rates instead (Poisson, 32 + 32 tokens) and tells the highest at which 9 of 10 keep the bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import RunningServer

STREAMS = (1, 8, 16, 32)
TTFT_PROMPT = 512
BOUNDS_MS = {"ttft": 1000.0, "tpot": 100.0}
"""What counts as good: time to the first token, and time of each one after it."""


@dataclass
class Answer:
    """Of one request: when each piece came, in seconds from its start, and how many tokens there were."""

    times: list[float]
    tokens: int

    @property
    def ttft(self) -> float:
        return self.times[0]

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1)


class Target:
    """A server that is asked."""

    def __init__(self, name: str, url: str, model: str, session: aiohttp.ClientSession) -> None:
        self.name, self._url, self._model, self._session = name, url.rstrip("/"), model, session

    async def ask(self, prompt: list[int], tokens: int) -> Answer:
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True}, "cache_prompt": False,
        }  # fmt: skip
        began, times, usage = time.perf_counter(), [], {}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise SystemExit(f"{self.name}: {reply.status}: {(await reply.text())[:300]}")
            async for line in reply.content:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    event = json.loads(line[5:])
                    usage = event.get("usage") or usage
                    if event.get("choices"):
                        times.append(time.perf_counter() - began)
        return Answer(times, usage.get("completion_tokens") or len(times))


def prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(2000, 40000) for _ in range(length)]


async def aggregate(target: Target, draw: random.Random, streams: int, tokens: int, turns: int) -> dict[str, float]:
    """Return tokens a second of all streams together, each of which asks `turns` times, one after another."""

    async def stream() -> list[Answer]:
        return [await target.ask(prompt(draw, 32), tokens) for _ in range(turns)]

    began = time.perf_counter()
    answers = sum(await asyncio.gather(*(stream() for _ in range(streams))), [])
    seconds = time.perf_counter() - began
    return {
        "tok_s": sum(answer.tokens for answer in answers) / seconds,
        "ttft_ms": 1000 * statistics.median(answer.ttft for answer in answers),
        "tpot_ms": 1000 * statistics.median(answer.tpot for answer in answers),
    }


async def measure(target: Target, draw: random.Random, tokens: int) -> dict[str, float]:
    """Return every figure of one server, once."""
    await target.ask(prompt(draw, 32), 8)
    long = [await target.ask(prompt(draw, TTFT_PROMPT), 2) for _ in range(3)]
    found = {f"ttft_ms of {TTFT_PROMPT}": 1000 * statistics.median(answer.ttft for answer in long)}
    for streams in STREAMS:
        figures = await aggregate(target, draw, streams, tokens, 2)
        found |= {f"{name} at {streams}": value for name, value in figures.items()}
    return found


async def compare(targets: list[Target], rounds: int, tokens: int) -> dict[str, Any]:
    """Return medians of each server, and of the rounds' ratios of the first over each other."""
    found: dict[str, list[dict[str, float]]] = {target.name: [] for target in targets}
    for number in range(rounds):
        draw = random.Random(number)
        turn = targets if number % 2 == 0 else targets[::-1]
        for target in turn:
            found[target.name].append(await measure(target, draw, tokens))
            print(json.dumps({"round": number, target.name: _rounded(found[target.name][-1])}), flush=True)
    medians = {
        name: {key: statistics.median(each[key] for each in runs) for key in runs[0]} for name, runs in found.items()
    }
    ours = found[targets[0].name]
    ratios = {
        target.name: {
            key: statistics.median(mine[key] / other[key] for mine, other in zip(ours, found[target.name], strict=True))
            for key in ours[0]
        }
        for target in targets[1:]
    }
    return {
        "medians": {name: _rounded(values) for name, values in medians.items()},
        "ratios": {name: {key: round(value, 3) for key, value in values.items()} for name, values in ratios.items()},
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 1) for key, value in values.items()}


async def goodput(target: Target, seconds: float) -> dict[str, Any]:
    """Return the highest rate at which nine of ten requests keep the bounds, and what was found on the way."""
    found, best, rate = [], 0.0, 1.0
    while True:
        draw, answers = random.Random(int(rate * 10)), []

        async def one(draw: random.Random = draw, answers: list[Answer] = answers) -> None:
            answers.append(await target.ask(prompt(draw, 32), 32))

        tasks, began = [], time.perf_counter()
        while time.perf_counter() - began < seconds:
            tasks.append(asyncio.ensure_future(one()))
            await asyncio.sleep(draw.expovariate(rate))
        await asyncio.gather(*tasks)
        good = [a for a in answers if a.ttft * 1000 <= BOUNDS_MS["ttft"] and a.tpot * 1000 <= BOUNDS_MS["tpot"]]
        part = len(good) / len(answers)
        found.append({"rate": round(rate, 2), "requests": len(answers), "good": round(part, 3)})
        print(json.dumps(found[-1]), flush=True)
        if part < 0.9:
            return {"goodput_per_s": round(best, 2), "bounds_ms": BOUNDS_MS, "rates": found}
        best, rate = rate, rate * 1.4


def served(model: Path, settings: dict[str, Any], folder: Path) -> RunningServer:
    """Start a server of ours over one model."""
    version = folder / "m" / "1"
    version.mkdir(parents=True)
    given = {"model": str(model.resolve()), "max_model_len": 2048, "max_num_seqs": 32, "enable_prefix_caching": False}
    (version / "model.json").write_text(json.dumps(given | settings))
    return RunningServer(folder)


async def main(arguments: argparse.Namespace) -> None:
    head = {
        "load": os.getloadavg(),
        "cores": os.cpu_count(),
        "model": str(arguments.model),
        "settings": arguments.settings,
    }
    print(json.dumps(head), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        server = served(arguments.model, json.loads(arguments.settings), Path(folder))
        try:
            ready = server.wait_ready(300)
            timeout = aiohttp.ClientTimeout(total=900)
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout
            ) as session:
                ours = Target("headrace", f"http://{server.http}", "m", session)
                if arguments.goodput:
                    result = await goodput(ours, arguments.seconds)
                else:
                    peers = [peer.partition("=") for peer in arguments.peer]
                    targets = [ours, *(Target(name, url, arguments.name, session) for name, _, url in peers)]
                    result = await compare(targets, arguments.rounds, arguments.tokens)
        finally:
            server.stop()
    result = {**head, "ready_s": round(ready, 1), **result}
    print(json.dumps(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--name", default="m", help="of the model at the peers (%(default)s)")
    parser.add_argument("--settings", default="{}", help="of model.json, as JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--goodput", action="store_true")
    parser.add_argument("--seconds", type=float, default=20, help="of each rate of --goodput")
    parser.add_argument("--out", type=Path)
    asyncio.run(main(parser.parse_args()))
