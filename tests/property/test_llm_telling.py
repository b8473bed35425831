"""Whatever the engine tells in which steps, and whenever clients are held back: each hears all of it once, in order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_backends.llm.engine import Told
from headrace_backends.llm.request import FinishReason
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.telling import _News
from headrace_protocol.errors import ErrorCode
from telling_fakes import Client, Telling, chance, out

CALLS = 3
CHOICES = 2
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("step"), st.lists(st.tuples(st.integers(0, CALLS - 1), st.integers(0, CHOICES - 1)), max_size=6)
        ),
        st.tuples(st.sampled_from(["pause", "resume", "end", "cancel"]), st.integers(0, CALLS - 1)),
    ),
    max_size=40,
)


@given(steps=STEPS, stream=st.lists(st.booleans(), min_size=CALLS, max_size=CALLS), joined=st.booleans())
def test_each_client_hears_everything_once_and_in_order(steps: list[Any], stream: list[bool], joined: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        run(Telling(patch), steps, stream, joined=joined)


def run(t: Telling, steps: list[Any], stream: list[bool], *, joined: bool) -> None:
    params = SamplingParams(n=CHOICES, logprobs=0)
    clients = [t.call(number, params=params, tells_logprobs=True, stream=stream[number]) for number in range(CALLS)]
    calls = [t.teller._calls[number] for number in range(CALLS)]
    said: list[list[list[int]]] = [[[] for _ in range(CHOICES)] for _ in clients]
    over = set[int]()
    queued: list[Any] = []
    token = 0
    for what, which in steps:
        if what == "step":
            by_call: dict[int, list[Any]] = {}
            for number, index in which:
                if number in over or any(output.index == index for output in by_call.get(number, ())):
                    continue
                token += 1
                said[number][index].append(token)
                text = "" if token % 3 == 0 else f"<{token}>"
                by_call.setdefault(number, []).append(out(text, index=index, logprobs=(chance(token),)))
            queued.append(_News([Told(number, outputs) for number, outputs in by_call.items()], t.now))
        elif what == "end" and which not in over:
            over.add(which)
            ends = [out("!", index=index, end=FinishReason.STOP, tokens=0) for index in range(CHOICES)]
            queued.append(_News([Told(which, ends)], t.now))
        elif what == "cancel":
            clients[which].cancelled = True
            over.add(which)
            t.teller.look(calls[which])
            queued.append(calls[which])
        elif what in ("pause", "resume"):
            clients[which].paused = what == "pause"
            queued.append(calls[which])
        if not joined:
            t.teller.round(queued)
            queued.clear()
    for client in clients:
        client.paused = False
    t.teller.round([*queued, *calls])
    for number, client in enumerate(clients):
        check(client, said[number], over=number in over, stream=stream[number])
    assert len(t.teller) == CALLS - len(over)


def check(client: Client, said: list[list[int]], *, over: bool, stream: bool) -> None:
    heard: list[list[int]] = [[] for _ in range(CHOICES)]
    for event in client.events:
        for choice in event.choices:
            heard[choice.index] += [entry.chosen.id for entry in choice.logprobs]
    if client.cancelled and not client.final:
        assert client.error is not None
        assert client.error.code is ErrorCode.CANCELLED
        assert all(whole[: len(part)] == part for whole, part in zip(said, heard, strict=True))
        return
    assert client.final == over
    for whole, part in zip(said, heard, strict=True):
        # a token without text and log probabilities alone is told at once: they were asked for
        assert part == (whole if stream or over else [])
