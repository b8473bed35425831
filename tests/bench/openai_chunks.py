"""What the doors of OpenAI's API cost for each token that they stream: from the bytes of a response to those of a chunk.

    python tests/bench/openai_chunks.py

Prints microseconds of CPU a token, the least of five rounds. What the network costs is not in it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace.gateway.http.openai.call import ChunkMaker, event_of
from headrace.gateway.http.openai.chat_answer import ChatChunks, ChatForm
from headrace.gateway.http.openai.completion_answer import CompletionChunks, CompletionForm
from headrace.gateway.http.openai.directory import LanguageModel
from headrace.types import InferenceResponse, OutputTensor
from headrace_protocol import datatype as dt
from headrace_protocol.generation import ENCODER, EVENT_OUTPUT, ChoiceDelta, GenerationEvent, ModelCard, PromptTold
from openai_door import likely

TOKENS = 20_000
ROUNDS = 5
MODEL = LanguageModel("smollm2", "smollm2", -1, ModelCard(8192, 49152), "fp_1234567890")
EXCHANGE: Any = SimpleNamespace(request_id="a" * 24, created=1_796_053_995)
PLAN: Any = SimpleNamespace(legacy=False, reader=lambda *, in_reasoning: None)
PLAIN = ChoiceDelta(0, " token", num_tokens=5)
LIKELY = likely(" token", -0.5, *((f" {number}", -float(number)) for number in range(5)))
WITH_LOGPROBS = ChoiceDelta(0, " token", num_tokens=5, logprobs=(LIKELY,))


def chat(**form: bool) -> Callable[[], ChunkMaker]:
    return lambda: ChatChunks(ChatForm(1, PLAN, stream=True, **form), EXCHANGE, MODEL)


def completion(**form: bool) -> Callable[[], ChunkMaker]:
    return lambda: CompletionChunks(CompletionForm(1, 1, **form), EXCHANGE, MODEL)


def measure(make: Callable[[], ChunkMaker], delta: ChoiceDelta) -> float:
    """Return the seconds of CPU that a token takes."""
    maker = make()
    maker.take(GenerationEvent((PromptTold(5),), (ChoiceDelta(0, "a", num_tokens=1),)))
    payload = ENCODER.encode(GenerationEvent((), (delta,)))
    tensor = OutputTensor(EVENT_OUTPUT, dt.BYTES, (1,), len(payload).to_bytes(4, "little") + payload)
    response = InferenceResponse("smollm2", 1, [tensor])
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(TOKENS):
            event = event_of(response)
            assert event is not None
            maker.take(event)
        rounds.append((time.process_time() - began) / TOKENS)
    return min(rounds)


CASES: dict[str, tuple[Callable[[], ChunkMaker], ChoiceDelta]] = {
    "chat": (chat(), PLAIN),
    "chat, running usage": (chat(include_usage=True, continuous_usage=True), PLAIN),
    "chat, 5 log probabilities": (chat(logprobs=True), WITH_LOGPROBS),
    "completion": (completion(), PLAIN),
    "completion, 5 log probabilities": (completion(logprobs=True), WITH_LOGPROBS),
}

if __name__ == "__main__":
    for name, (make, delta) in CASES.items():
        print(f"{name}: {measure(make, delta) * 1e6:.2f} us a token")
