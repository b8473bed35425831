"""What becomes of news of the engine: when a client is told, what is joined, and how a call ends. No thread, no time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace_backends.llm import open_calls, telling
from headrace_backends.llm.engine import Told
from headrace_backends.llm.logprobs import TokenLogprob, TokenLogprobs
from headrace_backends.llm.open_calls import joined
from headrace_backends.llm.request import FinishReason
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.telling import _News
from headrace_protocol.errors import ErrorCode, ErrorDetail, InferError, internal
from telling_fakes import NO_DESCRIPTOR, Telling, chance, out


@pytest.fixture
def t(monkeypatch: pytest.MonkeyPatch) -> Telling:
    return Telling(monkeypatch)


STOP = FinishReason.STOP


def test_all_calls_of_a_step_are_told_in_one_frame(t: Telling) -> None:
    clients = [t.call(number) for number in range(5)]
    t.told(*(Told(number, [out(str(number))]) for number in range(5)))
    assert [client.text for client in clients] == ["0", "1", "2", "3", "4"]
    assert t.frames == 1


def test_a_step_without_anything_to_be_seen_is_told_with_the_next(t: Telling) -> None:
    client = t.call(1)
    t.told(Told(1, [out("")]))
    assert len(client.events) == 1, "the first is told all the same: the request runs"
    t.told(Told(1, [out("", total=2)]))
    assert len(client.events) == 1
    t.told(Told(1, [out("ab", total=3)]))
    assert (client.text, client.events[-1].choices[0].num_tokens) == ("ab", 3)


def test_no_log_probability_of_text_that_was_held_back_is_lost(t: Telling) -> None:
    client = t.call(1, params=SamplingParams(logprobs=0), tells_logprobs=True)
    t.told(Told(1, [out("", logprobs=(chance(1),))]))
    client.paused = True
    t.told(Told(1, [out("", logprobs=(chance(2),))]))
    t.told(Told(1, [out("abc", logprobs=(chance(3), chance(4)), end=STOP)]))
    client.paused = False
    t.teller.round([t.teller._calls[1]])
    assert [entry.chosen.id for event in client.events for entry in event.choices[0].logprobs] == [1, 2, 3, 4]
    assert client.final


def test_what_a_paused_client_missed_is_one_event_when_it_goes_on(t: Telling) -> None:
    client, other = t.call(1), t.call(2)
    client.paused = True
    for text in "abc":
        t.told(Told(1, [out(text)]), Told(2, [out(text)]))
    t.told(Told(1, [out("d", end=STOP)]))
    assert (client.events, other.text) == ([], "abc")
    client.paused = False
    t.teller.round([t.teller._calls[1]])
    assert len(client.events) == 1
    assert (client.text, client.final) == ("abcd", True)
    assert len(t.teller) == 1


def test_a_call_that_is_not_streamed_is_told_once_with_all_of_its_choices(t: Telling) -> None:
    client = t.call(1, params=SamplingParams(n=2), prompts=2, stream=False)
    for index in (3, 0, 2, 1):
        t.told(Told(1, [out(f"{index}", index=index)]))
        t.told(Told(1, [out("!", index=index, end=STOP)]))
    (event,) = client.events
    assert [choice.index for choice in event.choices] == [0, 1, 2, 3]
    assert [choice.finish_reason for choice in event.choices] == ["stop"] * 4
    assert len(event.prompts) == 2
    assert client.final


def test_of_more_choices_than_are_told_the_likeliest_in_the_mean_are(t: Telling) -> None:
    client = t.call(1, params=SamplingParams(n=3), told_n=2, prompts=2, stream=False)
    likelihoods = {0: (-9.0, 3), 1: (-4.0, 1), 2: (-10.0, 10), 3: (-1.0, 1), 4: (-2.0, 1), 5: (-3.0, 1)}
    t.told(
        Told(
            1,
            [
                out(f"{index}", index=index, end=STOP, cumulative_logprob=sum_, total=total)
                for index, (sum_, total) in likelihoods.items()
            ],
        )
    )
    (event,) = client.events
    assert [(choice.index, choice.text) for choice in event.choices] == [(0, "2"), (1, "0"), (2, "3"), (3, "4")]
    assert event.choices[0].cumulative_logprob is None, "it was not asked for"


def test_cached_tokens_are_told_of_each_prompt_in_the_first_event_alone(t: Telling) -> None:
    client = t.call(1, prompts=2)
    t.told(Told(1, [out("a", cached=1), out("b", index=1, cached=2)]))
    t.told(Told(1, [out("c")]))
    assert [prompt.num_cached_tokens for prompt in client.events[0].prompts] == [1, 2]
    assert not client.events[1].prompts


def test_the_first_event_waits_for_the_log_probabilities_of_all_prompts(t: Telling) -> None:
    client = t.call(1, prompts=2, params=SamplingParams(prompt_logprobs=0))
    t.told(Told(1, [out("a", prompt_logprobs=(None, chance(5)))]))
    t.told(Told(1, [out("b")]))
    assert not client.events
    t.told(Told(1, [out("c", index=1, prompt_logprobs=(None, chance(6)))]))
    (event,) = client.events
    assert [prompt.logprobs[1].chosen.id for prompt in event.prompts] == [5, 6]
    assert [(choice.index, choice.text) for choice in event.choices] == [(0, "ab"), (1, "c")]


def test_the_last_event_says_where_the_time_went(t: Telling) -> None:
    client = t.call(1)
    t.told(Told(1, [out("a")], scheduled_ns=40, first_token_ns=70))
    t.now = 190
    t.told(Told(1, [out("b", end=STOP)], num_preemptions=2))
    timing = client.events[-1].timing
    assert timing is not None
    assert (timing.queue_ns, timing.prefill_ns, timing.decode_ns, timing.preemptions) == (30, 30, 120, 2)
    assert client.events[0].timing is None


def test_an_error_ends_a_call_also_after_something_was_told(t: Telling) -> None:
    client = t.call(1)
    t.told(Told(1, [out("a")]))
    t.told(Told(1, error=internal("bad luck")))
    assert (client.text, client.error.message) == ("a", "bad luck")
    assert not len(t.teller)
    t.told(Told(1, [out("b")]))
    assert client.text == "a", "news of a call that has ended"


def test_a_choice_that_fails_ends_a_call_of_one_and_is_told_beside_others(t: Telling) -> None:
    one, two = t.call(1), t.call(2, params=SamplingParams(n=2))
    t.told(
        Told(1, [out(end=FinishReason.ERROR, error="numbers")]), Told(2, [out(end=FinishReason.ERROR, error="numbers")])
    )
    assert (one.error.code, one.error.message) == (ErrorCode.INTERNAL, "numbers")
    assert (two.events[0].choices[0].finish_reason, two.events[0].choices[0].error) == ("error", "numbers")
    t.told(Told(2, [out("ok", index=1, end=STOP)]))
    assert two.final


def test_a_cancelled_call_is_aborted_at_once_and_told_nothing_more(t: Telling) -> None:
    client = t.call(1)
    t.told(Told(1, [out("a")]))
    call = t.teller._calls[1]
    client.cancelled = True
    t.teller.look(call)
    assert t.aborted == [1], "before the teller's turn"
    t.teller.round([call])
    assert client.error.code is ErrorCode.CANCELLED
    t.teller.look(call)
    assert t.aborted == [1]
    assert call.ended.is_set()


def test_a_client_for_whom_too_much_is_kept_is_dropped(t: Telling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_calls, "MAX_HELD", 10)
    client = t.call(1, params=SamplingParams(logprobs=5), tells_logprobs=True)
    client.paused = True
    t.told(Told(1, [out("a", logprobs=(chance(1, 5),))]))
    assert client.error is None
    t.told(Told(1, [out("a", logprobs=(chance(1, 5),))]))
    assert client.error.code is ErrorCode.UNAVAILABLE
    assert t.aborted == [1]


def test_calls_under_way_have_a_bound(t: Telling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "MAX_CALLS", 1)
    t.call(1)
    with pytest.raises(InferError) as raised:
        t.call(2)
    assert (raised.value.code, raised.value.detail) == (ErrorCode.UNAVAILABLE, ErrorDetail.QUEUE_FULL)


def test_an_engine_that_broke_ends_what_it_did_not_tell_of_and_then_the_process(t: Telling) -> None:
    told, forgotten = t.call(1), t.call(2)
    error = internal("no device")
    assert t.teller.round([_News([Told(1, error=error)], 5), error])
    assert told.error is error
    assert forgotten.error.code is ErrorCode.UNAVAILABLE
    assert t.broken == [error]


def test_one_response_that_cannot_be_sent_keeps_nobody_elses(t: Telling) -> None:
    t.refuses = True
    clients = [t.call(number) for number in range(3)]
    t.told(*(Told(number, [out("x", end=STOP)]) for number in range(3)))
    assert [client.text for client in clients] == ["x"] * 3
    assert not len(t.teller)


def test_a_response_that_finds_no_descriptor_ends_its_call_alone(t: Telling) -> None:
    clients = [t.call(number) for number in range(3)]
    t.lacking = [clients[1]]
    t.told(*(Told(number, [out("x")]) for number in range(3)))
    t.lacking = []
    t.told(*(Told(number, [out("y", end=STOP)]) for number in range(3)))
    assert [(client.text, client.final) for client in clients] == [("xy", True), ("", False), ("xy", True)]
    assert (clients[1].error, t.aborted) == (NO_DESCRIPTOR, [1])
    assert (len(t.teller), t.broken) == (0, [])


def test_an_answer_in_one_piece_that_finds_no_descriptor_fails_with_the_cause(t: Telling) -> None:
    client = t.call(1, decoupled=False, stream=False)
    client.tell = lambda _: (_ for _ in ()).throw(NO_DESCRIPTOR)  # type: ignore[method-assign]
    t.told(Told(1, [out("x", end=STOP)]))
    assert client.error is NO_DESCRIPTOR
    assert (len(t.teller), t.broken) == (0, [])


def test_an_error_that_cannot_be_told_is_told_when_it_can(t: Telling) -> None:
    owed, other = t.call(1), t.call(2)
    call = t.teller._calls[1]
    t.lacking, owed.failures = [owed], [NO_DESCRIPTOR] * 2
    t.told(Told(1, [out("x")]), Told(2, [out("x")]))
    t.told(Told(1, [out("y")]), Told(2, [out("y", end=STOP)]))
    assert (owed.error, call.ended.is_set()) == (None, False)
    assert other.final
    t.teller.start()
    assert call.ended.wait(10), "nothing else comes to be told"
    t.teller.close()
    assert (owed.error, owed.text) == (NO_DESCRIPTOR, "")
    assert t.broken == []


def test_a_form_that_fails_fails_its_call_alone(t: Telling) -> None:
    bad, good = t.call(1, params=SamplingParams(logprobs=0), tells_logprobs=True), t.call(2)
    nonsense = TokenLogprobs(TokenLogprob("no token", -1.0, 1))  # type: ignore[arg-type]
    t.told(Told(1, [out("a", logprobs=(nonsense,))]), Told(2, [out("b", end=STOP)]))
    assert bad.error.code is ErrorCode.INTERNAL
    assert (good.text, good.final, t.aborted) == ("b", True, [1])


def test_vectors_are_cut_and_made_of_length_one(t: Telling, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(telling, "send_many", lambda responses: told.extend(r.outputs["embedding"] for r in responses))
    t.call(1, embed=True, dimensions=2, stream=False)
    t.call(2, embed=True, normalize=False, stream=False)
    t.call(3, embed=True, stream=False)
    vectors = np.array([[3, 4, 12]], np.float32)
    t.told(Told(1, vectors=vectors), Told(2, vectors=vectors), Told(3, vectors=np.zeros((1, 3), np.float32)))
    assert np.allclose(told[0], [[0.6, 0.8]])
    assert told[1].tolist() == [[3, 4, 12]]
    assert told[2].tolist() == [[0, 0, 0]], "nothing has no direction"


def test_outputs_are_joined_as_the_engine_would_have_told_them_at_once() -> None:
    parts = [out("a", logprobs=(chance(1),)), out("", tokens=2, logprobs=(chance(2), chance(3))), out("b", end=STOP)]
    whole = joined(parts)
    again = parts[0].followed_by(parts[1]).followed_by(parts[2])
    assert whole == again
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("ab", (0, 0, 1, 0), STOP)
