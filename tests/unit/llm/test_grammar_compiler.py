"""Grammars are compiled away from who asks, once, within a time; what is kept of them has a bound."""

import threading
from types import SimpleNamespace

import pytest

from headrace_backends.llm.grammar_compiler import GrammarCompiler
from headrace_protocol.errors import ErrorCode, InferError, invalid, unavailable
from headrace_protocol.generation import StructuredOutput

WAIT = 30


def regex(text: str) -> StructuredOutput:
    return StructuredOutput("regex", text)


class Builder:
    """Builds things that are no grammars; each description waits while it is held back."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.held: dict[str, threading.Event] = {}
        self.entered = threading.Semaphore(0)
        self.fails: InferError | Exception | None = None
        self.late = 0
        """How many of the next ones take too long."""

    def hold(self, text: str) -> None:
        self.held[text] = threading.Event()

    def wait(self, done: threading.Event, _limit_s: float) -> bool:
        if self.late:
            self.late -= 1
            assert self.entered.acquire(timeout=WAIT)
            return False
        return done.wait(WAIT)

    def __call__(self, structured: StructuredOutput):
        self.built.append(structured.spec)
        self.entered.release()
        if structured.spec in self.held:
            assert self.held[structured.spec].wait(WAIT)
        if self.fails is not None:
            raise self.fails
        return SimpleNamespace(spoiled=False, spec=structured.spec)


@pytest.fixture
def builder():
    return Builder()


@pytest.fixture
def compiler_of(builder):
    made: list[GrammarCompiler] = []

    def make(**limits) -> GrammarCompiler:
        made.append(GrammarCompiler(builder, wait=builder.wait, **limits))
        return made[-1]

    yield make
    for event in builder.held.values():
        event.set()
    for each in made:
        each.close()


def error_of(future) -> InferError:
    error = future.exception(WAIT)
    assert isinstance(error, InferError)
    return error


def test_one_description_is_compiled_once(builder, compiler_of):
    compiler = compiler_of()
    grammars = {id(compiler.compile(regex("a")).result(WAIT)) for _ in range(5)}
    assert (len(grammars), builder.built) == (1, ["a"])


def test_kinds_with_the_same_text_are_not_confused(compiler_of):
    compiler = compiler_of()
    choice = compiler.compile(StructuredOutput("choice", "a")).result(WAIT)
    assert compiler.compile(regex("a")).result(WAIT) is not choice


def test_who_asks_does_not_wait_and_quick_ones_pass_a_slow_one(builder, compiler_of):
    builder.hold("slow")
    compiler = compiler_of()
    slow = compiler.compile(regex("slow"))
    assert compiler.compile(regex("quick")).result(WAIT)
    assert not slow.done()
    builder.held["slow"].set()
    assert slow.result(WAIT)


def test_one_that_takes_too_long_is_refused_and_others_go_on(builder, compiler_of):
    builder.hold("for ever")
    builder.late = 1
    compiler = compiler_of(limit_s=7)
    assert "longer than 7 s" in error_of(compiler.compile(regex("for ever"))).message
    assert compiler.compile(regex("quick")).result(WAIT)


def test_while_all_threads_are_lost_to_long_ones_nothing_more_is_taken(builder, compiler_of):
    compiler = compiler_of()
    builder.late = 2
    for name in ("one", "two"):
        builder.hold(name)
        assert error_of(compiler.compile(regex(name))).code is ErrorCode.INVALID_ARG
    assert error_of(compiler.compile(regex("three"))).code is ErrorCode.UNAVAILABLE
    assert "three" not in builder.built


def test_what_is_wrong_is_told_and_remembered(builder, compiler_of):
    builder.fails = invalid("regex: not one")
    compiler = compiler_of()
    assert [error_of(compiler.compile(regex("("))).message for _ in range(3)] == ["regex: not one"] * 3
    assert builder.built == ["("]


@pytest.mark.parametrize("failure", [unavailable("not now"), ValueError("a fault of ours")])
def test_what_may_work_later_is_tried_again(builder, compiler_of, failure):
    builder.fails = failure
    compiler = compiler_of()
    assert error_of(compiler.compile(regex("a"))).code in {ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL}
    builder.fails = None
    assert compiler.compile(regex("a")).result(WAIT)


def test_where_the_system_has_no_thread_to_give_one_is_refused_and_may_be_tried_again(compiler_of, monkeypatch):
    compiler = compiler_of()
    assert compiler.compile(regex("warm")).result(WAIT)
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "grammar-build":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(InferError, match="can't start new thread") as raised:
            compiler.compile(regex("a")).result(WAIT)
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert compiler.compile(regex("a")).result(WAIT).spec == "a"


def test_two_hundred_descriptions_leave_no_more_than_are_kept(compiler_of):
    compiler = compiler_of(most_kept=16)
    for future in [compiler.compile(regex(f"a{{{at}}}")) for at in range(200)]:
        assert future.result(WAIT)
    assert len(compiler) == 16


def test_what_is_kept_is_bounded_in_bytes_too(compiler_of):
    compiler = compiler_of(most_kept_bytes=10_000)
    for at in range(20):
        compiler.compile(regex(f"{at:02}" * 1000)).result(WAIT)
    assert len(compiler) == 3


def test_what_was_asked_for_lately_is_kept(builder, compiler_of):
    compiler = compiler_of(most_kept=2)
    for text in ("a", "b", "a", "c", "a"):
        compiler.compile(regex(text)).result(WAIT)
    assert sorted(builder.built) == ["a", "b", "c"]


def test_a_grammar_that_has_grown_too_large_is_made_anew(builder, compiler_of):
    compiler = compiler_of()
    first = compiler.compile(regex("a")).result(WAIT)
    first.spoiled = True
    assert compiler.compile(regex("a")).result(WAIT) is not first
    assert builder.built == ["a", "a"]


def test_more_than_may_wait_are_refused(builder, compiler_of):
    compiler = compiler_of(threads=1, most_waiting=3)
    builder.hold("0")
    waiting = [compiler.compile(regex(str(at))) for at in range(3)]
    assert error_of(compiler.compile(regex("one more"))).code is ErrorCode.UNAVAILABLE
    builder.held["0"].set()
    assert [future.result(WAIT).spec for future in waiting] == ["0", "1", "2"]


def test_closing_fails_what_waits_and_ends_the_threads(builder, compiler_of):
    compiler = compiler_of(threads=1)
    builder.hold("running")
    running, waiting = compiler.compile(regex("running")), compiler.compile(regex("waiting"))
    assert builder.entered.acquire(timeout=WAIT)
    closing = threading.Thread(target=compiler.close)
    closing.start()
    while not compiler._closed:
        pass
    builder.held["running"].set()
    closing.join(WAIT)
    assert not closing.is_alive()
    assert running.result(WAIT)
    assert error_of(waiting).code is ErrorCode.UNAVAILABLE
    assert error_of(compiler.compile(regex("late"))).code is ErrorCode.UNAVAILABLE
