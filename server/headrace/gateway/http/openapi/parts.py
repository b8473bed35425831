"""What operations are made of: parameters, bodies and answers, as OpenAPI writes them."""

from __future__ import annotations

import json
from typing import Any, Final

from headrace.gateway.http.answer import BINARY, JSON
from headrace.gateway.http.compression import ACCEPTED
from headrace.gateway.http.openapi.schema import Schema, reference
from headrace.gateway.http.request_codec import HEADER_LENGTH

EVENTS: Final = "text/event-stream"

_HEADER_LENGTH_TEXT: Final = "Bytes of the JSON at the start of the body; binary data of tensors follows it."

PARAMETERS: Final[dict[str, Schema]] = {
    "model": {
        "name": "model",
        "in": "path",
        "required": True,
        "description": "Name of a model, percent-encoded.",
        "schema": {"type": "string", "minLength": 1},
        "example": "simple",
    },
    "version": {
        "name": "version",
        "in": "path",
        "required": True,
        "description": "A version of the model. Without one the traffic policy says which, else the highest is meant.",
        "schema": {"type": "string", "pattern": "^[0-9]{1,18}$"},
        "example": "1",
    },
    "repository": {
        "name": "repository",
        "in": "path",
        "required": True,
        "description": "Name of a repository: ignored by the index, refused otherwise.",
        "schema": {"type": "string", "minLength": 1},
        "example": "models",
    },
    "region": {
        "name": "region",
        "in": "path",
        "required": True,
        "description": "Name of a region of shared memory, percent-encoded.",
        "schema": {"type": "string", "minLength": 1},
        "example": "inputs",
    },
    "Accept-Encoding": {
        "name": "Accept-Encoding",
        "in": "header",
        "description": f"Codings in which the answer may come: {ACCEPTED}, with weights.",
        "schema": {"type": "string"},
        "example": "gzip",
    },
    "Content-Encoding": {
        "name": "Content-Encoding",
        "in": "header",
        "description": f"Coding of the whole body: {ACCEPTED} or identity.",
        "schema": {"type": "string"},
        "example": "identity",
    },
    "Inference-Header-Content-Length": {
        "name": HEADER_LENGTH,
        "in": "header",
        "description": f"{_HEADER_LENGTH_TEXT} Absent: all of it is JSON. 0: all of it is the model's one input.",
        "schema": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
    },
    "X-Request-Id": {
        "name": "X-Request-Id",
        "in": "header",
        "description": "What the request is called in the answer's id and headers, and in traces; else it gets an id.",
        "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
        "example": "my-request-1",
    },
    "traceparent": {
        "name": "traceparent",
        "in": "header",
        "description": "W3C trace context that the request belongs to. Taken, and nothing done with it yet.",
        "schema": {"type": "string"},
        "example": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    },
}

HEADERS: Final[dict[str, Schema]] = {
    "Content-Encoding": {
        "description": "Coding of the body.",
        "schema": {"type": "string", "enum": ["gzip", "deflate"]},
    },
    "Vary": {"description": "Where the client had a choice of codings.", "schema": {"type": "string"}},
    "Inference-Header-Content-Length": {
        "description": _HEADER_LENGTH_TEXT,
        "schema": {"type": "integer", "minimum": 0},
    },
}
_CODED: Final = {name: {"$ref": f"#/components/headers/{name}"} for name in ("Content-Encoding", "Vary")}

FAILURES: Final[dict[int, str]] = {
    400: "What was sent is wrong; the text names the field.",
    401: "The API key is missing or wrong.",
    403: "The operator restricted this kind of call to those who send a certain header.",
    404: "There is no such model, version or region.",
    408: "The head or the body of the request did not come on for 60 s.",
    413: "The body, or a part of it, is above a limit of the server.",
    415: "The Content-Encoding is not served, and Accept-Encoding says which are; or the Content-Type is not.",
    417: "Expect is something else than 100-continue.",
    429: "Too much waits; the same request may be taken a little later.",
    431: "A line of the head is above 16 KiB, or there are more than 128 headers.",
    500: "A fault of the server or of the model.",
    501: "What was asked for is not served.",
    503: "Not now: not ready, stopping, the queue is full or waited too long, or the server's mode forbids it.",
}
ANYWHERE: Final = (403, 408, 413, 417, 431, 500, 501)
"""Failures that any operation may end with."""
OPENAI_ALONE: Final = (401, 429)
"""Failures that only OpenAI's operations end with."""


