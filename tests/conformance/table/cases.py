"""What a row of the conformance table is: what is sent, and what has to come of it, at whichever door.

A case names its outcome once, by the protocol's internal code; the two tables below say what that is at each door. Where
a door is legitimately different, the case says so, and why. Nothing here knows how anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

DOORS = ("http", "grpc", "grpcio")
"""HTTP, gRPC by the transport that the server chooses, gRPC by grpcio."""

HTTP_STATUS = {
    "OK": 200,
    "UNKNOWN": 400,
    "INTERNAL": 500,
    "NOT_FOUND": 404,
    "INVALID_ARG": 400,
    "UNAVAILABLE": 503,
    "UNSUPPORTED": 501,
    "ALREADY_EXISTS": 400,
    "CANCELLED": 400,
    # What only HTTP has.
    "NO_SUCH_METHOD": 405,
    "TOO_LARGE": 413,
    "UNKNOWN_CODING": 415,
    "FORBIDDEN": 403,
}
GRPC_STATUS = {
    "OK": "OK",
    "UNKNOWN": "UNKNOWN",
    "INTERNAL": "INTERNAL",
    "NOT_FOUND": "NOT_FOUND",
    "INVALID_ARG": "INVALID_ARGUMENT",
    "UNAVAILABLE": "UNAVAILABLE",
    "UNSUPPORTED": "UNIMPLEMENTED",
    "ALREADY_EXISTS": "ALREADY_EXISTS",
    "CANCELLED": "CANCELLED",
}


class Refused(Exception):
    """The server answered with an error; `status` is the number of HTTP or the name of gRPC."""

    def __init__(self, status: int | str, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text


@dataclass(frozen=True)
class Differs:
    """What comes of a case at one door, where that is not what the case says, and why."""

    because: str
    code: str | None = None
    says: str | None = None
    check: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Case:
    """One row. `send` gets an `Ask` (a client of one door) and returns what the server answered."""

    name: str
    send: Callable[[Any], Any]
    code: str = "OK"
    says: str = ""
    """Words, apart by blanks, that the text of the refusal must contain; a vertical bar inside one means either."""
    check: Callable[[Any], None] | None = None
    differs: Mapping[str, Differs] = field(default_factory=dict)
    only: str = ""
    """The one door that has it: "http" or "grpc"."""
    because: str = ""
    """Why only one door has it."""

    def at(self, door: str) -> tuple[str, str, Callable[[Any], None] | None]:
        """Return code, words and check at this door."""
        other = self.differs.get(kind(door))
        if other is None:
            return self.code, self.says, self.check
        code = self.code if other.code is None else other.code
        says = self.says if other.says is None else other.says
        return code, says, other.check or (self.check if other.code is None else None)


def each(http: Callable[[Any], Any], grpc: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a `send` for what the two protocols write so differently that nothing is to be shared."""
    return lambda ask: (http if ask.door == "http" else grpc)(ask)


def equal(got: Any, wanted: Any) -> None:
    """For checks that are one expression."""
    assert got == wanted


def gives(wanted: Any) -> Callable[[Any], None]:
    """Return the check that this is what came."""
    return lambda answer: equal(answer, wanted)


def kind(door: str) -> str:
    """Return "http" or "grpc"."""
    return "http" if door == "http" else "grpc"


def table(*groups: Iterable[Case], doors: Iterable[str] = DOORS) -> pytest.MarkDecorator:
    """Return the mark that runs a test for each case at each door that has it."""
    rows = []
    names = set()
    for case in (case for group in groups for case in group):
        assert bool(case.only) == bool(case.because), f"{case.name}: say why only one door has it"
        assert case.name not in names, f"two cases are called {case.name}"
        names.add(case.name)
        rows += [pytest.param(door, case, id=f"{case.name}-{door}") for door in doors if case.only in ("", kind(door))]
    return pytest.mark.parametrize(("door", "case"), rows)


def judge(ask: Any, case: Case, *, closed: bool = False) -> None:
    """Send a case through a door and hold what comes against what the case says; then the server has to be well.

    `closed`: the server refuses the request by which that would be seen.
    """
    code, says, check = case.at(ask.door)
    wanted = (HTTP_STATUS if ask.door == "http" else GRPC_STATUS)[code]
    try:
        answer = case.send(ask)
    except Refused as refusal:
        assert refusal.status == wanted, f"expected {wanted}, got {refusal}"
        told = refusal.text.lower()
        missing = [word for word in says.lower().split() if not any(part in told for part in word.split("|"))]
        assert not missing, f"{missing} not in: {refusal.text}"
        assert "traceback" not in told, refusal.text
        assert len(refusal.text) <= (8003 if ask.door == "http" else 2003), f"a text of {len(refusal.text)} characters"
        if not closed:
            ask.still_well()
        return
    assert code == "OK", f"expected {code}, got an answer: {answer}"
    if check is not None:
        check(answer)
