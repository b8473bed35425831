"""A running server against the document it gives of itself: schemathesis makes requests out of it, good ones and bad.

OPENAPI_EXAMPLES=500 makes more of them for each operation than there is time for every day, OPENAPI_SEED others.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

import scripted_engine
from clients import call
from harness import RunningServer, running
from headrace_protocol import datatype as dt

SAMPLES = Path(__file__).resolve().parents[2] / "model_repository"
EXAMPLES = int(os.environ.get("OPENAPI_EXAMPLES", "20"))
DEADLINE_S = 80 + EXAMPLES
SEED = os.environ.get("OPENAPI_SEED", "20")
CONFIG = """\
[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", 501, 503]
"""
"""501 and 503 are answers that the document tells of; a 500 is a fault in any case."""

UNKNOWN_MODELS = "--exclude-checks=positive_data_acceptance"
"""What fits the schema of a request need not fit a model, which the document cannot know."""

FLAGS = (
    "--model-control-mode=explicit",
    "--load-model=simple",
    "--load-model=identity",
    "--load-model=repeat",
    "--allow-client-shm=true",
)
RANGES = {
    **{f"INT{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
NOT_A_DOUBLE = 2**53 + 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server over a copy of the sample models, every extension switched on."""
    models = shutil.copytree(SAMPLES, tmp_path_factory.mktemp("openapi") / "models")
    with running(models, *FLAGS) as running_server:
        yield running_server


@pytest.fixture
def document(server: RunningServer) -> dict[str, Any]:
    """The server's document, to be narrowed."""
    status, described = call(server, "/openapi.json")
    assert status == 200
    return copy.deepcopy(described)


def run(server: RunningServer, document: dict[str, Any], folder: Path, *flags: str) -> None:
    """Have schemathesis try what a document tells of; fail with its report where an answer is another."""
    described = folder / "openapi.json"
    described.write_text(json.dumps(document))
    (folder / "schemathesis.toml").write_text(CONFIG)
    argv = [
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", "schemathesis.toml"),
        *("run", described.name, f"--url=http://{server.http}", f"--seed={SEED}", f"--max-examples={EXAMPLES}"),
        *("--phases=examples,coverage,fuzzing", "--request-timeout=20", "--generation-database=none", "--no-color"),
        *("--checks=all", "--continue-on-failure", "--suppress-health-check=all"),
        *flags,
    ]
    result = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 0, result.stdout[-12_000:] + result.stderr[-4_000:]
    assert server.process.poll() is None, server.log()
    assert server.status("/v2/health/live") == 200


def often(*values: str, **schema: Any) -> dict[str, Any]:
    """Return a schema of text that is one of `values` about every second time."""
    return {"anyOf": [{"enum": list(values)}, {"type": "string", **schema}]}


@pytest.fixture
def memory(server: RunningServer) -> Iterator[SharedMemory]:
    """Memory that can be registered; every region is gone afterwards."""
    shared = SharedMemory(create=True, size=4096)
    yield shared
    assert call(server, "/v2/systemsharedmemory/unregister", {}) == (200, None)
    shared.close()
    shared.unlink()


def test_no_request_gets_an_answer_that_the_document_does_not_tell_of(server, document, tmp_path):
    run(server, document, tmp_path, UNKNOWN_MODELS)


def test_nor_does_one_for_what_there_is(server, document, memory, tmp_path):
    parameters = document["components"]["parameters"]
    parameters["model"]["schema"] = often("simple", "identity", "repeat", minLength=1)
    parameters["version"]["schema"] = often("1", "2", pattern="^[0-9]{1,18}$")
    parameters["region"]["schema"] = often("inputs", minLength=1)
    region = document["components"]["schemas"]["SystemRegionRequest"]["properties"]
    region["key"] = often(f"/{memory.name}")
    region["byte_size"] = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 4096}, region["byte_size"]]}

    run(server, document, tmp_path, UNKNOWN_MODELS, "--mode=positive")


def integers(*values: int) -> dict[str, Any]:
    """Return the schema of some integers. 1.0 is one for JSON schema, but not for the protocol: so they are listed."""
    return {"enum": list(values)}


