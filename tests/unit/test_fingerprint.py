"""Equal content has one identity wherever it lies, and everything that may change an answer has another."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from headrace.repository.config_text import parse_text
from headrace.repository.fingerprint import content_identity
from headrace.repository.freeze import freeze
from headrace.repository.normalise import NormaliseSettings, normalise
from headrace.repository.sources import ModelSource

CONFIG = 'backend: "identity" max_batch_size: 4 input { name: "A" data_type: TYPE_FP32 dims: [ 1 ] }'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / "m"
    for version in ("1", "2"):
        (folder / version / "parts").mkdir(parents=True)
        (folder / version / "parts" / "weights").write_bytes(version.encode() * 3_000_000)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "helper.py").write_text("x = 1")
    return folder


def identity(folder: Path, version: int = 1, config: str = CONFIG) -> bytes:
    proto = parse_text(config).proto
    normalise(proto, model_name="m", server=NormaliseSettings())
    versions = {int(path.name): path for path in folder.iterdir() if path.name.isdecimal()}
    return content_identity(freeze(proto), ModelSource("m", folder, versions), version)


def test_a_copy_elsewhere_with_other_dates_is_the_same(folder, tmp_path):
    copy = tmp_path / "there" / "m"
    shutil.copytree(folder, copy)
    os.utime(copy / "helper.py", (1, 1))
    assert identity(copy) == identity(folder)


def test_instances_versions_comments_and_compiled_files_change_no_answer(folder):
    before = identity(folder)
    (folder / "config.pbtxt").write_text(f"# a comment\n{CONFIG}")
    (folder / "3").mkdir()
    (folder / "2" / "parts" / "weights").write_text("other")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "helper.pyc").write_text("compiled")
    groups = "instance_group { count: 7 kind: KIND_CPU } version_policy { all { } }"
    assert identity(folder, config=f"{CONFIG} {groups}") == before


def weights(folder: Path) -> None:
    with (folder / "1" / "parts" / "weights").open("r+b") as file:
        file.seek(2_999_999)
        file.write(b"x")


def renamed(folder: Path) -> None:
    (folder / "1" / "parts" / "weights").rename(folder / "1" / "parts" / "other")


def moved(folder: Path) -> None:
    (folder / "1" / "parts" / "weights").rename(folder / "1" / "weights")


def shared(folder: Path) -> None:
    (folder / "helper.py").write_text("x = 2")


def added(folder: Path) -> None:
    (folder / "1" / "more").write_text("")


@pytest.mark.parametrize("change", [weights, renamed, moved, shared, added], ids=lambda change: change.__name__)
def test_a_changed_file_makes_another(folder, change):
    before = identity(folder)
    change(folder)
    assert identity(folder) != before


def test_versions_and_configurations_have_their_own(folder):
    found = [identity(folder), identity(folder, 2), identity(folder, config=CONFIG.replace("4", "5"))]
    assert len(set(found)) == 3
