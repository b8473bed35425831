"""POST /v1/rerank and /v1/score, over models that rerank and over models that make vectors."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from headrace.types import TensorMetadata
from text_models import TextDoor, opened, tell_vectors

RERANK = {"model": "ranker", "query": "abc", "documents": ["xyz", {"text": "abx"}, "cab", "a", "ab", "b"]}


@pytest.fixture
async def door() -> AsyncIterator[TextDoor]:
    async with opened() as started:
        yield started


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
async def test_documents_are_told_in_the_order_of_their_scores(door, path):
    status, _, answer = await door.post(path, RERANK, X_Request_Id="mine")
    assert status == 200, answer
    assert answer == {
        "id": "rerank-mine",
        "model": "ranker",
        "usage": {"prompt_tokens": 0, "total_tokens": 0},
        "results": [
            {"index": 2, "document": {"text": "cab"}, "relevance_score": 3.0},
            {"index": 1, "document": {"text": "abx"}, "relevance_score": 2.0},
            {"index": 4, "document": {"text": "ab"}, "relevance_score": 2.0},
            {"index": 3, "document": {"text": "a"}, "relevance_score": 1.0},
            {"index": 5, "document": {"text": "b"}, "relevance_score": 1.0},
            {"index": 0, "document": {"text": "xyz"}, "relevance_score": 0.0},
        ],
    }
    assert [request.inputs[0].shape for request in door.data.requests] == [(4, 1), (2, 1)]


async def test_the_best_alone_are_told_and_documents_where_they_are_wanted(door):
    _, _, answer = await door.post("/v1/rerank", {**RERANK, "top_n": 1, "return_documents": False})
    assert answer["results"] == [{"index": 2, "relevance_score": 3.0}]
    _, _, answer = await door.post("/v2/rerank", {**RERANK, "top_n": 1})
    assert answer["results"] == [{"index": 2, "relevance_score": 3.0}]
    _, _, answer = await door.post("/v2/rerank", {**RERANK, "top_n": 99, "return_documents": True})
    assert len(answer["results"]) == 6
    assert answer["results"][0]["document"] == {"text": "cab"}


async def test_of_a_model_that_makes_vectors_the_cosine_is_the_score(door):
    body = {"model": "vectors", "query": "aaa", "documents": ["bbb", "aaa"]}
    _, _, answer = await door.post("/v1/rerank", body)
    first, second = answer["results"]
    assert (first["index"], second["index"]) == (1, 0)
    assert first["relevance_score"] == pytest.approx(1)
    assert second["relevance_score"] == pytest.approx((9 + 4) / (22**0.5 * 13**0.5))
    assert answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}


async def test_a_language_model_that_embeds_reranks(door):
    task, call = await door.asked("/v1/rerank", {"model": "embedder", "query": "q", "documents": ["a", "b"]})
    assert (call.call.task, call.call.prompts) == ("embed", ["q", "a", "b"])
    tell_vectors(call, np.array([[2, 0], [0, 3], [1, 1]]), (1, 1, 1))
    answer = (await task)[2]
    assert [one["index"] for one in answer["results"]] == [1, 0]
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([0.5**0.5, 0])


@pytest.mark.parametrize(("path", "names"), [("/v1/score", ("text_1", "text_2")), ("/score", ("queries", "documents"))])
async def test_one_text_is_scored_with_each_of_the_others(door, path, names):
    _, _, answer = await door.post(path, {"model": "ranker", names[0]: "abc", names[1]: ["a", "bc"]}, X_Request_Id="m")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "id": "score-m",
        "object": "list",
        "model": "ranker",
        "data": [{"index": 0, "object": "score", "score": 1.0}, {"index": 1, "object": "score", "score": 2.0}],
        "usage": {"prompt_tokens": 0, "total_tokens": 0},
    }


async def test_as_many_texts_as_others_are_pairs(door):
    pairs = {"text_1": ["ab", "xy"], "text_2": ["a", "y"]}
    _, _, answer = await door.post("/v1/score", {"model": "ranker", **pairs})
    assert [one["score"] for one in answer["data"]] == [1, 1]
    _, _, answer = await door.post("/v1/score", {"model": "vectors", "text_1": ["aa", "b"], "text_2": ["aa", "b"]})
    assert [one["score"] for one in answer["data"]] == pytest.approx([1, 1])
    _, _, answer = await door.post("/v1/score", {"model": "vectors", "text_1": "aa", "text_2": "aa"})
    assert [one["score"] for one in answer["data"]] == pytest.approx([1])


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/v1/rerank", {"query": None}, "query", "missing_required_parameter"),
        ("/v1/rerank", {"query": ""}, "query", "invalid_value"),
        ("/v1/rerank", {"query": ["a"]}, "query", "invalid_value"),
        ("/v1/rerank", {"documents": None}, "documents", "missing_required_parameter"),
        ("/v1/rerank", {"documents": []}, "documents", "invalid_value"),
        ("/v1/rerank", {"documents": "a"}, "documents", "invalid_value"),
        ("/v1/rerank", {"documents": ["a", ""]}, "documents[1]", "invalid_value"),
        ("/v1/rerank", {"documents": ["a", 5]}, "documents[1]", "invalid_value"),
        ("/v1/rerank", {"documents": [{}]}, "documents[0].text", "missing_required_parameter"),
        ("/v1/rerank", {"documents": ["a"] * 1025}, "documents", "invalid_value"),
        ("/v1/rerank", {"top_n": 0}, "top_n", "invalid_value"),
        ("/v1/rerank", {"model": "other"}, "model", "unsupported_model"),
        ("/v1/score", {"text_2": "a"}, "text_1", "missing_required_parameter"),
        ("/v1/score", {"text_1": "a"}, "text_2", "missing_required_parameter"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1", "invalid_value"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "invalid_value"),
        ("/v1/score", {"queries": ["a", ""], "text_2": ["a", "b"]}, "queries[1]", "invalid_value"),
    ],
)
async def test_what_is_wrong_is_named(door, path, body, param, code):
    base = RERANK if path == "/v1/rerank" else {"model": "ranker"}
    status, _, answer = await door.post(path, {**base, **body})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
    assert not door.data.requests


async def test_numbers_in_place_of_one_score_are_a_fault_of_the_model(door):
    said = {"task": "rerank", "query_input": "TEXT", "document_input": "DOCUMENT"}
    _, _, (text,), outputs = door.data.declared["vectors"]
    document = TensorMetadata("DOCUMENT", "BYTES", (-1, 1))
    door.data.declared["vectors"] = (said, 4, (document, text), outputs)
    status, _, answer = await door.post("/v1/rerank", {**RERANK, "model": "vectors"})
    assert status == 500
    assert "gave 3 numbers for each pair" in answer["error"]["message"]
    assert [tensor.name for tensor in door.data.requests[0].inputs] == ["TEXT", "DOCUMENT"]


async def test_a_model_that_says_it_reranks_and_takes_one_text_is_told_so(door):
    said, size, (query, _), outputs = door.data.declared["ranker"]
    door.data.declared["ranker"] = (said, size, (query,), outputs)
    status, _, answer = await door.post("/v1/rerank", RERANK)
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "1 inputs of texts, and 2 are needed" in answer["error"]["message"]
