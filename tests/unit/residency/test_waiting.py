"""WaitingRoom: in order, bounded, and nobody is told twice."""

import pytest

from headrace.residency.waiting import Waiter, WaitingRoom
from headrace_protocol.errors import ErrorDetail, InferError, not_found


class Client:
    def __init__(self, told, name):
        self.told = told
        self.name = name

    def there(self):
        self.told.append((self.name, "there"))

    def failed(self, error):
        self.told.append((self.name, error.message))


@pytest.fixture
def told():
    return []


def waiter(told, name, model="m", expires_ns=100, nbytes=1):
    client = Client(told, name)
    return Waiter(model, expires_ns, nbytes, client.there, client.failed)


def test_all_are_let_in_once_in_the_order_in_which_they_came(told):
    room = WaitingRoom()
    for name in "abc":
        room.join(waiter(told, name))
    room.join(waiter(told, "other", model="n"))
    room.let_in("m")
    room.let_in("m")
    assert told == [("a", "there"), ("b", "there"), ("c", "there")]
    assert (room.count, room.nbytes, room.models()) == (1, 1, ["n"])


def test_who_has_left_is_told_nothing(told):
    room = WaitingRoom()
    one = waiter(told, "a")
    room.join(one)
    assert room.leave(one)
    assert not room.leave(one)
    room.let_in("m")
    assert not told
    assert not room.waits("m")
    assert (room.count, room.nbytes) == (0, 0)


def test_each_has_a_deadline_of_its_own(told):
    room = WaitingRoom()
    for name, expires_ns in (("a", 30), ("b", 10), ("c", 20)):
        room.join(waiter(told, name, expires_ns=expires_ns))
    assert room.expire(9, "{} is late".format) == set()
    assert room.expire(20, "{} is late".format) == {"m"}
    assert told == [("b", "m is late"), ("c", "m is late")]
    room.fail("m", not_found("it is gone"))
    assert told[2:] == [("a", "it is gone")]


@pytest.mark.parametrize("bound", [{"most_requests": 2}, {"most_bytes": 2}])
def test_one_too_many_is_refused(told, bound):
    room = WaitingRoom(**bound)
    room.join(waiter(told, "a"))
    room.join(waiter(told, "b"))
    with pytest.raises(InferError, match="2 requests wait for models already") as caught:
        room.join(waiter(told, "c"))
    assert caught.value.detail is ErrorDetail.QUEUE_FULL
    room.let_in("m")
    room.join(waiter(told, "c"))


def test_a_request_larger_than_the_bound_waits_alone(told):
    room = WaitingRoom(most_bytes=10)
    room.join(waiter(told, "a", nbytes=50))
    assert room.nbytes == 50


def test_one_that_cannot_take_its_answer_costs_others_nothing(told, caplog):
    room = WaitingRoom()

    def fail():
        raise RuntimeError("no")

    room.join(Waiter("m", 1, 0, fail, fail))
    room.join(waiter(told, "b"))
    room.let_in("m")
    assert told == [("b", "there")]
    assert "could not be told" in caplog.text
