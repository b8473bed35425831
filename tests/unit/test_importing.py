"""An archive of TorchServe's becomes a model folder, whole, or a sentence that says why not."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.importing.torchserve import NotImportableError, imported_modules, plan
from headrace.repository.config_text import parse_text

HANDLER = "import json\nimport helper\n\ndef handle(data, context):\n    return data\n"


def manifest(**model: Any) -> dict[str, Any]:
    return {
        "runtime": "python",
        "model": {"modelName": "net", "handler": "handler.py", "modelVersion": "2.1", **model},
        "archiverVersion": "0.12.0",
    }


FILES = {"handler.py": HANDLER, "helper.py": "", "weights.bin": "w"}


def written(path: Path, told: Any, files: dict[str, str] = FILES, settings: str | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", told if isinstance(told, str) else json.dumps(told))
        for name, text in files.items():
            archive.writestr(name, text)
        if settings is not None:
            archive.writestr("model-config.yaml", settings)
    return path


def imported(tmp_path: Path, archive: Path, *more: str) -> int:
    return main(["import", str(archive), "--repository", str(tmp_path / "models"), *more])


def test_an_archive_becomes_a_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = "minWorkers: 3\nbatchSize: 4\nmaxBatchDelay: 50\njobQueueSize: 7\ndeviceType: cpu\nhandler: {scale: 2}\n"
    archive = written(tmp_path / "net.mar", manifest(serializedFile="weights.bin"), settings=settings)
    assert imported(tmp_path, archive) == 0
    folder = tmp_path / "models" / "net"
    config = parse_text((folder / "config.pbtxt").read_text()).proto
    assert (config.name, config.backend, config.max_batch_size) == ("net", "python", 4)
    assert config.dynamic_batching.max_queue_delay_microseconds == 50_000
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 7
    assert config.instance_group[0].count == 3
    assert (folder / "2/mar/weights.bin").read_text() == "w"
    assert "TritonPythonModel" in (folder / "2/model.py").read_text()
    assert json.loads((folder / "2/settings.json").read_text())["handler"] == {"scale": 2}
    assert "is now version 2 of model net" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["net"]


def test_an_archive_in_tar_form_does_too(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "net.tar.gz", "w:gz") as archive:
        for name, text in {**FILES, "MAR-INF/MANIFEST.json": json.dumps(manifest())}.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    assert imported(tmp_path, tmp_path / "net.tar.gz", "--name", "other", "--version", "9") == 0
    assert (tmp_path / "models/other/9/mar/handler.py").read_text() == HANDLER


def test_a_second_version_lies_beside_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = written(tmp_path / "net.mar", manifest())
    assert imported(tmp_path, archive) == 0
    assert imported(tmp_path, archive, "--version", "3") == 0
    assert sorted(path.name for path in (tmp_path / "models/net").iterdir()) == ["2", "3", "config.pbtxt"]
    assert imported(tmp_path, archive) == 1
    assert "is there already" in capsys.readouterr().err
    other = written(tmp_path / "net.mar", manifest(), settings="batchSize: 8")
    assert imported(tmp_path, other, "--version", "4") == 1
    assert "says other things than the archive" in capsys.readouterr().err


REFUSED = [
    ({"workflow": {}}, None, "it is a workflow archive"),
    ({"model": []}, None, "its manifest describes no model"),
    ([], None, "its manifest is not a JSON object"),
    ("{", None, "its MAR-INF/MANIFEST.json is not JSON"),
    ({**manifest(), "runtime": "java"}, None, "its handler runs on 'java'"),
    (manifest(handler=""), None, "its manifest names no handler"),
    (manifest(handler=["h"]), None, "its manifest has no text as model.handler, but ['h']"),
    (manifest(serializedFile="gone.pt"), None, "names 'gone.pt' (model.serializedFile), which is not in it"),
    (manifest(configFile="gone.yaml"), None, "names 'gone.yaml' (model.configFile), which is not in it"),
    (manifest(modelName="../x"), None, "'../x' cannot be the name of a model"),
    (manifest(modelName=""), None, "'' cannot be the name of a model"),
    (manifest(), "parallelType: tp", "spread over several processes"),
    (manifest(), "sequenceBatching: true", "stateful sequences"),
    (manifest(), "continuousBatching: true", "continuous batching"),
    (manifest(), "batchSize: 0", "batchSize in its model-config.yaml is 0, expected 1 to"),
    (manifest(), "batchSize: two", "batchSize in its model-config.yaml is not a number, but 'two'"),
    (manifest(), "minWorkers: .inf", "minWorkers in its model-config.yaml is not a number, but inf"),
    (manifest(), "deviceType: tpu", "deviceType in its model-config.yaml is 'tpu', expected cpu or gpu"),
    (manifest(), "deviceIds: [-1]", "deviceIds in its model-config.yaml is no list of GPUs, but [-1]"),
    (manifest(), "[1, 2]", "its model-config.yaml does not hold settings by name"),
    (manifest(), "{", "its model-config.yaml is not YAML that can be taken over"),
    (manifest(), "a: !!python/object/apply:os.getcwd []", "its model-config.yaml is not YAML that can be taken over"),
    (manifest(), "a: &a [1]\nb: *a", "its model-config.yaml refers to parts of itself"),
]


@pytest.mark.parametrize(("told", "settings", "why"), REFUSED)
def test_what_cannot_be_converted_is_said_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: Any, settings: str | None, why: str
) -> None:
    assert imported(tmp_path, written(tmp_path / "net.mar", told, settings=settings)) == 1
    said = capsys.readouterr().err
    assert "net.mar cannot be imported: " in said
    assert why in said
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("name", ["../evil.py", "/evil.py", "a/../../evil.py"])
def test_an_archive_whose_members_lead_elsewhere_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert imported(tmp_path, written(tmp_path / "net.mar", manifest(), {**FILES, name: "x"})) == 1
    assert "lies outside of the archive" in capsys.readouterr().err
    assert list((tmp_path / "models").iterdir()) == []
    assert not list(tmp_path.rglob("evil.py"))


def test_an_archive_larger_than_is_allowed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = written(tmp_path / "net.mar", manifest(), {**FILES, "big": "x" * 100_000})
    assert imported(tmp_path, archive, "--max-bytes", "10000") == 1
    assert "more than 10000 bytes" in capsys.readouterr().err


def test_what_is_no_archive_or_has_no_manifest_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.mar").write_text("x")
    assert imported(tmp_path, tmp_path / "net.mar") == 1
    with zipfile.ZipFile(tmp_path / "net.mar", "w") as archive:
        archive.writestr("x", "")
    assert imported(tmp_path, tmp_path / "net.mar") == 1
    assert imported(tmp_path, tmp_path / "missing.mar") == 1
    said = capsys.readouterr().err.splitlines()
    assert "cannot be unpacked" in said[0]
    assert "holds no MAR-INF/MANIFEST.json" in said[1]
    assert "cannot be read: No such file" in said[2]


def test_what_is_left_to_do_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"model.py": "import surely_not_installed.net\nfrom os import path", "requirements.txt": "surely"}
    told = manifest(handler="image_classifier", modelFile="model.py", requirementsFile="requirements.txt")
    archive = written(tmp_path / "net.mar", told, files, "responseTimeout: 60\nuseVenv: true")
    assert imported(tmp_path, archive) == 0
    said = capsys.readouterr().out
    assert "the handler 'image_classifier' comes with TorchServe: install the package torchserve" in said
    assert "requirements.txt is not installed" in said
    assert "responseTimeout has no effect" in said
    assert "EXECUTION_ENV_PATH" in said
    assert "imports what is not installed here: surely_not_installed" in said


def test_the_modules_that_code_imports_are_told_without_its_own() -> None:
    sources = {
        "h.py": "import torch.nn as nn, os\nfrom ts.utils import x\nfrom . import y\nimport own\nfrom pkg.a import b\n",
        "own.py": "def f():\n    import later",
        "pkg/a.py": "broken(",
    }
    assert imported_modules(sources) == ["torch", "ts"]


@pytest.mark.parametrize(
    ("text", "version"), [("1.0", 1), ("12", 12), ("v2", 1), ("", 1), ("0.5", 1), ("9" * 30, 1), (3, 3)]
)
def test_the_version_is_the_number_before_the_dot(text: object, version: int) -> None:
    assert plan(manifest(modelVersion=text), None, ["handler.py"]).version == version


def test_without_settings_requests_are_not_batched() -> None:
    config = plan(manifest(), None, ["handler.py"]).config
    assert config.max_batch_size == 1
    assert not config.HasField("dynamic_batching")


def test_gpus_are_taken_over() -> None:
    config = plan(manifest(), {"deviceType": "gpu", "deviceIds": [0, 2]}, ["handler.py"]).config
    assert list(config.instance_group[0].gpus) == [0, 2]


def test_a_manifest_whose_handler_is_a_number_is_refused_as_any_other() -> None:
    with pytest.raises(NotImportableError):
        plan(manifest(handler=True), None, [])
