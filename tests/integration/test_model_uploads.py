"""Model files that come with a load call, through a real server: what is taken, what is refused, what is left."""

from __future__ import annotations

import base64
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient

import onnx_models
from clients import ask, call
from harness import RunningServer, running
from headrace_protocol._generated import grpc_service_pb2 as pb
from repositories import add_identity
from stock_doors import DOORS, Client, client, index, refused

LIMIT = 1_000_000
ALLOWED = ("--model-control-mode=explicit", "--allow-model-upload", f"--model-upload-byte-size={LIMIT}")
CONFIG = json.dumps({})
ESCAPES = (
    "../../../../tmp/pwn",
    "/tmp/x",
    "1/../../../x",
    "1/..",
    "..",
    "1",
    "",
    "1/",
    "1//x",
    "1/./x",
    "config.pbtxt",
    "model.py",
    "01/model.py",
    "-1/model.py",
    "1\\..\\x",
    "1/a\nb",
    "1/a\0b",
    "1/" + "a/" * 100 + "x",
    "1/" + "a" * 300,
    "file:1/x",
)


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def server(repository: Path, temporary: Path) -> Iterator[RunningServer]:
    add_identity(repository, "m")
    with running(repository, *ALLOWED, env={"TMPDIR": str(temporary)}) as started:
        yield started
    assert left_in(temporary) == [], "files were left behind by a stop"


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def api(server: RunningServer, door: str) -> Iterator[Client]:
    with client(server, door) as opened:
        yield opened


@pytest.fixture
def name(api: Client, temporary: Path) -> Iterator[str]:
    """A name without a folder in the repository; nothing of it may be left on the disk."""
    name = f"uploaded{next(_numbers)}"
    yield name
    api.unload_model(name)
    until(lambda: uploads(temporary) == [], "files stay after the unload")


_numbers = itertools.count()


def left_in(temporary: Path) -> list[str]:
    found = []
    for root in temporary.glob("headrace-uploads-*"):
        for folder, folders, files in os.walk(root):  # which, unlike rglob, bears folders that vanish meanwhile
            found += [str(Path(folder, name).relative_to(temporary)) for name in (*folders, *files)]
    return sorted(found)


def uploads(temporary: Path) -> list[str]:
    return [path for path in left_in(temporary) if not path.endswith("/lock")]


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def network(tmp_path: Path, seed: int) -> bytes:
    """Return an ONNX model that answers differently for each seed."""
    return onnx_models.mlp(tmp_path / f"{seed}.onnx", 4, 8, 3, seed=seed).read_bytes()


def scores(server: RunningServer, name: str) -> list[float]:
    return ask(server, "grpc", name, {"x": np.ones((1, 4), np.float32)})["y"].tolist()


def everything_but_uploads(*folders: Path) -> set[str]:
    return {str(path) for folder in folders for path in folder.rglob("*")}


def test_an_uploaded_model_serves_and_its_files_go_with_it(
    server: RunningServer, api: Client, name: str, tmp_path: Path, temporary: Path
) -> None:
    api.load_model(name, config=CONFIG, files={"file:7/model.onnx": network(tmp_path, 1)})
    assert scores(server, name)
    assert {"name": name, "version": "7", "state": "READY"} in index(api)
    (file,) = [path for path in uploads(temporary) if path.endswith(".onnx")]
    assert file.endswith(f"/{name}/7/model.onnx")
    (root,) = temporary.glob("headrace-uploads-*")
    assert root.stat().st_mode & 0o077 == 0


def test_several_versions_and_folders_are_taken(
    server: RunningServer, api: Client, name: str, tmp_path: Path, temporary: Path
) -> None:
    files = {"file:1/model.onnx": network(tmp_path, 1), "file:2/a/b/model.onnx": network(tmp_path, 2)}
    config = json.dumps({"version_policy": {"specific": {"versions": [1]}}})
    api.load_model(name, config=config, files=files)
    assert [entry["version"] for entry in index(api) if entry["name"] == name] == ["1"]
    assert sum(path.endswith(".onnx") for path in uploads(temporary)) == 2


