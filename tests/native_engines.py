"""Our engine around a small model on the disk, and somebody who hears what it tells."""

from __future__ import annotations

import threading

from headrace_backends.llm.engine import EngineCall, Told
from headrace_backends.llm.native import NativeEngine
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.errors import InferError


class Heard:
    """Hears an engine until a call has ended."""

    def __init__(self) -> None:
        self.news: list[Told] = []
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, threading.Event] = {}

    def told(self, news: list[Told]) -> None:
        self.news.extend(news)
        for each in news:
            assert each.error is None, each.error
            self.tokens.setdefault(each.number, []).extend(t for output in each.outputs for t in output.token_ids)
            if any(output.finished for output in each.outputs):
                self.ended[each.number].set()

    def broke(self, error: InferError) -> None:
        raise AssertionError(error)


def opened(version, settings: dict) -> tuple[NativeEngine, Heard]:
    common = {"model": "base", "dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 80}
    engine, heard = NativeEngine(version, common | settings, threads=1, device="cpu"), Heard()
    engine.open(heard)
    return engine, heard


def run(
    version, settings: dict, prompt, count: int, adapters: list[str | None], temperature: float = 0
) -> tuple[list[list[int]], NativeEngine]:
    """Continue the prompt once with each adapter, all at once; return the tokens and the closed engine."""
    engine, heard = opened(version, settings)
    try:
        params = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True)
        for number, adapter in enumerate(adapters):
            heard.ended[number] = threading.Event()
            engine.submit(EngineCall(number, (prompt,), params, 0, seed=number, adapter=adapter))
        for ended in heard.ended.values():
            assert ended.wait(60)
        engine.final_stats = engine.stats()
    finally:
        engine.close()
    return [heard.tokens[number] for number in range(len(adapters))], engine
