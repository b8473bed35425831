"""Rows of the table: what a load may bring with it, a configuration and files, and every misuse of that."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from conformance.table.cases import Case, Refused, each, equal
from conformance.table.repository import (
    ASK_INT8,
    CONFIG,
    afterwards,
    load,
    load_with,
    steps,
    unload,
    unload_with,
    unloaded,
)
from conformance.table.tensors import Infer
from repositories import identity_config

ENVIRONMENT = '{"parameters": {"EXECUTION_ENV_PATH": {"string_value": "%s"}}, "backend"'
JSON_HAS_TYPES = "parameters of JSON have other types than those of gRPC"


def _overrides() -> Iterator[Case]:
    yield Case(
        "load with a configuration",
        afterwards(steps(load("parked", CONFIG), ASK_INT8), lambda ask: unloaded(ask, "parked")),
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
        **{
            f"with a Python at {path}": (CONFIG.replace('{"backend"', ENVIRONMENT % path), "EXECUTION_ENV_PATH")
            for path in ("/tmp/env", "$$TRITON_MODEL_DIRECTORY/../env", "env", "$$TRITON_MODEL_DIRECTORYenv/x")
        },
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
        unloaded(ask, "parked")
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
        afterwards(steps(load("parked", CONFIG, {"file:1/note": b"x"}), ASK_INT8), lambda ask: unloaded(ask, "parked")),
    )
    yield Case(
        "upload of a name that is not in the repository",
        afterwards(
            steps(load("uploaded", CONFIG, {"file:7/note": b"x"}), Infer("uploaded", ASK_INT8.inputs)),
            unload("uploaded"),
        ),
        check=lambda answer: equal(answer.version, "7"),
    )


CASES = [*_overrides(), *_uploads()]
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