def failure(status: int, name: str = "Error") -> Schema:
    """Return the answer of a failure; `name` is the schema of its body."""
    answer: Schema = {"description": FAILURES[status], "content": {JSON: {"schema": reference(name)}}}
    if status == 415:
        answer["headers"] = {"Accept-Encoding": {"description": "What is served.", "schema": {"type": "string"}}}
    if status == 429:
        seconds = {"type": "integer", "minimum": 0}
        answer["headers"] = {"Retry-After": {"description": "Seconds.", "schema": seconds}}
    return answer


def answers_json_or_chunks(
    schema: Schema,
    text: str,
    chunk: Schema,
    said: str = "On one line: a chunk, an error where the stream fails, and [DONE] at the end.",
) -> Schema:
    """Return the answer of a generation: JSON, or server-sent events with a chunk each where it is streamed."""
    data = {"type": "string", "description": said, "contentMediaType": JSON, "contentSchema": chunk}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    answer = answers_json(schema, text)
    return {**answer, "content": {**answer["content"], EVENTS: {"schema": event}}}


def parameter(name: str) -> Schema:
    """Return a reference to one of PARAMETERS."""
    return {"$ref": f"#/components/parameters/{name}"}


def answers_json(schema: Schema, text: str, example: Any = None) -> Schema:
    """Return the answer that is JSON of this schema."""
    media: Schema = {"schema": schema}
    if example is not None:
        media["example"] = example
    return {"description": text, "headers": _CODED, "content": {JSON: media}}


def answers_empty(text: str) -> Schema:
    """Return the answer that has no body."""
    return {"description": text}


def answers_tensors(example: Any) -> Schema:
    """Return the answer to an inference: JSON, or JSON with binary data behind it."""
    answer = answers_json(reference("InferResponse"), "The outputs.", example)
    header = {"$ref": f"#/components/headers/{HEADER_LENGTH}"}
    binary = {"schema": _binary("An InferResponse as JSON, then the binary data of its outputs in order.")}
    return {
        **answer,
        "headers": {**_CODED, HEADER_LENGTH: header},
        "content": {**answer["content"], BINARY: binary},
    }


def answers_events(example: Any) -> Schema:
    """Return the answer that is a stream of server-sent events; the schema is that of one event."""
    data = {
        "type": "string",
        "description": "On one line: a GenerateResponse, or an Error where the stream fails.",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": [reference("GenerateResponse"), reference("Error")]},
    }
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    headers = {"Cache-Control": {"description": "no-cache", "schema": {"type": "string"}}}
    media = {"schema": event, "example": {"data": json.dumps(example)}}
    return {"description": "Events, one for each response.", "headers": headers, "content": {EVENTS: media}}


def takes_json(schema: Schema, examples: dict[str, Any], *, required: bool) -> Schema:
    """Return the request body that is JSON of this schema."""
    media: Schema = {"schema": schema, "examples": {name: {"value": value} for name, value in examples.items()}}
    return {"required": required, "content": {JSON: media}}


def takes_tensors(examples: dict[str, Any]) -> Schema:
    """Return the request body of an inference: JSON, JSON with binary data behind it, or one raw tensor."""
    body = takes_json(reference("InferRequest"), examples, required=True)
    text = (
        f"An InferRequest as JSON, as long as {HEADER_LENGTH} says, then the binary data of its inputs in order: "
        "little-endian, row-major, unpadded, each element of BYTES behind its length in 4 bytes. With the length 0, "
        "all of it is the one input of the model."
    )
    return {**body, "content": {**body["content"], BINARY: {"schema": _binary(text)}}}


def _binary(text: str) -> Schema:
    """Return the schema of bytes that are no text."""
    return {"type": "string", "format": "binary", "description": text}
