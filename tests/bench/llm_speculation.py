"""Measures what guessing brings: tokens per second with n-gram guesses over plain decoding, outputs compared token for token.

    python tests/bench/llm_speculation.py --model FOLDER_OR_GGUF [--dtype bfloat16] [--threads 1] [--rounds 5] [--json FILE]

Three workloads (rows 7 and 8 of what speculation is usually measured by):

* quoting: one stream, greedy; the answer repeats much of the prompt (repeat, edit code, correct, quote);
* free: one stream, seeded sampling at temperature 1; nothing to copy from, so this shows what guessing costs;
* load: many greedy streams of both kinds at once, once with guesses always on and once with the switch-off that is the default.

Each round runs plain and guessing one after the other, in turned order every second round; the median of the rounds'
ratios is told, of wall and of processor time. In fp32 all outputs must be equal, which is looked at first whatever is
measured. In bf16 a product of one row and of five rows may differ in the last bits, so near ties may fall otherwise: how
many outputs part is told, with the gap between the log probabilities of the two tokens where they do; in greedy runs a gap
that is no tie ends the bench.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from headrace_backends.llm.admission import SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.loading import LoadedModel, load
from headrace_backends.llm.ngram import NgramConfig, NgramDrafter
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.runner import TorchRunner
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.scheduler import Scheduler
from language_models import smollm2_folder

BLOCKS, BLOCK, LENGTH = 1024, 16, 1024
TIE = 0.5
"""Log probabilities nearer than this are one in bf16: its step at logits of 16 to 32 is an eighth, and layers add up."""

TEXT = (
    "The harbour of Lindau has two towers. The older one, the Mangturm, was built in the twelfth century and served as "
    "a lighthouse for six hundred years. In 1856 the new lighthouse was finished; it stands thirty-three metres high and "
    "is one of the few in the world that has a clock in its wall. Opposite of it a lion of six metres, made of marble "
    "from Kelheim, looks over the lake towards Austria."
)
CODE = (
    "def average(values):\n    total = 0\n    count = 0\n    for value in values:\n        if value is None:\n"
    "            continue\n        total += value\n        count += 1\n    if count == 0:\n        return None\n"
    "    return total / count\n"
)
QUOTING = [
    f"Repeat the following text word for word, without any change:\n\n{TEXT}",
    f"Rename the variable `total` to `sum_of_values` in this Python function and print the whole function:\n\n{CODE}",
    f"Add a docstring to this function and print the whole function:\n\n```python\n{CODE}```",
    f"Copy the text below and put each sentence on a line of its own:\n\n{TEXT}",
]
FREE = [
    "Tell a short story about a lighthouse keeper and a storm.",
    "Why is the sky blue? Explain it to a child.",
    "Give advice to somebody who wants to learn to cook.",
    "Describe a market in a town by the sea.",
]


class Bench:
    """One model with its cache; each run has a scheduler of its own, without a prefix cache."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.runner = TorchRunner(loaded.model, BLOCKS, BLOCK, LENGTH, fuse=True)
        self.stats = None

    def prompt(self, text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        told = self.loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        return list(told["input_ids"])

    def run(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, drafter: NgramDrafter | None
    ) -> list[list[int]]:
        """Generate for all at once; return their tokens."""
        blocks = BlockManager(BLOCKS, BLOCK, prefix_caching=False)
        scheduler = Scheduler(SchedulerConfig(max_model_len=LENGTH, max_num_seqs=max(1, len(prompts))), blocks)
        ends = self.loaded.eos_token_ids
        requests = [GenerationRequest(str(at), tokens, params, at, ends) for at, tokens in enumerate(prompts)]
        assert scheduler.add(*requests) is None
        while len(scheduler):
            step = scheduler.schedule(0)
            scheduler.update(step, self.runner.execute(step), 0)
            if drafter is not None:
                running = [request for request in scheduler.running if request.output_token_ids]
                for request, guesses in zip(running, drafter.propose(running), strict=True):
                    scheduler.set_drafts(request, guesses)
        self.stats = scheduler.stats
        return [request.output_token_ids for request in requests]

    def gap(self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> float:
        """Return how far apart in log probability the two tokens are at which the outputs part."""
        at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        if at == min(len(one), len(other)):
            return float("inf")
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
        scheduler = Scheduler(SchedulerConfig(max_model_len=LENGTH), BlockManager(BLOCKS, BLOCK))
        scheduler.add(GenerationRequest("gap", [*prompt, *one[:at]], params, 0))
        (result,) = self.runner.execute(scheduler.schedule(0))
        chances = {each.token_id: each.logprob for each in result.logprobs[0].top}
        return abs(chances[one[at]] - chances[other[at]])


def measured(
    bench: Bench, sets: Sequence[Sequence[Sequence[int]]], params: SamplingParams, config, rounds: int
) -> dict:
    """Return ratios of plain over guessing time, for runs of each set of prompts in turn."""

    def timed(drafting: bool) -> tuple[float, float, list[list[list[int]]], list[int]]:
        wall, processor, outputs, counts = time.perf_counter(), time.process_time(), [], [0, 0, 0]
        for prompts in sets:
            outputs.append(bench.run(prompts, params, NgramDrafter(config) if drafting else None))
            stats = bench.stats
            counts = [
                a + b
                for a, b in zip(
                    counts, (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens), strict=True
                )
            ]
        return time.perf_counter() - wall, time.process_time() - processor, outputs, counts

    timed(drafting=True)
    walls, processors, rates = [], [], []
    for at in range(rounds):
        first = timed(drafting=bool(at % 2))
        second = timed(drafting=not at % 2)
        plain, guessing = (second, first) if at % 2 else (first, second)
        made = [sum(map(len, outputs)) for outputs in (sum(plain[2], []), sum(guessing[2], []))]
        walls.append(plain[0] / guessing[0] * made[1] / made[0])
        processors.append(plain[1] / guessing[1] * made[1] / made[0])
        rates.append((made[0] / plain[0], made[1] / guessing[0]))
    drafts, proposed, accepted = guessing[3]
    gaps = [
        bench.gap(prompt, a, b)
        for prompts, ones, others in zip(sets, plain[2], guessing[2], strict=True)
        for prompt, a, b in zip(prompts, ones, others, strict=True)
        if a != b
    ]
    if gaps and (bench.loaded.dtype == torch.float32 or (params.greedy and max(gaps) > TIE)):
        raise SystemExit(f"outputs differ, and not by ties: {gaps}")
    return {
        "wall_ratio": round(statistics.median(walls), 3),
        "wall_range": [round(min(walls), 3), round(max(walls), 3)],
        "cpu_ratio": round(statistics.median(processors), 3),
        "plain_tokens_per_s": round(statistics.median(rate[0] for rate in rates), 1),
        "guessing_tokens_per_s": round(statistics.median(rate[1] for rate in rates), 1),
        "acceptance": round(accepted / max(1, proposed), 3),
        "accepted_per_draft": round(accepted / max(1, drafts), 2),
        "drafts": drafts,
        "tokens": made[1],
        "outputs_equal": f"{sum(map(len, sets)) - len(gaps)} of {sum(map(len, sets))}",
        "gaps": [round(gap, 4) for gap in gaps],
    }


def same_in_fp32(model: Path, adaptive: NgramConfig) -> None:
    """Look that guessing changes no token, greedy or seeded."""
    bench = Bench(load(model, "float32"))
    for texts, temperature in ((QUOTING, 0), (FREE, 1)):
        params = SamplingParams(temperature=temperature, max_tokens=48)
        prompts = [bench.prompt(text) for text in texts]
        plain = [bench.run([prompt], params, None) for prompt in prompts]
        assert plain == [bench.run([prompt], params, NgramDrafter(adaptive)) for prompt in prompts], "outputs differ"
    print("fp32: all outputs are equal with guesses and without", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--k", type=int, default=NgramConfig().num_speculative_tokens)
    parser.add_argument("--only", nargs="+", choices=["quoting", "free", "load"], default=["quoting", "free", "load"])
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = arguments.model or smollm2_folder()
    adaptive = NgramConfig(num_speculative_tokens=arguments.k)
    if arguments.only != ["load"]:
        same_in_fp32(model, adaptive)
    loaded = load(model, arguments.dtype)
    bench = Bench(loaded)
    print(f"{loaded.dtype}, {arguments.threads} thread(s), load average {os.getloadavg()[0]:.1f}", flush=True)
    greedy = SamplingParams(temperature=0, max_tokens=arguments.tokens)
    drawn = SamplingParams(temperature=1.0, max_tokens=arguments.tokens)
    quoting, free = ([[bench.prompt(text)] for text in texts] for texts in (QUOTING, FREE))
    texts = QUOTING + FREE
    many = [[bench.prompt(texts[at % len(texts)]) for at in range(arguments.streams)]]
    always = NgramConfig(num_speculative_tokens=arguments.k, disable_above=10**6, patience=10**6)
    short = SamplingParams(temperature=0, max_tokens=min(48, arguments.tokens), ignore_eos=True)
    workloads = {
        "quoting": [("quoting", quoting, greedy, adaptive)],
        "free": [("free", free, drawn, adaptive)],
        "load": [("load, always", many, short, always), ("load, switched off", many, short, adaptive)],
    }
    told = {}
    for name in arguments.only:
        for title, sets, params, config in workloads[name]:
            told[title] = measured(bench, sets, params, config, arguments.rounds)
            print(json.dumps({"workload": title, **told[title]}), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
