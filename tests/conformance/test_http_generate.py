"""generate on a real socket: one JSON object for one response, an error with a status of its own for anything else."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

from headrace_protocol import datatype as dt
from headrace_protocol.errors import ErrorCode, InferError
from http_door import error_of

PATH = "/v2/models/stream/generate"


async def asked(door, body: object = None, path: str = PATH, **headers: str):
    """Ask; return the task of the answer and the call behind it."""
    task = asyncio.create_task(door.ask("POST", path, body or {"id": "1", "text": "x"}, **headers))
    (call,) = await door.data.begun()
    return task, call


async def test_one_response_is_the_answer(door):
    task, call = await asked(door, {"id": "1", "text": "hé", "numbers": [1, 2, 3, 4], "parameters": {"k": 0.5}})
    inputs = [(tensor.name, tensor.shape) for tensor in call.request.inputs]
    assert inputs == [("text", (1,)), ("numbers", (2, 2))]
    assert call.request.parameters == {"k": 0.5}
    call.send(b"ab", parameters={"reason": "stop"}, final=True)
    status, headers, body = await task
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == {
        "id": "1",
        "model_name": "stream",
        "model_version": "1",
        "reason": "stop",
        "OUTPUT0": [97, 98],
    }
    assert call.unread == 0


async def test_the_end_of_a_decoupled_model_may_come_by_itself(door):
    task, call = await asked(door)
    call.send(b"a")
    call.send(None)
    status, _, body = await task
    assert (status, json.loads(body)["OUTPUT0"]) == (200, 97)
    assert call.unread == 0


@pytest.mark.parametrize("count", [0, 2])
async def test_none_or_several_responses_are_an_error_that_names_generate_stream(door, count):
    task, call = await asked(door)
    for _ in range(count):
        call.send(b"a")
    if count == 0:
        call.send(None)
    status, _, body = await task
    assert status == 400
    assert "generate takes exactly one, generate_stream any number" in error_of(body)
    assert call.unread == 0
    assert call.cancelled.is_set() is (count == 2), "the model does not go on for nobody"


@pytest.mark.parametrize("after", [0, 1])
async def test_a_failure_is_the_answer_also_after_a_response(door, after):
    task, call = await asked(door)
    if after:
        call.send(b"a")
    call.fail(InferError(ErrorCode.UNAVAILABLE, "the backend is gone"))
    status, _, body = await task
    assert (status, error_of(body)) == (503, "the backend is gone")
    assert call.unread == 0


async def test_an_output_without_a_json_form_is_an_error(door):
    task, call = await asked(door)
    call.send(b"ab", datatype=dt.BF16)
    status, _, body = await task
    assert status == 400
    assert "JSON has no form for BF16" in error_of(body)
    assert call.unread == 0
    assert call.cancelled.is_set()


async def test_a_client_that_goes_away_cancels_its_request(door):
    task, call = await asked(door)
    task.cancel()
    await asyncio.wait_for(call.cancelled.wait(), 5)


async def test_an_ordinary_model_answers_too(door):
    status, _, body = await door.ask("POST", "/v2/models/echo/versions/1/generate", {"INPUT0": [[1, 2, 3, 4.5]]})
    assert status == 200
    assert json.loads(body) == {"model_name": "echo", "model_version": "1", "OUTPUT0": [1.0, 2.0, 3.0, 4.5]}
    assert (door.data.answered, door.data.released) == (1, 1)


@pytest.mark.parametrize("kind", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("model", "body", "status", "words"),
    [
        ("nope", {"text": "x"}, 404, "'nope' is unknown"),
        ("loading", {"text": "x"}, 503, "not ready"),
        ("stream/versions/9", {"text": "x"}, 404, "no version 9"),
        ("stream", [], 400, "expected 'object'"),
        ("stream", {"text": 5}, 400, "input 'text'"),
        ("stream", {"numbers": [1, 2, 3]}, 400, "input 'numbers'"),
        ("stream", {"x": {}}, 400, "'x'"),
        ("stream", {"triton_x": 1}, 400, "'triton_x'"),
        ("stream", b'{"numbers":[' + b"0," * 200_000 + b"0]}", 413, "input 'numbers'"),
    ],
)
async def test_what_is_wrong_before_inference_is_an_ordinary_error(door, kind, model, body, status, words):
    got, headers, said = await door.ask("POST", f"/v2/models/{model}/{kind}", body)
    assert (got, headers["Content-Type"]) == (status, "application/json")
    assert words in error_of(said)
    assert await door.is_well()


@pytest.mark.parametrize("kind", ["generate", "generate_stream"])
async def test_bodies_are_taken_and_given_as_they_are(door, kind):
    packed = gzip.compress(b'{"text":"x"}')
    status, headers, _ = await door.ask("POST", f"/v2/models/stream/{kind}", packed, Content_Encoding="gzip")
    assert (status, headers["Accept-Encoding"]) == (400, "identity")
    assert (await door.ask("POST", f"/v2/models/stream/{kind}", packed, Content_Encoding="br"))[0] == 415
    task, call = await asked(door, path=f"/v2/models/stream/{kind}", Accept_Encoding="gzip")
    call.send(bytes(5000), final=True)
    status, headers, _ = await task
    assert (status, headers.get("Content-Encoding")) == (200, None)


async def test_the_length_header_of_infer_does_not_raise_the_limit(door):
    body = b'{"text":"%b"}' % (b"x" * (1 << 19))
    status, _, _ = await door.ask("POST", PATH, body, Inference_Header_Content_Length=str(len(body)))
    assert status == 413


async def test_what_keeps_a_caller_with_a_version_reaches_the_data_plane(door):
    task, call = await asked(door, x_headrace_sticky="caller 7")
    call.send(b"a", final=True)
    await task
    assert call.request.sticky == b"caller 7"


async def test_headers_are_not_forwarded_to_generate_but_the_trace_context_is(door):
    context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    task, call = await asked(door, x_tenant="a", traceparent=context)
    call.send(b"a", final=True)
    await task
    assert call.request.parameters is None
    assert call.request.trace_context == context
