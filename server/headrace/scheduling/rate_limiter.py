"""RateLimiter: which instances may run now, where running takes resources that there are only so many of. Pure.

A claim stands for instances that need the same, those of one process. Claims that wait are in a line by their *tags*
(start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996): each execution moves a claim's next tag on by its priority,
so that one of priority n gets 1/n of the turns of one of priority 1; and a claim that had nothing to run comes in beside
the others, not before all of them. What stands before another in the line has its resources kept for it, so that one that
needs much is not passed by many that need little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from headrace.repository.model_config import Need
from headrace_protocol.errors import invalid

GLOBAL: Final = -1
"""In the place of a device: of the whole machine."""
Place = tuple[str, int]
"""A resource's name, in small letters, and the device that has it."""


class Claim:
    """The instances of one process. Made by `RateLimiter.join`; its fields are the limiter's."""

    __slots__ = ("finish", "needs", "number", "priority", "running", "tag", "wake", "wants")

    def __init__(
        self, number: int, needs: dict[Place, int], priority: int, wants: Callable[[], bool], wake: Callable[[], None]
    ) -> None:
        self.number = number
        """Which of two claims with equal tags goes first."""
        self.needs: Final = needs
        self.priority: Final = priority
        self.wants: Final = wants
        """Whether an instance is free and there is a batch for it. Asked often, and only told the truth."""
        self.wake: Final = wake
        """Has the claim's owner look again whether it may run."""
        self.running = 0
        self.tag: int | None = None
        """Its place in the line; None while it wants nothing."""
        self.finish = 0
        """The least tag that it gets next."""


class RateLimiter:
    """Counts what runs. Whoever runs something asks `may_run`, then says `begin` and, once, `end`."""

    def __init__(self, limits: Mapping[tuple[str, int | None], int]) -> None:
        """`limits`: how many there are, by name in small letters and device; device None = of each device."""
        self._limits = dict(limits)
        self._claims: list[Claim] = []
        self._neediest: dict[Place, int] = {}
        """The most that any claim needs."""
        self._used: dict[Place, int] = {}
        self._time = 0
        """The tag of what began last."""
        self._last_number = 0

    def join(
        self,
        needs: Iterable[Need],
        device: int,
        priority: int,
        wants: Callable[[], bool],
        wake: Callable[[], None],
    ) -> Claim:
        """Return the claim of instances on a device. Raises INVALID_ARG where they could never run."""
        wanted: dict[Place, int] = {}
        for need in needs:
            place = (need.name, GLOBAL if need.everywhere else device)
            self._check(need, place)
            wanted[place] = need.count
        self._last_number += 1
        claim = Claim(self._last_number, wanted, max(1, priority), wants, wake)
        self._claims.append(claim)
        self._note_needs()
        self.look()  # there may be more of something than before
        return claim

    def _check(self, need: Need, place: Place) -> None:
        kinds = {device == GLOBAL for claim in self._claims for name, device in claim.needs if name == need.name}
        if kinds - {need.everywhere}:
            raise invalid(
                f"resource '{need.name}' is global in one model configuration and of each device in another: "
                "it has to be the same in all"
            )
        limit = self._limit_given(place)
        if limit is not None and limit < need.count:
            raise invalid(
                f"resource '{need.name}' is limited to {limit}, and an instance that needs {need.count} could never run"
            )

    def leave(self, claim: Claim) -> None:
        """Forget a claim, nothing of which runs any more."""
        assert not claim.running
        self._claims.remove(claim)
        self._note_needs()
        self.look()

    def may_run(self, claim: Claim) -> bool:
        """Return whether an instance of the claim may run a batch now."""
        if self._line_up():
            self._wake()  # what was kept for somebody is not needed any more
        return self._fits(claim)

    def begin(self, claim: Claim) -> None:
        """Note that an instance runs; `may_run` said so."""
        self._time = max(self._time, self._tag(claim))
        claim.finish = self._tag(claim) + claim.priority
        claim.tag = None
        claim.running += 1
        for place, count in claim.needs.items():
            self._used[place] = self._used.get(place, 0) + count
        self.look()

    def end(self, claim: Claim) -> None:
        """Note that one of what runs is over."""
        assert claim.running
        claim.running -= 1
        for place, count in claim.needs.items():
            self._used[place] -= count
            if not self._used[place]:
                del self._used[place]
        self.look()

    def look(self) -> None:
        """Wake all that may run now: something has changed."""
        self._line_up()
        self._wake()

    def _wake(self) -> None:
        """Go along the line and wake whoever may run, what those before it need being kept for them."""
        kept = dict(self._used)
        for _, _, claim in sorted((claim.tag, claim.number, claim) for claim in self._claims if claim.tag is not None):
            if self._has_room(claim, kept):
                claim.wake()
            for place, count in claim.needs.items():
                kept[place] = kept.get(place, 0) + count

    def _has_room(self, claim: Claim, kept: Mapping[Place, int]) -> bool:
        return all(kept.get(place, 0) + count <= self._limit(place) for place, count in claim.needs.items())

    def _note_needs(self) -> None:
        self._neediest = {}
        for claim in self._claims:
            for place, count in claim.needs.items():
                self._neediest[place] = max(self._neediest.get(place, 0), count)

    def usage(self) -> list[tuple[Place, int, int]]:
        """Return each resource with how many of it are used, and how many there are."""
        return [(place, self._used.get(place, 0), self._limit(place)) for place in sorted(self._neediest)]

    def _line_up(self) -> bool:
        """Give a place in the line to those that have begun to want, and take it from those that do not any more.

        Returns whether one was taken.
        """
        left = False
        for claim in self._claims:
            if not claim.wants():
                left = left or claim.tag is not None
                claim.tag = None
            elif claim.tag is None:
                claim.tag = max(claim.finish, self._time)
        return left

    def _tag(self, claim: Claim) -> int:
        return claim.tag if claim.tag is not None else max(claim.finish, self._time)

    def _fits(self, claim: Claim) -> bool:
        place_in_line = (self._tag(claim), claim.number)
        kept = dict(self._used)
        for other in self._claims:
            if other is not claim and other.tag is not None and (other.tag, other.number) < place_in_line:
                for place, count in other.needs.items():
                    kept[place] = kept.get(place, 0) + count
        return self._has_room(claim, kept)

    def _limit(self, place: Place) -> int:
        given = self._limit_given(place)
        return self._neediest.get(place, 0) if given is None else given

    def _limit_given(self, place: Place) -> int | None:
        name, device = place
        if device == GLOBAL:
            return next((count for (limited, _), count in self._limits.items() if limited == name), None)
        found = self._limits.get((name, device))
        return self._limits.get((name, None)) if found is None else found

    def check_integrity(self) -> None:
        """Assert the invariants; for tests."""
        used: dict[Place, int] = {}
        for claim in self._claims:
            for place, count in claim.needs.items():
                if claim.running:
                    used[place] = used.get(place, 0) + count * claim.running
        assert used == self._used
