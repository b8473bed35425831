"""Every way in which the engine may compute the same text, over one model, and what transformers says it has to be.

Half of each batch is greedy, half is drawn with seeds. A way is right where it gives the tokens that one request alone gets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace_backends.llm.admission import SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.core import EngineCore
from headrace_backends.llm.draft_model import DraftModelConfig, DraftModelDrafter
from headrace_backends.llm.loading import load
from headrace_backends.llm.ngram import Drafter, NgramConfig, NgramDrafter
from headrace_backends.llm.runner import TorchRunner
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.scheduler import Scheduler
from headrace_backends.llm.text_codec import HfTextCodec
from headrace_backends.llm.waiting import Policy
from language_models import BLOCK, generated_by_transformers, request

QUESTIONS = (
    "What is the capital of France?",
    "Write a poem about rivers.",
    "Count from one to ten: one, two, three, four, five, six, seven, eight, nine, ten. Count from one to ten: one, two,",
    "Why is the sky blue? Answer for a child of six years, in a few short sentences.",
)
BLOCKS = 160


@dataclass(frozen=True)
class Way:
    """How requests are computed, and what shows that they were."""

    limits: dict[str, Any] = field(default_factory=dict)
    fused: bool = True
    blocks: int = BLOCKS
    caching: bool = False
    drafter: str | None = None
    happened: Callable[[Any], bool] = lambda _: True
    """Of the scheduler's counts."""


WAYS: dict[str, Way] = {
    "one at a time": Way({"max_num_seqs": 1}),
    "in one batch": Way(),
    "in one batch, by the model's own layers": Way(fused=False),
    "in chunks": Way({"max_num_batched_tokens": 23, "max_num_seqs": 8}),
    "with preemption": Way({"max_model_len": 96}, blocks=13, happened=lambda counts: counts.num_preemptions > 0),
    "with cached prefixes": Way(
        {"max_num_seqs": 3}, caching=True, happened=lambda counts: counts.prefix_cache_hits >= 3 * BLOCK
    ),
    "with guesses by n-grams": Way(drafter="ngram", happened=lambda counts: counts.num_accepted_tokens > 0),
    "with guesses by a draft model, some of them wrong": Way(
        drafter="draft",
        happened=lambda counts: 0 < counts.num_accepted_tokens < counts.num_draft_tokens,
    ),
    "with all of these": Way(
        {"max_model_len": 96, "max_num_batched_tokens": 23, "max_num_seqs": 6, "policy": Policy.LPM},
        blocks=13,
        caching=True,
        drafter="ngram",
        happened=lambda counts: counts.num_preemptions > 0 and counts.num_accepted_tokens > 0,
    ),
}


class Wrong:
    """Guesses what another guesses, and changes the last token of each second guess."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self._turns = itertools.count()

    def propose(self, requests):
        return [
            [*guess[:-1], guess[-1] ^ 1] if guess and next(self._turns) % 2 else guess
            for guess in self._inner.propose(requests)
        ]

    def forget(self, request_id: str) -> None:
        self._inner.forget(request_id)


class Ways:
    """A model, once in transformers' hands and once in ours, and its answers to some questions."""

    def __init__(self, source: Path, dtype: str, *, count: int, length: int = 256) -> None:
        """Continue each question by `count` tokens; no request is longer than `length`."""
        self.count, self.length = count, length
        loaded = load(source, dtype)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.end = min(loaded.eos_token_ids)
        self.prompts = [self._prompt(question) for question in QUESTIONS]
        self.expected = [generated_by_transformers(self.model, prompt, count) for prompt in self.prompts]
        self.plain = TorchRunner(self.model, BLOCKS, BLOCK, length)
        self.fused = TorchRunner(load(source, dtype).model, BLOCKS, BLOCK, length, fuse=True)
        self.text = HfTextCodec(self.tokenizer, loaded.vocab_size)
        self._names = itertools.count()

    def _prompt(self, question: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer(question).input_ids)
        messages = [{"role": "user", "content": question}]
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def run(self, way: Way, which: Sequence[int] | None = None) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of the questions `which`, all of them by default: greedy ones, and those drawn by seeds."""
        places = range(len(self.prompts)) if which is None else which
        greedy = SamplingParams(temperature=0, max_tokens=self.count, min_tokens=self.count)
        drawn = SamplingParams(
            temperature=0.9, top_p=0.9, top_k=50, max_tokens=self.count, min_tokens=self.count
        )  # fmt: skip
        run = next(self._names)
        requests = [
            request(f"{run}/{kind}/{at}", self.prompts[at], params, seed=at, eos_token_ids=frozenset({self.end}))
            for kind, params in enumerate((greedy, drawn))
            for at in places
        ]
        core = self._core(way)
        for each in requests:
            assert core.add(each) is None
        runner = self.fused if way.fused else self.plain
        now = 0
        while len(core):
            step = core.schedule(now)
            assert step, "nothing can run"
            core.update(step, runner.execute(step), now)
            core.check_integrity()
            now += 1
        blocks = core.scheduler.blocks
        assert blocks.num_free == blocks.num_usable, "a block is not given back"
        assert way.happened(core.scheduler.stats), "it was not computed that way"
        tokens = [list(each.output_token_ids) for each in requests]
        return tokens[: len(places)], tokens[len(places) :]

    def _core(self, way: Way) -> EngineCore:
        config = SchedulerConfig(**{"max_model_len": self.length, "max_num_batched_tokens": 2048, **way.limits})
        scheduler = Scheduler(config, BlockManager(way.blocks, BLOCK, prefix_caching=way.caching))
        drafters = {None: lambda: None, "ngram": lambda: NgramDrafter(NgramConfig()), "draft": self._draft}
        return EngineCore(scheduler, self.text, drafters[way.drafter]())

    def _draft(self) -> Drafter:
        """Return one that guesses by the same weights, unfused."""
        config = DraftModelConfig(max_model_len=self.length, vocab_size=self.plain._model.config.vocab_size)
        return Wrong(DraftModelDrafter(config, self.plain, BlockManager(BLOCKS, BLOCK)))

    def gap(self, prefix: Sequence[int], one: int, other: int) -> tuple[float, float]:
        """Return how far two tokens' logits lie from the highest after some tokens, as transformers has it.

        In units of the last place of bf16 at that height: of a number from 2^k up to 2^(k + 1) that is 2^(k - 7).
        """
        kept = self.model.config._attn_implementation
        self.model.set_attn_implementation("sdpa")
        try:
            with torch.inference_mode():
                logits = self.model(torch.tensor([list(prefix)]), use_cache=False).logits[0, -1].float()
        finally:
            self.model.set_attn_implementation(kept)
        most = float(logits.max())
        place = 2.0 ** (int(torch.tensor(abs(most)).log2().floor()) - 7)
        return (most - float(logits[one])) / place, (most - float(logits[other])) / place
