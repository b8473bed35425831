"""Measures what keeping texts to a grammar costs: tokens per second under it over those without, in the same run.

    python tests/bench/llm_grammar.py --model FOLDER_OR_GGUF [--dtype bfloat16] [--threads 1] [--streams 16] [--rounds 5]

Each round generates the same number of tokens for all streams without a grammar, under a JSON schema, under any JSON and
under a regular expression, in turned order every second round; the median of the rounds' ratios is told, of wall and of
processor time. A schema leaves many places with one token alone, which are computed several at once; `--no-forced` shows
the cost without. Grammars are compiled before. `--sampler` measures the sampler alone instead, at 32 rows of two
vocabularies in bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from headrace_backends.llm import core as engine_core
from headrace_backends.llm.admission import SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.core import EngineCore
from headrace_backends.llm.grammar_masks import RowMask
from headrace_backends.llm.grammar_source import grammars_of
from headrace_backends.llm.loading import LoadedModel, load
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.runner import TorchRunner
from headrace_backends.llm.sampler import sample
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.sampling_row import SamplingRow
from headrace_backends.llm.scheduler import Scheduler
from headrace_backends.llm.text_codec import HfTextCodec
from headrace_protocol.generation import StructuredOutput
from language_models import smollm2_folder

BLOCKS, BLOCK, LENGTH = 512, 16, 512
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "pattern": "^[a-z]{2,10}@[a-z]{2,10}\\.(com|org)$"},
        "roles": {"type": "array", "items": {"enum": ["reader", "writer", "owner"]}, "minItems": 1, "maxItems": 3},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "email", "roles", "active"],
    "additionalProperties": False,
}
GRAMMARS = {
    "none": None,
    "json_schema": StructuredOutput("json_schema", json.dumps({"type": "array", "items": PERSON, "minItems": 40})),
    "any JSON array": StructuredOutput("json_schema", json.dumps({"type": "array", "minItems": 500})),
    "regex": StructuredOutput("regex", r"([A-Z][a-z]+( [a-z]+){2,12}[.!?] ){40,}"),
}


class Bench:
    """One model, and engines around it."""

    def __init__(self, loaded: LoadedModel, streams: int, tokens: int) -> None:
        self.loaded, self.streams, self.tokens = loaded, streams, tokens
        self.runner = TorchRunner(loaded.model, BLOCKS, BLOCK, LENGTH)
        self.grammars = grammars_of(loaded.tokenizer, loaded.eos_token_ids, loaded.vocab_size)
        self.codec = HfTextCodec(loaded.tokenizer, loaded.vocab_size)
        self.prompt = self.codec.encode("Write a list of the people who work in our library, as JSON:\n")

    def run(self, structured: StructuredOutput | None, temperature: float) -> tuple[float, float, float]:
        """Return tokens per second of wall and of processor time, and tokens of each step and stream."""
        config = SchedulerConfig(max_model_len=LENGTH, max_num_seqs=self.streams)
        core = EngineCore(Scheduler(config, BlockManager(BLOCKS, BLOCK)), self.codec, None, self.grammars)
        if structured is not None:
            self.grammars.compile(structured).result()
        params = SamplingParams(temperature=temperature, max_tokens=self.tokens, ignore_eos=structured is None)
        made = [
            GenerationRequest(str(at), self.prompt, params, at, self.loaded.eos_token_ids, structured=structured)
            for at in range(self.streams)
        ]
        for each in made:
            assert core.add(each) is None
        assert core.settle(0) == []
        core.update(step := core.schedule(0), self.runner.execute(step), 0)  # the prompts
        before = sum(each.num_output_tokens for each in made)
        wall, processor, steps = time.perf_counter(), time.process_time(), 0
        while len(core):
            core.update(step := core.schedule(0), self.runner.execute(step), 0)
            steps += 1
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        count = sum(each.num_output_tokens for each in made) - before
        assert all(each.error is None for each in made), [each.error for each in made]
        return count / wall, count / processor, count / steps / self.streams


def measure(bench: Bench, rounds: int, temperature: float) -> None:
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in GRAMMARS}
    for grammar in GRAMMARS.values():
        bench.run(grammar, temperature)
    for at in range(rounds):
        for name in GRAMMARS if at % 2 else reversed(GRAMMARS):
            figures[name].append(bench.run(GRAMMARS[name], temperature))
    for name, each in figures.items():
        ratios = [
            (wall / plain[0], cpu / plain[1]) for (wall, cpu, _), plain in zip(each, figures["none"], strict=True)
        ]
        told = {
            "tokens_per_s": round(statistics.median(wall for wall, _, _ in each), 1),
            "ratio_wall": round(statistics.median(wall for wall, _ in ratios), 3),
            "ratio_processor": round(statistics.median(cpu for _, cpu in ratios), 3),
            "tokens_per_step": round(statistics.median(part for _, _, part in each), 2),
        }
        print(json.dumps({"streams": bench.streams, "temperature": temperature, "grammar": name, **told}), flush=True)


def measure_sampler() -> None:
    ways = [{"temperature": 0.0}, {}, {"temperature": 0.7}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9},
            {"temperature": 0.0, "repetition_penalty": 1.1}, {"temperature": 0.0, "logprobs": 5}]  # fmt: skip
    for vocabulary in (49_152, 262_144):
        logits = (torch.randn(32, vocabulary) * 3).bfloat16()
        words = np.random.default_rng(0).integers(0, 1 << 32, vocabulary // 32, np.uint32)
        for params in ways:
            for mask in (None, RowMask(words), RowMask(words & (np.arange(len(words)) < 2) * np.uint32(0xFFFFFFFF))):
                rows = [SamplingRow(SamplingParams(**params), at, range(50), range(20), mask=mask) for at in range(32)]
                times = []
                for _ in range(7):
                    began = time.perf_counter()
                    sample(logits, rows)
                    times.append(time.perf_counter() - began)
                allowed = "all" if mask is None else int(np.bitwise_count(mask.words).sum())
                told = {"vocabulary": vocabulary, "allowed": allowed, **params, "ms": round(min(times) * 1e3, 2)}
                print(json.dumps(told), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-forced", action="store_true")
    parser.add_argument("--sampler", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.sampler:
        measure_sampler()
        return
    if arguments.no_forced:
        engine_core._MOST_FORCED = 0
    loaded = load(arguments.model or smollm2_folder(), arguments.dtype)
    print(f"{loaded.dtype}, {arguments.threads} thread(s), load average {os.getloadavg()[0]:.1f}")
    bench = Bench(loaded, arguments.streams, arguments.tokens)
    try:
        for temperature in (0.0, 0.7):
            measure(bench, arguments.rounds, temperature)
    finally:
        bench.grammars.close()


if __name__ == "__main__":
    main()
