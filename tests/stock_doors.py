"""tritonclient over either door, with one word for each code: what a test table says of both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from google.protobuf import json_format
from tritonclient.utils import InferenceServerException

from harness import RunningServer
from headrace_protocol._generated import grpc_service_pb2 as pb

DOORS = ("http", "grpc")
_CODES = {
    "400": "INVALID_ARGUMENT",
    "404": "NOT_FOUND",
    "413": "TOO_LARGE",
    "500": "INTERNAL",
    "501": "UNIMPLEMENTED",
    "503": "UNAVAILABLE",
}

Client = Any
"""Either client: they share the names of what is called here."""


@contextlib.contextmanager
def client(server: RunningServer, door: str) -> Iterator[Client]:
    """Open a stock client that waits for a minute."""
    made: Client
    if door == "http":
        made = httpclient.InferenceServerClient(server.http, network_timeout=60.0, connection_timeout=60.0)
    else:
        made = grpcclient.InferenceServerClient(server.grpc)
    with made:
        yield made


def refused(call: Callable[..., object], *arguments: object, **keywords: object) -> tuple[str, str]:
    """Return code and sentence of the error that a call meets."""
    with pytest.raises(InferenceServerException) as raised:
        call(*arguments, **keywords)
    status = str(raised.value.status())
    code = _CODES.get(status, status)  # over HTTP a status
    return code.removeprefix("StatusCode."), raised.value.message()


def index(door_client: Client) -> list[dict[str, str]]:
    """Return the repository index as HTTP shows it: a field without a value is left out."""
    found = door_client.get_model_repository_index()
    if isinstance(found, list):
        return found
    fields = ("name", "version", "state", "reason")
    return [{field: getattr(model, field) for field in fields if getattr(model, field)} for model in found.models]


def statistics(door_client: Client, model: str, version: str = "") -> list[pb.ModelStatistics]:
    """Return the statistics as messages, whichever the door."""
    told = door_client.get_inference_statistics(model, version)
    if isinstance(told, dict):
        return list(json_format.ParseDict(told, pb.ModelStatisticsResponse()).model_stats)
    return list(pb.ModelStatisticsResponse.FromString(told.SerializeToString()).model_stats)  # the client has its own
