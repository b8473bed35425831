"""Rows of the table: the repository's index, loads and unloads with what they may bring, and their misuse."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tritonclient.grpc.service_pb2 as pb
from google.protobuf.json_format import MessageToDict

from conformance.table.cases import Case, Differs, Refused, each
from conformance.table.tensors import Infer, tensor
from figures import wait_until
from repositories import identity_config

CONFIG = json.dumps(
    {
        "backend": "identity",
        "max_batch_size": 0,
        "input": [{"name": "INPUT0", "data_type": "TYPE_INT8", "dims": [-1]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_INT8", "dims": [-1]}],
    }
)
ASK_INT8 = Infer("parked", [tensor("INPUT0", np.array([7], np.int8))])
JSON_HAS_TYPES = "parameters of JSON have other types than those of gRPC"


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


def _afterwards(first: Callable[[Any], Any], *then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the sending of `first`, after which `then` is sent whatever came of it."""

    def send(ask: Any) -> Any:
        try:
            return first(ask)
        finally:
            for one in then:
                one(ask)

    return send


def _unloaded(ask: Any, model: str) -> Any:
    """Unload and wait until it is told."""
    unload(model)(ask)
    wait_until(
        f"{model} is unloaded", lambda: set(_state(ask, model).values()) <= {("UNAVAILABLE", "unloaded"), ("", "")}
    )
    return _state(ask, model)


