"""Computes steps with a model of transformers: flattened inputs, one forward, logits of the rows that are sampled.

Knows no queue, no clock and no text; what becomes of the logits is `step_runner`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from headrace_backends.llm.attention import IMPLEMENTATION, STEP, SequenceSpan, ShapeProbe
from headrace_backends.llm.attention_paged import PagedStep
from headrace_backends.llm.fusing import fused
from headrace_backends.llm.kv_cache import KvCache, LayerShape, bytes_per_block, check_blocks, takes_eight_bits
from headrace_backends.llm.step import ScheduledRequest, pools
from headrace_backends.llm.step_runner import StepRunner
from headrace_protocol.errors import unsupported


class TorchRunner(StepRunner):
    """Runs one model of transformers with a paged cache. Not for two threads at once."""

    def __init__(
        self,
        model: Any,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        *,
        fuse: bool = False,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        """Take over the model's attention and reserve the cache.

        `fuse` takes the model's weights over as well, where its architecture is known and compiled loops are to be had: the
        model cannot be used any more but by this runner, nor may its modules be hooked. `quantization` of the weights, "int8"
        or "int4", is of fused models. `kv_cache_dtype` is "auto", the model's own, or "int8". Raises UNSUPPORTED where the
        model does not let its attention be replaced, or cannot be quantised, INVALID_ARG where the cache is too small for one
        request of `max_model_len` tokens.
        """
        probe = probed(model)
        shapes, eight_bits = probe.layers, takes_eight_bits(kv_cache_dtype)
        self.block_bytes: Final = bytes_per_block(shapes, block_size, model.dtype, eight_bits=eight_bits)
        check_blocks(num_blocks, block_size, max_model_len, self.block_bytes)
        self._model: Final = model
        self._device: Final[torch.device] = model.device
        self.cache: Final = KvCache(shapes, num_blocks, block_size, model.dtype, model.device, eight_bits=eight_bits)
        self._hidden: torch.Tensor | None = None
        """Of the step that is computed: each token's last hidden state, [1, tokens, width]."""
        self._fused: Final = fused(model, probe, quantization) if fuse else None
        if self._fused is None and quantization is not None:
            raise unsupported(
                f"quantization: {type(model).__name__} cannot be had in {quantization} here: its layers cannot be fused"
            )
        if self._fused is None:
            model.base_model.register_forward_hook(self._keep_hidden)
        super().__init__(int(model.config.get_text_config().vocab_size))
        self._warm_up()

    def _logits(self, scheduled: Sequence[ScheduledRequest], rows: Sequence[int]) -> torch.Tensor:
        """Return the logits [rows, vocabulary] that follow those of the step's tokens, in the model's own dtype."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[SequenceSpan] = []
        for entry in scheduled:
            spans.append(SequenceSpan(len(tokens), len(entry.token_ids), entry.start, entry.block_table))
            tokens.extend(entry.token_ids)
            positions.extend(range(entry.start, entry.end))
            slots.extend(entry.slots(self.cache.block_size))
        return self._forward(tokens, positions, PagedStep(self.cache, spans, slots), rows)

    def _forward(
        self, tokens: Sequence[int], positions: Sequence[int], step: PagedStep, rows: Sequence[int]
    ) -> torch.Tensor:
        if self._fused is not None:
            logits, hidden = self._fused(self._integers(tokens), self._integers(positions), step, self._integers(rows))
            self._hidden = hidden[None]
            return logits
        out: torch.Tensor = self._model(
            input_ids=self._integers([tokens]),
            position_ids=self._integers([positions]),
            use_cache=False,
            logits_to_keep=self._integers(rows),
            **{STEP: step},
        ).logits
        return out[0]

    def _warm_up(self) -> None:
        """Run one token in the block that nobody gets, so that what is compiled at first use is when requests come."""
        with torch.inference_mode():
            self._forward([0], [0], PagedStep(self.cache, [SequenceSpan(0, 1, 0, [0])], [0]), [0])

    def _keep_hidden(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._hidden = output[0]

    def _pooled(self, scheduled: Sequence[ScheduledRequest]) -> dict[int, NDArray[np.float32]]:
        """Return what each entry that pools gives of its vector (see `StepResult.pooled`), by its place."""
        hidden, self._hidden = self._hidden, None
        pooled: dict[int, NDArray[np.float32]] = {}
        first = 0
        for at, entry in enumerate(scheduled):
            after = first + len(entry.token_ids)
            if pools(entry):
                assert hidden is not None
                rows = hidden[0, first if entry.request.pooling == "mean" else after - 1 : after]
                pooled[at] = rows.float().sum(dim=0).cpu().numpy()
            first = after
        return pooled

    def _integers(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def cached_shapes(model: Any) -> Mapping[int, LayerShape]:
    """Return what each layer caches. See `probed`."""
    return probed(model).layers


def probed(model: Any) -> ShapeProbe:
    """Return what each layer caches and asks, by running one token; the model attends by `attention` from then on.

    Raises UNSUPPORTED where not all of the model's layers attend through transformers' attention interface.
    """
    name = type(model).__name__
    model.set_attn_implementation(IMPLEMENTATION)
    probe = ShapeProbe()
    try:
        with torch.inference_mode():
            one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            model(input_ids=one, position_ids=one, use_cache=False, logits_to_keep=one[0], **{STEP: probe})
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise unsupported(f"{name} cannot run with paged attention: {error}") from error
    expected = model.config.get_text_config().num_hidden_layers
    if len(probe.layers) != expected:
        raise unsupported(
            f"{name} cannot run with paged attention: {len(probe.layers)} of its {expected} layers use the interface"
        )
    return probe
