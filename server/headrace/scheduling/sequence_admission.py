"""Which requests may be one of a sequence at all: their batch size and their correlation id. Pure."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from headrace.repository.model_config import SequenceBatching
from headrace.scheduling.sequence_parts import SequenceItem
from headrace.types import SEQUENCE_START
from headrace_protocol.datatype import BYTES
from headrace_protocol.errors import InferError, invalid

_FIRST_OWN_ID: Final = 1 << 62


class SequenceAdmission:
    """Checks the requests to one model, and names those of an iterative model that come without a name."""

    def __init__(self, settings: SequenceBatching, model_name: str) -> None:
        self._settings = settings
        self._model_name = model_name
        self._named = 0

    def admit(self, item: SequenceItem, taken: Container[int | str]) -> None:
        """Raise INVALID_ARG where a request cannot be one of a sequence; complete those of an iterative model.

        `taken` are the correlation ids in use.
        """
        model, correlation = self._model_name, self._settings.correlation
        if item.rows != 1:
            raise invalid(
                f"model '{model}' takes sequences, whose requests have a batch size of 1, this one has {item.rows}"
            )
        if self._settings.iterative:
            item.flags = SEQUENCE_START
            item.correlation_id = item.correlation_id or self._own_id(taken)
        given = item.correlation_id
        if not given:
            raise invalid(f"model '{model}' takes sequences: a request needs a sequence_id that is not 0 or empty")
        if correlation is None:
            return
        if (correlation is BYTES) is not isinstance(given, str):
            kind = "a string" if isinstance(given, str) else "a number"
            raise invalid(f"sequence_id {given!r} is {kind}, model '{model}' takes it as {correlation.name}")
        if isinstance(given, int) and given > self._settings.largest_id:
            raise invalid(
                f"sequence_id {given} is too large: model '{model}' takes it as {correlation.name}, "
                f"up to {self._settings.largest_id}"
            )

    def no_start(self, item: SequenceItem) -> InferError:
        """Return the error for a request of a sequence that is not under way."""
        return invalid(
            f"sequence {item.correlation_id!r} is not under way in model '{self._model_name}': the first request of a "
            "sequence needs the start flag, and so does one after its end"
        )

    def _own_id(self, taken: Container[int | str]) -> int | str:
        """Return an id that is not in use: of the upper half of those that the model takes, one after the other."""
        first = min(_FIRST_OWN_ID, self._settings.largest_id // 2 + 1)
        while True:
            number = first + self._named % first
            self._named += 1
            own = str(number) if self._settings.correlation is BYTES else number
            if own not in taken:
                return own
