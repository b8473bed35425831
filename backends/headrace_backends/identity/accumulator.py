"""Sums over sequences, for the identity backend: with a state that the server keeps, or told by controls and kept here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from headrace_backends.api import BatchRequest, EndedSequence
from headrace_protocol.datatype import Array


class Accumulator:
    """Adds the outputs of each request to those before it in its sequence.

    Where the configuration has states, they hold the sums: the first that of the first output, and so on. Otherwise the
    sums are kept here by correlation id, and the configuration's controls of kind START and END say when one is over.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        batching = config.get("sequence_batching", {})
        self._states: Final = [(s["input_name"], s["output_name"]) for s in batching.get("state", ())]
        self._controls: Final = {
            control.get("kind", "CONTROL_SEQUENCE_START"): given["name"]
            for given in batching.get("control_input", ())
            for control in given["control"]
        }
        self._sums: Final[dict[int | str, dict[str, Array]]] = {}

    def __len__(self) -> int:
        """Return of how many sequences a sum is kept here."""
        return len(self._sums)

    def add(self, request: BatchRequest, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the sums in the place of the outputs, and the states."""
        if self._states:
            sums = dict(outputs)
            for name, (before, after) in zip(outputs, self._states, strict=False):
                sums[name] = sums[after] = np.add(outputs[name], request.input(before))
            return sums
        earlier = {} if self._is(request, "START") else self._sums.get(request.correlation_id, {})
        sums = {
            name: np.add(array, earlier[name]) if name in earlier else np.array(array)
            for name, array in outputs.items()
        }
        self._sums[request.correlation_id] = sums
        if self._is(request, "END"):
            del self._sums[request.correlation_id]
        return sums

    def end(self, sequence: EndedSequence) -> None:
        """Forget a sequence that ended without its end flag."""
        self._sums.pop(sequence.correlation_id, None)

    def _is(self, request: BatchRequest, kind: str) -> bool:
        name = self._controls.get(f"CONTROL_SEQUENCE_{kind}")
        return name is not None and bool(request.input(name).item())
