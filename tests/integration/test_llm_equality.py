"""SmolLM2-135M gives the same tokens however they are computed, and transformers' own where the likeliest is taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace_backends.llm.loading import load
from headrace_backends.llm.sampling_params import SamplingParams
from language_models import Engine, request
from llm_ways import WAYS, Ways

COUNT = 16


@pytest.fixture(scope="module")
def ways(smollm2: Path) -> Iterator[Ways]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads wait for each other longer than they compute where cores are shared
    yield Ways(smollm2, "float32", count=COUNT)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def drawn(ways: Ways) -> list[list[int]]:
    """What each seed draws where all are in one batch."""
    tokens = ways.run(WAYS["in one batch"])[1]
    assert len({tuple(each) for each in tokens}) == len(tokens)
    return tokens


@pytest.mark.parametrize("name", WAYS)
def test_the_tokens_are_the_same(ways: Ways, drawn: list[list[int]], name: str) -> None:
    which = [0, 3] if name == "one at a time" else range(len(ways.prompts))
    greedy, seeded = ways.run(WAYS[name], which)
    assert greedy == [ways.expected[at] for at in which]
    assert seeded == [drawn[at] for at in which]


def test_the_chat_template_and_the_end_of_a_turn_come_from_the_file(smollm2: Path) -> None:
    loaded = load(smollm2, "bfloat16")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert loaded.tokenizer.decode(prompt).endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    assert loaded.eos_token_ids == {2} == {loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert (loaded.vocab_size, loaded.max_model_len) == (49152, 8192)
    answer = request("a", prompt, SamplingParams(temperature=0), eos_token_ids=loaded.eos_token_ids)
    (tokens,) = Engine(loaded.model).run([answer])
    assert loaded.tokenizer.decode(tokens) == "The capital of France is Paris.<|im_end|>"