def _is(wanted: Any) -> Callable[[Any], None]:
    def check(answer: Any) -> None:
        assert answer == wanted

    return check


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
        check=_is({"1": ("UNAVAILABLE", "the weights are stale")}),
    )
    yield Case(
        "state of two versions",
        lambda ask: _state(ask, "versions"),
        check=_is({"1": ("READY", ""), "3": ("READY", "")}),
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
        steps(load("parked"), lambda ask: _unloaded(ask, "parked")),
        check=_is({"1": ("UNAVAILABLE", "unloaded")}),
    )
    yield Case(
        "load twice, unload twice",
        steps(load("parked"), load("parked"), unload("parked"), lambda ask: _unloaded(ask, "parked")),
    )
    yield Case(
        "ask what is unloaded",
        steps(load("parked"), lambda ask: _unloaded(ask, "parked"), ASK_INT8),
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


def _overrides() -> Iterator[Case]:
    yield Case(
        "load with a configuration",
        _afterwards(steps(load("parked", CONFIG), ASK_INT8), lambda ask: _unloaded(ask, "parked")),
    )
    bad: dict[str, tuple[str, str]] = {
        "that is no JSON": ("{", "config JSON"),
        "that is an array": ("[]", "config"),
        "that is empty": ("", "config"),
        "in protobuf text": (identity_config("parked"), "config JSON"),
        "with an unknown field": ('{"nonsense": 1}', "nonsense"),
        "with parameter for parameters": ('{"parameter": {}}', "parameter"),
        "with a map written as key and value": (
            '{"parameters": {"key": "A", "value": {"string_value": "b"}}}',
            "parameters.A",
        ),
        "with FP32 for TYPE_FP32": (CONFIG.replace("TYPE_INT8", "INT8"), "data_type INT8"),
        "with dims as text": (CONFIG.replace("[-1]", '"3"'), "dims"),
        "with a negative batch": (CONFIG.replace('"max_batch_size": 0', '"max_batch_size": -1'), "max_batch_size"),
        "with a number too large": ('{"max_batch_size": 99999999999}', "max_batch_size"),
        "of another backend that is not here": ('{"backend": "nope"}', "nope"),
        "with another name": (CONFIG.replace('{"backend"', '{"name": "other", "backend"'), "other"),
        "with a label file outside": (
            CONFIG.replace('"output": [{', '"output": [{"label_filename": "../../etc/passwd", '),
            "label_filename",
        ),
        "with a model file outside": (
            CONFIG.replace('{"backend"', '{"default_model_filename": "../x", "backend"'),
            "default_model_filename",
        ),
        "nested deep": ('{"parameters":' * 5000 + "1" + "}" * 5000, "nested"),
    }
    for name, (config, says) in bad.items():
        yield Case(f"load with a configuration {name}", load("parked", config), "INVALID_ARG", says)
    yield Case(
        "a bad configuration leaves what serves",
        _after_refusal,
        check=lambda answer: np.testing.assert_array_equal(answer.arrays["OUTPUT0"], [7]),
    )
    for value in (5, True, b"x"):
        over = {} if not isinstance(value, bytes) else {"only": "grpc", "because": "JSON has no bytes"}
        yield Case(f"config that is {value!r}", load_with(config=value), "INVALID_ARG", "config", **over)
    for value in ({}, [], None, 1.5):
        yield Case(
            f"config that is {value!r} in JSON",
            load_with(config=value),
            "INVALID_ARG",
            "config",
            only="http",
            because=JSON_HAS_TYPES,
        )
    for key in ("nope", "", "Config", "file", "config "):
        yield Case(f"load parameter {key!r}", load_with(**{key: "x"}), "INVALID_ARG", "parameter")
    for value in (1, "yes"):
        yield Case(
            f"unload_dependents {value!r}", unload_with(unload_dependents=value), "INVALID_ARG", "unload_dependents"
        )
    yield Case("unload parameter nope", unload_with(nope=True), "INVALID_ARG", "nope")
    for body in (b"x", [], {"parameters": []}, {"parameters": 1}):
        for verb in ("load", "unload"):
            yield Case(
                f"{verb} with the body {body!r}",
                lambda ask, verb=verb, body=body: ask.post(f"/v2/repository/models/parked/{verb}", body),
                "INVALID_ARG",
                only="http",
                because="it is a matter of JSON",
            )


def _after_refusal(ask: Any) -> Any:
    """Load, try to load something bad, and ask what served before."""
    load("parked", CONFIG)(ask)
    try:
        load("parked", '{"nonsense": 1}')(ask)
    except Refused:
        return ask.infer(ASK_INT8)
    finally:
        _unloaded(ask, "parked")
    raise AssertionError("a bad configuration was taken")


def _uploads() -> Iterator[Case]:
    """Files that come with a load; the server of the table allows them, another row's server does not."""

    def upload(path: str, content: bytes = b"x", config: str | None = CONFIG) -> Callable[[Any], Any]:
        return load_with(
            **({} if config is None else {"config": config}),
            **{f"file:{path}": content},
        )

    def over_both(path: str, config: str | None = CONFIG) -> Callable[[Any], Any]:
        encoded: Any = base64.b64encode(b"x").decode()
        return each(
            upload(path, encoded, config),
            upload(path, b"x", config),
        )

    outside = (
        "../../../../tmp/pwn",
        "/tmp/x",
        "1/../../../x",
        "1/..",
        "..",
        "1/../2/x",
        "",
        "x",
        "model.onnx",
        "1/",
        "/1/x",
        "1//x",
        "1/./x",
        "01/x",
        "-1/x",
        "1/a\\..\\x",
        "1/a\0b",
        "1/" + "d/" * 40 + "x",
        "1/" + "n" * 300,
    )
    for path in outside:
        yield Case(f"upload of {path[:40]!r}", over_both(path), "INVALID_ARG", "file:")
    yield Case("upload without a configuration", over_both("1/x", None), "INVALID_ARG", "config")
    why = {"only": "http", "because": JSON_HAS_TYPES}
    for value in ("!!!", "eA=", "eA", 5, None, ["eA=="]):
        yield Case(
            f"upload of {value!r}",
            load_with(**{"config": CONFIG, "file:1/x": value}),
            "INVALID_ARG",
            "file:1/x base64",
            **why,
        )
    yield Case(
        "upload as text",
        load_with(**{"config": CONFIG, "file:1/x": "eA=="}),
        "INVALID_ARG",
        "file:1/x bytes_param",
        only="grpc",
        because="over HTTP it is base64 in a text",
    )
    yield Case(
        "upload of a file and of a folder of its name",
        each(
            load_with(**{"config": CONFIG, "file:1/a": "eA==", "file:1/a/b": "eA=="}),
            load_with(**{"config": CONFIG, "file:1/a": b"x", "file:1/a/b": b"x"}),
        ),
        "INVALID_ARG",
        "1/a folder",
    )
    yield Case(
        "upload by the stock client",
        _afterwards(
            steps(load("parked", CONFIG, {"file:1/note": b"x"}), ASK_INT8), lambda ask: _unloaded(ask, "parked")
        ),
    )
    yield Case(
        "upload of a name that is not in the repository",
        _afterwards(
            steps(load("uploaded", CONFIG, {"file:7/note": b"x"}), Infer("uploaded", ASK_INT8.inputs)),
            unload("uploaded"),
        ),
        check=lambda answer: _is("7")(answer.version),
    )


CASES = [*_indexes(), *_loads(), *_overrides(), *_uploads()]
CLOSED_CASES = [
    Case(
        "upload where it is not allowed",
        each(
            load_with(**{"config": CONFIG, "file:1/x": "eA=="}),
            load_with(**{"config": CONFIG, "file:1/x": b"x"}),
        ),
        "UNSUPPORTED",
        "--allow-model-upload",
    ),
]
"""For a server with nothing but the defaults, in explicit mode."""
NONE_CASES = [
    Case("load where models are loaded at start alone", load("parked"), "UNAVAILABLE", "explicit"),
    Case("unload where models are loaded at start alone", unload("simple"), "UNAVAILABLE", "explicit"),
    Case("index where models are loaded at start alone", _index),
]
"""For a server in mode `none`."""
