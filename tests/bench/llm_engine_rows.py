"""The rows of `llm_engine.py`: each runs two ways of the same work once, and returns what it found.

"ratio" is the better way's gain: times as many tokens a second, or times as little time, of the wall; "cpu_ratio" the same of
the process's own time. "equal" is the part of outputs that are the same token for token.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_backends.llm.admission import SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.loading import LoadedModel
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.runner import TorchRunner
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.scheduler import Scheduler

BLOCK, BLOCKS, LENGTH = 16, 1536, 2048
STREAMS = 32
TEXT = (
    "The river rises in the hills above the town and runs north through meadows, mills and old stone bridges. "
    "Every spring it floods, and every spring people write down how high the water stood on the church wall. "
)


@dataclass(slots=True)
class Ran:
    """What became of a run."""

    outputs: list[list[int]]
    wall: float
    processor: float
    first: list[float]
    """Seconds until each request's first token."""
    gaps: list[float]
    """Seconds between a request's tokens, of all requests."""
    most_running: int
    waste: float
    """Part of the slots of blocks that were held while no token was in them, on average."""

    @property
    def count(self) -> int:
        return sum(map(len, self.outputs))


class Bench:
    """A model and what runs it."""

    def __init__(self, loaded: LoadedModel, path: Path, *, fuse: bool, quantization: str | None) -> None:
        self.tokenizer = loaded.tokenizer
        self._loaded = loaded
        self._path = path
        self._options = {"fuse": fuse, "quantization": quantization}
        self.exact = quantization is None
        """Products of few bits are rounded otherwise for one row than for many, so near ties may part."""
        self.runner = TorchRunner(loaded.model, BLOCKS, BLOCK, LENGTH, **self._options)
        self._short: TorchRunner | None = None
        self.text = self.tokenizer.encode(TEXT * 40)

    def with_short_cache(self) -> TorchRunner:
        """The same model over a cache of 8 bits, of as many bytes."""
        if self._short is None:
            from headrace_backends.llm.loading import load

            again = load(self._path, str(self._loaded.dtype).removeprefix("torch."))
            self._short = TorchRunner(again.model, BLOCKS, BLOCK, LENGTH, kv_cache_dtype="int8", **self._options)
        return self._short

    def prompts(self, count: int, length: int, *, shared: int = 0, seed: int = 0) -> list[list[int]]:
        """Prompts of so many tokens out of the text, each beginning elsewhere, the first `shared` tokens alike."""
        numbers = random.Random(seed)
        prompts = []
        for _ in range(count):
            at = numbers.randrange(len(self.text) - length)
            prompts.append(self.text[:shared] + self.text[at : at + length - shared])
        return prompts

    def run(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, runner: TorchRunner | None = None,
        blocks: int = BLOCKS, prefix_caching: bool = False, manager: BlockManager | None = None,
        arrivals: Sequence[int] | None = None, **limits: int,
    ) -> Ran:  # fmt: skip
        """Generate so many tokens for each prompt; request i comes before step `arrivals[i]`, else at once."""
        runner = runner or self.runner
        manager = manager or BlockManager(blocks, BLOCK, prefix_caching=prefix_caching)
        scheduler = Scheduler(
            SchedulerConfig(
                **{"max_model_len": LENGTH, "max_num_seqs": 256, "max_num_batched_tokens": LENGTH, **limits}
            ),
            manager,
        )
        requests = [
            GenerationRequest(
                str(at), tuple(prompt), SamplingParams(temperature=0, max_tokens=length, ignore_eos=True), 0
            )
            for at, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        coming = [(0 if arrivals is None else arrivals[at], request) for at, request in enumerate(requests)]
        ran = Ran([], 0, 0, [], [], 0, 0)
        came: dict[str, float] = {}
        last: dict[str, float] = {}
        waste, step = [], 0
        wall, processor = time.perf_counter(), time.process_time()
        while len(scheduler) or coming:
            for _, request in [each for each in coming if each[0] <= step]:
                scheduler.add(request)
                came[request.id] = time.perf_counter()
            coming = [each for each in coming if each[0] > step]
            known = {request.id: request.num_output_tokens for request in scheduler.running}
            scheduled = scheduler.schedule(step)
            scheduler.update(scheduled, runner.execute(scheduled), step)
            now = time.perf_counter()
            ran.most_running = max(ran.most_running, len(scheduled.scheduled))
            held = sum(len(entry.block_table) * BLOCK for entry in scheduled.scheduled)
            waste.append(1 - sum(entry.end for entry in scheduled.scheduled) / held)
            for entry in scheduled.scheduled:
                request = entry.request
                if request.num_output_tokens > known.get(request.id, 0):
                    if request.id in last:
                        ran.gaps.append(now - last[request.id])
                    else:
                        ran.first.append(now - came[request.id])
                    last[request.id] = now
            step += 1
        ran.wall, ran.processor = time.perf_counter() - wall, time.process_time() - processor
        ran.waste = statistics.mean(waste)
        ran.outputs = [list(request.output_token_ids) for request in requests]
        return ran


def _equal(one: Ran, other: Ran) -> float:
    pairs = list(zip(one.outputs, other.outputs, strict=True))
    return sum(a == b for a, b in pairs) / len(pairs)


def _ratios(slow: Ran, fast: Ran) -> dict[str, float]:
    assert slow.count == fast.count
    return {
        "ratio": slow.wall / fast.wall,
        "cpu_ratio": slow.processor / fast.processor,
        "equal": _equal(slow, fast),
        "tokens_per_s": fast.count / fast.wall,
        "tokens_per_cpu_s": fast.count / fast.processor,
    }


def continuous(bench: Bench) -> dict[str, float]:
    """32 requests at once, against the same one after the other: of those the first 6 are run, and count for all."""
    prompts = bench.prompts(STREAMS, 32)
    together = bench.run(prompts, [48] * STREAMS)
    alone = bench.run(prompts[:6], [48] * 6, max_num_seqs=1)
    same = [one == other for one, other in zip(alone.outputs, together.outputs, strict=False)]
    assert all(same) or not bench.exact, "a batch changed tokens"
    return {
        "equal": sum(same) / len(same),
        "ratio": alone.wall / 6 * STREAMS / together.wall,
        "cpu_ratio": alone.processor / 6 * STREAMS / together.processor,
        "tokens_per_s": together.count / together.wall,
        "tokens_per_cpu_s": together.count / together.processor,
        "one_stream_tokens_per_s": alone.count / alone.wall,
        "one_stream_tokens_per_cpu_s": alone.count / alone.processor,
    }


def static_batches(bench: Bench) -> dict[str, float]:
    """96 requests of exponential lengths: whole batches of 32 that run until their longest ends, and continuous ones."""
    numbers = random.Random(1)
    lengths = [min(192, 1 + int(numbers.expovariate(1 / 40))) for _ in range(3 * STREAMS)]
    prompts = bench.prompts(3 * STREAMS, 32, seed=1)
    fast = bench.run(prompts, lengths, max_num_seqs=STREAMS)
    wall = processor = 0.0
    for at in range(0, len(prompts), STREAMS):
        part = slice(at, at + STREAMS)
        ran = bench.run(prompts[part], [max(lengths[part])] * STREAMS)
        wall, processor = wall + ran.wall, processor + ran.processor
        for whole, output in zip(ran.outputs, fast.outputs[part], strict=True):
            assert whole[: len(output)] == output or not bench.exact, "a batch changed tokens"
    return {
        "ratio": wall / fast.wall,
        "cpu_ratio": processor / fast.processor,
        "tokens_per_s": fast.count / fast.wall,
    }


def prefix(bench: Bench) -> dict[str, float]:
    """Time to the first token of a prompt of 1,016 tokens, whose first 1,000 another had: with the cache, and without."""
    one, other = bench.prompts(2, 1016, shared=1000, seed=2)
    manager = BlockManager(BLOCKS, BLOCK, prefix_caching=True)
    bench.run([one], [1], manager=manager)
    found = bench.run([other], [8], manager=manager)
    computed = bench.run([other], [8])
    return {
        "ratio": computed.first[0] / found.first[0],
        "cpu_ratio": computed.processor / found.processor,
        "equal": _equal(found, computed),
        "first_token_ms": found.first[0] * 1e3,
    }


def no_hits(bench: Bench) -> dict[str, float]:
    """What the prefix cache costs where nothing is found in it: time with it over time without, both ways in turn."""
    times: dict[bool, list[float]] = {True: [], False: []}
    outputs = []
    prompts = [[token, *prompt] for token, prompt in enumerate(bench.prompts(16, 96, seed=3), 300)]
    for cached in (True, False, False, True):
        ran = bench.run(prompts, [24] * 16, prefix_caching=cached)
        times[cached].append(ran.processor)
        outputs.append(ran.outputs)
    assert all(each == outputs[0] for each in outputs) or not bench.exact, "the cache changed tokens"
    return {"cost_ratio": sum(times[True]) / sum(times[False])}


def chunked(bench: Bench) -> dict[str, float]:
    """The longest wait for a token of 8 streams while a prompt of 1,536 tokens comes: in one step, and in chunks of 256."""
    prompts = [*bench.prompts(8, 32, seed=4), *bench.prompts(1, 1536, seed=5)]
    lengths, arrivals = [40] * 8 + [4], [0] * 8 + [6]
    whole = bench.run(prompts, lengths, arrivals=arrivals, max_num_batched_tokens=2048)
    parts = bench.run(prompts, lengths, arrivals=arrivals, max_num_batched_tokens=256)
    return {
        "ratio": max(whole.gaps) / max(parts.gaps),
        "equal": _equal(whole, parts),
        "longest_gap_ms": max(parts.gaps) * 1e3,
        "newcomers_first_token_ratio": max(parts.first) / max(whole.first),
    }


def paged(bench: Bench) -> dict[str, float]:
    """A cache of four times 1,024 tokens: four requests with that room reserved, and as many as blocks as they grow allow."""
    prompts = bench.prompts(48, 32, seed=6)
    lengths = [64] * 48
    blocks = 4 * 1024 // BLOCK + 1
    reserved = bench.run(prompts, lengths, blocks=blocks, max_num_seqs=4)
    fast = bench.run(prompts, lengths, blocks=blocks)
    return {
        **_ratios(reserved, fast),
        "sequences_ratio": fast.most_running / reserved.most_running,
        "waste": fast.waste,
        "waste_reserved": 1 - sum(len(p) + n / 2 for p, n in zip(prompts, lengths, strict=True)) / 48 / 1024,
    }


def short_cache(bench: Bench) -> dict[str, float]:
    """A cache of 8 bits: how many tokens as many bytes hold, how long steps take at 512 tokens, how many outputs are equal."""
    prompts = bench.prompts(16, 512, seed=7)
    plain = bench.run(prompts, [24] * 16)
    short = bench.run(prompts, [24] * 16, runner=bench.with_short_cache())
    same = [a == b for x, y in zip(plain.outputs, short.outputs, strict=True) for a, b in zip(x, y, strict=True)]
    return {
        "tokens_ratio": bench.runner.block_bytes / bench.with_short_cache().block_bytes,
        "ratio": statistics.median(plain.gaps) / statistics.median(short.gaps),
        "equal": _equal(plain, short),
        "equal_tokens": sum(same) / len(same),
    }


ROWS: dict[str, Callable[[Bench], dict[str, float]]] = {
    "continuous": continuous,
    "static_batches": static_batches,
    "prefix": prefix,
    "no_hits": no_hits,
    "chunked": chunked,
    "paged": paged,
    "short_cache": short_cache,
}
