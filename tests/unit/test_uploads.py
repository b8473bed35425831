"""Where uploaded files lie: all or none of them, within a bound, gone with their process."""

import os
import threading
from pathlib import Path

import pytest

from headrace.repository import uploads
from headrace.repository.overrides import OverrideRequest, parse_override
from headrace.repository.uploads import UploadStore
from headrace_protocol.errors import ErrorCode, InferError


def request(**files: bytes) -> OverrideRequest:
    parsed = parse_override(
        {"config": "{}", **{f"file:1/{name}": data for name, data in files.items()}}, allow_files=True
    )
    assert parsed is not None
    return parsed


def refused(store: UploadStore, files: OverrideRequest) -> InferError:
    with pytest.raises(InferError) as raised:
        store.write("m", files)
    return raised.value


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def test_a_model_folder_is_written_for_its_owner_alone(tmp_path):
    store = UploadStore(100_000, tmp_path)
    written = store.write("m", request(a=b"1", b=b"22"))
    assert contents(written.directory) == ["1/a", "1/b"]
    assert written.directory.name == "m"
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    written.temporary.remove()
    written.temporary.remove()
    assert contents(tmp_path) == []
    assert store.used == 0
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_without_an_upload(tmp_path):
    store = UploadStore(100_000, tmp_path)
    store.remove_leftovers()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_files_that_can_never_fit_are_the_callers_mistake(tmp_path):
    store = UploadStore(10_000, tmp_path)
    error = refused(store, request(a=bytes(10_000)))
    assert error.code is ErrorCode.INVALID_ARG
    assert "10000" in error.message
    assert list(tmp_path.iterdir()) == []


def test_many_small_files_count_for_more_than_their_bytes(tmp_path):
    store = UploadStore(100_000, tmp_path)
    assert refused(store, request(**{f"f{number}": b"" for number in range(50)})).code is ErrorCode.INVALID_ARG


def test_files_for_which_there_is_no_room_now_may_be_tried_again(tmp_path):
    store = UploadStore(30_000, tmp_path)
    first = store.write("m", request(a=bytes(20_000)))
    error = refused(store, request(a=bytes(20_000)))
    assert error.code is ErrorCode.UNAVAILABLE
    first.temporary.remove()
    store.write("m", request(a=bytes(20_000)))
    store.close()


def test_a_disk_that_fails_leaves_no_part_of_an_upload_and_the_reason_is_told(tmp_path, monkeypatch):
    store = UploadStore(100_000, tmp_path)
    real = Path.open

    def full(self, *arguments, **keywords):
        if self.name == "b":
            raise OSError(28, "No space left on device")
        return real(self, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", full)
    error = refused(store, request(a=b"1", b=b"2"))
    assert error.code is ErrorCode.UNAVAILABLE
    assert "No space left" in error.message
    assert contents(tmp_path) == []
    assert store.used == 0
    store.close()


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    store = UploadStore(100_000, tmp_path / "missing")
    assert refused(store, request(a=b"1")).code is ErrorCode.UNAVAILABLE
    assert store.used == 0


def test_closing_waits_for_what_is_being_written_and_takes_no_more(tmp_path, monkeypatch):
    store = UploadStore(100_000, tmp_path)
    began, go = threading.Event(), threading.Event()
    real = uploads._write_files

    def slow(*arguments):
        began.set()
        assert go.wait(5)
        real(*arguments)

    monkeypatch.setattr(uploads, "_write_files", slow)
    writer = threading.Thread(target=store.write, args=("m", request(a=b"1")))
    writer.start()
    assert began.wait(5)
    closer = threading.Thread(target=store.close)
    closer.start()
    go.set()
    writer.join(5)
    closer.join(5)
    assert list(tmp_path.iterdir()) == []
    assert refused(store, request(a=b"1")).code is ErrorCode.UNAVAILABLE
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_but_not_what_a_living_one_uses(tmp_path):
    killed, living = UploadStore(100_000, tmp_path), UploadStore(100_000, tmp_path)
    left = killed.write("m", request(x=b"1"))
    used = living.write("m", request(x=b"1"))
    os.close(killed._lock)  # what the end of a process does
    other = tmp_path / "somebody-else"
    other.mkdir()
    (tmp_path / "headrace-uploads-unborn").mkdir()
    (tmp_path / "headrace-uploads-link").symlink_to(other)
    UploadStore(100_000, tmp_path).remove_leftovers()
    assert not left.directory.exists()
    assert used.directory.exists()
    living.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["headrace-uploads-link", "somebody-else"]


def test_a_store_whose_folder_was_taken_for_a_leftover_makes_another(tmp_path, monkeypatch):
    store = UploadStore(100_000, tmp_path)
    real = os.open
    robbed = []

    def open_after_a_thief(path, *arguments):
        if not robbed:
            robbed.append(path)
            Path(path).parent.rmdir()
        return real(path, *arguments)

    monkeypatch.setattr(uploads.os, "open", open_after_a_thief)
    written = store.write("m", request(a=b"1"))
    assert robbed
    assert contents(written.directory) == ["1/a"]
    store.close()


def test_a_store_whose_lock_was_taken_and_removed_first_makes_another(tmp_path, monkeypatch):
    store = UploadStore(100_000, tmp_path)
    real = uploads.fcntl.flock
    robbed = []

    def lock_after_a_thief(lock, operation):
        if not robbed:
            robbed.append(lock)
            uploads._remove_tree(next(tmp_path.glob("headrace-uploads-*")))
        real(lock, operation)

    monkeypatch.setattr(uploads.fcntl, "flock", lock_after_a_thief)
    written = store.write("m", request(a=b"1"))
    assert robbed
    assert contents(written.directory) == ["1/a"]
    (root,) = tmp_path.iterdir()
    assert (root / "lock").exists()
    store.close()
