"""Every operation of the HTTP door in words: what it takes, what it answers, how it fails. A table, no logic.

Which paths lead to an endpoint, and of which kind it is, is the router's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.gateway.http.openapi import examples
from headrace.gateway.http.openapi.language_operations import LANGUAGE
from headrace.gateway.http.openapi.operation import Operation
from headrace.gateway.http.openapi.parts import (
    answers_empty,
    answers_events,
    answers_json,
    answers_tensors,
    takes_json,
    takes_tensors,
)
from headrace.gateway.http.openapi.schema import Schema, array_of, reference
from headrace.gateway.http.openapi.text_operations import TEXTS
from headrace.gateway.http.openapi.traffic import TRAFFIC
from headrace.gateway.http.routes import Endpoint

_OF_A_MODEL: Final = (400, 404, 503)
_TO_INFER: Final = (400, 404, 415, 503)
_CODED_BODY: Final = ("Content-Encoding",)


def _health(name: str, summary: str, bad: str) -> Operation:
    special = {"400": answers_empty(bad)}
    return Operation(name, summary, answers_empty("Yes."), (503,), special=special)


_SERVER: Final = {
    (Endpoint.LIVE, "GET"): _health("live", "Whether the server works", "It does not."),
    (Endpoint.READY, "GET"): _health(
        "ready", "Whether a request would be served now", "No: a model that should serve does not."
    ),
    (Endpoint.SERVER_METADATA, "GET"): Operation(
        "server_metadata",
        "The server's name, version and extensions",
        answers_json(reference("ServerMetadata"), "About the server."),
    ),
    (Endpoint.OPENAPI, "GET"): Operation(
        "openapi", "This document", answers_json({"type": "object"}, "An OpenAPI document.")
    ),
    (Endpoint.MODELS, "GET"): Operation(
        "models", "The names of the models that are ready", answers_json(reference("ModelNames"), "Each name once.")
    ),
}
_MODEL: Final = {
    (Endpoint.MODEL_READY, "GET"): Operation(
        "model_ready", "Whether a model would serve a request now", answers_empty("It would."), _OF_A_MODEL
    ),
    (Endpoint.MODEL_METADATA, "GET"): Operation(
        "model_metadata",
        "A model's inputs, outputs and versions",
        answers_json(reference("ModelMetadata"), "About the model."),
        _OF_A_MODEL,
    ),
    (Endpoint.MODEL_CONFIG, "GET"): Operation(
        "model_config",
        "A model's configuration",
        answers_json(reference("ModelConfig"), "As the server uses it: completed from the model's file."),
        _OF_A_MODEL,
    ),
    (Endpoint.STATISTICS, "GET"): Operation(
        "statistics",
        "How often models were asked, and how long it took",
        answers_json(reference("ModelStatisticsResponse"), "One entry for each version that serves."),
        _OF_A_MODEL,
    ),
}
_INFERENCE: Final = {
    (Endpoint.INFER, "POST"): Operation(
        "infer",
        "One inference",
        answers_tensors(examples.INFER_ANSWER),
        _TO_INFER,
        "A decoupled model is refused with 501: it may give any number of responses.",
        ("Content-Encoding", "Inference-Header-Content-Length", "traceparent"),
        takes_tensors({"all outputs": examples.INFER, "one output, as binary data": examples.INFER_ONE_OUTPUT}),
    ),
    (Endpoint.GENERATE, "POST"): Operation(
        "generate",
        "One inference, tensors as members of plain JSON",
        answers_json(reference("GenerateResponse"), "The one response.", examples.GENERATE_ANSWER),
        _TO_INFER,
        "A member with the name of an input is that tensor; `id` is the request's id; `parameters` are taken as if they "
        "stood outside; any other member is a parameter for the model. A model that gives no response, or more than "
        "one, gets 400. Bodies are not compressed, either way.",
        ("traceparent",),
        takes_json(reference("GenerateRequest"), {"two inputs": examples.GENERATE}, required=True),
        codings=False,
    ),
    (Endpoint.GENERATE_STREAM, "POST"): Operation(
        "generate_stream",
        "As generate, with any number of responses as server-sent events",
        answers_events(examples.GENERATE_ANSWER),
        _TO_INFER,
        "The status tells of the first response; what fails later is an event with a member `error`. After the last "
        "event the answer ends.",
        ("traceparent",),
        takes_json(reference("GenerateRequest"), {"two inputs": examples.GENERATE}, required=True),
        codings=False,
    ),
}
_REPOSITORY: Final = {
    (Endpoint.INDEX, "POST"): Operation(
        "repository_index",
        "The models of the repositories, loaded or not",
        answers_json(
            array_of(reference("IndexEntry")),
            "An entry for each version; one for a model that was never loaded.",
        ),
        (400, 415),
        headers=_CODED_BODY,
        body=takes_json(reference("IndexRequest"), {"those that are ready": {"ready": True}}, required=False),
    ),
    (Endpoint.LOAD, "POST"): Operation(
        "load",
        "Load or reload a model",
        answers_empty("It is loaded and serves."),
        _TO_INFER,
        "In the model control mode `explicit` alone. Where it fails, what served before goes on serving.",
        _CODED_BODY,
        takes_json(reference("LoadRequest"), {"as it is in the repository": {}}, required=False),
    ),
    (Endpoint.UNLOAD, "POST"): Operation(
        "unload",
        "Unload a model",
        answers_empty("It takes no more requests; those in it are finished."),
        _TO_INFER,
        "In the model control mode `explicit` alone. Unloading what is not loaded is no error.",
        _CODED_BODY,
        takes_json(
            reference("UnloadRequest"),
            {"with those that only it needs": {"parameters": {"unload_dependents": True}}},
            required=False,
        ),
    ),
}


def _memory(
    kind: str, endpoints: tuple[Endpoint, Endpoint, Endpoint], example: Schema
) -> dict[tuple[Endpoint, str], Operation]:
    status, register, unregister = endpoints
    name = {"System": "POSIX shared memory", "Cuda": "GPU memory"}[kind]
    regions = array_of(reference(f"{kind}Region"))
    return {
        (status, "GET"): Operation(
            f"{kind.lower()}_memory_status",
            f"The registered regions of {name}",
            answers_json(regions, "One region, or all of this kind."),
            (404,),
        ),
        (register, "POST"): Operation(
            f"register_{kind.lower()}_memory",
            f"Register a region of {name}",
            answers_empty("Requests may use it."),
            (400, 415, 503),
            "Only where the server was started with `--allow-client-shm=true`; a region has to be named in the path.",
            _CODED_BODY,
            takes_json(reference(f"{kind}RegionRequest"), {"4 KiB": example}, required=True),
        ),
        (unregister, "POST"): Operation(
            f"unregister_{kind.lower()}_memory",
            f"Forget a region of {name}, or all of them",
            answers_empty("It is forgotten, once the requests that use it are finished."),
            (400, 415),
            "Forgetting what is not there is no error.",
            _CODED_BODY,
        ),
    }


_SETTINGS: Final = {
    (Endpoint.TRACE, "GET"): Operation(
        "trace_settings",
        "Which requests are traced",
        answers_json(reference("TraceSettings"), "The settings in force."),
        (404, 415),
    ),
    (Endpoint.TRACE, "POST"): Operation(
        "change_trace_settings",
        "Change which requests are traced",
        answers_json(reference("TraceSettings"), "The settings now in force."),
        (400, 404, 415),
        "All changes are made, or none. null takes a model's setting back to the server's, and the server's to that of "
        "the command line. The file is not changed by a call: 501.",
        _CODED_BODY,
        takes_json(reference("TraceSettingsRequest"), {"every 100th request": examples.TRACE}, required=False),
    ),
    (Endpoint.LOGGING, "GET"): Operation(
        "log_settings", "What is logged", answers_json(reference("LogSettings"), "The settings in force."), (415,)
    ),
    (Endpoint.LOGGING, "POST"): Operation(
        "change_log_settings",
        "Change what is logged",
        answers_json(reference("LogSettings"), "The settings now in force."),
        (400, 415),
        "All changes are made, or none. null changes nothing, whatever its name. The file is not changed by a call: 501.",
        _CODED_BODY,
        takes_json(reference("LogSettingsRequest"), {"more": examples.LOGGING}, required=False),
    ),
}

_SYSTEM: Final = (Endpoint.SYSTEM_STATUS, Endpoint.SYSTEM_REGISTER, Endpoint.SYSTEM_UNREGISTER)
_CUDA: Final = (Endpoint.CUDA_STATUS, Endpoint.CUDA_REGISTER, Endpoint.CUDA_UNREGISTER)

OPERATIONS: Final[Mapping[tuple[Endpoint, str], Operation]] = {
    **_SERVER,
    **_MODEL,
    **_INFERENCE,
    **_REPOSITORY,
    **_memory("System", _SYSTEM, examples.REGISTER_SYSTEM),
    **_memory("Cuda", _CUDA, examples.REGISTER_CUDA),
    **_SETTINGS,
    **TRAFFIC,
    **LANGUAGE,
    **TEXTS,
}
"""By endpoint and method."""
