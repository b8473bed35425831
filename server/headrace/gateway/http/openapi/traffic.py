"""What the document tells of traffic policies: their schemas and operations."""

from __future__ import annotations

from typing import Any, Final

from headrace.gateway.http.openapi.operation import Operation
from headrace.gateway.http.openapi.parts import answers_json, takes_json
from headrace.gateway.http.openapi.schema import (
    SIZE,
    Schema,
    array_of,
    described,
    exact_object,
    object_of,
    or_null,
    reference,
)
from headrace.gateway.http.routes import Endpoint

CANARY: Final[dict[str, Any]] = {"default": 1, "guard": {"max_error_rate": 0.05, "window_secs": 30}}
_TEXT: Final[Schema] = {"type": "string"}
_FLAG: Final[Schema] = {"type": "boolean"}
_VERSION: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 2**53}
_PERCENT: Final[Schema] = {"type": "number", "minimum": 0, "maximum": 100}
_RATE: Final[Schema] = {"type": "number", "minimum": 0, "maximum": 1}


def traffic_schemas() -> dict[str, Schema]:
    """Return the schemas of a traffic policy, of changes to it and of how it does."""
    policy = _policy()
    switch = {
        "version": _VERSION,
        "load": described(_FLAG, "Load the version where it does not serve; in the model control mode explicit alone."),
        "unload_old": described(
            _FLAG, "Unload what was the default, once no request is in it; in the same mode alone."
        ),
        "timeout_secs": described(
            {"type": "number", "minimum": 0, "maximum": 3600}, "How long it may take to be ready."
        ),
    }
    operations = {
        "switch": described(exact_object(switch, ("version",)), "Make a version the default once it is ready."),
        "promote": described(_VERSION, "Make a version the default, and end all weights."),
        "rollback": described({"anyOf": [{"const": True}, _VERSION]}, "End one weight, or all of them."),
        "reset": described({"const": True}, "Go back to what the model's configuration says."),
    }
    alone = [exact_object({name: schema}, (name,)) for name, schema in operations.items()]
    return {
        "TrafficPolicy": exact_object(policy),
        "TrafficGuard": _guard(),
        "TrafficShadow": _shadow(),
        "TrafficRequest": {"anyOf": [exact_object({name: or_null(part) for name, part in policy.items()}), *alone]},
        "TrafficStatus": _status(),
    }


def _policy() -> dict[str, Schema]:
    weights = {"type": "object", "patternProperties": {"^[1-9][0-9]{0,15}$": _PERCENT}, "additionalProperties": False}
    return {
        "default": described(_VERSION, "What gets the requests that no other version gets."),
        "weights": described(weights, "Percent of the requests, by version other than the default."),
        "sticky_parameter": described(
            {**_TEXT, "maxLength": 128}, "Request parameter that keeps callers with a version."
        ),
        "shadow": reference("TrafficShadow"),
        "guard": reference("TrafficGuard"),
    }


def _guard() -> Schema:
    return exact_object(
        {
            "max_error_rate": _RATE,
            "max_error_rate_above_default": _RATE,
            "max_p99_ms": {"type": "number", "minimum": 0.001, "maximum": 3_600_000},
            "max_p99_ratio": {"type": "number", "minimum": 1, "maximum": 1000},
            "min_requests": {"type": "integer", "minimum": 1, "maximum": 1_000_000},
            "window_secs": {"type": "integer", "minimum": 2, "maximum": 600},
        }
    )


def _shadow() -> Schema:
    return exact_object(
        {
            "version": _VERSION,
            "percent": _PERCENT,
            "max_in_flight": {"type": "integer", "minimum": 1, "maximum": 4096},
            "timeout_secs": {"type": "number", "minimum": 0.1, "maximum": 3600},
            "streams": _FLAG,
        },
        ("version", "percent"),
    )


def _status() -> Schema:
    version = {"version": SIZE, "ready": _FLAG, "weight": _PERCENT, "answered": SIZE, "failed": SIZE}
    rollback = {"version": SIZE, "reason": _TEXT, "text": _TEXT, "at": _TEXT}
    counts = object_of({}, additionalProperties=SIZE)
    return exact_object(
        {
            "model": _TEXT,
            "policy": reference("TrafficPolicy"),
            "default": described(SIZE, "What a request without a version, header and weight would get now."),
            "versions": array_of(exact_object(version, tuple(version))),
            "set_by": {"enum": ["call", "configuration"]},
            "shadow_in_flight": SIZE,
            "shadows": described(object_of({}, additionalProperties=counts), "By version, what became of shadows."),
            "rollbacks": array_of(exact_object(rollback, tuple(rollback))),
        },
        ("model", "policy", "default", "versions", "set_by", "shadow_in_flight", "shadows", "rollbacks"),
    )


TRAFFIC: Final = {
    (Endpoint.TRAFFIC, "GET"): Operation(
        "traffic",
        "Which version gets the requests that name none",
        answers_json(reference("TrafficStatus"), "The policy in force, and how the versions do."),
        (404, 415, 503),
    ),
    (Endpoint.TRAFFIC, "POST"): Operation(
        "change_traffic",
        "Change which version gets the requests that name none",
        answers_json(reference("TrafficStatus"), "What is in force now."),
        (400, 404, 415, 503),
        "Members of the policy that are given take the place of those before, null takes them away; all changes are made, or "
        "none. switch, promote, rollback and reset stand alone.",
        ("Content-Encoding",),
        takes_json(reference("TrafficRequest"), {"a default with a guard": CANARY}, required=False),
    ),
}
