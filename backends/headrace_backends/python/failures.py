"""What an exception of a model's code is called in the error that clients get: type, text and where it was raised.

Frames of this package are left out: they are the same for every model and tell nothing.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final

_OURS: Final = str(Path(__file__).resolve().parents[1]) + "/"
_MAX_TEXT: Final = 4096
"""Characters of an exception's own text that are told."""
_MAX_FRAMES: Final = 16


def describe(error: BaseException) -> str:
    """Return `Type: text` and a line `at file(line): function` for each frame of the model's code, innermost first."""
    try:
        text = str(error)
    except Exception as second:
        text = f"(its text cannot be had: {type(second).__name__})"
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}... ({len(text)} characters)"
    kind = type(error).__name__
    return "\n".join([f"{kind}: {text}" if text else kind, *places(error)])


def places(error: BaseException) -> list[str]:
    """Return where the exception passed through code that is not this package's, innermost first."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, "<frozen importlib"))
    ]
    lines = [f"at {frame.filename}({frame.lineno}): {frame.name}" for frame in reversed(frames)]
    if len(lines) <= _MAX_FRAMES:
        return lines
    half = _MAX_FRAMES // 2
    return [*lines[:half], f"... {len(lines) - _MAX_FRAMES} frames more ...", *lines[-half:]]
