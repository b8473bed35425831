"""The walk of the model repositories, over real folders."""

import os
import shutil
import time
from pathlib import Path

import pytest

from headrace.repository import layout
from headrace.repository.layout import ModelLayout, is_model_name, list_names, scan, scan_model


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def put(repository: Path, name: str = "m", version: str = "1", content: str = "weights") -> Path:
    file = repository / name / version / "model.bin"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


def look(repository: Path, name: str = "m") -> ModelLayout:
    found = scan_model([repository], name)
    assert found is not None
    return found


def next_clock_tick(directory: Path) -> None:
    """Wait until the file system's clock, which stamps changes, has moved on."""
    probe = directory / ".tick"
    probe.write_text("")
    before = probe.stat().st_ctime_ns
    deadline = time.monotonic() + 5
    while probe.stat().st_ctime_ns == before:
        assert time.monotonic() < deadline
        probe.chmod(0o600)
    probe.unlink()


# What is found


def test_versions_are_folders_whose_names_are_plain_numbers(repository):
    for version in ("0", "1", "12", "01", "-1", "v3", "\u0661", "9" * 30, str(2**63)):
        put(repository, version=version)
    (repository / "m" / "5").write_text("a file")
    found = look(repository)
    assert set(found.versions) == {0, 1, 12}
    assert found.versions[12] == repository / "m" / "12"
    assert len(found.warnings) == 7
    assert any("'01'" in warning for warning in found.warnings)
    assert any("version 5" in warning for warning in found.warnings)


def test_folders_of_the_format_get_no_warning(repository):
    put(repository)
    for name in ("warmup", "initial_state", "configs"):
        (repository / "m" / name).mkdir()
    assert look(repository).warnings == ()


@pytest.mark.parametrize("name", [".m", "m~", "m.tmp", "m.partial", "lost+found", "__pycache__", "a..b", " m", "a\nb"])
def test_hidden_temporary_and_impossible_names_are_no_models(repository, name):
    put(repository, name)
    assert not is_model_name(name)
    assert scan([repository]).models == {}
    assert scan_model([repository], name) is None
    assert list_names([repository]) == {}


def test_files_in_a_repository_are_no_models(repository):
    (repository / "README.md").write_text("hello")
    assert scan([repository]).models == {}


