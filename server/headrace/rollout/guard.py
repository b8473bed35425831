"""Guard: whether a version that is on trial keeps within its bounds, from counts that are read now and then. Pure.

It looks at a window that slides: what was counted since the oldest sample in it. A version that was loaded anew begins a new
window. Durations come as the counts of a LatencySketch in microseconds, within 1/16 of which every quantile is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from headrace.observability.sketch import count_above, quantiles
from headrace.rollout.policy import GuardPolicy

_NS_PER_S: Final = 1_000_000_000
_US_PER_MS: Final = 1_000
_P99: Final = 0.99
_MOST_CRASHES: Final = 3
"""In a window: a version that gets requests only while it lives may never come to as many as a rate needs."""
_SAMPLES: Final = 30
"""Kept of a window, and the latest."""
_FEWEST_SLOW: Final = 3
"""One slow request in twenty is no quantile yet."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a version has counted since it was loaded."""

    load: int
    """Another number for each time it was loaded."""
    answered: int
    failed: int
    """By the backend's fault or ours; not those that were refused for want of room, or cancelled."""
    under_way: int
    crashes: int
    """How often one of its processes was started again."""
    durations: tuple[int, ...]
    """Of answered requests: the counts of a sketch; () = nothing is known of them."""
    serves: bool = True


@dataclass(frozen=True, slots=True)
class Trip:
    """Why a version is taken back."""

    reason: str
    """error_rate, p99, crashes, stalled or gone: the label of the metric."""
    text: str
    """With the figures, for people."""


@dataclass(frozen=True, slots=True)
class _Window:
    """What was counted within a window."""

    answered: int = 0
    failed: int = 0
    crashes: int = 0
    durations: tuple[int, ...] = ()

    @property
    def ended(self) -> int:
        return self.answered + self.failed

    @property
    def error_rate(self) -> float:
        return self.failed / self.ended if self.ended else 0.0


class Recent:
    """The samples of one version over a window: some thirty of them, however often it is told."""

    def __init__(self, window_secs: int) -> None:
        self._window_ns = window_secs * _NS_PER_S
        self._apart_ns = self._window_ns // _SAMPLES
        self._samples: deque[tuple[int, Sample]] = deque()

    def add(self, now_ns: int, sample: Sample) -> None:
        """Note what was counted by now."""
        samples = self._samples
        if samples and samples[-1][1].load != sample.load:
            samples.clear()
        while len(samples) > 1 and samples[1][0] <= now_ns - self._window_ns:
            samples.popleft()
        if len(samples) > 1 and samples[-1][0] - samples[-2][0] < self._apart_ns:
            samples.pop()
        samples.append((now_ns, sample))

    def window(self) -> _Window:
        """Return what was counted within the window."""
        if not self._samples:
            return _Window()
        first, last = self._samples[0][1], self._samples[-1][1]
        durations = tuple(now - then for now, then in zip(last.durations, first.durations, strict=True))
        return _Window(
            last.answered - first.answered, last.failed - first.failed, last.crashes - first.crashes, durations
        )

    def full(self) -> bool:
        """Return whether the samples reach over the whole window."""
        samples = self._samples
        return len(samples) > 1 and samples[-1][0] - samples[0][0] >= self._window_ns

    def least_under_way(self) -> int:
        """Return how many requests were in the version at each time that was noted."""
        return min((sample.under_way for _, sample in self._samples), default=0)


class Guard:
    """Watches one version against bounds and against the default version."""

    def __init__(self, policy: GuardPolicy) -> None:
        self._policy = policy
        self._trial = Recent(policy.window_secs)
        self._default = Recent(policy.window_secs)

    def observe(self, now_ns: int, trial: Sample, default: Sample | None) -> Trip | None:
        """Take what both have counted by now; return why the version is to be taken back, None while it is good."""
        if not trial.serves:
            return Trip("gone", "it does not take requests any more")
        self._trial.add(now_ns, trial)
        if default is not None:
            self._default.add(now_ns, default)
        window = self._trial.window()
        if window.crashes >= _MOST_CRASHES:
            return Trip("crashes", f"its processes died {window.crashes} times in {self._policy.window_secs} s")
        stuck = self._trial.least_under_way()
        if self._trial.full() and not window.ended and stuck:
            return Trip("stalled", f"{stuck} requests are in it, and none ended in {self._policy.window_secs} s")
        if window.ended < self._policy.min_requests:
            return None
        return self._errors(window) or self._durations(window)

    def _errors(self, window: _Window) -> Trip | None:
        policy, rate = self._policy, window.error_rate
        told = f"{window.failed} of {window.ended} requests failed ({rate:.1%})"
        if policy.max_error_rate is not None and rate > policy.max_error_rate:
            return Trip("error_rate", f"{told}, at most {policy.max_error_rate:.1%} may")
        if policy.max_error_rate_above_default is not None:
            default = self._default.window()
            most = default.error_rate + policy.max_error_rate_above_default
            if rate > most:
                return Trip("error_rate", f"{told}, of the default version's {default.error_rate:.1%}")
        return None

    def _durations(self, window: _Window) -> Trip | None:
        policy = self._policy
        if policy.max_p99_ms is not None and self._too_many(window, policy.max_p99_ms):
            return Trip("p99", f"{_p99_told(window)}, at most {policy.max_p99_ms:g} ms may be")
        if policy.max_p99_ratio is not None:
            default = self._default.window()
            if default.answered < policy.min_requests:
                return None
            usual = _p99_ms(default)
            if usual > 0 and self._too_many(window, usual * policy.max_p99_ratio):
                return Trip(
                    "p99",
                    f"{_p99_told(window)}, the default version's {usual:.1f} ms; "
                    f"at most {policy.max_p99_ratio:g} times as long may be",
                )
        return None

    @staticmethod
    def _too_many(window: _Window, most_ms: float) -> bool:
        slow = count_above(window.durations, round(most_ms * _US_PER_MS))
        return slow >= _FEWEST_SLOW and slow > (1 - _P99) * window.answered


def _p99_ms(window: _Window) -> float:
    return quantiles(window.durations, (_P99,))[0] / _US_PER_MS


def _p99_told(window: _Window) -> str:
    return f"99 of 100 requests take up to {_p99_ms(window):.1f} ms"
