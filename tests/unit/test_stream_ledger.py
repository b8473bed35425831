"""The books of one stream: order, bounds and ends."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.gateway.grpc.stream_ledger import Answer, StreamLedger, StreamRequest
from headrace_protocol.errors import invalid


class Book:
    """A ledger, and what it lets out, as (request id, number of the answer)."""

    def __init__(self, **bounds):
        self.ledger = StreamLedger(**bounds)
        self.requests = {}

    def begin(self, name, *, ordered=True, nbytes=1):
        self.requests[name] = request = StreamRequest(name)
        self.ledger.begin(request, nbytes, ordered=ordered)
        self.ledger.check_integrity()

    def put(self, name, text="", *, last=True):
        answer = Answer(self.requests[name], invalid(name + text), last)
        taken = self.ledger.put(answer)
        self.ledger.check_integrity()
        return taken

    def take(self):
        """Return everything that may be written now, and note that it was."""
        out = []
        while (answer := self.ledger.take()) is not None:
            out.append(answer.outcome.message)
            self.ledger.written(answer)
            self.ledger.check_integrity()
        return out


def test_ordinary_requests_are_answered_in_the_order_in_which_they_came():
    book = Book()
    for name in "abc":
        book.begin(name)
    book.put("c")
    book.put("b")
    assert book.take() == []
    book.put("a")
    assert book.take() == ["a", "b", "c"]


def test_decoupled_requests_are_answered_as_they_come():
    book = Book()
    book.begin("a")
    book.begin("d", ordered=False)
    book.begin("b")
    book.put("d", "1", last=False)
    book.put("b")
    assert book.take() == ["d1"]
    book.put("a")
    book.put("d", "2")
    assert book.take() == ["a", "b", "d2"]


def test_an_ordinary_request_with_several_answers_keeps_its_turn_until_the_last():
    book = Book()
    book.begin("a")
    book.begin("b")
    book.put("b", "1", last=False)
    book.put("b", "2")
    book.put("a", "1", last=False)
    assert book.take() == ["a1"]
    book.put("a", "2")
    assert book.take() == ["a2", "b1", "b2"]


def test_held_answers_that_are_not_the_last_leave_the_turn_where_it_is():
    book = Book()
    for name in "abc":
        book.begin(name)
    book.put("b", "1", last=False)
    book.put("c")
    book.put("a")
    assert book.take() == ["a", "b1"]
    book.put("b", "2")
    assert book.take() == ["b2", "c"]


def test_requests_are_bounded_until_their_last_answer_is_written():
    book = Book(max_requests=2)
    assert book.ledger.may_read()
    book.begin("a", ordered=False)
    assert book.ledger.may_read()
    book.begin("b", ordered=False)
    assert not book.ledger.may_read()
    book.put("a", last=False)
    book.put("b")
    assert not book.ledger.may_read()
    book.take()
    assert book.ledger.may_read()


def test_bytes_are_bounded_but_one_request_may_always_be_read():
    book = Book(max_bytes=10)
    book.begin("a", nbytes=100)
    assert not book.ledger.may_read()
    book.put("a")
    book.take()
    assert book.ledger.may_read()
    book.begin("b", nbytes=9)
    assert book.ledger.may_read()
    book.begin("c", nbytes=1)
    assert not book.ledger.may_read()


def test_a_stream_is_finished_when_the_client_closed_its_side_and_all_is_written():
    book = Book()
    book.begin("a")
    book.ledger.half_close()
    assert not book.ledger.finished
    book.put("a")
    assert not book.ledger.finished
    book.take()
    assert book.ledger.finished


@pytest.mark.parametrize("ordered", [True, False])
def test_a_request_that_is_cut_short_gives_its_other_answers_back_and_its_turn_on(ordered):
    book = Book()
    book.begin("a", ordered=ordered)
    book.begin("b")
    for number in "12":
        book.put("a", number, last=False)
    book.put("b")
    first = book.ledger.take()
    assert first.outcome.message == "a1"
    others = book.ledger.cut(first.request)
    book.ledger.check_integrity()
    assert [answer.outcome.message for answer in others] == ["a2"]
    book.ledger.written(first)
    assert not book.put("a", "3")
    assert book.take() == ["b"]
    assert book.ledger.under_way == 0


def test_what_comes_after_the_stream_was_abandoned_is_not_taken():
    book = Book()
    for name in "abc":
        book.begin(name)
    book.put("a", last=False)
    book.put("b")
    requests, answers = book.ledger.abandon()
    book.ledger.check_integrity()
    assert [request.id for request in requests] == ["a", "b", "c"]
    assert [answer.outcome.message for answer in answers] == ["a", "b"]
    assert not book.put("c")
    assert book.take() == []


class AnyStream(RuleBasedStateMachine):
    """Any mixture of requests: nothing is lost, nothing comes twice, ordinary ones come in order."""

    def __init__(self):
        super().__init__()
        self.book = Book(max_requests=8)
        self.kinds = []
        self.sent = {}
        self.out = []
        self.ended = set()

    @precondition(lambda self: self.book.ledger.may_read())
    @rule(ordered=st.booleans(), nbytes=st.integers(0, 100))
    def begin(self, ordered, nbytes):
        name = len(self.kinds)
        self.kinds.append(ordered)
        self.sent[name] = []
        self.book.begin(str(name) + ":", ordered=ordered, nbytes=nbytes)

    @precondition(lambda self: len(self.ended) < len(self.kinds))
    @rule(data=st.data(), last=st.booleans())
    def answer(self, data, last):
        name = data.draw(st.sampled_from([n for n in range(len(self.kinds)) if n not in self.ended]))
        number = len(self.sent[name])
        self.sent[name].append(number)
        if last:
            self.ended.add(name)
        assert self.book.put(f"{name}:", str(number), last=last)

    @rule()
    def write(self):
        self.out += [tuple(map(int, text.split(":"))) for text in self.book.take()]

    @invariant()
    def answers_of_one_request_keep_their_order(self):
        for name, numbers in self.sent.items():
            written = [number for one, number in self.out if one == name]
            assert written == numbers[: len(written)]

    @invariant()
    def ordinary_requests_keep_theirs(self):
        names = [name for name, _ in self.out if self.kinds[name]]
        assert names == sorted(names)

    def teardown(self):
        for name in range(len(self.kinds)):
            if name not in self.ended:
                self.ended.add(name)
                self.sent[name].append(len(self.sent[name]))
                self.book.put(f"{name}:", str(self.sent[name][-1]))
        self.write()
        assert sorted(self.out) == [(name, number) for name in self.sent for number in self.sent[name]]
        assert self.book.ledger.under_way == 0


AnyStream.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnyStream = AnyStream.TestCase
