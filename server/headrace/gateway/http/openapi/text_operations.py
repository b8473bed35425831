"""The operations of the doors for vectors, scores and tokens of texts, in words. A table, no logic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from headrace.gateway.http.openapi.operation import Operation
from headrace.gateway.http.openapi.parts import answers_json, takes_json
from headrace.gateway.http.openapi.schema import reference
from headrace.gateway.http.routes import Endpoint

_FAILURES: Final = (400, 401, 404, 415, 429, 503)
_HEADERS: Final = ("Content-Encoding", "X-Request-Id", "traceparent")
_EMBED: Final[dict[str, Any]] = {"model": "minilm", "input": ["What is a watermill?", "A mill that water drives."]}
_RERANK: Final[dict[str, Any]] = {
    "model": "minilm",
    "query": "What drives a watermill?",
    "documents": ["Wind drives sails.", "Water drives a wheel."],
    "top_n": 1,
}
_SCORE: Final[dict[str, Any]] = {"model": "minilm", "text_1": "a mill", "text_2": ["a windmill", "a cat"]}


def _asking(name: str, summary: str, request: str, answer: str, text: str, examples: dict[str, Any]) -> Operation:
    return Operation(
        name,
        summary,
        answers_json(reference(answer), text),
        _FAILURES,
        headers=_HEADERS,
        body=takes_json(reference(request), examples, required=True),
        openai=True,
    )


_RANKING: Final = ("RerankRequest", "Reranking")

TEXTS: Final[Mapping[tuple[Endpoint, str], Operation]] = {
    (Endpoint.EMBEDDINGS, "POST"): _asking(
        *("embeddings", "Vectors of texts", "EmbeddingsRequest", "Embeddings"),
        "One for each text, in order.",
        {"two texts": _EMBED},
    ),
    (Endpoint.RERANK, "POST"): _asking(
        *("rerank", "Order documents by how well they fit a query", *_RANKING),
        "The documents come back unless `return_documents` is false.",
        {"two documents": _RERANK},
    ),
    (Endpoint.RERANK_V2, "POST"): _asking(
        *("rerank_v2", "As /v1/rerank, in Cohere's second version", *_RANKING),
        "The documents come back only where `return_documents` is true.",
        {"two documents": _RERANK},
    ),
    (Endpoint.SCORE, "POST"): _asking(
        *("score", "How well texts fit each other", "ScoreRequest", "Scores"),
        "One for each pair, in order.",
        {"two pairs": _SCORE},
    ),
    (Endpoint.TOKENIZE, "POST"): _asking(
        *("tokenize", "The tokens of a text, or of a conversation", "TokenizeRequest", "Tokens"),
        "The tokens.",
        {"a text": {"model": "smollm2", "prompt": "Once upon a time"}},
    ),
    (Endpoint.DETOKENIZE, "POST"): _asking(
        *("detokenize", "The text of tokens", "DetokenizeRequest", "TextOfTokens"),
        "The text, special tokens included.",
        {"tokens": {"model": "smollm2", "tokens": [9112, 28]}},
    ),
}
"""By endpoint and method."""
