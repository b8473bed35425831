"""POST /v1/completions on a real socket, over a model whose every event the test sends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace_protocol.generation import ChoiceDelta, PromptTold, TokenChance, TokenLogprob
from openai_door import OpenAIDoor, likely, opened

PATH = "/v1/completions"
ONCE = {"model": "chatty", "prompt": "Once"}


@pytest.fixture
async def door() -> AsyncIterator[OpenAIDoor]:
    async with opened() as started:
        yield started


async def test_a_completion_is_answered_as_openai_answers_it(door):
    task, call = await door.asked(PATH, ONCE, X_Request_Id="mine")
    call.say(" upon", finish="length")
    status, _, answer = await task
    assert status == 200
    assert isinstance(answer.pop("created"), int)
    assert answer.pop("usage")["total_tokens"] == 4
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer == {
        "id": "cmpl-mine",
        "object": "text_completion",
        "model": "chatty",
        "choices": [{"index": 0, "text": " upon", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
    }
    assert call.call.prompts == ["Once"]
    assert call.call.sampling == {"max_tokens": 16, "top_k": 20}


async def test_what_keeps_a_caller_with_a_version_reaches_the_data_plane(door):
    task, call = await door.asked(PATH, ONCE, X_Headrace_Sticky="caller 7")
    call.say(" upon")
    await task
    assert call.request.sticky == b"caller 7"


async def test_choices_of_several_prompts_are_in_order_and_counted_once_a_prompt(door):
    task, call = await door.asked(PATH, {**ONCE, "prompt": ["a", [1, 2]], "n": 2, "best_of": 3})
    deltas = [ChoiceDelta(index, str(index), num_tokens=2, finish_reason="stop") for index in (3, 1, 0, 2)]
    call.tell(*deltas, prompts=(PromptTold(1), PromptTold(2, 1)), final=True)
    _, _, answer = await task
    assert (call.call.prompts, call.call.best_of) == (["a", [1, 2]], 3)
    assert [choice["text"] for choice in answer["choices"]] == ["0", "1", "2", "3"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 8)


async def test_a_stream_has_text_in_every_chunk_and_the_reason_in_the_last(door):
    task, call = await door.streamed(PATH, {**ONCE, "stream_options": {"include_usage": True}})
    call.say(" up", "", "on", "")
    chunks = await task
    assert [choice["text"] for chunk in chunks for choice in chunk["choices"]] == [" up", "on", ""]
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]] == [None, None, "stop"]
    assert [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks] == [None, None, None, 4]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_of_tokens_count_from_the_start_of_the_whole_text(door, stream):
    body = {**ONCE, "prompt": "aé🎉", "echo": True, "logprobs": 1}
    task, call = await (door.streamed if stream else door.asked)(PATH, body)
    assert (call.call.echo, call.call.sampling["logprobs"], call.call.sampling["prompt_logprobs"]) == (True, 1, 1)
    party = "🎉".encode()
    halves = (half_of(party[:2]), half_of(party[2:]))
    prompt = PromptTold(4, text="aé🎉", logprobs=(None, likely("é", -0.1, ("e", -3.0)), *halves))
    call.tell(ChoiceDelta(0, "", num_tokens=1, logprobs=(likely(" x", -1.0),)), prompts=(prompt,))
    call.tell(ChoiceDelta(0, " xy", num_tokens=2, logprobs=(likely("y", None),)))
    call.tell(ChoiceDelta(0, "", num_tokens=2, finish_reason="stop"), final=True)
    told = await task
    choices = [choice for chunk in told for choice in chunk["choices"]] if stream else told[2]["choices"]
    assert "".join(choice["text"] for choice in choices) == "aé🎉 xy"
    lists = {name: [x for choice in choices for x in choice["logprobs"][name]] for name in choices[0]["logprobs"]}
    assert lists == {
        "tokens": ["a", "é", "\ufffd", "\ufffd", " x", "y"],
        "token_logprobs": [None, -0.1, -0.5, -0.5, -1.0, -9999.0],
        "top_logprobs": [
            None,
            {"e": -3.0, "é": -0.1},
            {"\ufffd": -0.5},
            {"\ufffd": -0.5},
            {" x": -1.0},
            {"y": -9999.0},
        ],
        "text_offset": [0, 1, 2, 3, 3, 5],
    }


def half_of(part: bytes) -> TokenLogprob:
    """Return a token that is a part of a character."""
    return TokenLogprob(TokenChance(1, "\ufffd", tuple(part), -0.5, 1))


async def test_the_prompt_alone_comes_back_where_no_token_is_wanted(door):
    """Evaluations ask like this: echo, logprobs, and max_tokens 0."""
    task, call = await door.asked(PATH, {**ONCE, "prompt": "Yes", "echo": True, "logprobs": 1, "max_tokens": 0})
    assert call.call.sampling["max_tokens"] == 0
    prompt = PromptTold(2, text="Yes", logprobs=(None, likely("es", -0.25)))
    call.tell(ChoiceDelta(0, finish_reason="length"), prompts=(prompt,), final=True)
    _, _, answer = await task
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Yes", "length")
    assert choice["logprobs"]["tokens"] == ["Y", "es"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25]
    assert answer["usage"]["completion_tokens"] == 0


async def test_no_likely_token_beside_the_chosen_one_is_not_no_log_probability(door):
    task, call = await door.asked(PATH, {**ONCE, "logprobs": 0})
    assert call.call.sampling["logprobs"] == 0
    call.tell(
        ChoiceDelta(0, "a", num_tokens=1, logprobs=(likely("a"),), finish_reason="stop"),
        prompts=(PromptTold(1),),
        final=True,
    )
    _, _, answer = await task
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}]


@pytest.mark.parametrize(
    ("given", "max_tokens"), [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 0}, 0), ({"max_tokens": 1}, 1)]
)
async def test_how_many_tokens_a_completion_may_have(door, given, max_tokens):
    task, call = await door.asked(PATH, {**ONCE, **given})
    assert call.call.sampling["max_tokens"] == max_tokens
    call.say("x")
    await task


async def test_top_p_0_takes_the_likeliest_token(door):
    task, call = await door.asked(PATH, {**ONCE, "top_p": 0})
    assert (call.call.sampling["temperature"], "top_p" in call.call.sampling) == (0, False)
    call.say("x")
    await task


async def test_log_probabilities_of_the_prompt_come_as_in_vllm(door):
    task, call = await door.asked(PATH, {**ONCE, "prompt_logprobs": 1})
    prompt = PromptTold(2, logprobs=(None, likely("b", -0.5, ("c", -0.75), id_=7)))
    call.tell(ChoiceDelta(0, "x", num_tokens=1, finish_reason="stop"), prompts=(prompt,), final=True)
    _, _, answer = await task
    told = answer["choices"][0]["prompt_logprobs"]
    assert told == [None, {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]


async def test_tokens_may_be_told_by_number_so_that_none_has_the_name_of_another(door):
    task, call = await door.asked(PATH, {**ONCE, "logprobs": 1, "return_tokens_as_token_ids": True})
    entry = likely("\ufffd", -0.5, ("\ufffd", -0.5), ("\ufffd", -0.75), id_=7)
    call.tell(
        ChoiceDelta(0, "a", num_tokens=1, logprobs=(entry,), finish_reason="stop"),
        prompts=(PromptTold(1),),
        final=True,
    )
    _, _, answer = await task
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"token_id:7": -0.5, "token_id:8": -0.75}]


async def test_waiting_is_bounded_by_what_the_request_says(door):
    task, call = await door.asked(PATH, {**ONCE, "timeout": 5000, "priority": -2, "cache_salt": "s"})
    assert (call.request.timeout_us, call.call.priority, call.call.cache_salt) == (5000, -2, "s")
    call.say("x")
    await task
