"""Archives of environments: unpacked once for the same content, kept while used, and never left behind."""

from __future__ import annotations

import asyncio
import io
import sys
import tarfile
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest

from headrace.instances.environment import Environments, remove_leftovers, variables
from headrace.repository.outside import outside_state
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.errors import InferError


def packed(archive: Path, marker: str, python: str = sys.executable, **files: str) -> Path:
    script = f'#!/bin/sh\nexec {python} "$@"\n'
    with tarfile.open(archive, "w") as tar:
        for name, text in {"bin/python": script, "marker": marker, **files}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text), 0o755
            tar.addfile(info, io.BytesIO(text.encode()))
    return archive


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_equal_content_is_unpacked_once_and_stays_until_the_last_user_goes(tmp_path: Path) -> None:
    environments = Environments(tmp_path)
    first, second = packed(tmp_path / "a.tar", "x"), packed(tmp_path / "b.tar", "x")
    opened = await asyncio.gather(*(environments.open(path) for path in (first, second, first)))
    assert len({environment.folder for environment in opened}) == 1
    folder = opened[0].folder
    for environment in opened[1:]:
        await environment.release()
        await environment.release()
    assert (folder / "marker").read_text() == "x"
    await opened[0].release()
    assert not folder.exists()
    again = await environments.open(first)
    assert (again.folder / "marker").read_text() == "x"
    environments.close()
    assert names(tmp_path) == ["a.tar", "b.tar"]


async def test_other_content_at_the_same_path_is_another_environment(tmp_path: Path) -> None:
    environments = Environments(tmp_path)
    before = await environments.open(packed(tmp_path / "a.tar", "one"))
    after = await environments.open(packed(tmp_path / "a.tar", "two"))
    assert [(opened.folder / "marker").read_text() for opened in (before, after)] == ["one", "two"]
    environments.close()


async def test_an_archive_that_puts_its_paths_right_does_so_once_it_is_unpacked(tmp_path: Path) -> None:
    fixer = "import sys, pathlib; (pathlib.Path(__file__).parent.parent / 'fixed').write_text(sys.prefix)"
    environments = Environments(tmp_path)
    opened = await environments.open(packed(tmp_path / "a.tar", "x", **{"bin/conda-unpack": fixer}))
    assert (opened.folder / "fixed").is_file()
    broken = packed(tmp_path / "b.tar", "y", **{"bin/conda-unpack": "raise SystemExit(3)"})
    with pytest.raises(InferError, match="its own bin/conda-unpack fails"):
        await environments.open(broken)
    assert names(opened.folder.parent) == sorted([opened.folder.name, "lock"])
    environments.close()


def test_what_a_killed_server_left_is_removed_and_what_another_uses_is_not(tmp_path: Path) -> None:
    dead, alive = tmp_path / "headrace-environments-dead", tmp_path / "headrace-environments-alive"
    for root in (dead, alive):
        (root / "x").mkdir(parents=True)
        (root / "lock").touch()
    with (alive / "lock").open("rb") as held:
        flock(held, LOCK_EX)
        remove_leftovers(tmp_path)
    assert names(tmp_path) == [alive.name]


def test_a_process_of_an_environment_hears_nothing_of_the_servers_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/servers")
    monkeypatch.setenv("KEPT", "yes")
    (tmp_path / "conda-meta").mkdir()
    told = variables(tmp_path)
    assert "PYTHONPATH" not in told
    assert (told["KEPT"], told["CONDA_PREFIX"]) == ("yes", str(tmp_path))
    assert told["PATH"].startswith(f"{tmp_path}/bin:")


def state(path: str, directory: Path) -> bytes:
    proto = pb.ModelConfig()
    proto.parameters["EXECUTION_ENV_PATH"].string_value = path
    return outside_state(proto, directory)


def test_a_change_of_the_environment_is_a_change_of_the_model(tmp_path: Path) -> None:
    assert outside_state(pb.ModelConfig(), tmp_path) == state("", tmp_path) == b""
    site = tmp_path / "lib/python3.11/site-packages"
    site.mkdir(parents=True)
    found = [state("$$TRITON_MODEL_DIRECTORY", tmp_path)]
    (site / "package").mkdir()
    found.append(state("$$TRITON_MODEL_DIRECTORY", tmp_path))
    (tmp_path / "env.tar").write_text("1")
    found.append(state(f"{tmp_path}/env.tar", tmp_path))
    packed(tmp_path / "new.tar", "x").replace(tmp_path / "env.tar")
    found.append(state(f"{tmp_path}/env.tar", tmp_path))
    found.append(state(f"{tmp_path}/missing", tmp_path))
    assert len(set(found)) == len(found)
    assert state("a\0b", tmp_path) == b""
