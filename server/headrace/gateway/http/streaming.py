"""A request under way whose responses are passed on as they come, as fast as its client takes them."""

from __future__ import annotations

from collections import deque

from headrace.gateway.http.request import Outlet
from headrace.planes import Cancellable, Outcome
from headrace.types import InferenceResponse


class OutcomeStream:
    """Implements request.Streaming. What `_pass_on` does with an outcome is its user's.

    Outcomes that the client is too slow for are kept, unread, until it goes on: the data plane bounds how many there
    can be.
    """

    __slots__ = ("_kept", "_outlet", "under_way")

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._kept: deque[Outcome] = deque()
        self.under_way: Cancellable | None = None

    def take(self, outcome: Outcome) -> None:
        """Take the next outcome of the request."""
        if self._kept or self._outlet.full:
            self._kept.append(outcome)
        else:
            self._pass_on(outcome)

    def resume(self) -> None:
        """Pass on what was kept, as far as there is room."""
        while self._kept and not self._outlet.full:
            self._pass_on(self._kept.popleft())

    def cancel(self) -> None:
        """Its client is gone, or it failed."""
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            under_way.cancel()
        while self._kept:
            outcome = self._kept.popleft()
            if isinstance(outcome, InferenceResponse):
                outcome.release()

    def _pass_on(self, outcome: Outcome) -> None:
        raise NotImplementedError