def test_another_upload_takes_the_place_of_the_first_and_its_files(
    server: RunningServer, api: Client, name: str, tmp_path: Path, temporary: Path
) -> None:
    api.load_model(name, config=CONFIG, files={"file:1/model.onnx": network(tmp_path, 1)})
    before = scores(server, name)
    api.load_model(name, config=CONFIG, files={"file:1/model.onnx": network(tmp_path, 2)})
    assert scores(server, name) != before
    until(lambda: sum(path.endswith(".onnx") for path in uploads(temporary)) == 1, "the first one's files stay")


def test_an_upload_that_does_not_load_leaves_what_serves_and_no_files(
    server: RunningServer, api: Client, name: str, tmp_path: Path, temporary: Path
) -> None:
    api.load_model(name, config=CONFIG, files={"file:1/model.onnx": network(tmp_path, 1)})
    before = scores(server, name)
    code, text = refused(api.load_model, name, config=CONFIG, files={"file:1/model.onnx": b"this is no ONNX"})
    assert (code, name in text) == ("INVALID_ARGUMENT", True)
    assert scores(server, name) == before
    until(lambda: sum(path.endswith(".onnx") for path in uploads(temporary)) == 1, "the failed one's files stay")


def test_a_plain_load_after_an_upload_is_of_the_repository(
    server: RunningServer, api: Client, tmp_path: Path, temporary: Path
) -> None:
    config = json.dumps({"backend": "onnxruntime"})
    api.load_model("m", config=config, files={"file:1/model.onnx": network(tmp_path, 1)})
    assert scores(server, "m")
    api.load_model("m")
    array = np.ones((1, 4), np.float32)
    assert np.array_equal(ask(server, "http binary", "m", {"INPUT0": array})["OUTPUT0"], array)
    until(lambda: uploads(temporary) == [], "the uploaded files stay")


@pytest.mark.parametrize("path", ESCAPES)
def test_a_path_out_of_the_version_folder_is_refused_before_any_write(
    api: Client, path: str, repository: Path, temporary: Path
) -> None:
    before = everything_but_uploads(repository, temporary)
    files = {"file:1/good": b"ok", f"file:{path}": b"pwn"}
    code, text = refused(api.load_model, "m", config=CONFIG, files=files)
    assert (code, "file:" in text) == ("INVALID_ARGUMENT", True)
    assert everything_but_uploads(repository, temporary) == before
    assert not any(Path(place).exists() for place in ("/tmp/pwn", "/tmp/x", repository.parent / "x"))


def test_files_without_a_configuration_are_refused(api: Client, temporary: Path) -> None:
    name = "m"
    code, text = refused(api.load_model, name, files={"file:1/model.onnx": b"x"})
    assert (code, "'config'" in text) == ("INVALID_ARGUMENT", True)
    assert uploads(temporary) == []


