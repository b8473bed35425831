"""Twice as many requests as a model takes, for a minute: are the others refused at once, and does memory stay flat?

    python tests/bench/overload.py --seconds 60

A model takes `execute_delay_ms` a batch, so that its capacity is known; its queue holds a few batches, and each request has a
deadline. Open loop: requests are sent when they are due, whatever became of those before. Prints one JSON object; exits with
status 1 where a refusal took long, an accepted request missed its deadline at the 99th percentile, or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness import RunningServer
from repositories import add_identity

BATCH, DELAY_MS, DEADLINE_MS, QUEUE = 8, 20, 500, 64
CAPACITY = BATCH * 1000 / DELAY_MS
CONFIG = f"""dynamic_batching {{
  default_queue_policy {{ max_queue_size: {QUEUE} timeout_action: REJECT default_timeout_microseconds: {DEADLINE_MS * 1000} }}
}}"""
BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()


async def run(server: RunningServer, seconds: float, rate: float) -> dict[str, object]:
    """Send `rate` requests a second; return what came of them."""
    process = psutil.Process(server.process.pid)
    answered: list[float] = []
    refused: list[float] = []
    other: list[int] = []
    memory: list[int] = []
    url = f"http://{server.http}/v2/models/busy/infer"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one() -> None:
            began = time.perf_counter()
            async with session.post(url, data=BODY) as answer:
                await answer.read()
            took = time.perf_counter() - began
            if answer.status == 200:
                answered.append(took)
            elif answer.status == 503:
                refused.append(took)
            else:
                other.append(answer.status)

        tasks: set[asyncio.Task[None]] = set()
        began = time.perf_counter()
        sent = 0
        next_look = 0.0
        while (now := time.perf_counter() - began) < seconds:
            while sent < now * rate:
                task = asyncio.ensure_future(one())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                sent += 1
            if now >= next_look:
                memory.append(process.memory_info().rss)
                next_look = now + seconds / 20
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)
    return {
        "sent": sent,
        "answered": len(answered),
        "refused": len(refused),
        "other": other[:10],
        "answered_p50_ms": _ms(answered, 0.5),
        "answered_p99_ms": _ms(answered, 0.99),
        "refused_p50_ms": _ms(refused, 0.5),
        "refused_p99_ms": _ms(refused, 0.99),
        "rss_mb_early": round(statistics.median(memory[2:6]) / 2**20, 1),
        "rss_mb_late": round(statistics.median(memory[-4:]) / 2**20, 1),
    }


def _ms(values: list[float], part: float) -> float:
    return round(1000 * sorted(values)[int(part * (len(values) - 1))], 1) if values else 0.0


def problems(found: dict[str, object]) -> list[str]:
    """Return what should not be."""
    wrong = []
    if found["other"] or not found["refused"]:
        wrong.append(f"statuses: {found['other']}, {found['refused']} refused")
    if float(found["answered_p99_ms"]) > DEADLINE_MS * 1.5:  # type: ignore[arg-type]
        wrong.append("accepted requests came after their deadline")
    if float(found["refused_p50_ms"]) > DEADLINE_MS / 2:  # type: ignore[arg-type]
        wrong.append("refusals were slow")
    if float(found["rss_mb_late"]) > float(found["rss_mb_early"]) * 1.1 + 5:  # type: ignore[arg-type]
        wrong.append("memory grew")
    return wrong


def measure(seconds: float, factor: float) -> dict[str, object]:
    """Run a server under `factor` times its model's capacity."""
    with tempfile.TemporaryDirectory() as folder:
        add_identity(Path(folder), "busy", max_batch_size=BATCH, extra=CONFIG, execute_delay_ms=str(DELAY_MS))
        server = RunningServer(Path(folder))
        try:
            server.wait_ready()
            return asyncio.run(run(server, seconds, CAPACITY * factor))
        finally:
            server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--factor", type=float, default=2)
    arguments = parser.parse_args()
    found = measure(arguments.seconds, arguments.factor)
    wrong = problems(found)
    print(json.dumps(found | {"capacity_per_s": CAPACITY, "problems": wrong}))
    sys.exit(bool(wrong))
