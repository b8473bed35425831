"""How drivers tell outcomes to those who wait for them. Whoever fails to take his is told that, and costs nobody else anything."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headrace.planes import Outcome
from headrace.types import InferenceResponse
from headrace_protocol.errors import internal

_log = logging.getLogger("headrace.scheduling")


def hand_over(done: Callable[[Outcome], None], outcome: Outcome) -> bool:
    """Tell an outcome. Never raises.

    Where `done` fails, what the outcome holds is given back and `done` is called once more, with an INTERNAL error in its
    place: the last that it is told. False then.
    """
    try:
        done(outcome)
    except Exception:
        _log.exception("an answer could not be handed over")
    else:
        return True
    if isinstance(outcome, InferenceResponse):
        outcome.release()
    try:
        done(internal("the server failed to hand the answer over; its log has the reason"))
    except Exception:
        _log.exception("nor could it be told that an answer could not be handed over")
    return False
