"""A model's tokens are read for its grammars once: beside loading where it generates, and never at the cost of a request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_backends.llm import grammar_source
from headrace_backends.llm.engine_loop import EngineLoop
from headrace_backends.llm.grammar_llguidance import LlgBuilder
from headrace_backends.llm.grammar_source import ModelTokens, grammars_of
from headrace_protocol.errors import ErrorCode, InferError, unsupported
from headrace_protocol.generation import StructuredOutput
from language_models import byte_tokenizer, tiny_folder
from native_engines import opened

WAIT = 60
DIGITS = StructuredOutput("regex", "[0-9]+")


class Reading:
    """Stands in the place of `LlgBuilder`, and notes when it is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[], Any] = lambda: None) -> None:
        self.begun, self.threads = threading.Event(), list[str]()
        self.done = False
        self._before = before
        monkeypatch.setattr(grammar_source, "LlgBuilder", self.read)

    def read(self, *of: Any) -> LlgBuilder:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        self._before()
        builder = LlgBuilder(*of)
        self.done = True
        return builder


def test_tokens_are_read_ahead_of_requests_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(monkeypatch)
    grammars = grammars_of(byte_tokenizer(), {258}, 300, ahead=True)
    assert reading.begun.wait(WAIT), "nothing was compiled yet"
    for spec in ("a+", "b+"):
        assert grammars.compile(StructuredOutput("regex", spec)).result(WAIT)
    grammars.close()
    assert reading.threads == ["grammar-tokens"]


def test_tokens_of_a_model_that_may_never_need_them_are_read_when_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(monkeypatch)
    grammars = grammars_of(byte_tokenizer(), {258}, 300)
    grammars.tokens.wait()
    assert not reading.begun.is_set()
    assert grammars.compile(DIGITS).result(WAIT)
    grammars.close()
    assert reading.threads == ["grammar-tokens"]


def test_what_is_read_from_may_be_freed_once_the_grammars_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closing, end = threading.Event(), ModelTokens.end

    def note_and_end(tokens: ModelTokens) -> None:
        closing.set()
        end(tokens)

    monkeypatch.setattr(ModelTokens, "end", note_and_end)
    reading = Reading(monkeypatch, lambda: closing.wait(WAIT))
    grammars_of(byte_tokenizer(), {258}, 300, ahead=True).close()
    assert reading.done


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (unsupported("no fast form"), ErrorCode.UNSUPPORTED, "no fast form"),
        (ZeroDivisionError("a fault"), ErrorCode.INTERNAL, "ZeroDivisionError: a fault"),
    ],
)
def test_tokens_that_cannot_be_read_fail_each_request_and_not_the_model(
    caplog: pytest.LogCaptureFixture, failure: Exception, code: ErrorCode, text: str
) -> None:
    def fail() -> LlgBuilder:
        raise failure

    tokens = ModelTokens(fail)
    tokens.begin()
    tokens.wait()
    assert f"not to be had of this model: {text}" in caplog.text
    raised = []
    for _ in range(2):
        with pytest.raises(InferError, match=text) as caught:
            tokens.builder()
        raised.append(caught.value)
    assert {error.code for error in raised} == {code}
    assert raised[0] is not raised[1]


def test_a_model_is_loaded_beside_and_there_only_once_its_tokens_are_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    tiny_folder(tmp_path / "base", vocab_size=512)
    started, start = threading.Event(), EngineLoop.start

    def last_of_loading(loop: EngineLoop) -> None:
        start(loop)
        started.set()

    beside: list[bool] = []
    reading = Reading(monkeypatch, lambda: beside.append(started.wait(WAIT)))
    monkeypatch.setattr(EngineLoop, "start", last_of_loading)
    engine, _ = opened(tmp_path, {})
    try:
        assert beside == [True], "loading went on to its end meanwhile"
        assert reading.done
        assert "tokens for structured output: read in" in caplog.text
    finally:
        engine.close()


def test_a_model_that_makes_vectors_alone_reads_no_tokens_for_grammars(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_folder(tmp_path / "base", vocab_size=512)
    reading = Reading(monkeypatch)
    engine, _ = opened(tmp_path, {"task": "embed"})
    engine.close()
    assert not reading.begun.is_set()
