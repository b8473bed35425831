"""Measures the engine against itself: what each of its ideas brings, as a ratio of two ways in one run.

    python tests/bench/llm_engine.py [ROW ...] [--model FOLDER_OR_GGUF] [--dtype bfloat16] [--threads 1] [--rounds 3]

Both ways of a row take turns, `--rounds` of them; the median of the rounds' ratios is told with the least and the highest, in
time of the wall and of this process's processors: the second still means something where others use the machine. Tokens
of both ways are compared. Rows, and what they are, are in `llm_engine_rows.py`; one JSON object is printed of each. The first
line has the machine, and the speed at which that many threads read memory: a step of one stream reads all weights, and cannot be
faster than that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from llm_engine_rows import ROWS, Bench
from memory_speed import memory_speed

from headrace_backends.llm.loading import load
from language_models import smollm2_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; all where none is named")
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="layers as transformers has them")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = arguments.model or smollm2_folder()
    loaded = load(path, arguments.dtype)
    size = sum(parameter.nbytes for parameter in loaded.model.parameters())
    bench = Bench(loaded, path, fuse=not arguments.plain, quantization=arguments.quantization)
    speed = memory_speed(arguments.threads)
    head = {
        "model": path.name, "dtype": str(loaded.dtype), "threads": arguments.threads,
        "load_average": os.getloadavg()[0], "memory_GB_per_s": round(speed, 1), "weights_MB": round(size / 1e6),
        "one_stream_tokens_per_s_at_most": round(speed * 1e9 / size, 1),
    }  # fmt: skip
    print(json.dumps(head), flush=True)
    for name in arguments.rows or ROWS:
        told = [ROWS[name](bench) for _ in range(arguments.rounds)]
        print(json.dumps({"row": name, **_summary(told)}), flush=True)


def _summary(rounds: list[dict[str, float]]) -> dict[str, object]:
    summary: dict[str, object] = {}
    for key in rounds[0]:
        values = [each[key] for each in rounds]
        summary[key] = round(statistics.median(values), 3)
        if "ratio" in key:
            summary[f"{key}_range"] = [round(min(values), 3), round(max(values), 3)]
    return summary


if __name__ == "__main__":
    main()
