"""POST /v1/rerank and /v1/score: how well texts fit a query, or each other.

A model that says it reranks scores pairs of texts; of one that makes vectors the cosine of two is the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from headrace.clock import Clock
from headrace.gateway.http.openai.declared import DeclaredModel
from headrace.gateway.http.openai.embeddings import RowsUnderWay
from headrace.gateway.http.openai.endpoint import CallEndpoint
from headrace.gateway.http.openai.errors import missing, refusal
from headrace.gateway.http.openai.exchange import Exchange
from headrace.gateway.http.openai.fields import Fields, read_body
from headrace.gateway.http.openai.sampling import read_timeout
from headrace.gateway.http.openai.text_rows import Rows
from headrace.gateway.http.openai.vectors import Model, begin_rows, begin_vectors, find_model, shaped
from headrace.gateway.http.request import Outlet, Streaming
from headrace.planes import DataPlane
from headrace_protocol.errors import internal

MAX_DOCUMENTS: Final = 1024

Scores = list[float]


class _Scoring(CallEndpoint):
    """What both endpoints have in common: the model, and scores of pairs."""

    def _model(self, fields: Fields) -> tuple[Model, str]:
        """Return the model that a request names, and its name for the answer."""
        asked = fields.text("model")
        model = find_model(self._data, self._directory, asked, ("rerank", "embedding"))
        return model, model.name if asked is None else asked

    def _score(
        self,
        model: Model,
        pairs: tuple[Sequence[str], Sequence[str]],
        fields: Fields,
        under_way: RowsUnderWay,
        exchange: Exchange,
    ) -> None:
        """Begin to score pairs; the one of the two that has a single text goes with each of the other."""
        timeout_us = read_timeout(fields)
        if isinstance(model, DeclaredModel) and model.task == "rerank":
            under_way.under_way = begin_rows(self._data, model, _columns(*pairs), exchange, under_way.take, timeout_us)
        elif isinstance(model, DeclaredModel):
            texts = [*pairs[0], *pairs[1]]
            under_way.under_way = begin_rows(self._data, model, [texts], exchange, under_way.take, timeout_us)
        else:
            truncated = fields.integer("truncate_prompt_tokens", -1)
            under_way.under_way = begin_vectors(
                self._data,
                model,
                [*pairs[0], *pairs[1]],
                exchange,
                under_way.take,
                sampling=None if truncated is None else {"truncate_prompt_tokens": truncated},
                timeout_us=timeout_us,
            )


class Rerank(_Scoring):
    """POST /v1/rerank, /rerank and /v2/rerank, as Jina and Cohere have it."""

    def __init__(self, data: DataPlane, clock: Clock, *, returns_documents: bool = True) -> None:
        """`returns_documents`: whether documents come back where the request does not say."""
        super().__init__(data, clock)
        self._returns_documents = returns_documents

    def begin(self, exchange: Exchange, outlet: Outlet) -> Streaming:
        """Read the request and begin to score."""
        exchange.names = {"prompts": "documents", "adapter": "model"}
        fields = read_body(exchange.http)
        model, name = self._model(fields)
        query = fields.needed_text("query")
        documents = read_documents(fields)
        top = fields.integer("top_n", 1)
        returned = fields.flag("return_documents", self._returns_documents)

        def make(rows: Rows) -> bytes:
            scores = _scores(model, rows, 1, len(documents))
            best = sorted(range(len(documents)), key=lambda number: (-scores[number], number))[:top]
            results: list[dict[str, Any]] = []
            for number in best:
                text = {"document": {"text": documents[number]}} if returned else {}
                results.append({"index": number, **text, "relevance_score": scores[number]})
            head = {"id": f"rerank-{exchange.request_id}", "model": name, "usage": _usage(rows)}
            return msgspec.json.encode({**head, "results": results})

        under_way = RowsUnderWay(exchange, outlet, make)
        self._score(model, ([query], documents), fields, under_way, exchange)
        return under_way


class Score(_Scoring):
    """POST /v1/score and /score, as vLLM has it."""

    def begin(self, exchange: Exchange, outlet: Outlet) -> Streaming:
        """Read the request and begin to score."""
        exchange.names = {"prompts": "text_2", "adapter": "model"}
        fields = read_body(exchange.http)
        model, name = self._model(fields)
        first, second = read_texts(fields, ("text_1", "queries")), read_texts(fields, ("text_2", "documents"))
        if len(first) > 1 and len(first) != len(second):
            raise refusal(f"'text_1' has {len(first)} texts, and 'text_2' {len(second)}: one, or as many", "text_1")

        def make(rows: Rows) -> bytes:
            scores = _scores(model, rows, len(first), len(second))
            told = {
                "id": f"score-{exchange.request_id}",
                "object": "list",
                "created": exchange.created,
                "model": name,
                "data": [{"index": number, "object": "score", "score": score} for number, score in enumerate(scores)],
                "usage": _usage(rows),
            }
            return msgspec.json.encode(told)

        under_way = RowsUnderWay(exchange, outlet, make)
        self._score(model, (first, second), fields, under_way, exchange)
        return under_way


def _columns(first: Sequence[str], second: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    return (list(first) * len(second), second) if len(first) == 1 else (first, second)


def _scores(model: Model, rows: Rows, first: int, second: int) -> Scores:
    """Return the scores of `second` pairs, of which the first texts are `first`: one, or as many."""
    if isinstance(model, DeclaredModel) and model.task == "rerank":
        if rows.values.shape[1] != 1:
            raise internal(f"model '{model.name}' gave {rows.values.shape[1]} numbers for each pair, not one score")
        scores: Scores = rows.values[:, 0].tolist()
        return scores
    vectors = shaped(rows.values, None, normalize=True)
    assert len(vectors) == first + second
    cosines: Scores = np.einsum(
        "pw,pw->p", np.broadcast_to(vectors[:first], vectors[first:].shape), vectors[first:]
    ).tolist()
    return cosines


def _usage(rows: Rows) -> dict[str, int]:
    return {"prompt_tokens": rows.num_tokens, "total_tokens": rows.num_tokens}


def read_documents(fields: Fields) -> list[str]:
    """Return the documents, each a text or an object with one. Raises HttpError 400, which names the one at fault."""
    items = fields.items("documents", MAX_DOCUMENTS, "documents")
    if items is None:
        raise missing("documents")
    if not items:
        raise refusal("'documents' is empty", "documents")
    found = []
    for number, item in enumerate(items):
        if isinstance(item, dict):
            found.append(Fields(item, f"documents[{number}]").needed_text("text"))
        else:
            found.append(_text(fields, f"documents[{number}]", item))
    return found


def read_texts(fields: Fields, names: tuple[str, str]) -> list[str]:
    """Return a text or texts, under either name."""
    name = names[0] if fields.has(names[0]) or not fields.has(names[1]) else names[1]
    value = fields.any(name)
    if value is None:
        raise missing(name)
    if not isinstance(value, list):
        return [_text(fields, name, value)]
    if not value:
        raise refusal(f"'{name}' is empty", name)
    items = fields.items(name, MAX_DOCUMENTS, "texts") or ()
    return [_text(fields, f"{name}[{number}]", item) for number, item in enumerate(items)]


def _text(fields: Fields, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise fields.wrong(name, "a string", value)
    if not value:
        raise refusal(f"'{name}' is empty", name)
    return value
