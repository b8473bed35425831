"""What reads the calls in a text, once it is known where they begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.gateway.http.openai.tools.parts import PartSink

Accepts = Callable[[str], bool]
"""Whether a function of this name may be called."""


class CallsBody(Protocol):
    """Reads on in pieces, and tells its sink of each call."""

    @property
    def begun(self) -> bool:
        """Whether a call has begun."""
        ...

    @property
    def in_arguments(self) -> bool:
        """Whether arguments have begun and not ended."""
        ...

    @property
    def raw(self) -> str:
        """What was read and told in no way, for it was not known yet to be of a call."""
        ...

    @property
    def done(self) -> bool:
        """Whether nothing of calls can follow."""
        ...

    @property
    def broken(self) -> bool:
        """Whether the text is of no call from the position on that `feed` returned; what is in `raw` is of none either."""
        ...

    def feed(self, text: str, at: int) -> int:
        """Read on from `at`; return where it is done or broken, or the length of `text`."""
        ...


NewBody = Callable[[PartSink], CallsBody]


def left_over(body: CallsBody) -> str:
    """Return what of a body is content where its text has ended: nothing if it is but a separator of calls."""
    raw = body.raw
    return "" if body.begun and not raw.strip(" \t\r\n,;") else raw
