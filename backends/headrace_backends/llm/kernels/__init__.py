"""Compiled loops of the language models' engine: what PyTorch has no single operator for.

numba compiles them at their first use, for the processor that runs them, and keeps them on the disk for the next start; no
other compiler is needed. Without numba the engine runs on PyTorch's operators alone, slower. See docs/llm.md.
"""

from __future__ import annotations

import functools
import logging
from typing import Final

_LOG: Final = logging.getLogger(__name__)


@functools.cache
def available() -> bool:
    """Say whether loops can be compiled here; why not is told once."""
    try:
        import headrace_backends.llm.kernels.rows  # noqa: F401
    except ImportError as error:
        _LOG.warning("the engine runs without compiled loops, slower: %s (pip install numba)", error)
        return False
    return True
