"""The schemas of the doors for vectors, scores and tokens of texts: what is read of requests, and what answers have."""

from __future__ import annotations

from typing import Final

from headrace.gateway.http.openai.embeddings import MAX_INPUTS
from headrace.gateway.http.openai.rerank import MAX_DOCUMENTS
from headrace.gateway.http.openapi.schema import (
    MAX_INT64,
    Schema,
    array_of,
    described,
    object_of,
    or_null,
    reference,
)

_TEXT: Final[Schema] = {"type": "string"}
_SOME_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_FLAG: Final[Schema] = {"type": "boolean"}
_NUMBER: Final[Schema] = {"type": "number"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": MAX_INT64}
_TOKENS: Final[Schema] = array_of(_COUNT)
_COMMON: Final[dict[str, Schema]] = {
    "model": _TEXT,
    "truncate_prompt_tokens": described(
        {"type": "integer", "minimum": -1, "maximum": MAX_INT64}, "Language models; -1: as many as fit."
    ),
    "timeout": described(_COUNT, "Microseconds in the queue; 0 = as the model is set."),
}


def text_schemas() -> dict[str, Schema]:
    """Return the schemas by name."""
    return {**_of_requests(), **_of_answers()}


def _of_requests() -> dict[str, Schema]:
    tokens = {**_TOKENS, "minItems": 1}
    several = {**array_of({"anyOf": [_SOME_TEXT, tokens]}), "minItems": 1, "maxItems": MAX_INPUTS}
    embeddings: dict[str, Schema] = {
        **_COMMON,
        "input": {"anyOf": [_SOME_TEXT, tokens, several]},
        "encoding_format": {"type": "string", "enum": ["float", "base64"]},
        "dimensions": described(
            {"type": "integer", "minimum": 1, "maximum": MAX_INT64}, "Cut to so many, and of length 1 again."
        ),
        "normalize": described(_FLAG, "Whether vectors have length 1; true."),
        "add_special_tokens": _FLAG,
    }
    document = {"anyOf": [_SOME_TEXT, object_of({"text": _SOME_TEXT}, ("text",))]}
    rerank: dict[str, Schema] = {
        **_COMMON,
        "query": _SOME_TEXT,
        "documents": {**array_of(document), "minItems": 1, "maxItems": MAX_DOCUMENTS},
        "top_n": described({"type": "integer", "minimum": 1, "maximum": MAX_INT64}, "The best so many alone."),
        "return_documents": _FLAG,
    }
    texts = {"anyOf": [_SOME_TEXT, {**array_of(_SOME_TEXT), "minItems": 1, "maxItems": MAX_DOCUMENTS}]}
    score: dict[str, Schema] = {
        **_COMMON,
        "text_1": described(texts, "One, or as many as the others. Also `queries`."),
        "text_2": described(texts, "Also `documents`."),
    }
    tokenize: dict[str, Schema] = {
        "model": _TEXT,
        "prompt": described(_TEXT, "Either this or messages."),
        "messages": array_of(reference("ChatMessage")),
        "add_special_tokens": _FLAG,
        "return_token_strs": _FLAG,
    }
    return {
        "EmbeddingsRequest": _nullable(embeddings, ("input",)),
        "RerankRequest": _nullable(rerank, ("query", "documents")),
        "ScoreRequest": _nullable(score, ()),
        "TokenizeRequest": _nullable(tokenize, ()),
        "DetokenizeRequest": _nullable({"model": _TEXT, "tokens": _TOKENS}, ("tokens",)),
    }


def _nullable(properties: dict[str, Schema], required: tuple[str, ...]) -> Schema:
    members = {name: schema if name in required else or_null(schema) for name, schema in properties.items()}
    return object_of(members, required)


def _of_answers() -> dict[str, Schema]:
    usage = object_of({"prompt_tokens": _COUNT, "total_tokens": _COUNT}, ("prompt_tokens", "total_tokens"))
    vector = {"anyOf": [array_of(_NUMBER), described(_TEXT, "Base64 of FP32 numbers, little-endian.")]}
    one = {"object": {"const": "embedding"}, "index": _COUNT, "embedding": vector}
    result = {"index": _COUNT, "document": object_of({"text": _TEXT}, ("text",)), "relevance_score": _NUMBER}
    scored = {"index": _COUNT, "object": {"const": "score"}, "score": _NUMBER}
    embeddings = {
        "object": {"const": "list"},
        "data": array_of(object_of(one, tuple(one))),
        "model": _TEXT,
        "usage": usage,
    }
    rerank = {
        "id": _TEXT,
        "model": _TEXT,
        "usage": usage,
        "results": described(array_of(object_of(result, ("index", "relevance_score"))), "The best first."),
    }
    score = {
        "id": _TEXT,
        "object": {"const": "list"},
        "created": _COUNT,
        "model": _TEXT,
        "data": array_of(object_of(scored, tuple(scored))),
        "usage": usage,
    }
    tokens = {
        "count": _COUNT,
        "max_model_len": _COUNT,
        "tokens": _TOKENS,
        "token_strs": or_null(array_of(_TEXT)),
    }
    return {
        "Embeddings": object_of(embeddings, tuple(embeddings)),
        "Reranking": object_of(rerank, tuple(rerank)),
        "Scores": object_of(score, tuple(score)),
        "Tokens": object_of(tokens, tuple(tokens)),
        "TextOfTokens": object_of({"prompt": _TEXT}, ("prompt",)),
    }
