"""The OpenAPI document of this server: operations, parts and schemas put together. Pure, and built once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from headrace import __version__
from headrace.gateway.http.openapi.bodies import schemas
from headrace.gateway.http.openapi.operation import Operation
from headrace.gateway.http.openapi.operations import OPERATIONS
from headrace.gateway.http.openapi.parts import (
    ANYWHERE,
    FAILURES,
    HEADERS,
    OPENAI_ALONE,
    PARAMETERS,
    failure,
    parameter,
)
from headrace.gateway.http.openapi.schema import Schema
from headrace.gateway.http.routes import PATHS, Endpoint

KINDS: Final = {
    "health": "Whether the server and its models work.",
    "metadata": "What the server and its models are.",
    "inference": "What it is all for.",
    "shared-memory": "Memory that clients share with the server, so that tensors need not travel.",
    "model-config": "How models are configured.",
    "model-repository": "What is loaded.",
    "statistics": "What models have done.",
    "trace": "Which requests are traced.",
    "logging": "What is logged.",
    "rollout": "Which version gets the requests that name none.",
    "openai": "Language models, as OpenAI's clients ask for them.",
}
"""Every kind of operation, by which the operator may restrict them; the tags of the document."""

_TEXT: Final = """\
KServe v2, the Open Inference Protocol, with Triton's extensions.

What fails is answered with `{"error": "..."}`, below /v1 with OpenAI's `{"error": {...}}`. Paths are percent-decoded, and what follows a `?` is not looked at. A
request that is no HTTP gets 400, or 505 for another version than 1.1 and 1.0; a path that is not listed 404; a method
that is not listed 405, but for HEAD, which goes with GET, and OPTIONS. Bodies may come in chunks. Answers above 1 KiB are
compressed for clients that say so in `Accept-Encoding`.
"""
_PARAMETER_OF_A_PATH: Final = re.compile(r"\{(\w+)\}")


def document(restricted: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the document. `restricted`: by kind of operation, the header that a caller has to show."""
    restricted = restricted or {}
    paths: dict[str, dict[str, Schema]] = {path: {} for path in PATHS}
    for endpoint in Endpoint:
        in_order = sorted(
            (path for path, target in PATHS.items() if target is endpoint), key=lambda path: path.count("{")
        )
        for method in endpoint.methods:
            operation = OPERATIONS[endpoint, method]
            for path in in_order:
                described = _describe(operation, path, in_order[0])
                described["tags"] = [endpoint.kind]
                if endpoint.kind in restricted:
                    described["security"] = [{endpoint.kind: []}]
                paths[path][method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": __version__, "description": _TEXT},
        "tags": [{"name": name, "description": text} for name, text in KINDS.items()],
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "parameters": PARAMETERS,
            "headers": HEADERS,
            "responses": {
                **{str(status): failure(status) for status in FAILURES if status not in OPENAI_ALONE},
                **{f"openai-{status}": failure(status, "OpenAIError") for status in FAILURES},
                **{f"anthropic-{status}": failure(status, "AnthropicError") for status in FAILURES},
            },
            "securitySchemes": {
                kind: {"type": "apiKey", "in": "header", "name": header} for kind, header in restricted.items()
            },
        },
    }


def _describe(operation: Operation, path: str, first: str) -> Schema:
    in_path = _PARAMETER_OF_A_PATH.findall(path)
    more = [name for name in in_path if name not in _PARAMETER_OF_A_PATH.findall(first)]
    codings = ("Accept-Encoding",) if operation.codings else ()
    name = operation.name
    if more:
        name += f"_of_{more[-1]}"
    elif path.count("/") != first.count("/"):  # the same without a version in front
        name += "_unversioned"
    described: Schema = {
        "operationId": name,
        "summary": operation.summary,
        "parameters": [parameter(name) for name in (*in_path, *operation.headers, *codings)],
    }
    if operation.text:
        described["description"] = operation.text
    if operation.body is not None:
        described["requestBody"] = operation.body
    failures = {str(status) for status in (*ANYWHERE, *operation.failures)}
    prefix = "anthropic-" if operation.anthropic else "openai-" if operation.openai else ""
    answers = {
        **{status: {"$ref": f"#/components/responses/{prefix}{status}"} for status in failures},
        **operation.special,
        "200": operation.success,
    }
    described["responses"] = dict(sorted(answers.items()))
    return described
