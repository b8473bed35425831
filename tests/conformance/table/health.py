"""Rows of the table: health, readiness, metadata, configuration, statistics, and the names by which they are asked."""

from __future__ import annotations

from typing import Any

import tritonclient.grpc.service_pb2 as pb

from conformance.table.asking import GOOD
from conformance.table.cases import Case, Differs, each, equal
from conformance.table.models import DATATYPES
from conformance.table.tensors import Infer

READERS = {
    "metadata": lambda model, version: lambda ask: ask.stock(lambda c: c.get_model_metadata(model, version)),
    "config": lambda model, version: lambda ask: ask.stock(lambda c: c.get_model_config(model, version)),
    "statistics": lambda model, version: lambda ask: ask.stock(lambda c: c.get_inference_statistics(model, version)),
    "ready": lambda model, version: lambda ask: ask.model_ready(model, version),
    "infer": lambda model, version: Infer(model, GOOD.inputs, version=version),
}
"""What can be asked of a model and a version."""


def is_true(answer: Any) -> None:
    assert answer is True


def _metadata(ask: Any, model: str) -> Any:
    told = ask.stock(
        lambda c: c.get_model_metadata(model) if ask.door == "http" else c.get_model_metadata(model, as_json=True)
    )
    return {
        "name": told["name"],
        "versions": told["versions"],
        "platform": told["platform"],
        **{
            side: [(one["name"], one["datatype"], [int(dim) for dim in one["shape"]]) for one in told[side]]
            for side in ("inputs", "outputs")
        },
    }


def _config(ask: Any, model: str) -> Any:
    if ask.door == "http":
        return ask.stock(lambda c: c.get_model_config(model))
    return ask.stock(lambda c: c.get_model_config(model, as_json=True))["config"]


def _statistics(ask: Any, model: str) -> list[dict[str, Any]]:
    if ask.door == "http":
        return ask.stock(lambda c: c.get_inference_statistics(model))["model_stats"]
    return ask.stock(lambda c: c.get_inference_statistics(model, as_json=True))["model_stats"]


def _counted(ask: Any) -> dict[str, int]:
    """Return by how much the numbers of `simple` grow over one good and one bad request."""

    def numbers() -> dict[str, int]:
        (told,) = _statistics(ask, "simple")
        counts = {key: int(told.get(key, 0)) for key in ("inference_count", "execution_count")}
        return counts | {key: int(told["inference_stats"][key].get("count", 0)) for key in ("success", "queue")}

    before = numbers()
    ask.infer(GOOD)
    return {key: value - before[key] for key, value in numbers().items()}


def _shows_simple(told: Any) -> None:
    tensors = {
        side: [(f"{name}{index}", "INT32", [-1, 16]) for index in (0, 1)]
        for side, name in (("inputs", "INPUT"), ("outputs", "OUTPUT"))
    }
    assert told == {"name": "simple", "versions": ["1"], "platform": "onnxruntime_onnx", **tensors}


def _shows_every_datatype(told: Any) -> None:
    assert [one[1:] for one in told["inputs"]] == [(kind, [-1, -1]) for kind in DATATYPES]


def _is_ours(told: Any) -> None:
    assert told["name"] == "headrace"
    known = {"classification", "model_repository", "schedule_policy", "model_configuration", "binary_tensor_data"}
    assert known | {"parameters", "statistics"} <= set(told["extensions"])


def _server_metadata(ask: Any) -> Any:
    if ask.door == "http":
        return ask.stock(lambda c: c.get_server_metadata())
    return ask.stock(lambda c: c.get_server_metadata(as_json=True))


def _check_config(told: Any) -> None:
    assert (told["name"], told["backend"], int(told["max_batch_size"])) == ("simple", "onnxruntime", 8)
    assert told["input"][0]["data_type"] == "TYPE_INT32"


def _unknown(reader: str) -> list[Case]:
    ask = READERS[reader]
    return [
        Case(f"{reader} of an unknown model", ask("nobody", ""), "NOT_FOUND", "nobody"),
        Case(f"{reader} of an unknown model and version", ask("nobody", "1"), "NOT_FOUND", "nobody"),
        Case(f"{reader} of an unknown version", ask("simple", "99"), "NOT_FOUND", "simple 99"),
        Case(f"{reader} of a version that is no number", ask("simple", "x"), "INVALID_ARG", "version 'x'"),
        Case(f"{reader} of a negative version", ask("simple", "-1"), "INVALID_ARG", "version '-1'"),
        Case(f"{reader} of a version beyond 64 bits", ask("simple", str(2**63)), "INVALID_ARG", "version"),
    ]


