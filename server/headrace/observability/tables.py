"""Tables for the log at start-up."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.observability.logging import escape
from headrace.types import IndexEntry

_LONGEST_CELL = 160


def models_table(entries: Sequence[IndexEntry]) -> str:
    """Return a table of models: name, version, state and, where it is not ready, why. Lines end with no newline."""
    rows = [(entry.name, entry.version or "-", entry.state or "NOT LOADED", entry.reason or "-") for entry in entries]
    return _table(("Model", "Version", "State", "Reason"), rows or [("-", "-", "-", "no models")])


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = [[_cell(text) for text in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = [
        "|" + "|".join(f" {text:<{width}} " for text, width in zip(row, widths, strict=True)) + "|" for row in cells
    ]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def _cell(text: str) -> str:
    return escape(text, _LONGEST_CELL)