def test_a_model_in_two_repositories_has_a_problem_but_a_repository_given_twice_has_not(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    put(one)
    put(two)
    (tmp_path / "link").symlink_to(one)
    assert "two or more repositories" in scan([one, two]).models["m"].problem
    found = scan_model([one, two], "m")
    assert found is not None
    assert "two or more repositories" in found.problem
    assert scan([one, one, tmp_path / "link"]).models["m"].problem == ""


def test_a_repository_that_is_not_there_is_unreadable_and_the_others_are_read(repository, tmp_path):
    put(repository)
    missing = tmp_path / "missing"
    found = scan([missing, repository])
    assert set(found.models) == {"m"}
    assert found.unreadable == {missing}
    assert "missing" in found.warnings[0]


def test_a_folder_with_too_many_files_is_refused(repository, monkeypatch):
    monkeypatch.setattr(layout, "MAX_FILES", 5)
    for index in range(6):
        (put(repository).parent / f"part{index}").write_text("")
    assert "more than 5 files" in look(repository).problem


# What counts as a change


def test_an_untouched_folder_looks_the_same(repository):
    put(repository)
    assert look(repository) == look(repository)
    assert scan([repository]) == scan([repository])


def test_a_file_replaced_by_one_with_an_older_date_is_a_change(repository, tmp_path):
    target = put(repository)
    before = look(repository)
    archive = tmp_path / "archive.bin"
    archive.write_text("other  ")
    os.utime(archive, (1e9, 1e9))
    shutil.copy2(archive, target)
    assert target.stat().st_mtime == 1e9
    assert look(repository).version_fingerprints != before.version_fingerprints


def test_a_file_moved_over_another_of_the_same_size_and_date_is_a_change(repository, tmp_path):
    target = put(repository)
    os.utime(target, (1e9, 1e9))
    before = look(repository)
    other = tmp_path / "other.bin"
    other.write_text("WEIGHTS")
    os.utime(other, (1e9, 1e9))
    other.rename(target)
    assert look(repository) != before


def test_other_bytes_under_the_same_size_and_date_are_a_change(repository):
    target = put(repository)
    os.utime(target, (1e9, 1e9))
    before = look(repository)
    next_clock_tick(repository)
    target.write_text("WEIGHTS")
    os.utime(target, (1e9, 1e9))
    after = look(repository)
    assert after.version_fingerprints != before.version_fingerprints
    assert after.shared_fingerprint == before.shared_fingerprint


def test_a_version_link_switched_to_another_folder_is_a_change(repository, tmp_path):
    store = tmp_path / "store"
    for name in ("a", "b"):
        file = put(store, name, ".", "weights")
        os.utime(file, (1e9, 1e9))
    (repository / "m").mkdir()
    link = repository / "m" / "1"
    link.symlink_to("../../store/a")
    before = look(repository)
    assert set(before.versions) == {1}
    link.unlink()
    link.symlink_to("../../store/b")
    assert look(repository) != before


def test_a_change_behind_a_link_is_a_change(repository, tmp_path):
    real = tmp_path / "weights"
    real.write_text("one")
    target = put(repository)
    target.unlink()
    target.symlink_to(real)
    before = look(repository)
    real.write_text("other")
    assert look(repository) != before


def test_configuration_versions_and_the_rest_are_told_apart(repository):
    put(repository, version="1")
    put(repository, version="2")
    before = look(repository)
    (repository / "m" / "config.pbtxt").write_text("max_batch_size: 1")
    config = look(repository)
    assert config.config_fingerprint != before.config_fingerprint
    assert config.version_fingerprints == before.version_fingerprints
    assert config.shared_fingerprint == before.shared_fingerprint
    (repository / "m" / "labels.txt").write_text("cat")
    labels = look(repository)
    assert labels.shared_fingerprint != config.shared_fingerprint
    assert labels.config_fingerprint == config.config_fingerprint
    put(repository, version="2", content="longer weights")
    second = look(repository)
    assert second.version_fingerprints[1] == labels.version_fingerprints[1]
    assert second.version_fingerprints[2] != labels.version_fingerprints[2]


def test_a_new_file_deep_in_a_version_is_a_change_but_byte_code_is_not(repository):
    deep = put(repository).parent / "assets" / "more"
    deep.mkdir(parents=True)
    before = look(repository)
    cache = deep.parent / "__pycache__"
    cache.mkdir()
    (cache / "model.pyc").write_text("code")
    assert look(repository) == before
    (deep / "vocabulary.txt").write_text("a")
    assert look(repository) != before


# What the walk must survive


def test_links_in_a_circle_end(repository):
    put(repository)
    (repository / "m" / "1" / "again").symlink_to("..")
    (repository / "m" / "self").symlink_to("self")
    (repository / "m" / "2").symlink_to(".")
    found = look(repository)
    assert found.problem == ""
    assert found == look(repository)


def test_pipes_and_devices_are_noted_but_never_opened_and_kernel_folders_not_entered(repository):
    version = put(repository).parent
    os.mkfifo(version / "pipe")
    (version / "zero").symlink_to("/dev/zero")
    (version / "proc").symlink_to("/proc")
    (version / "sys").symlink_to("/sys")
    began = time.monotonic()
    found = look(repository)
    assert found.problem == ""
    assert time.monotonic() - began < 5
    assert found == look(repository)


def test_a_link_to_nothing_is_no_error(repository):
    put(repository)
    (repository / "m" / "labels.txt").symlink_to("nowhere")
    (repository / "ghost").symlink_to("nowhere")
    assert set(scan([repository]).models) == {"m"}
    assert look(repository).problem == ""


def test_names_tell_which_folder_there_is_twice(repository, tmp_path):
    other = tmp_path / "other"
    for folder in (repository / "once", repository / "twice", other / "twice"):
        (folder / "1").mkdir(parents=True)
    assert list_names([repository, other, repository]) == {"once": False, "twice": True}
