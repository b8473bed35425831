"""Asks a model whether it can serve, beside what it serves, and tells when that has changed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

_LOG: Final = logging.getLogger(__name__)


class ReadinessCheck:
    """One question at a time, each in a thread of its own. `ready` is the last answer; True before the first."""

    def __init__(self, is_ready: Callable[[], bool], on_change: Callable[[], None]) -> None:
        """`on_change` is called by any thread when `ready` has changed."""
        self._is_ready: Final = is_ready
        self._on_change: Final = on_change
        self._lock: Final = threading.Lock()
        self._asking: object | None = None
        """Stands for the question that has not been answered yet."""
        self.ready = True

    def ask(self) -> None:
        """Ask, unless the last question is not answered yet: then the model counts as not ready."""
        with self._lock:
            late = self._asking is not None
            if not late:
                self._asking = question = object()
        if late:
            self._set(ready=False, why="it does not answer")
        else:
            threading.Thread(target=self._answer, args=(question,), name="headrace-readiness", daemon=True).start()

    def _answer(self, question: object) -> None:
        why = "it says so"
        try:
            ready = bool(self._is_ready())
        except BaseException as error:
            ready, why = False, f"asking it failed: {type(error).__name__}: {error}"
        with self._lock:
            if self._asking is question:
                self._asking = None
        self._set(ready=ready, why=why)

    def _set(self, *, ready: bool, why: str) -> None:
        with self._lock:
            changed, self.ready = ready != self.ready, ready
        if changed:
            if not ready:
                _LOG.warning("the model is not ready: %s", why)
            self._on_change()
