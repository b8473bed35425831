"""A guard takes a version back that goes beyond a bound, and no other."""

from __future__ import annotations

import pytest

from headrace.observability.sketch import LatencySketch, count_above
from headrace.rollout.guard import Guard, Recent, Sample
from headrace.rollout.policy import GuardPolicy

SECOND = 1_000_000_000


class Version:
    """Counts as a loaded version does."""

    def __init__(self) -> None:
        self.load = 1
        self.sketch = LatencySketch()
        self.answered = self.failed = self.under_way = self.crashes = 0
        self.serves = True

    def ask(self, answered: int = 0, failed: int = 0, ms: float = 10) -> None:
        self.answered += answered
        self.failed += failed
        for _ in range(answered):
            self.sketch.observe(round(ms * 1000))

    def sample(self) -> Sample:
        counts = tuple(self.sketch.counts)
        return Sample(self.load, self.answered, self.failed, self.under_way, self.crashes, counts, self.serves)


class Watched:
    """A guard over a version on trial and a default, and the time."""

    def __init__(self, **policy) -> None:
        self.guard = Guard(GuardPolicy(**policy))
        self.trial, self.default = Version(), Version()
        self.now = 0
        assert self.look() is None

    def look(self, seconds: float = 1):
        self.now += round(seconds * SECOND)
        trip = self.guard.observe(self.now, self.trial.sample(), self.default.sample())
        return None if trip is None else trip.reason


def test_a_version_that_fails_is_taken_back_at_the_first_look():
    watched = Watched(max_error_rate=0.05)
    watched.trial.ask(answered=15, failed=5)

    assert watched.look() == "error_rate"


def test_a_rate_at_its_bound_is_within_it():
    watched = Watched(max_error_rate=0.05)
    watched.trial.ask(answered=95, failed=5)
    assert watched.look() is None
    watched.trial.ask(failed=1)
    assert watched.look() == "error_rate"


def test_nothing_is_said_of_too_few_requests():
    watched = Watched(max_error_rate=0, min_requests=20)
    watched.trial.ask(failed=19)
    assert watched.look() is None
    watched.trial.ask(failed=1)
    assert watched.look() == "error_rate"


def test_what_was_before_the_window_does_not_count():
    watched = Watched(max_error_rate=0.05, window_secs=10)
    watched.trial.ask(failed=19)
    assert watched.look() is None
    for _ in range(15):
        assert watched.look() is None
    watched.trial.ask(answered=100)
    assert watched.look() is None


def test_errors_of_the_default_are_allowed_where_the_bound_says_so():
    watched = Watched(max_error_rate_above_default=0.1)
    watched.default.ask(answered=80, failed=20)
    watched.trial.ask(answered=75, failed=25)
    assert watched.look() is None
    watched.trial.ask(failed=25)
    assert watched.look() == "error_rate"


def test_a_slow_version_is_taken_back():
    watched = Watched(max_p99_ms=100)
    watched.trial.ask(answered=100, ms=90)
    assert watched.look() is None
    watched.trial.ask(answered=3, ms=120)
    assert watched.look() == "p99"


def test_one_slow_request_is_no_quantile():
    watched = Watched(max_p99_ms=100)
    watched.trial.ask(answered=30, ms=10)
    watched.trial.ask(answered=2, ms=5000)
    assert watched.look() is None


def test_one_slow_request_in_a_hundred_is_within_the_bound():
    watched = Watched(max_p99_ms=100)
    watched.trial.ask(answered=495, ms=10)
    watched.trial.ask(answered=5, ms=5000)
    assert watched.look() is None


def test_a_version_may_be_so_many_times_as_slow_as_the_default():
    watched = Watched(max_p99_ratio=2)
    watched.trial.ask(answered=100, ms=50)
    assert watched.look() is None, "nothing is known of the default"
    watched.default.ask(answered=100, ms=30)
    assert watched.look() is None
    watched.trial.ask(answered=5, ms=90)
    assert watched.look() == "p99"


def test_answers_from_a_cache_have_no_durations_to_compare_with():
    watched = Watched(max_p99_ratio=2)
    watched.default.answered += 100
    watched.trial.ask(answered=100, ms=50)
    assert watched.look() is None


def test_a_version_in_which_requests_hang_is_taken_back_after_a_window():
    watched = Watched(max_error_rate=0.5, window_secs=5)
    watched.trial.under_way = 4
    looks = [watched.look() for _ in range(12)]
    assert looks.count(None) in range(5, 12)
    assert looks[-1] == "stalled"


def test_a_version_whose_processes_die_again_and_again_is_taken_back():
    watched = Watched(max_error_rate=0.5)
    watched.trial.crashes += 2
    assert watched.look() is None
    watched.trial.crashes += 1
    assert watched.look() == "crashes"


def test_a_version_that_nobody_asks_is_good():
    watched = Watched(max_error_rate=0, window_secs=5)
    assert {watched.look() for _ in range(20)} == {None}


def test_a_slow_answer_now_and_then_is_no_stall():
    watched = Watched(max_error_rate=0.5, window_secs=5)
    watched.trial.under_way = 4
    for _ in range(20):
        watched.trial.ask(answered=1, ms=4000)
        assert watched.look(4) is None


def test_a_version_that_takes_no_requests_is_gone():
    watched = Watched(max_error_rate=0.5)
    watched.trial.serves = False
    assert watched.look() == "gone"


def test_a_version_that_was_loaded_anew_begins_anew():
    watched = Watched(max_error_rate=0.05)
    watched.trial.ask(answered=100, failed=4)
    assert watched.look() is None
    watched.trial = Version()
    watched.trial.load = 2
    assert watched.look() is None
    watched.trial.ask(answered=100)
    assert watched.look() is None


def test_what_an_earlier_load_answered_makes_nothing_good():
    watched = Watched(max_error_rate=0.05)
    watched.trial.ask(answered=500)
    assert watched.look() is None
    watched.trial = Version()
    watched.trial.load = 2
    assert watched.look() is None
    watched.trial.ask(failed=30)
    assert watched.look() == "error_rate"


@pytest.mark.parametrize("every", [0.1, 1, 7])
def test_samples_are_few_however_often_it_is_told(every):
    recent = Recent(30)
    version = Version()
    for step in range(2000):
        version.ask(answered=1)
        recent.add(round(step * every * SECOND), version.sample())
    assert len(recent._samples) <= 33
    assert recent.window().answered == pytest.approx(30 / every, rel=0.15, abs=2)


def test_values_within_a_sixteenth_above_a_bound_are_not_counted():
    sketch = LatencySketch()
    for value in (10, 1000, 1020, 1100, 100_000, 1 << 50):
        sketch.observe(value)

    assert count_above(sketch.counts, 1000) == 3
    assert count_above(sketch.counts, 0) == 6
    assert count_above(sketch.counts, 1 << 60) == 0
