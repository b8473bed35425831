"""Computes steps by llama.cpp: sequences for block tables, and logits that our own sampler chooses from.

What of a step depends on what the step itself computes (a prefix that two requests share, another adapter, hidden states in
place of logits alone) goes into a batch of its own. Knows no queue, no clock and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_backends.llm.adapters.llama_cpp_sequences import SequenceBook, SequenceMemory
from headrace_backends.llm.block_manager import NULL_BLOCK
from headrace_backends.llm.step import ScheduledRequest, SchedulerOutput, StepResult, pools
from headrace_backends.llm.step_runner import StepRunner


class Context(SequenceMemory, Protocol):
    """What is asked of `llama_cpp_model.LlamaContext`."""

    @property
    def batch(self) -> int:
        """Tokens that are computed at once, at most."""
        ...

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], outputs: Sequence[bool]
    ) -> int: ...

    def logits(self, rows: int) -> NDArray[np.float32]: ...

    def hidden(self, rows: int) -> NDArray[np.float32]: ...

    def want_hidden(self, *, wanted: bool) -> None: ...

    def use_adapter(self, adapter: Any) -> None: ...


class LlamaCppRunner(StepRunner):
    """Runs one model of llama.cpp's. Not for two threads at once."""

    def __init__(
        self,
        context: Context,
        vocab_size: int,
        block_size: int,
        num_sequences: int,
        adapters: Mapping[str, Any],
        *,
        keep_prefixes: bool,
    ) -> None:
        """`adapters` are LoRA adapters by their names; `num_sequences` is how many the context may have."""
        super().__init__(vocab_size)
        self._context: Final = context
        self._book: Final = SequenceBook(context, num_sequences, block_size, keep=keep_prefixes)
        self._block_size: Final = block_size
        self._adapters: Final = adapters
        self._wave = _Wave(context)
        self._hidden: dict[int, NDArray[np.float32]] = {}

    def execute(self, step: SchedulerOutput) -> Sequence[StepResult]:
        self._book.begin([*step.preempted_ids, *step.finished_ids])
        ids = [entry.request.id for entry in step.scheduled]
        try:
            results = super().execute(step)
        except BaseException:
            self._book.forget(ids)
            raise
        # what is computed in the block that is nobody's is nobody's either
        self._book.forget(entry.request.id for entry in step.scheduled if NULL_BLOCK in entry.block_table)
        return results

    def _logits(self, scheduled: Sequence[ScheduledRequest], rows: Sequence[int]) -> torch.Tensor:
        wanted = set(rows)
        self._hidden = {}
        self._wave = _Wave(self._context)
        first = 0
        for at, entry in enumerate(scheduled):
            self._add(at, entry, [first + offset in wanted for offset in range(len(entry.token_ids))])
            first += len(entry.token_ids)
        self._wave.compute()
        places = {row: place for place, row in enumerate(sorted(wanted))}
        logits = self._wave.logits
        order = [places[row] for row in rows]
        return torch.from_numpy(logits if order == list(range(len(logits))) else logits[order])

    def _add(self, at: int, entry: ScheduledRequest, outputs: list[bool]) -> None:
        """Put an entry's tokens into the batch, or into the next one."""
        wave, request = self._wave, entry.request
        if self._book.is_new(entry):
            found = entry.block_table[: entry.start // self._block_size]
            if not wave.blocks.isdisjoint(found):
                wave.compute()
        adapter = None if request.lora is None else self._adapters[request.lora]
        hidden = pools(entry)
        wave.begin(adapter, hidden=hidden)
        sequence, start = self._book.place(entry)
        wave.blocks.update(entry.block_table[entry.start // self._block_size :])
        again = request.token_ids[start : entry.start]
        wave.add([*again, *entry.token_ids], start, sequence, [False] * len(again) + outputs)
        if hidden:
            count = len(entry.token_ids)
            wave.compute(keep_hidden=lambda states: self._keep(at, entry, states[-count:]))

    def _keep(self, at: int, entry: ScheduledRequest, states: NDArray[np.float32]) -> None:
        self._hidden[at] = states.sum(axis=0) if entry.request.pooling == "mean" else states[-1].copy()

    def _pooled(self, scheduled: Sequence[ScheduledRequest]) -> Mapping[int, NDArray[np.float32]]:
        return {at: self._hidden[at] for at, entry in enumerate(scheduled) if pools(entry)}


class _Wave:
    """Tokens that are computed together, and the logits of all that have been."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._sequences: list[int] = []
        self._outputs: list[bool] = []
        self._logits: list[NDArray[np.float32]] = []
        self._adapter: Any = None
        self._wants_hidden = False
        self.blocks: set[int] = set()
        """What the tokens that wait are written into."""

    @property
    def logits(self) -> NDArray[np.float32]:
        """Of all outputs, in order; borrowed until the next step."""
        if len(self._logits) == 1:
            return self._logits[0]
        return np.concatenate(self._logits) if self._logits else np.zeros((0, 1), np.float32)

    def begin(self, adapter: Any, *, hidden: bool) -> None:
        """Have the next tokens computed with that adapter, and with hidden states or without."""
        if (adapter is not self._adapter or hidden != self._wants_hidden) and self._tokens:
            self.compute()
        self._adapter, self._wants_hidden = adapter, hidden

    def add(self, tokens: Sequence[int], start: int, sequence: int, outputs: Sequence[bool]) -> None:
        self._tokens.extend(tokens)
        self._positions.extend(range(start, start + len(tokens)))
        self._sequences.extend([sequence] * len(tokens))
        self._outputs.extend(outputs)

    def compute(self, keep_hidden: Callable[[NDArray[np.float32]], None] | None = None) -> None:
        """Compute what waits, in as many batches as it takes."""
        if not self._tokens:
            return
        context, hidden = self._context, []
        context.use_adapter(self._adapter)
        context.want_hidden(wanted=self._wants_hidden)
        for first in range(0, len(self._tokens), context.batch):
            part = slice(first, first + context.batch)
            tokens = self._tokens[part]
            outputs = [True] * len(tokens) if self._wants_hidden else self._outputs[part]
            self._own_logits()
            count = context.decode(tokens, self._positions[part], self._sequences[part], outputs)
            if self._wants_hidden:
                hidden.append(context.hidden(count).copy())
            elif count:
                self._logits.append(context.logits(count))
        if keep_hidden is not None:
            keep_hidden(np.concatenate(hidden))
        for waiting in (self._tokens, self._positions, self._sequences, self._outputs):
            waiting.clear()
        self.blocks.clear()

    def _own_logits(self) -> None:
        """Copy the last batch's logits, which llama.cpp writes over."""
        if self._logits and self._logits[-1].base is not None:
            self._logits[-1] = self._logits[-1].copy()
