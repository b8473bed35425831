"""The repository API: modes, names, and what a load call may bring with it."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from headrace.config import ControlMode
from headrace.controlplane import RegistryControlPlane
from headrace.repository.registry import ModelRegistry
from headrace.repository.uploads import UploadStore
from headrace.types import IndexEntry
from headrace_protocol.errors import ErrorCode, InferError


class Model:
    config = None
    accepting = ready = True
    not_ready_reason = ""

    def __init__(self, source, version) -> None:
        self.name = source.name
        self.version = version
        self.content = {path.name: path.read_bytes() for path in source.versions[version].iterdir()}
        self.directory = source.directory
        self.config_proto = source.config.proto


class Loader:
    async def load(self, source, version):
        return Model(source, version)

    async def unload(self, model) -> None:
        return


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "models"
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "1" / "model.bin").write_bytes(b"from the repository")
    return folder


@pytest.fixture
def store(tmp_path):
    parent = tmp_path / "temporary"
    parent.mkdir()
    store = UploadStore(LIMIT, parent)
    yield store
    store.close()
    assert list(parent.iterdir()) == []


@pytest.fixture
async def registry(repository):
    registry = ModelRegistry(Loader(), [repository])
    await registry.start([])
    yield registry
    await registry.close(timeout=0)


LIMIT = 10_000_000
BIG = {"file:1/model.bin": bytes(LIMIT * 6 // 10)}
SETTINGS = {
    "memory": None,
    "trace": None,
    "log": None,
    "traffic": None,
}  # which the repository API has nothing to do with


@pytest.fixture
def control(registry):
    return RegistryControlPlane(registry, ControlMode.EXPLICIT, **SETTINGS)


@pytest.fixture
def uploading(registry, store):
    return RegistryControlPlane(registry, ControlMode.EXPLICIT, uploads=store, **SETTINGS)


async def refused(call) -> InferError:
    with pytest.raises(InferError) as raised:
        await call
    return raised.value


def everything_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.POLL])
async def test_only_explicit_mode_takes_calls(registry, mode):
    control = RegistryControlPlane(registry, mode, **SETTINGS)
    for call in (control.load("m", {}), control.unload("m", unload_dependents=False)):
        error = await refused(call)
        assert error.code is ErrorCode.UNAVAILABLE
        assert mode.value in error.message
    assert control.index(ready_only=False) == [IndexEntry("m")]


@pytest.mark.parametrize(
    "name", ["", "  ", "a/b", "..", "../m", "m/..", "/etc", ".", "a\0b", "a\nb", "x" * 300, "a\\b"]
)
async def test_names_that_are_no_folder_name_are_refused(control, name):
    for call in (control.load(name, {}), control.unload(name, unload_dependents=True)):
        assert (await refused(call)).code is ErrorCode.INVALID_ARG


async def test_load_serves_and_unload_says_unloaded(control, registry):
    await control.load("m", {})
    assert control.index(ready_only=True) == [IndexEntry("m", "1", "READY")]
    await control.unload("m", unload_dependents=False)
    assert control.index(ready_only=True) == []
    (entry,) = control.index(ready_only=False)
    assert entry.reason == "unloaded"


async def test_a_model_without_a_folder_is_not_found(control):
    error = await refused(control.load("ghost", {}))
    assert error.code is ErrorCode.NOT_FOUND
    assert "'ghost'" in error.message


async def test_a_configuration_can_come_with_the_call(control, registry):
    await control.load("m", {"config": '{"max_batch_size": 3}'})
    model = registry.get("m")
    assert model.config_proto.max_batch_size == 3
    assert model.content["model.bin"] == b"from the repository"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"config": "{"}, "config"),
        ({"config": '{"parameter": {}}'}, "parameter"),
        ({"config": '{"input": [{"dims": "3"}]}'}, "dims"),
        ({"config": b"{}"}, "JSON text"),
        ({"config": 5}, "JSON text"),
        ({"confg": "{}"}, "'confg'"),
        ({"file": "x"}, "'file'"),
    ],
)
async def test_a_bad_parameter_is_named_and_what_serves_goes_on(control, registry, parameters, words):
    await control.load("m", {})
    before = registry.get("m")
    error = await refused(control.load("m", parameters))
    assert error.code is ErrorCode.INVALID_ARG
    assert words in error.message
    assert registry.get("m") is before


async def test_files_are_unsupported_unless_the_server_allows_them(control):
    error = await refused(control.load("m", {"config": "{}", "file:1/model.bin": b"x"}))
    assert error.code is ErrorCode.UNSUPPORTED


async def test_uploaded_files_take_the_place_of_the_folder_and_go_with_it(uploading, registry, tmp_path):
    await uploading.load("m", {"config": "{}", "file:7/model.bin": b"uploaded"})
    model = registry.get("m")
    assert (model.version, model.content) == (7, {"model.bin": b"uploaded"})
    assert model.directory.name == "m"
    assert model.directory.is_relative_to(tmp_path / "temporary")
    assert model.directory.stat().st_mode & 0o077 == 0
    await uploading.load("m", {})
    assert registry.get("m").content == {"model.bin": b"from the repository"}
    async with asyncio.timeout(5):
        while model.directory.exists():  # noqa: ASYNC110 - a thread removes it
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "path",
    [
        "../../../../tmp/pwn",
        "/tmp/x",
        "1/../../../x",
        "1/..",
        "1/./x",
        "1//x",
        "1/",
        "1",
        "",
        "model.py",
        "01/model.py",
        "-1/model.py",
        "v1/model.py",
        "1/a\0b",
        "1/a\nb",
        "1\\..\\x",
        "1/a\\b",
        "\u0661/x",
        "99999999999999999999/x",
        "1/" + "a" * 300,
        "1/" + "a/" * 20 + "x",
        "1/" + "a/" * 600 + "x",
    ],
)
async def test_paths_that_leave_the_version_folder_are_refused_before_any_write(uploading, tmp_path, path):
    before = everything_under(tmp_path)
    error = await refused(uploading.load("m", {"config": "{}", "file:1/good": b"ok", f"file:{path}": b"pwn"}))
    assert error.code is ErrorCode.INVALID_ARG
    assert "file:" in error.message
    assert len(error.message) < 400
    assert everything_under(tmp_path) == before


async def test_a_path_that_is_file_and_folder_is_refused(uploading, tmp_path):
    before = everything_under(tmp_path)
    error = await refused(uploading.load("m", {"config": "{}", "file:1/a": b"", "file:1/a/b": b""}))
    assert error.code is ErrorCode.INVALID_ARG
    assert everything_under(tmp_path) == before


async def test_files_need_a_configuration(uploading):
    error = await refused(uploading.load("m", {"file:1/model.bin": b"x"}))
    assert error.code is ErrorCode.INVALID_ARG
    assert "'config'" in error.message


async def test_file_content_must_be_bytes(uploading):
    error = await refused(uploading.load("m", {"config": "{}", "file:1/model.bin": "text"}))
    assert error.code is ErrorCode.INVALID_ARG


async def test_two_uploads_of_one_name_at_once_leave_nothing_behind(uploading, registry, tmp_path):
    calls = [uploading.load("m", {"config": "{}", "file:1/model.bin": bytes([number])}) for number in range(4)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert any(result is None for result in results)
    assert all(result is None or result.code is ErrorCode.UNAVAILABLE for result in results)
    await uploading.unload("m", unload_dependents=False)
    async with asyncio.timeout(5):
        while any("m" in folders for _, folders, _ in os.walk(tmp_path / "temporary")):  # noqa: ASYNC110 - threads remove
            await asyncio.sleep(0.001)


async def test_an_upload_whose_caller_leaves_is_removed(uploading, store, tmp_path):
    call = asyncio.create_task(uploading.load("m", {"config": "{}", "file:1/model.bin": b"x" * 1_000_000}))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(5):
        while store.used or list((tmp_path / "temporary").rglob("model.bin")):  # noqa: ASYNC110 - a thread removes it
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "config",
    [
        {"default_model_filename": "/etc/model.onnx"},
        {"default_model_filename": "../../other/1/model.onnx"},
        {"model_operations": {"op_library_filename": ["/tmp/lib.so"]}},
        {"output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [1], "label_filename": "../x"}]},
        {"cc_model_filenames": {"8.0": "a/../../b"}},
    ],
)
async def test_a_configuration_from_a_client_names_no_file_outside_the_model(control, registry, config):
    error = await refused(control.load("m", {"config": json.dumps(config)}))
    assert error.code is ErrorCode.INVALID_ARG
    assert "out of the model's folder" in error.message
    assert registry.index() == [IndexEntry("m")], "the model was touched"


async def test_what_does_not_load_gives_its_room_back(uploading, store, registry):
    for _ in range(5):
        with pytest.raises(InferError):
            await uploading.load("m", {"config": '{"version_policy": {"specific": {"versions": [9]}}}', **BIG})
    async with asyncio.timeout(5):
        while store.used:  # noqa: ASYNC110 - threads remove the files
            await asyncio.sleep(0.001)
    assert registry.served() == []


async def test_room_is_free_again_after_an_unload_and_after_a_load_in_its_place(uploading, store):
    await uploading.load("m", {"config": "{}", **BIG})
    error = await refused(uploading.load("n", {"config": "{}", **BIG}))
    assert error.code is ErrorCode.UNAVAILABLE
    assert "--model-upload-byte-size" in error.message
    await uploading.load("m", {})
    async with asyncio.timeout(5):
        while store.used:  # noqa: ASYNC110 - a thread removes the files
            await asyncio.sleep(0.001)
    await uploading.load("n", {"config": "{}", **BIG})
    await uploading.unload("n", unload_dependents=False)
    async with asyncio.timeout(5):
        while store.used:  # noqa: ASYNC110 - a thread removes the files
            await asyncio.sleep(0.001)
