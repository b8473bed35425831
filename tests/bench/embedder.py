"""What batches bring to a real model: all-MiniLM-L6-v2 behind its tokenizer, with batches and one text at a time.

`python tests/bench/embedder.py` prints texts a second at both settings and their ratio, for each form of the network.
"""

from __future__ import annotations

import argparse
import itertools
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
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = write_encoders(folder)
        found: dict[tuple[str, int], float] = {}
        for max_batch_size in (1, 32):
            repository = folder / f"models_{max_batch_size}"
            repository.mkdir()
            add_embedder(repository, files, max_batch_size=max_batch_size, delay_us=0)
            with running(repository) as server:
                for form in FORMS:
                    model = f"minilm_{form}"
                    texts_a_second(server, model, options.clients, 1.0)
                    before = figures(server, f"encoder_{form}")
                    found[form, max_batch_size] = texts_a_second(server, model, options.clients, options.seconds)
                    added = figures(server, f"encoder_{form}").since(before)
                    print(
                        f"{form:5} batches of up to {max_batch_size:2}: {found[form, max_batch_size]:7.1f} texts/s, "
                        f"{added.rows / added.executions:5.1f} in an execution"
                    )
        for form in FORMS:
            print(f"{form}: batches bring {found[form, 32] / found[form, 1]:.2f} times as much")


if __name__ == "__main__":
    main()
