"""Rows of the table: calls that only those may make who show a header, and headers that become parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.service_pb2 as pb
import tritonclient.http as httpclient

from conformance.table.arrays import PAIR
from conformance.table.cases import Case, Differs, Refused, equal
from conformance.table.tensors import Infer, Tensor

KINDS = {
    "inference": lambda client, headers: client.infer("simple", _pair(client), headers=headers),
    "metadata": lambda client, headers: client.get_model_metadata("simple", headers=headers),
    "shared-memory": lambda client, headers: client.get_system_shared_memory_status(headers=headers),
    "model-config": lambda client, headers: client.get_model_config("simple", headers=headers),
    "model-repository": lambda client, headers: client.get_model_repository_index(headers=headers),
    "statistics": lambda client, headers: client.get_inference_statistics("simple", headers=headers),
    "trace": lambda client, headers: client.get_trace_settings(headers=headers),
    "logging": lambda client, headers: client.get_log_settings(headers=headers),
}
"""A call of each kind by the stock client. Health stays open, so that the server can be watched."""
OTHERS = {
    "metadata": lambda client, headers: client.get_server_metadata(headers=headers),
    "shared-memory": lambda client, headers: client.get_cuda_shared_memory_status(headers=headers),
    "model-repository": lambda client, headers: client.load_model("parked", headers=headers),
    "trace": lambda client, headers: client.update_trace_settings("", {}, headers=headers),
}
UNLOCKED = {
    "live": lambda client, headers: client.is_server_live(headers=headers),
    "ready": lambda client, headers: client.is_server_ready(headers=headers),
    "model ready": lambda client, headers: client.is_model_ready("simple", headers=headers),
}
OPEN, ADMIN = "user", "admin"
GROUPS = {
    OPEN: ("inference", "metadata"),
    ADMIN: tuple(kind for kind in KINDS if kind not in ("inference", "metadata")),
}
SECRET = {OPEN: "open sesame", ADMIN: "s3cret=:,"}
FLAGS = tuple(
    f"--{option}={','.join(kinds)}:{header}={SECRET[header]}"
    for option in ("http-restricted-api", "grpc-restricted-protocol")
    for header, kinds in GROUPS.items()
)
FORWARD = (
    "--http-header-forward-pattern=^(x-|priority|triton_)",
    "--grpc-header-forward-pattern=^(x-|priority|triton_)",
)


def _pair(client: Any) -> list[Any]:
    module = httpclient if isinstance(client, httpclient.InferenceServerClient) else grpcclient
    inputs = [module.InferInput(one.name, list(one.shape), one.datatype) for one in PAIR]
    for made, one in zip(inputs, PAIR, strict=True):
        made.set_data_from_numpy(one.data)
    return inputs


def shown(call: Callable[[Any, Any], Any], headers: Mapping[str, str]) -> Callable[[Any], Any]:
    """Return the sending of a call with these headers, which over gRPC have the prefix of the protocol."""

    def send(ask: Any) -> Any:
        prefix = "" if ask.door == "http" else "triton-grpc-protocol-"
        return ask.stock(lambda client: call(client, {prefix + key: value for key, value in headers.items()}))

    return send


def _group(kind: str) -> str:
    return next(header for header, kinds in GROUPS.items() if kind in kinds)


def _restricted() -> Iterator[Case]:
    refused = {"grpc": Differs("it has no status of its own for it", code="UNAVAILABLE")}
    for kind, call in KINDS.items():
        header = _group(kind)
        secret = SECRET[header]
        other = OPEN if header == ADMIN else ADMIN
        yield Case(f"{kind} with the header", shown(call, {header: secret}))
        wrong = {
            "without the header": {},
            "with another value": {header: "nope"},
            "with a part of the value": {header: secret[:-1]},
            "with more than the value": {header: secret + "x"},
            "with an empty value": {header: ""},
            "with the value in capitals": {header: secret.upper()},
            "with the header of others": {other: SECRET[other]},
        }
        for name, headers in wrong.items():
            yield Case(f"{kind} {name}", shown(call, headers), "FORBIDDEN", header, differs=refused)
    for kind, call in OTHERS.items():
        yield Case(
            f"{kind} by another call, without the header", shown(call, {}), "FORBIDDEN", _group(kind), differs=refused
        )
    for name, call in UNLOCKED.items():
        yield Case(f"{name} is open", shown(call, {}), check=lambda answer: equal(answer, True))
    yield Case(
        "a refusal tells no secret",
        lambda ask: _refusal(ask, KINDS["trace"]),
        check=lambda text: equal(SECRET[ADMIN] in text, False),
    )
    yield Case(
        "streams without the header",
        lambda ask: ask.stream_messages([]),
        "UNAVAILABLE",
        OPEN,
        only="grpc",
        because="HTTP has generate_stream instead",
    )
    for path in ("generate", "generate_stream", "infer"):
        yield Case(
            f"{path} without the header",
            lambda ask, path=path: ask.post(f"/v2/models/four/{path}", b"{}"),
            "FORBIDDEN",
            OPEN,
            only="http",
            because="gRPC has no such call",
        )
    yield Case(
        "an unknown path stays unknown",
        lambda ask: ask.get("/v2/nope"),
        "NOT_FOUND",
        only="http",
        because="it is a matter of paths",
    )
    yield Case(
        "an unary call by hand without the prefix",
        lambda ask: ask.wire("ModelConfig", pb.ModelConfigRequest(name="simple"), [(ADMIN, SECRET[ADMIN])]),
        "UNAVAILABLE",
        ADMIN,
        only="grpc",
        because="HTTP has no prefix",
    )


def _refusal(ask: Any, call: Callable[[Any, Any], Any]) -> str:
    try:
        shown(call, {ADMIN: "nope"})(ask)
    except Refused as refusal:
        return refusal.text
    raise AssertionError("it was answered")


def _echo(headers: Mapping[str, str], parameters: Mapping[str, Any] | None = None) -> Infer:
    one = Tensor("INPUT0", "FP32", (1,), np.ones(1, np.float32))
    return Infer("echo", [one], parameters=parameters or {}, more={"headers": dict(headers)})


def _forwarded() -> Iterator[Case]:
    def gives(**wanted: Any) -> Callable[[Any], None]:
        return lambda answer: equal(
            {key.lower(): value for key, value in answer.parameters.items()},
            {key.replace("_", "-"): value for key, value in wanted.items()},
        )

    yield Case("a header that matches is a parameter", _echo({"x-one": "1"}), check=gives(x_one="1"))
    yield Case("two headers that match", _echo({"x-one": "1", "x-two": "2"}), check=gives(x_one="1", x_two="2"))
    yield Case("a header that does not match", _echo({"y-one": "1", "not-x-one": "2"}), check=gives())
    yield Case("an empty header that matches", _echo({"x-one": ""}), check=gives(x_one=""))
    yield Case("a header beside a parameter", _echo({"x-one": "1"}, {"two": 2}), check=gives(x_one="1", two=2))
    for name in ("priority", "triton_x"):
        yield Case(f"a header called {name}", _echo({name: "1"}), "INVALID_ARG", f"{name} reserved|forward")


RESTRICTED_CASES = [*_restricted()]
FORWARDED_CASES = [*_forwarded()]