def elements(datatype: dt.DataType) -> dict[str, Any] | None:
    """Return the schema of an element in JSON; None where it has no form there."""
    if datatype.name in RANGES:
        low, high = RANGES[datatype.name]
        return integers(low, low + 1, 0, high - 1, *([NOT_A_DOUBLE] if high > NOT_A_DOUBLE else []), high)
    return {
        "BOOL": {"type": "boolean"},
        "FP32": {"type": "number", "minimum": -1e38, "maximum": 1e38},
        "FP64": {"type": "number"},
        "BYTES": {"type": "string"},
    }.get(datatype.name)


def of_length(count: int, items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": count, "maxItems": count}


def only(document: dict[str, Any], path: str, model: str, body: dict[str, Any]) -> dict[str, Any]:
    """Narrow a document to one operation on one model, with no header, and with this body."""
    document["paths"] = {path: document["paths"][path]}
    operation = document["paths"][path]["post"]
    document["components"]["parameters"]["model"]["schema"] = {"const": model}
    operation["parameters"] = [{"$ref": "#/components/parameters/model"}]
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return document


def test_every_inference_that_fits_document_and_model_is_served(server, document, tmp_path):
    tensors = [
        {
            "type": "object",
            "required": ["name", "datatype", "shape", "data"],
            "additionalProperties": False,
            "properties": {
                "name": {"const": f"INPUT_{datatype.name}"},
                "datatype": {"const": datatype.name},
                "shape": {"const": [count]},
                "data": of_length(count, items),
            },
        }
        for datatype in dt.ALL
        for count in (0, 1, 3)
        if (items := elements(datatype)) is not None
    ]
    parameters = document["components"]["schemas"]["InferParameters"]
    parameters["additionalProperties"] = {"type": ["string", "boolean"]}
    for name in ("priority", "timeout", "sequence_id"):
        parameters["properties"][name] = integers(0, 1, 2**64 - 1)
    body = {
        "type": "object",
        "required": ["inputs"],
        "additionalProperties": False,
        "properties": {
            "id": {"type": "string"},
            "parameters": {"$ref": "#/components/schemas/InferParameters"},
            "inputs": {"type": "array", "items": {"anyOf": tensors}, "minItems": 1, "maxItems": 1},
        },
    }

    run(server, only(document, "/v2/models/{model}/infer", "identity", body), tmp_path, "--mode=positive")


@pytest.mark.parametrize("action", ["generate", "generate_stream"])
def test_everything_that_can_be_generated_is(server, document, tmp_path, action):
    tensors = [
        {
            "type": "object",
            "required": [f"INPUT_{datatype.name}"],
            "additionalProperties": False,
            "properties": {
                "id": {"type": "string"},
                f"INPUT_{datatype.name}": {"anyOf": [items, {"type": "array", "items": items}]},
            },
        }
        for datatype in dt.ALL
        if (items := elements(datatype)) is not None
    ]

    run(
        server,
        only(document, f"/v2/models/{{model}}/{action}", "identity", {"anyOf": tensors}),
        tmp_path,
        "--mode=positive",
    )


def test_a_stream_of_any_length_is_what_the_document_says(server, document, tmp_path):
    elements_of_a_stream = {"type": "array", "items": integers(-1, 0, 7), "maxItems": 20}
    body = {
        "type": "object",
        "required": ["IN"],
        "additionalProperties": False,
        "properties": {"IN": elements_of_a_stream},
    }

    run(server, only(document, "/v2/models/{model}/generate_stream", "repeat", body), tmp_path, "--mode=positive")


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a language model."""
    folder = tmp_path_factory.mktemp("speaking")
    (folder / "models").mkdir()
    environment = scripted_engine.installed(folder / "site")
    scripted_engine.add_model(folder / "models", "chatty", max_model_len=64, tool_format="hermes")
    with running(folder / "models", env=environment) as started:
        yield started


def test_language_models_answer_as_the_document_says(speaking, tmp_path):
    """Not all that fits the schemas is served: they do not tell of every member that needs another."""
    _, document = call(speaking, "/openapi.json")
    document["paths"] = {
        path: told for path, told in document["paths"].items() if not path.startswith(("/v2", "/open"))
    }
    for name, schema in document["components"]["schemas"].items():
        if name.endswith("Request") and "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": "chatty"}
            schema["required"] = [*schema.get("required", ()), "model"]
    document["components"]["parameters"]["model"]["schema"] = often("chatty", "x/y", minLength=1)

    run(speaking, document, tmp_path, UNKNOWN_MODELS, "--mode=positive")
