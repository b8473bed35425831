"""POST /v1/embeddings, over language models and over any that say they make vectors."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from headrace.access.caller import Caller, Grant, Role
from headrace.gateway.gatekeeper import Gatekeeper
from headrace.gateway.http.openai.text_rows import TextRows
from headrace.types import TensorMetadata
from headrace_protocol import datatype as dt
from headrace_protocol.errors import ErrorCode, FailureReason, InferError
from http_door import SETTINGS
from text_models import MODELS, TextDoor, opened, tell_vectors

PATH = "/v1/embeddings"


@pytest.fixture
async def door() -> AsyncIterator[TextDoor]:
    async with opened() as started:
        yield started


def unit(*numbers: float) -> list[float]:
    vector = np.array(numbers, np.float32)
    return (vector / np.linalg.norm(vector)).tolist()


async def test_a_declared_model_answers_as_openai_does(door):
    status, headers, answer = await door.post(PATH, {"model": "vectors", "input": ["abc", "aa"]}, X_Request_Id="mine")
    assert status == 200, answer
    assert headers["x-request-id"] == "mine"
    assert answer == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": pytest.approx(unit(3, 1, 2))},
            {"object": "embedding", "index": 1, "embedding": pytest.approx(unit(2, 2, 2))},
        ],
        "model": "vectors",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    (request,) = door.data.requests
    assert (request.id, request.inputs[0].shape) == ("mine", (2, 1))


async def test_a_fault_of_our_own_is_the_answer(door, monkeypatch):
    def fault(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(TextRows, "_rows", fault)
    status, _, answer = await door.post(PATH, {"model": "vectors", "input": ["abc", "aa"]})
    assert (status, answer["error"]["message"]) == (
        500,
        "the server failed to hand the answer over; its log has the reason",
    )
    monkeypatch.undo()
    monkeypatch.setattr(TextRows, "_end", fault)
    status, _, answer = await door.post(PATH, {"model": "vectors", "input": ["abc", "aa"]})
    assert status == 500, answer


async def test_vectors_in_base64_are_the_same_numbers(door):
    body = {"model": "vectors", "input": "abc"}
    _, _, floats = await door.post(PATH, body)
    _, _, encoded = await door.post(PATH, {**body, "encoding_format": "base64"})
    decoded = np.frombuffer(base64.b64decode(encoded["data"][0]["embedding"]), "<f4")
    assert decoded.tolist() == floats["data"][0]["embedding"]


async def test_vectors_are_cut_and_have_length_one_again(door):
    _, _, answer = await door.post(PATH, {"model": "vectors", "input": "abc", "dimensions": 2, "normalize": False})
    assert answer["data"][0]["embedding"] == pytest.approx(unit(3, 1))
    _, _, answer = await door.post(PATH, {"model": "vectors", "input": "abc", "normalize": False})
    assert answer["data"][0]["embedding"] == [3, 1, 2]
    status, _, answer = await door.post(PATH, {"model": "vectors", "input": "abc", "dimensions": 4})
    assert (status, answer["error"]["param"]) == (400, "dimensions")


async def test_more_texts_than_a_batch_takes_go_in_several_requests_and_come_back_in_order(door):
    texts = ["a" * number for number in range(1, 11)]
    _, _, answer = await door.post(PATH, {"model": "vectors", "input": texts, "normalize": False})
    assert [
        len(dt.decode_bytes(request.inputs[0].data, request.inputs[0].shape[0])) for request in door.data.requests
    ] == [
        4,
        4,
        2,
    ]
    assert [one["embedding"] for one in answer["data"]] == [[number, number, 2] for number in range(1, 11)]
    assert answer["usage"]["prompt_tokens"] == 55


async def test_a_model_that_takes_a_text_at_a_time_is_asked_by_a_few_requests_at_once(door):
    _, _, answer = await door.post(PATH, {"model": "single", "input": ["a"] * 40, "normalize": False})
    assert [one["embedding"] for one in answer["data"]] == [[1, 1, 2]] * 40
    assert answer["usage"] == {"prompt_tokens": 0, "total_tokens": 0}
    assert len(door.data.requests) == 40
    assert door.data.most_under_way == 16


async def test_a_request_of_many_texts_counts_once_for_its_caller():
    caller = Caller(Grant("some", frozenset({Role.INFER})), 0)

    class OnlyOne:
        anonymous = caller

    async with opened(replace(SETTINGS, gatekeeper=Gatekeeper(OnlyOne()))) as door:
        status, _, answer = await door.post(PATH, {"model": "single", "input": ["a"] * 3})
        assert status == 200, answer
        assert [request.caller for request in door.data.requests] == [caller, None, None]


async def test_one_text_that_fails_is_the_answer_and_the_rest_is_cancelled(door):
    status, _, answer = await door.post(PATH, {"model": "single", "input": ["hold", "a", "fail", "b"] * 10})
    assert (status, answer["error"]["message"]) == (400, "the model takes no 'fail'")
    await asyncio.wait_for(door.data.cancelled.wait(), 5)
    assert len(door.data.requests) < 30


async def test_a_client_that_goes_takes_its_requests_along(door):
    task = asyncio.create_task(door.post(PATH, {"model": "vectors", "input": "hold"}))
    await asyncio.wait_for(door.data.holding.wait(), 5)
    task.cancel()
    await asyncio.wait_for(door.data.cancelled.wait(), 5)


@pytest.mark.parametrize("text", ["nan", "short"])
async def test_what_is_no_vector_of_numbers_is_a_fault_of_the_model(door, text):
    status, _, answer = await door.post(PATH, {"model": "vectors", "input": [text, "b", "c"]})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "output 'VECTOR'" in answer["error"]["message"]


async def test_a_full_queue_is_told_as_such(door):
    door.data.failure = InferError(ErrorCode.UNAVAILABLE, "the queue is full", FailureReason.REJECTED)
    status, headers, answer = await door.post(PATH, {"model": "vectors", "input": ["a"] * 10})
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert headers["retry-after"]


async def test_a_language_model_makes_vectors_in_one_call(door):
    body = {"model": "embedder", "input": ["hi", [1, 2, 3]], "dimensions": 2, "encoding_format": "base64"}
    task, call = await door.asked(PATH, {**body, "truncate_prompt_tokens": 5, "normalize": False})
    asked = call.call
    assert (asked.task, asked.prompts, asked.dimensions, asked.normalize) == ("embed", ["hi", [1, 2, 3]], 2, False)
    assert asked.sampling == {"truncate_prompt_tokens": 5}
    tell_vectors(call, np.array([[0.6, 0.8], [1, 0]]), (2, 3))
    status, _, answer = await task
    assert status == 200, answer
    vectors = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer["data"]]
    np.testing.assert_array_equal(vectors, np.array([[0.6, 0.8], [1, 0]], np.float32))
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert answer["model"] == "embedder"


async def test_tokens_that_are_one_input_are_one(door):
    task, call = await door.asked(PATH, {"model": "embedder", "input": [7, 8]})
    assert call.call.prompts == [[7, 8]]
    tell_vectors(call, np.ones((1, 4)), (2,))
    assert len((await task)[2]["data"]) == 1


async def test_too_few_vectors_of_a_language_model_are_its_fault(door):
    task, call = await door.asked(PATH, {"model": "embedder", "input": ["a", "b"]})
    tell_vectors(call, np.ones((1, 4)), (1, 1))
    assert (await task)[0] == 500


async def test_what_a_backend_refuses_is_named_as_the_client_named_it(door):
    task, call = await door.asked(PATH, {"model": "embedder", "input": ["a" * 100]})
    call.fail(InferError(ErrorCode.INVALID_ARG, "prompts[0]: too long", param="prompts"))
    status, _, answer = await task
    assert (status, answer["error"]["param"], answer["error"]["message"]) == (400, "input", "input[0]: too long")


async def test_without_a_name_the_only_model_there_is_answers(door):
    status, _, answer = await door.post(PATH, {"input": "a"})
    assert (status, answer["error"]["code"]) == (400, "missing_required_parameter")
    assert "single, vectors, embedder" in answer["error"]["message"]
    del door.data.declared["single"], door.data.cards["embedder"]
    status, _, answer = await door.post(PATH, {"input": "a"})
    assert (status, answer["model"]) == (200, "vectors")
    del door.data.declared["vectors"]
    assert (await door.post(PATH, {"input": "a"}))[0] == 400


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({}, 400, "input", "missing_required_parameter"),
        ({"input": None}, 400, "input", "missing_required_parameter"),
        ({"input": ""}, 400, "input", "invalid_value"),
        ({"input": []}, 400, "input", "invalid_value"),
        ({"input": ["a", ""]}, 400, "input[1]", "invalid_value"),
        ({"input": ["a", 5]}, 400, "input[1]", "invalid_value"),
        ({"input": [[]]}, 400, "input[0]", "invalid_value"),
        ({"input": 5}, 400, "input", "invalid_value"),
        ({"input": ["a"] * 2049}, 400, "input", "invalid_value"),
        ({"input": [1, 2]}, 400, "input", "invalid_value"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "invalid_value"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions", "invalid_value"),
        ({"input": "a", "dimensions": "3"}, 400, "dimensions", "invalid_value"),
        ({"model": "embedder", "input": [1, 100]}, 400, "input", "invalid_value"),
        ({"model": "embedder", "input": [[1], [-1]]}, 400, "input[1]", "invalid_value"),
        ({"model": "embedder", "input": "a", "dimensions": 5}, 400, "dimensions", "invalid_value"),
        ({"model": "chatty", "input": "a"}, 400, "model", "unsupported_model"),
        ({"model": "other", "input": "a"}, 400, "model", "unsupported_model"),
        ({"model": "ranker", "input": "a"}, 400, "model", "unsupported_model"),
        ({"model": "unknown", "input": "a"}, 404, "model", "model_not_found"),
        ({"model": "loading", "input": "a"}, 503, None, None),
        ({"model": 5, "input": "a"}, 400, "model", "invalid_value"),
    ],
)
async def test_what_is_wrong_is_named(door, body, status, param, code):
    got, _, answer = await door.post(PATH, {"model": "vectors", **body})
    error = answer["error"]
    assert (got, error["param"], error["code"]) == (status, param, code), error
    assert not door.data.requests


@pytest.mark.parametrize(
    ("said", "inputs", "outputs", "why"),
    [
        ({"text_input": "X"}, None, None, "no input 'X' of texts"),
        ({"embedding_output": "X"}, None, None, "no output 'X'"),
        ({"token_count_output": "VECTOR"}, None, None, "no output 'VECTOR' of INT32"),
        ({}, (), None, "0 inputs of texts, and 1 are needed"),
        ({}, (TensorMetadata("A", "FP32", (-1, 1)),), None, "0 inputs of texts"),
        ({}, (*MODELS["vectors"][2], TensorMetadata("B", "FP32", (-1, 1))), None, "its input 'B' is none of the texts"),
        ({}, (TensorMetadata("A", "BYTES", (-1, 2)),), None, "takes [2] texts a row"),
        ({}, None, (TensorMetadata("A", "FP32", (-1,)), TensorMetadata("B", "FP32", (-1,))), "2 outputs of FP32"),
        ({}, None, (TensorMetadata("A", "INT8", (-1,)),), "0 outputs of FP32"),
    ],
)
async def test_a_model_that_says_what_it_does_not_do_is_told_so(door, said, inputs, outputs, why):
    _, size, was_inputs, was_outputs = MODELS["vectors"]
    door.data.declared["vectors"] = (
        {"task": "embedding", **said},
        size,
        was_inputs if inputs is None else inputs,
        was_outputs if outputs is None else outputs,
    )
    status, _, answer = await door.post(PATH, {"model": "vectors", "input": "a"})
    assert status == 500
    assert why in answer["error"]["message"]


async def test_models_that_say_what_they_make_are_listed(door):
    status, _, answer = await door.ask("GET", "/v1/models")
    told = {model["id"]: model["max_model_len"] for model in json.loads(answer)["data"]}
    assert status == 200
    assert {"vectors", "single", "ranker"} <= {name for name, length in told.items() if length is None}
    assert "other" not in told
    status, _, answer = await door.ask("GET", "/v1/models/ranker")
    assert (status, json.loads(answer)["root"]) == (200, "ranker")


async def test_which_tensors_are_which_may_be_said(door):
    texts = (TensorMetadata("OTHER", "BYTES", (-1, 1)), *MODELS["vectors"][2])
    outputs = (TensorMetadata("X", "FP32", (-1, 9)), *MODELS["vectors"][3])
    door.data.declared["vectors"] = (
        {"task": "embedding", "text_input": "TEXT", "embedding_output": "VECTOR"},
        4,
        texts[1:],
        outputs,
    )
    status, _, answer = await door.post(PATH, {"model": "vectors/versions/1", "input": "ab"})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 0)
    (request,) = door.data.requests
    assert [output.name for output in request.outputs] == ["VECTOR"]
    assert request.model_version == 1
