"""Measures the engine against transformers' generate: tokens per second of 1, 8 and 32 streams, greedy, fixed lengths.

    python tests/bench/llm_engine.py [--model FOLDER_OR_GGUF] [--dtype bfloat16] [--threads 1] [--streams 1 8 32]

Each stream has a prompt of its own of 16 to 64 tokens. Three ways are measured in turn, three rounds of them, and the
median of each is told, in time of the wall and of the processor: transformers with one stream at a time, transformers with
a padded batch, and ours. `--profile` shows where ours spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from headrace_backends.llm.attention import IMPLEMENTATION
from headrace_backends.llm.loading import LoadedModel, load
from headrace_backends.llm.sampling_params import SamplingParams
from language_models import Engine, request, smollm2_folder


def by_transformers(loaded: LoadedModel, prompts: list[list[int]], count: int) -> None:
    """Generate for all prompts as one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    loaded.model.set_attn_implementation("sdpa")
    loaded.model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0
    )


def one_by_one(loaded: LoadedModel, prompts: list[list[int]], count: int) -> None:
    for prompt in prompts:
        by_transformers(loaded, [prompt], count)


def by_engine(loaded: LoadedModel, prompts: list[list[int]], count: int) -> None:
    loaded.model.set_attn_implementation(IMPLEMENTATION)
    engine = Engine(loaded.model, blocks=512, max_model_len=1024, max_num_seqs=len(prompts))
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    engine.run([request(str(at), prompt, params) for at, prompt in enumerate(prompts)])


WAYS = {"transformers, one by one": one_by_one, "transformers, one batch": by_transformers, "headrace": by_engine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load(arguments.model or smollm2_folder(), arguments.dtype)
    numbers = random.Random(0)
    print(f"{loaded.dtype}, {arguments.threads} thread(s), load average {os.getloadavg()[0]:.1f}")
    for streams in arguments.streams:
        prompts = [[numbers.randrange(100, 9000) for _ in range(numbers.randint(16, 64))] for _ in range(streams)]
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
        for _ in range(arguments.rounds):
            for name, way in WAYS.items():
                wall, processor = time.perf_counter(), time.process_time()
                way(loaded, prompts, arguments.tokens)
                figures[name].append((time.perf_counter() - wall, time.process_time() - processor))
        made = streams * arguments.tokens
        for name, each in figures.items():
            wall, processor = (statistics.median(column) for column in zip(*each, strict=True))
            told = {"tokens_per_s": round(made / wall, 1), "tokens_per_cpu_s": round(made / processor, 1)}
            print(json.dumps({"streams": streams, "way": name, **told}), flush=True)
        if arguments.profile:
            profile = cProfile.Profile()
            profile.runcall(by_engine, loaded, prompts, arguments.tokens)
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
