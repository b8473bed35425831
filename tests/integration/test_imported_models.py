"""Handlers written for TorchServe, imported and asked by stock clients: batches, both forms of handlers, their errors."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from figures import figures, metric, wait_until
from harness import RunningServer, running
from headrace.cli import main

CLASS_HANDLER = """
import json
from pathlib import Path

from steps import doubled


class Handler:
    def initialize(self, context):
        folder = Path(context.system_properties["model_dir"])
        self.offset = int((folder / context.manifest["model"]["serializedFile"]).read_text())
        self.scale = context.model_yaml_config["handler"]["scale"]
        self.context = context

    def handle(self, data, context):
        context.metrics.add_counter("Rows", len(data))
        return self.postprocess(self.inference(self.preprocess(data)))

    def preprocess(self, data):
        return [row.get("data") or row.get("body") for row in data]

    def inference(self, bodies):
        return [doubled(body["x"]) * self.scale + self.offset if isinstance(body, dict) else body for body in bodies]

    def postprocess(self, values):
        answers = []
        for index, value in enumerate(values):
            if isinstance(value, str):
                self.context.set_response_status(400, f"cannot take {value!r}", index)
            self.context.set_response_content_type(index, "application/json")
            told = value if isinstance(value, (int, str)) else type(value).__name__
            answers.append({"value": told, "of": len(values), "id": self.context.get_request_id(index)})
        return answers
"""
FUNCTION_HANDLER = """
state = {}


def run(data, context):
    if data is None:
        state["name"] = context.manifest["model"]["modelName"]
        return None
    if any(bytes(row["body"]) == b"raise" for row in data):
        raise RuntimeError("planned")
    if any(bytes(row["body"]) == b"few" for row in data):
        return []
    return [state["name"] + ":" + bytes(row["body"]).decode() for row in data]
"""


def archived(path: Path, handler: str, files: dict[str, str], **model: str) -> Path:
    told = {"runtime": "python", "model": {"modelName": path.stem, "handler": handler, "modelVersion": "1.0", **model}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(told))
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("archives")
    settings = "batchSize: 4\nmaxBatchDelay: 20000\nhandler:\n  scale: 10\n"
    steps = "def doubled(x):\n    return 2 * x\n"
    files = {"net.py": CLASS_HANDLER, "steps.py": steps, "offset.txt": "1", "cfg.yaml": settings}
    archived(folder / "classy.mar", "net.py", files, serializedFile="offset.txt", configFile="cfg.yaml")
    archived(folder / "plain.mar", "functions.py:run", {"functions.py": FUNCTION_HANDLER})
    for name in ("classy", "plain"):
        assert main(["import", str(folder / f"{name}.mar"), "--repository", str(folder / "models")]) == 0
    with running(folder / "models") as server:
        yield server


class Client:
    def __init__(self, server: RunningServer, door: str) -> None:
        self.kit = {"http": tritonclient.http, "grpc": tritonclient.grpc}[door]
        self.address = server.http if door == "http" else server.grpc

    def ask(self, model: str, *bodies: bytes, **more: object):
        rows = np.array([[body] for body in bodies], np.object_)
        given = self.kit.InferInput("data", list(rows.shape), "BYTES")
        given.set_data_from_numpy(rows)
        with self.kit.InferenceServerClient(self.address) as client:
            return client.infer(model, [given], **more)


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: RunningServer) -> Client:
    return Client(server, request.param)


def test_requests_are_one_list_for_the_handler_and_each_gets_its_items(server: RunningServer, client: Client) -> None:
    before = figures(server, "classy")
    rows = metric(server, "torchserve_Rows", "classy")
    parameters = {"content_type": "application/json"}
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(
                lambda n: client.ask("classy", b'{"x": %d}' % n, parameters=parameters, request_id=f"r{n}"), range(4)
            )
        )
    for n, answer in enumerate(answers):
        (told,) = answer.as_numpy("result").reshape(-1).tolist()
        assert json.loads(told) == {"value": 20 * n + 1, "of": 4, "id": f"r{n}"}
    assert figures(server, "classy").since(before).executions == 1
    wait_until("the rows are counted", lambda: metric(server, "torchserve_Rows", "classy") == rows + 4)


def test_a_body_is_bytes_where_nothing_says_what_it_holds(client: Client) -> None:
    answers = [json.loads(row) for row in client.ask("classy", b"a", b"b", b"c", b"d").as_numpy("result").reshape(-1)]
    assert [answer["value"] for answer in answers] == ["bytearray"] * 4


def test_a_status_from_400_on_is_an_error_of_that_request_alone(client: Client) -> None:
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(client.ask, "classy", b"no", b"no", parameters={"content_type": "text/plain"})
        good = pool.submit(
            client.ask, "classy", b'{"x": 1}', b'{"x": 2}', parameters={"content_type": "application/json"}
        )
        with pytest.raises(InferenceServerException, match="cannot take 'no'") as refused:
            bad.result(60)
        assert good.result(60).as_numpy("result").shape == (2, 1)
    assert "400" in refused.value.status() or "INVALID_ARGUMENT" in refused.value.status()


def test_a_body_that_is_not_what_its_request_says_is_an_error_of_that_request(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="row 1 of input 'data' is not what content_type"):
        client.ask("classy", b"{}", b"{", b"{}", b"{}", parameters={"content_type": "application/json"})


def test_a_function_is_a_handler_too(client: Client) -> None:
    assert client.ask("plain", b"hello").as_numpy("result").tolist() == [[b"plain:hello"]]


@pytest.mark.parametrize(("body", "text"), [(b"raise", "planned"), (b"few", "0 items for 1 rows")])
def test_what_a_handler_does_wrong_is_an_error_and_the_next_request_works(
    client: Client, body: bytes, text: str
) -> None:
    with pytest.raises(InferenceServerException, match=text):
        client.ask("plain", body)
    assert client.ask("plain", b"again").as_numpy("result").tolist() == [[b"plain:again"]]