def _not_ready(reader: str) -> list[Case]:
    ask = READERS[reader]
    told = (
        {"grpc": Differs("ModelReady tells it in its answer", code="OK", check=is_false)} if reader == "ready" else {}
    )
    return [
        Case(f"{reader} of a model whose load failed", ask("broken", ""), "UNAVAILABLE", "broken", differs=told),
        Case(f"{reader} of a version whose load failed", ask("broken", "1"), "UNAVAILABLE", "broken", differs=told),
        Case(f"{reader} of a model that was never loaded", ask("parked", ""), "UNAVAILABLE", "parked", differs=told),
    ]


def is_false(answer: Any) -> None:
    assert answer is False


def _long_name(ask: Any) -> Any:
    return READERS["metadata"]("n" * 5000, "")(ask)


def _health_check(ask: Any) -> Any:
    """The standard health service, which tritonclient does not ask."""
    call = ask.channel.unary_unary("/grpc.health.v1.Health/Check")
    return call(b"", timeout=10) == b"\x08\x01"


CASES = [
    Case("live", lambda ask: ask.stock(lambda c: c.is_server_live()), check=is_true),
    Case("ready", lambda ask: ask.stock(lambda c: c.is_server_ready()), check=is_true),
    Case("model ready", lambda ask: ask.model_ready("simple"), check=is_true),
    Case("model ready with its version", lambda ask: ask.model_ready("versions", "3"), check=is_true),
    Case(
        "standard health service",
        _health_check,
        check=is_true,
        only="grpc",
        because="it is a service of gRPC's",
    ),
    Case("server metadata", _server_metadata, check=_is_ours),
    Case("metadata of a batching model", lambda ask: _metadata(ask, "simple"), check=_shows_simple),
    Case("metadata of every datatype", lambda ask: _metadata(ask, "plane"), check=_shows_every_datatype),
    Case(
        "metadata of two versions",
        lambda ask: _metadata(ask, "versions")["versions"],
        check=lambda told: equal(told, ["1", "3"]),
    ),
    Case("config", lambda ask: _config(ask, "simple"), check=_check_config),
    Case(
        "statistics of one model",
        lambda ask: [(one["name"], one["version"]) for one in _statistics(ask, "simple")],
        check=lambda told: equal(told, [("simple", "1")]),
    ),
    Case(
        "statistics of two versions",
        lambda ask: [(one["name"], one["version"]) for one in _statistics(ask, "versions")],
        check=lambda told: equal(told, [("versions", "1"), ("versions", "3")]),
    ),
    Case(
        "statistics of all models",
        lambda ask: {one["name"] for one in _statistics(ask, "")},
        check=lambda told: equal({"simple", "identity", "plane", "rows"} <= told, True),
    ),
    Case(
        "statistics count one request once",
        _counted,
        check=lambda grown: equal(grown, {"inference_count": 1, "execution_count": 1, "success": 1, "queue": 1}),
    ),
    Case(
        "statistics of all models but with a version",
        each(
            lambda ask: ask.get("/v2/models/stats"),
            lambda ask: ask.call("ModelStatistics", pb.ModelStatisticsRequest(name="", version="")),
        ),
    ),
    *[case for reader in READERS for case in _unknown(reader)],
    *[case for reader in ("metadata", "config", "ready", "infer") for case in _not_ready(reader)],
    Case("metadata of a name of 5000 characters", _long_name, "NOT_FOUND", "model"),
    Case("metadata of a name with dots", READERS["metadata"]("..", ""), "NOT_FOUND", ".."),
    Case(
        "metadata of a name that is a path",
        READERS["metadata"]("../simple", ""),
        "NOT_FOUND",
        "simple",
        differs={
            "http": Differs("the stock client leaves the slash in the path, and there is no such path", says="path")
        },
    ),
    Case("metadata of a name beyond ASCII", READERS["metadata"]("ñandú 🙂", ""), "NOT_FOUND", "ñandú"),
    Case("metadata of a name with a line end", READERS["metadata"]("a\nb", ""), "NOT_FOUND"),
    Case("metadata of a name with a NUL", READERS["metadata"]("a\0b", ""), "NOT_FOUND"),
    Case(
        "metadata of an empty name",
        each(
            lambda ask: ask.get("/v2/models/"),
            lambda ask: ask.call("ModelMetadata", pb.ModelMetadataRequest()),
        ),
        "NOT_FOUND",
    ),
]
