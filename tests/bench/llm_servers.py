"""Language models over HTTP: tokens a second and time to the first token by number of streams, beside other servers.

    python tests/bench/llm_servers.py MODEL [--peer NAME=URL ...] [--settings 'int8={"quantization": "int8"}' ...] [--out FILE]

Starts a server of ours over MODEL (a folder or a GGUF file) for each `--settings`, and asks it as an OpenAI client would; peers
run already, serve the same model, and are asked the same (`llm_peer.py` is one). Servers take turns, `--rounds` times; only one
is asked at a time, so the others rest. Prompts are random tokens, of which no two share a beginning; lengths are fixed
(`ignore_eos`), temperature is 0. Told are medians over the rounds, and of the rounds' ratios of ours over each other's.

The first line says how busy the machine is, how fast all its cores together read memory, and what that allows one stream of each
server, which reads all weights for a token: as many bytes as they have where they lie, or for ours as its settings make them.
`--weights-mb` tells of a peer that has others.

`--goodput` asks ours at rising rates instead (Poisson, 32 + 32 tokens) and tells the highest at which 9 of 10 keep the bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
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

from memory_speed import Weights, memory_speed, weights

from harness import RunningServer

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


async def measure(target: Target, draw: random.Random, tokens: int, many: list[int]) -> dict[str, float]:
    """Return every figure of one server, once, for each number of streams."""
    await target.ask(prompt(draw, 32), 8)
    long = [await target.ask(prompt(draw, TTFT_PROMPT), 2) for _ in range(3)]
    found = {f"ttft_ms of {TTFT_PROMPT}": 1000 * statistics.median(answer.ttft for answer in long)}
    for streams in many:
        figures = await aggregate(target, draw, streams, tokens, 2)
        found |= {f"{name} at {streams}": value for name, value in figures.items()}
    return found


async def compare(ours: list[Target], peers: list[Target], given: argparse.Namespace) -> dict[str, Any]:
    """Return medians of each server, and of the rounds' ratios of each of ours over those after it."""
    targets = ours + peers
    found: dict[str, list[dict[str, float]]] = {target.name: [] for target in targets}
    for number in range(given.rounds):
        draw = random.Random(number)
        for target in targets if number % 2 == 0 else targets[::-1]:
            found[target.name].append(await measure(target, draw, given.tokens, given.streams))
            print(json.dumps({"round": number, target.name: _rounded(found[target.name][-1])}), flush=True)
    medians = {
        name: {key: statistics.median(each[key] for each in runs) for key in runs[0]} for name, runs in found.items()
    }
    pairs = [(one.name, other.name) for one, other in itertools.combinations(targets, 2) if one in ours]
    return {
        "medians": {name: _rounded(values) for name, values in medians.items()},
        "ratios": {f"{one} over {other}": _ratios(found[one], found[other]) for one, other in pairs},
    }


def _ratios(ones: list[dict[str, float]], others: list[dict[str, float]]) -> dict[str, float]:
    return {
        key: round(statistics.median(one[key] / other[key] for one, other in zip(ones, others, strict=True)), 3)
        for key in ones[0]
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


def bytes_of_ours(found: Weights, settings: dict[str, Any]) -> float:
    """Return how many bytes of weights a token reads of a server of ours with those settings."""
    from headrace_backends.llm.loading import chosen_dtype

    if settings.get("engine", "headrace") != "headrace":
        return found.size
    bits = {"int8": 8.5, "int4": 5}  # 32 weights share a factor of 16 bits, those of 4 bits two
    quantization = settings.get("quantization")
    if quantization in bits:
        return found.numbers * bits[quantization] / 8
    return 2 * found.numbers if chosen_dtype(settings.get("dtype", "auto")).itemsize == 2 else found.exact


def limits(given: argparse.Namespace, speed: float) -> dict[str, dict[str, float]]:
    """Return the megabytes that a token reads at each server, and how many a second GB/s of memory allow one stream."""
    ours = {
        name: bytes_of_ours(weights(Path(settings.get("model", given.model))), settings)
        for name, settings in given.settings.items()
    }
    read = ours | dict.fromkeys(given.peer, weights(given.model).size)
    read |= {name: float(megabytes) * 1e6 for name, megabytes in given.weights_mb.items()}
    return {
        name: {"weights_MB": round(size / 1e6, 1), "tok_s at most": round(speed * 1e9 / size, 1)}
        for name, size in read.items()
    }


def _reached(limits: dict[str, dict[str, float]], medians: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return each server's tokens a second of one stream, beside what memory allows."""
    told = {}
    for name, limit in limits.items():
        speed = medians[name]["tok_s at 1"]
        told[name] = {"tok_s at 1": speed, **limit, "of it": round(speed / limit["tok_s at most"], 3)}
    return told


async def main(given: argparse.Namespace) -> None:
    speed = memory_speed(os.cpu_count() or 1)
    head = {
        "load": os.getloadavg(), "cores": os.cpu_count(), "model": str(given.model), "settings": given.settings,
        "memory_GB_per_s": round(speed, 1), "one_stream": limits(given, speed),
    }  # fmt: skip
    print(json.dumps(head), flush=True)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=900)
            )
        )
        ours, ready = [], {}
        for name, settings in given.settings.items():
            server = served(given.model, settings, folder / name)
            stack.callback(server.stop)
            ready[name] = round(server.wait_ready(300), 1)
            ours.append(Target(name, f"http://{server.http}", "m", session))
        if given.goodput:
            result = {"goodput": {target.name: await goodput(target, given.seconds) for target in ours}}
        else:
            peers = [Target(name, url, given.name, session) for name, url in given.peer.items()]
            result = await compare(ours, peers, given)
            if 1 in given.streams:
                head["one_stream"] = _reached(head["one_stream"], result["medians"])
    result = {**head, "ready_s": ready, **result}
    print(json.dumps(result))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1))


class Named(argparse.Action):
    """Gathers NAME=VALUE of an option that may be given several times."""

    def __call__(self, parser, namespace, text, option=None) -> None:
        name, equals, value = text.partition("=")
        gathered = getattr(namespace, self.dest)
        if not name or not equals or name in gathered:
            parser.error(f"{option}: expected {self.metavar} with a name of its own, got {text!r}")
        setattr(namespace, self.dest, {**gathered, name: value})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", action=Named, default={}, metavar="NAME=URL")
    parser.add_argument("--name", default="m", help="of the model at the peers (%(default)s)")
    parser.add_argument(
        "--settings", action=Named, default={}, metavar="NAME=JSON", help="of model.json, of one server"
    )
    parser.add_argument("--weights-mb", action=Named, default={}, metavar="NAME=MB", help="that a token reads there")
    parser.add_argument("--streams", type=lambda text: [int(each) for each in text.split(",")], default=[1, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--goodput", action="store_true")
    parser.add_argument("--seconds", type=float, default=20, help="of each rate of --goodput")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.settings = {name: json.loads(text) for name, text in given.settings.items()} or {"headrace": {}}
    names = {*given.settings, *given.peer}
    if len(names) < len(given.settings) + len(given.peer) or not given.weights_mb.keys() <= names:
        parser.error("servers need names of their own, and --weights-mb names one of them")
    return given


if __name__ == "__main__":
    asyncio.run(main(arguments()))
