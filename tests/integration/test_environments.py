"""Python models in Pythons of their own: folders and archives, replaced ones, and those in which no model can run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http

from figures import wait_until
from harness import RunningServer, running

CONFIG = """
backend: "python" max_batch_size: 0
input {{ name: "IN" data_type: TYPE_STRING dims: [ 1 ] }}
output {{ name: "OUT" data_type: TYPE_STRING dims: [ -1 ] }}
parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}
instance_group {{ count: 2 kind: KIND_CPU }}
"""
MODEL = """
import os
import sys

import numpy as np
import triton_python_backend_utils as pb_utils

import theirs


class TritonPythonModel:
    def execute(self, requests):
        told = [theirs.V, sys.prefix, sys.executable, os.environ.get("PYTHONPATH", ""), np.__file__]
        out = np.array([text.encode() for text in told], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]) for _ in requests]
"""


def add_model(repository: Path, name: str, path: Path | str) -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG.format(path=path))
    (folder / "1/model.py").write_text(MODEL)
    return folder


def packed(archive: Path, value: str, *more: tarfile.TarInfo) -> Path:
    """Write an archive with a Python that finds the module `theirs`, whose V is `value`."""
    script = f'#!/bin/sh\nPYTHONPATH="$(dirname "$0")/../modules" exec {sys.executable} "$@"\n'
    files = {"bin/python": script, "modules/theirs.py": f"V = {value!r}\n"}
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text), 0o755
            tar.addfile(info, io.BytesIO(text.encode()))
        for member in more:
            tar.addfile(member)
    return archive


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("venv") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "theirs.py").write_text("V = 'venv'\n")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("environments")


@pytest.fixture(scope="module")
def server(place: Path, venv: Path) -> Iterator[RunningServer]:
    repository = place / "models"
    add_model(repository, "folder", venv)
    folder = add_model(repository, "packed", "$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    packed(folder / "env.tar.gz", "one")
    add_model(repository, "outside", packed(place / "env.tar.gz", "one"))
    (place / "temporary").mkdir()
    flags = ("--model-control-mode=explicit", "--load-model=*")
    environment = {"TMPDIR": str(place / "temporary"), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with running(repository, *flags, env=environment) as server:
        yield server
    assert list((place / "temporary").iterdir()) == [], "what was unpacked goes with the server"


def told(server: RunningServer, model: str) -> list[str]:
    given = tritonclient.http.InferInput("IN", [1], "BYTES")
    given.set_data_from_numpy(np.array([b"x"], np.object_))
    with tritonclient.http.InferenceServerClient(server.http) as client:
        return [text.decode() for text in client.infer(model, [given]).as_numpy("OUT")]


def load(server: RunningServer, model: str) -> None:
    with tritonclient.http.InferenceServerClient(server.http) as client:
        client.load_model(model)


def unload(server: RunningServer, model: str) -> None:
    with tritonclient.http.InferenceServerClient(server.http) as client:
        client.unload_model(model)


def unpacked(place: Path) -> list[Path]:
    return sorted(place.glob("temporary/*/*/bin/python"))


def test_a_folder_runs_where_it_lies_and_sees_what_is_installed_there(server: RunningServer, venv: Path) -> None:
    value, prefix, executable, path, numpy = told(server, "folder")
    assert (value, prefix, executable, path) == ("venv", str(venv), str(venv / "bin/python"), "")
    assert numpy == np.__file__, "what a backend process needs is lent by the server's Python"


def test_an_archive_is_unpacked_once_for_all_that_name_the_same_content(server: RunningServer, place: Path) -> None:
    assert told(server, "packed")[0] == told(server, "outside")[0] == "one"
    packed(place / "models/packed/env.tar.gz", "one")
    assert len(unpacked(place)) in (1, 2), "archives of gzip bear a time, so that they may differ"


@pytest.mark.parametrize("model", ["packed", "outside"])
def test_an_archive_that_is_replaced_at_its_path_is_what_runs_after_a_load(
    server: RunningServer, place: Path, model: str
) -> None:
    """Also where it is as long and as old as the one before."""
    archive = place / ("models/packed/env.tar.gz" if model == "packed" else "env.tar.gz")
    before = archive.stat()
    packed(archive, "two")
    os.utime(archive, ns=(before.st_atime_ns, before.st_mtime_ns))
    load(server, model)
    assert told(server, model)[0] == "two"


def test_what_no_model_uses_any_more_is_removed(server: RunningServer, place: Path) -> None:
    unload(server, "packed")
    unload(server, "outside")
    wait_until("nothing is unpacked", lambda: not unpacked(place))
    load(server, "packed")
    assert told(server, "packed")[0] in ("one", "two")


def sparse() -> tarfile.TarInfo:
    info = tarfile.TarInfo("hole")
    info.type = tarfile.GNUTYPE_SPARSE
    return info


def link(name: str, leads_to: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, leads_to
    return info


def scripted(folder: Path, script: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin/python").chmod(0o755)
    return folder


def answering(folder: Path, **answer: object) -> Path:
    return scripted(folder, f"echo '{__import__('json').dumps(answer)}'")


BAD = {
    "relative": (lambda _: "env", "expected an absolute path"),
    "missing": (lambda place: place / "nowhere.tar.gz", "No such file or directory"),
    "empty": (lambda place: (place / "empty").mkdir() or place / "empty", "it has no bin/python"),
    "nonsense": (lambda place: (place / "x.tar").write_text("x") and place / "x.tar", "cannot be unpacked"),
    "outward": (lambda place: packed(place / "l.tar.gz", "x", link("l", "/etc")), "outside of the archive"),
    "holey": (lambda place: packed(place / "s.tar.gz", "x", sparse()), "neither a file nor a folder"),
    "failing": (lambda place: scripted(place / "failing", "echo oh dear >&2; exit 7"), "status 7: oh dear"),
    "mute": (lambda place: scripted(place / "mute", "echo"), "cannot be asked what it has"),
    "old": (
        lambda place: answering(place / "old", version=[3, 8, 1], abi="x", missing=[]),
        "its Python is 3.8.1, and models run on 3.11 or later",
    ),
    "other": (
        lambda place: answering(place / "other", version=[3, 19, 0], abi="x", missing=["msgspec"]),
        "its Python 3.19.0 lacks msgspec, which only an environment with the server's Python",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_an_environment_in_which_no_model_can_run_says_why(
    server: RunningServer, place: Path, tmp_path: Path, name: str
) -> None:
    make, why = BAD[name]
    add_model(place / "models", name, make(tmp_path))
    before = len(unpacked(place))
    with pytest.raises(tritonclient.http.InferenceServerException) as refused:
        load(server, name)
    assert "parameters.EXECUTION_ENV_PATH: environment" in str(refused.value)
    assert why in str(refused.value)
    assert len(unpacked(place)) == before
