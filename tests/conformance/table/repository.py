"""Rows of the table: the repository's index, loads and unloads with what they may bring, and their misuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tritonclient.grpc.service_pb2 as pb
from google.protobuf.json_format import MessageToDict

from conformance.table.cases import Case, Differs, each, gives
from conformance.table.tensors import Infer, tensor
from figures import wait_until

CONFIG = json.dumps(
    {
        "backend": "identity",
        "max_batch_size": 0,
        "input": [{"name": "INPUT0", "data_type": "TYPE_INT8", "dims": [-1]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_INT8", "dims": [-1]}],
    }
)
ASK_INT8 = Infer("parked", [tensor("INPUT0", np.array([7], np.int8))])


def _index(ask: Any, *, ready: bool = False) -> list[dict[str, Any]]:
    if ask.door == "http":
        return ask.post("/v2/repository/index", {"ready": ready})
    message = ask.wire("RepositoryIndex", pb.RepositoryIndexRequest(ready=ready))
    return MessageToDict(message).get("models", [])


def _state(ask: Any, model: str) -> dict[str, tuple[str, str]]:
    return {
        entry.get("version", ""): (entry.get("state", ""), entry.get("reason", ""))
        for entry in _index(ask)
        if entry["name"] == model
    }


def load(model: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> Callable[[Any], Any]:
    """Return the sending of a load by the stock client."""
    return lambda ask: ask.stock(lambda client: client.load_model(model, config=config, files=files and dict(files)))


def unload(model: str, *, dependents: bool = False) -> Callable[[Any], Any]:
    return lambda ask: ask.stock(lambda client: client.unload_model(model, unload_dependents=dependents))


def load_with(**parameters: Any) -> Callable[[Any], Any]:
    """Return the sending of a load of `parked` with parameters that the stock client would not send."""

    def over_http(ask: Any) -> Any:
        return ask.post("/v2/repository/models/parked/load", {"parameters": parameters})

    def over_grpc(ask: Any) -> Any:
        return ask.call("RepositoryModelLoad", _with_parameters(pb.RepositoryModelLoadRequest, parameters))

    return each(over_http, over_grpc)


def unload_with(**parameters: Any) -> Callable[[Any], Any]:
    def over_http(ask: Any) -> Any:
        return ask.post("/v2/repository/models/parked/unload", {"parameters": parameters})

    def over_grpc(ask: Any) -> Any:
        return ask.call("RepositoryModelUnload", _with_parameters(pb.RepositoryModelUnloadRequest, parameters))

    return each(over_http, over_grpc)


def _with_parameters(kind: Any, parameters: Mapping[str, Any]) -> Any:
    message = kind(model_name="parked")
    for key, value in parameters.items():
        kinds = {bool: "bool_param", int: "int64_param", str: "string_param", bytes: "bytes_param"}
        setattr(message.parameters[key], kinds[type(value)], value)
    return message


def steps(*sends: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the sending of several things, one after the other; what the last one gives counts."""

    def send(ask: Any) -> Any:
        answer = None
        for one in sends:
            answer = one(ask)
        return answer

    return send


