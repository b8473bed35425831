"""Asking a model whether it can serve."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from headrace_backends.readiness import ReadinessCheck

LIMIT_S = 10.0


class Model:
    """Answers as `answer` does, and tells of changes."""

    def __init__(self) -> None:
        self.answer: Callable[[], bool] = lambda: True
        self.changes: list[bool] = []
        self._asked = threading.Condition()
        self._count = 0
        self.check = ReadinessCheck(self._is_ready, self._changed)

    def _is_ready(self) -> bool:
        try:
            return self.answer()
        finally:
            with self._asked:
                self._count += 1
                self._asked.notify_all()

    def _changed(self) -> None:
        with self._asked:
            self.changes.append(self.check.ready)
            self._asked.notify_all()

    def ask(self) -> None:
        """Ask, and wait until it has answered."""
        before = self._count
        self.check.ask()
        with self._asked:
            assert self._asked.wait_for(lambda: self._count > before, LIMIT_S)

    def wait(self, changes: list[bool]) -> None:
        with self._asked:
            assert self._asked.wait_for(lambda: self.changes == changes, LIMIT_S), self.changes


def refuse() -> bool:
    raise OSError("no connection")


def test_only_changes_are_told() -> None:
    model = Model()
    model.ask()
    model.answer = lambda: False
    model.ask()
    model.wait([False])
    model.answer = lambda: True
    model.check.ask()
    model.wait([False, True])


def test_a_model_that_raises_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.answer = refuse
    model.ask()
    model.wait([False])
    assert "OSError: no connection" in caplog.text


def test_a_model_that_does_not_answer_until_it_is_asked_again_is_not_ready() -> None:
    model = Model()
    going_on = threading.Event()
    model.answer = lambda: going_on.wait(LIMIT_S)
    model.check.ask()
    assert model.check.ready
    model.check.ask()
    assert not model.check.ready
    going_on.set()
    model.wait([False, True])