def test_more_than_the_store_takes_is_refused_and_the_room_comes_back(
    api: Client, name: str, tmp_path: Path, temporary: Path
) -> None:
    code, text = refused(api.load_model, name, config=CONFIG, files={"file:1/model.onnx": bytes(LIMIT)})
    assert (code, "--model-upload-byte-size" in text) == ("INVALID_ARGUMENT", True)
    model = {"file:1/model.onnx": network(tmp_path, 1)}
    api.load_model(name, config=CONFIG, files={**model, "file:1/filling": bytes(LIMIT * 6 // 10)})
    other = {**model, "file:1/filling": bytes(LIMIT // 2)}
    code, text = refused(api.load_model, "another", config=CONFIG, files=other)
    assert (code, "--model-upload-byte-size" in text) == ("UNAVAILABLE", True)
    api.unload_model(name)
    until(lambda: uploads(temporary) == [], "the files stay")
    api.load_model("another", config=CONFIG, files=other)
    api.unload_model("another")
    until(lambda: uploads(temporary) == [], "the files stay")


@pytest.mark.parametrize(
    "parameters",
    [
        {"config": "{}", "file:1/model.onnx": "not base64!"},
        {"config": "{}", "file:1/model.onnx": "QUJD="},
        {"config": "{}", "file:1/model.onnx": 5},
        {"config": "{}", "file:1/model.onnx": None},
        {"config": "{}", "file": "QUJD"},
        {"config": "{}", "FILE:1/model.onnx": "QUJD"},
    ],
)
def test_content_that_is_no_base64_is_refused_over_http(
    server: RunningServer, temporary: Path, parameters: dict[str, object]
) -> None:
    status, answer = call(server, "/v2/repository/models/m/load", {"parameters": parameters})
    assert (status, "ile" in answer["error"]) == (400, True)
    assert uploads(temporary) == []


def test_content_that_is_not_bytes_is_refused_over_grpc(server: RunningServer, temporary: Path) -> None:
    request = pb.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = "{}"
    request.parameters["file:1/model.onnx"].string_param = "text"
    with grpc.insecure_channel(server.grpc) as channel:
        load = channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")
        with pytest.raises(grpc.RpcError) as raised:
            load(request.SerializeToString())
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        request.parameters["file:1/model.onnx"].bytes_param = b"x"
        request.parameters["config"].bytes_param = b"{}"
        with pytest.raises(grpc.RpcError) as raised:
            load(request.SerializeToString())
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert uploads(temporary) == []


def test_a_file_that_comes_twice_is_refused_or_taken_once(server: RunningServer, temporary: Path) -> None:
    text = base64.b64encode(b"x").decode()
    twice = {"config": "{}", "file:1/a": text, "file:1/a/b": text}
    status, answer = call(server, "/v2/repository/models/m/load", {"parameters": twice})
    assert (status, "folder" in answer["error"]) == (400, True)
    assert uploads(temporary) == []


def test_uploads_of_one_name_at_once_leave_one_model_and_its_files_alone(
    server: RunningServer, name: str, tmp_path: Path, temporary: Path
) -> None:
    content = network(tmp_path, 1)
    request = pb.RepositoryModelLoadRequest(model_name=name)
    request.parameters["config"].string_param = CONFIG
    request.parameters["file:1/model.onnx"].bytes_param = content
    with grpc.insecure_channel(server.grpc) as channel:
        load = channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")
        calls = [load.future(request.SerializeToString(), timeout=60) for _ in range(5)]
        codes = [made.code() for made in calls]
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    assert grpc.StatusCode.OK in codes
    assert scores(server, name)
    until(lambda: sum(path.endswith(".onnx") for path in uploads(temporary)) == 1, "files of superseded loads stay")


def test_uploads_are_off_unless_an_admin_allows_them(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "models").mkdir()
    with running(tmp_path / "models", "--model-control-mode=explicit", env={"TMPDIR": str(temporary)}) as server:
        for door in DOORS:
            with client(server, door) as api:
                code, text = refused(api.load_model, "m", config=CONFIG, files={"file:1/model.onnx": b"x"})
                assert (code, "--allow-model-upload" in text) == ("UNIMPLEMENTED", True)
        assert left_in(temporary) == []


def test_what_a_killed_server_left_is_removed_by_the_next(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "models").mkdir()
    env = {"TMPDIR": str(temporary)}
    killed = RunningServer(tmp_path / "models", *ALLOWED, env=env)
    try:
        killed.wait_ready()
        with grpcclient.InferenceServerClient(killed.grpc) as api:
            api.load_model("m", config=CONFIG, files={"file:1/model.onnx": network(tmp_path, 1)})
    finally:
        killed.kill()
    assert uploads(temporary)
    with running(tmp_path / "models", *ALLOWED, env=env):
        assert left_in(temporary) == []


def test_a_server_that_starts_leaves_the_uploads_of_one_that_runs(
    server: RunningServer, name: str, tmp_path: Path, temporary: Path
) -> None:
    with client(server, "grpc") as api:
        api.load_model(name, config=CONFIG, files={"file:1/model.onnx": network(tmp_path, 1)})
    before = left_in(temporary)
    with running(tmp_path, *ALLOWED, env={"TMPDIR": str(temporary)}):
        assert left_in(temporary) == before
    assert left_in(temporary) == before