def afterwards(first: Callable[[Any], Any], *then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the sending of `first`, after which `then` is sent whatever came of it."""

    def send(ask: Any) -> Any:
        try:
            return first(ask)
        finally:
            for one in then:
                one(ask)

    return send


def unloaded(ask: Any, model: str) -> Any:
    """Unload and wait until it is told."""
    unload(model)(ask)
    wait_until(
        f"{model} is unloaded", lambda: set(_state(ask, model).values()) <= {("UNAVAILABLE", "unloaded"), ("", "")}
    )
    return _state(ask, model)


def _lists_all(index: Any) -> None:
    found = {(entry["name"], entry.get("state", "")) for entry in index}
    assert {("simple", "READY"), ("broken", "UNAVAILABLE"), ("versions", "READY")} <= found
    assert "parked" in {entry["name"] for entry in index}


def _lists_ready(index: Any) -> None:
    assert {entry.get("state") for entry in index} == {"READY"}
    assert {"simple", "versions"} <= {entry["name"] for entry in index}
    assert "broken" not in {entry["name"] for entry in index}


def _indexes() -> Iterator[Case]:
    yield Case("index", _index, check=_lists_all)
    yield Case("index of what is ready", lambda ask: _index(ask, ready=True), check=_lists_ready)
    yield Case(
        "index by the stock client",
        lambda ask: ask.stock(lambda client: client.get_model_repository_index()),
    )
    yield Case(
        "state of a model whose load failed",
        lambda ask: _state(ask, "broken"),
        check=gives({"1": ("UNAVAILABLE", "the weights are stale")}),
    )
    yield Case(
        "state of two versions",
        lambda ask: _state(ask, "versions"),
        check=gives({"1": ("READY", ""), "3": ("READY", "")}),
    )
    yield Case(
        "index with a repository",
        each(
            lambda ask: ask.post("/v2/repository/one/index"),
            lambda ask: ask.call("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="one")),
        ),
        "UNSUPPORTED",
        "repository",
        differs={"http": Differs("as Triton's, HTTP does not look at it", code="OK")},
    )
    why = {"only": "http", "because": "the message of gRPC has a type for it"}
    for body in ({"ready": "yes"}, {"ready": 1}, {"ready": None}, [], b"x"):
        yield Case(
            f"index with {body!r}", lambda ask, body=body: ask.post("/v2/repository/index", body), "INVALID_ARG", **why
        )


def _loads() -> Iterator[Case]:
    yield Case("load what is loaded", load("simple"))
    yield Case(
        "load, ask, unload",
        steps(load("parked"), lambda ask: unloaded(ask, "parked")),
        check=gives({"1": ("UNAVAILABLE", "unloaded")}),
    )
    yield Case(
        "load twice, unload twice",
        steps(load("parked"), load("parked"), unload("parked"), lambda ask: unloaded(ask, "parked")),
    )
    yield Case(
        "ask what is unloaded",
        steps(load("parked"), lambda ask: unloaded(ask, "parked"), ASK_INT8),
        "UNAVAILABLE",
        "parked",
    )
    yield Case("unload of an unknown model", unload("nobody"))
    yield Case("unload with dependents", steps(load("parked"), unload("parked", dependents=True)))
    yield Case("load of a model that fails", load("broken"), "INVALID_ARG", "broken stale")
    yield Case("load of an unknown model", load("nobody"), "NOT_FOUND", "nobody")
    for name in ("..", ".", "a\\b", " ", "\t"):
        yield Case(f"load of {name!r}", load(name), "INVALID_ARG", "name")
        yield Case(f"unload of {name!r}", unload(name), "INVALID_ARG", "name")
    for name in ("../simple", "/etc", "a/b", "../../tmp/x"):
        told = {"http": Differs("the stock client leaves the slash in the path", code="NOT_FOUND", says="path")}
        yield Case(f"load of {name}", load(name), "INVALID_ARG", "name", differs=told)
    for path in ("..%2fsimple", "%2fetc", "a%2fb", "%2e%2e", "a%00b"):
        why = {"only": "http", "because": "gRPC has no escapes"}
        yield Case(
            f"load of {path} in the path",
            lambda ask, path=path: ask.post(f"/v2/repository/models/{path}/load"),
            "INVALID_ARG",
            "name",
            **why,
        )
    yield Case(
        "load with a repository",
        each(
            lambda ask: ask.post("/v2/repository/one/models/parked/load"),
            lambda ask: ask.call(
                "RepositoryModelLoad", pb.RepositoryModelLoadRequest(repository_name="one", model_name="parked")
            ),
        ),
        "UNSUPPORTED",
        "repository",
    )
    yield Case(
        "unload with a repository",
        each(
            lambda ask: ask.post("/v2/repository/one/models/parked/unload"),
            lambda ask: ask.call(
                "RepositoryModelUnload", pb.RepositoryModelUnloadRequest(repository_name="one", model_name="parked")
            ),
        ),
        "UNSUPPORTED",
        "repository",
    )


CASES = [*_indexes(), *_loads()]
NONE_CASES = [
    Case("load where models are loaded at start alone", load("parked"), "UNAVAILABLE", "explicit"),
    Case("unload where models are loaded at start alone", unload("simple"), "UNAVAILABLE", "explicit"),
    Case("index where models are loaded at start alone", _index),
]
"""For a server in mode `none`."""
