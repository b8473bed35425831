"""LoRA adapters over one loaded model: each token of a step gets its own request's adapter, or none.

A linear layer with an adapter adds scale * (x A^T) B^T to the rows that are of the adapter (Hu et al. 2021; several adapters in
one batch after Punica and S-LoRA, Chen et al. and Sheng et al. 2023), in one small product for each adapter that the step has.
The model's own weights stay as they are, and rows without an adapter get what they get without any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812

from headrace_backends.llm.lora_files import AdapterFile, read_adapter
from headrace_backends.llm.step import ModelRunner, SchedulerOutput, StepResult
from headrace_protocol.errors import invalid, unsupported


@dataclass(slots=True)
class _Route:
    """Which rows of the step under way have which adapter."""

    groups: Sequence[tuple[str, torch.Tensor | None]] = ()
    """Adapters that are there, each with its rows; None is all rows."""
    num_rows: int = 0


class _Layer:
    """What the adapters add to one linear layer. Called behind the layer's own forward."""

    def __init__(self, route: _Route) -> None:
        self._route = route
        self.updates: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, _module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Take [1, T, in] and [1, T, out]; return the output with what the rows' adapters add."""
        if self._route.groups and inputs[0].shape[:-1] != (1, self._route.num_rows):
            raise RuntimeError(f"a layer got rows {list(inputs[0].shape)} of a step of {self._route.num_rows} tokens")
        for adapter, rows in self._route.groups:
            update = self.updates.get(adapter)
            if update is None:
                continue
            a, b = update
            if rows is None:
                output = output + F.linear(F.linear(inputs[0], a), b)
            else:
                added = F.linear(F.linear(inputs[0][0, rows], a), b)
                output = output.index_add(1, rows, added[None])
        return output


class LoraAdapters:
    """The adapters of one model, all in memory. Hooked into the model's linear layers for as long as it lives."""

    def __init__(self, model: Any, paths: Mapping[str, Path], max_rank: int) -> None:
        """Read the adapters and hook them in.

        Raises NOT_FOUND, INVALID_ARG or UNSUPPORTED as `lora_files` does, also where an adapter is of a higher rank than
        `max_rank` or does not fit this model.
        """
        self._device: Final = model.device
        self._route: Final = _Route()
        self._layers: dict[str, _Layer] = {}
        self.ranks: dict[str, int] = {}
        self.num_bytes = 0
        """What the matrices take."""
        for name, path in paths.items():
            self._add(model, name, read_adapter(name, path), max_rank)

    def route(self, spans: Sequence[tuple[str | None, int]]) -> None:
        """Say whose rows the next forward has: of each request in order its adapter and its number of rows."""
        rows: dict[str, list[int]] = {}
        first = 0
        for adapter, count in spans:
            if adapter is not None:
                rows.setdefault(adapter, []).extend(range(first, first + count))
            first += count
        unknown = rows.keys() - self.ranks.keys()
        assert not unknown, f"adapters that were not checked at the door: {unknown}"
        self._route.num_rows = first
        self._route.groups = [
            (name, None if len(its) == first else torch.tensor(its, device=self._device)) for name, its in rows.items()
        ]

    def _add(self, model: Any, name: str, file: AdapterFile, max_rank: int) -> None:
        if file.rank > max_rank:
            raise invalid(f"LoRA adapter '{name}' has rank {file.rank}; max_lora_rank is {max_rank}")
        for path, update in file.updates.items():
            module = _linear(model, name, path)
            expected = [module.out_features, module.in_features]
            found = [update.b.shape[0], update.a.shape[1]]
            if found != expected:
                raise invalid(f"LoRA adapter '{name}': {path} is {expected} in the model and {found} in the adapter")
            layer = self._layers.get(path)
            if layer is None:
                layer = self._layers[path] = _Layer(self._route)
                module.register_forward_hook(layer)
            a, b = (each.to(model.device, model.dtype) for each in (update.a, update.b))
            layer.updates[name] = a, b
            self.num_bytes += a.nbytes + b.nbytes
        self.ranks[name] = file.rank


class LoraRunner:
    """A runner whose model has adapters: says whose rows are whose, then lets it compute."""

    def __init__(self, runner: ModelRunner, adapters: LoraAdapters) -> None:
        """`runner` runs the model that the adapters are hooked into."""
        self._runner: Final = runner
        self._adapters: Final = adapters

    def execute(self, step: SchedulerOutput) -> Sequence[StepResult]:
        self._adapters.route([(entry.request.lora, len(entry.token_ids)) for entry in step.scheduled])
        try:
            return self._runner.execute(step)
        finally:
            self._adapters.route([])


def _linear(model: Any, name: str, path: str) -> Any:
    """Return the linear layer at `path`, which an adapter changes."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise invalid(f"LoRA adapter '{name}' changes {path}, which {type(model).__name__} does not have") from None
    if module is model.get_output_embeddings():
        raise unsupported(f"LoRA adapter '{name}' changes {path}, the output layer, which is not supported")
    if not {"in_features", "out_features"} <= set(dir(module)):
        raise unsupported(f"LoRA adapter '{name}' changes {path}, a {type(module).__name__}: expected a linear layer")
    return module
