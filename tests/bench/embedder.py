"""What batches bring to a real model: all-MiniLM-L6-v2 behind its tokenizer, with batches and one text at a time.

`python tests/bench/embedder.py` prints texts a second at both settings and their ratio, for each form of the network.
Two servers take turns, so that what else happens on the machine meets both.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import tritonclient.grpc as grpcclient

from figures import figures
from harness import RunningServer, running
from minilm import FORMS, add_embedder, write_encoders

SENTENCE = "A headrace is the channel that leads water to the turbines of a power station, and ends at the weir."
WORDS = (5, 8, 12, 19)


def texts_a_second(server: RunningServer, model: str, clients: int, seconds: float) -> float:
    """Return how many texts were answered in a second, by clients that each ask one after the other."""
    end = time.monotonic() + seconds
    texts = [" ".join(SENTENCE.split()[:count]).encode() for count in WORDS]

    def one(number: int) -> int:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            for count in itertools.count():
                if time.monotonic() >= end:
                    return count
                tensor = grpcclient.InferInput("TEXT", [1, 1], "BYTES")
                tensor.set_data_from_numpy(np.array([[texts[(number + count) % len(texts)]]], np.object_))
                client.infer(model, [tensor])
        raise AssertionError

    started = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        done = sum(pool.map(one, range(clients)))
    return done / (time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="in which both settings take turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        files = write_encoders(folder)
        servers: dict[int, RunningServer] = {}
        for max_batch_size in (1, 32):
            repository = folder / f"models_{max_batch_size}"
            repository.mkdir()
            add_embedder(repository, files, max_batch_size=max_batch_size, delay_us=0)
            servers[max_batch_size] = stack.enter_context(running(repository))
        for form in FORMS:
            found: dict[int, list[float]] = {size: [] for size in servers}
            for _ in range(options.rounds):
                for size, server in servers.items():
                    rate = texts_a_second(server, f"minilm_{form}", options.clients, options.seconds)
                    found[size].append(rate)
            for size, server in servers.items():
                told = figures(server, f"encoder_{form}")
                print(
                    f"{form:5} batches of up to {size:2}: {statistics.median(found[size]):7.1f} texts/s "
                    f"({min(found[size]):.1f} to {max(found[size]):.1f}), {told.rows / told.executions:4.1f} in an execution"
                )
            ratios = [batched / single for single, batched in zip(found[1], found[32], strict=True)]
            print(f"{form}: batches bring {statistics.median(ratios):.2f} times as much")


if __name__ == "__main__":
    main()
