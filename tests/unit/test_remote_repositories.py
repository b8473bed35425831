"""Mirrors of repositories in stores: what is taken when, and what of it stays the same. fsspec's memory is the store."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from headrace.repository.addresses import Address, parse_address
from headrace.repository.layout import scan
from headrace.repository.remote import Mirrors, RemoteError, RemoteRepository

MODEL = {"config.pbtxt": b"max_batch_size: 4", "1/model.onnx": b"one", "labels/de.txt": b"ja"}
PARTS = ("config.pbtxt", "1", "labels")
"""What is kept as a whole while it does not change."""


class Store:
    """A bucket in memory, and the time that a test says it is."""

    def __init__(self, name, tmp_path, monkeypatch):
        self.files = fsspec.filesystem("memory")
        self.address = f"memory://{name}/models"
        self.root = f"/{name}/models"
        self.now = 0.0
        self.tmp_path = tmp_path
        # The memory's objects have times of the real clock; here the store tells none.
        find = self.files.find

        def undated(path, *, detail=False, **options):
            listed = find(path, detail=True, **options)
            if not detail:
                return list(listed)
            for name, info in listed.items():
                info.pop("created", None)
                info["etag"] = str(hash(self.files.cat(name)))
            return listed

        monkeypatch.setattr(self.files, "find", undated)

    def put(self, model, **changed):
        for path, content in (MODEL | {name.replace("__", "/"): value for name, value in changed.items()}).items():
            self.files.pipe(f"{self.root}/{model}/{path}", content)

    def mirror(self):
        return RemoteRepository(self.address, self.tmp_path / "cache", lambda: self.now)


@pytest.fixture
def store(request, tmp_path, monkeypatch):
    return Store(f"bucket{abs(hash(request.node.nodeid))}", tmp_path, monkeypatch)


def contents(mirror, model):
    folder = mirror.folder / model
    found = {}
    for parent, _, names in os.walk(folder, followlinks=True):
        for name in names:
            path = Path(parent, name)
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def settle(store, mirror):
    mirror.sync()
    store.now += 5
    mirror.sync()


def test_a_model_is_taken_once_it_has_stayed_as_it_is(store):
    mirror = store.mirror()
    store.put("m")
    mirror.sync()
    assert list(mirror.folder.iterdir()) == []
    assert mirror.moving
    store.now = 4.9
    mirror.sync()
    assert list(mirror.folder.iterdir()) == []
    store.now = 5
    mirror.sync()
    assert contents(mirror, "m") == MODEL
    assert not mirror.moving
    assert scan([mirror.folder]).models["m"].versions.keys() == {1}


def test_a_model_that_still_changes_is_waited_for(store):
    mirror = store.mirror()
    for second in range(0, 20, 4):
        store.now = second
        store.put("m", **{f"1__part{second}": b"x"})
        mirror.sync()
        assert list(mirror.folder.iterdir()) == []
    store.now = 21
    mirror.sync()
    assert len(contents(mirror, "m")) == len(MODEL) + 5


def test_a_marked_upload_waits_until_the_mark_is_gone(store):
    mirror = store.mirror()
    store.put("m")
    store.files.pipe(f"{store.root}/m/.uploading", b"")
    settle(store, mirror)
    mirror.sync(at_once=True)
    assert list(mirror.folder.iterdir()) == []
    store.files.rm(f"{store.root}/m/.uploading")
    settle(store, mirror)
    assert contents(mirror, "m") == MODEL


def test_files_that_have_not_changed_stay_the_very_same(store):
    mirror = store.mirror()
    store.put("m")
    settle(store, mirror)
    before = scan([mirror.folder]).models["m"]
    store.put("m", **{"2__model.onnx": b"two"})
    settle(store, mirror)
    after = scan([mirror.folder]).models["m"]
    assert after.versions.keys() == {1, 2}
    assert after.version_fingerprints[1] == before.version_fingerprints[1]
    assert after.config_fingerprint == before.config_fingerprint


def test_an_object_of_the_same_size_is_seen_to_have_changed(store):
    mirror = store.mirror()
    store.put("m")
    settle(store, mirror)
    before = scan([mirror.folder]).models["m"].version_fingerprints[1]
    store.put("m", **{"1__model.onnx": b"two"})
    settle(store, mirror)
    assert contents(mirror, "m")["1/model.onnx"] == b"two"
    assert scan([mirror.folder]).models["m"].version_fingerprints[1] != before


def test_a_model_that_is_gone_is_taken_away_with_its_files(store):
    mirror = store.mirror()
    store.put("m")
    store.put("other")
    settle(store, mirror)
    store.files.rm(f"{store.root}/m", recursive=True)
    mirror.sync()
    assert [path.name for path in mirror.folder.iterdir()] == ["other"]
    assert len(list((mirror.folder.parent / "content").iterdir())) == len(PARTS)


def test_replaced_contents_do_not_pile_up(store):
    mirror = store.mirror()
    for number in range(5):
        store.put("m", **{"1__model.onnx": b"%d" % number})
        settle(store, mirror)
    assert len(list((mirror.folder.parent / "content").iterdir())) == len(PARTS)
    assert len(list((mirror.folder.parent / "trees").iterdir())) == 1


def test_what_was_taken_is_known_at_the_next_start_and_damage_is_fetched_anew(store, monkeypatch):
    store.put("m")
    settle(store, store.mirror())
    fetched = []
    get_file = store.files.get_file
    monkeypatch.setattr(store.files, "get_file", lambda path, *a: (fetched.append(path), get_file(path, *a)))
    again = store.mirror()
    again.sync()
    assert fetched == []
    assert not again.moving
    (again.folder / "m/1/model.onnx").unlink()
    damaged = store.mirror()
    settle(store, damaged)
    assert fetched == [f"{store.root}/m/1/model.onnx"]
    assert contents(damaged, "m") == MODEL


def test_a_fetch_that_fails_leaves_what_is_there(store, monkeypatch):
    mirror = store.mirror()
    store.put("m")
    settle(store, mirror)
    store.put("m", **{"1__model.onnx": b"two"})

    def broken(path, *_):
        raise OSError("the network is gone")

    monkeypatch.setattr(store.files, "get_file", broken)
    with pytest.raises(RemoteError, match="the network is gone"):
        settle(store, mirror)
    assert contents(mirror, "m") == MODEL
    assert len(list((mirror.folder.parent / "content").iterdir())) == len(PARTS)
    monkeypatch.undo()


def test_an_object_that_changes_while_it_is_fetched_is_not_taken(store, monkeypatch):
    mirror = store.mirror()
    store.put("m")
    get_file = store.files.get_file

    def torn(path, target):
        get_file(path, target)
        with open(target, "ab") as file:  # noqa: PTH123
            file.write(b"more")

    monkeypatch.setattr(store.files, "get_file", torn)
    with pytest.raises(RemoteError, match="changed while it was fetched"):
        settle(store, mirror)
    assert list(mirror.folder.iterdir()) == []


@pytest.mark.parametrize("path", ["../evil", "1/../../evil", "a//b", "back\\slash"])
def test_objects_with_paths_that_lead_elsewhere_are_left_out(store, path, monkeypatch):
    mirror = store.mirror()
    store.put("m")
    found = mirror._store.find
    monkeypatch.setattr(
        mirror._store, "find", lambda *a, **k: found(*a, **k) | {f"{mirror._prefix}/m/{path}": {"size": 1, "etag": "x"}}
    )
    settle(store, mirror)
    assert contents(mirror, "m") == MODEL


def test_hidden_and_loose_objects_are_no_models(store):
    mirror = store.mirror()
    store.put(".git")
    store.files.pipe(f"{store.root}/README.md", b"hello")
    settle(store, mirror)
    assert list(mirror.folder.iterdir()) == []


def test_only_what_is_asked_for_is_fetched(store):
    mirror = store.mirror()
    store.put("a")
    store.put("b")
    mirror.sync(("a",), at_once=True)
    assert [path.name for path in mirror.folder.iterdir()] == ["a"]


def test_a_store_that_cannot_be_listed_is_told_once_and_harms_nothing(store, monkeypatch, caplog):
    mirror = store.mirror()
    store.put("m")
    settle(store, mirror)
    mirrors = Mirrors([mirror])

    def broken(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(mirror._store, "find", broken)
    mirrors.sync()
    mirrors.sync()
    mirrors.first(None, lambda _: True)
    assert caplog.text.count("cannot be listed: ConnectionError: no route") == 2
    assert contents(mirror, "m") == MODEL
    with pytest.raises(RemoteError):
        mirrors.fetch("m")


def test_the_first_sync_waits_for_what_is_being_uploaded(store):
    mirror = store.mirror()
    store.put("m")
    waited = []

    def wait(seconds):
        waited.append(seconds)
        store.now += seconds
        return True

    Mirrors([mirror]).first(None, wait)
    assert contents(mirror, "m") == MODEL
    assert sum(waited) == 5


def test_the_first_sync_gives_up_where_nothing_can_be_read(store, monkeypatch):
    mirror = store.mirror()
    monkeypatch.setattr(mirror._store, "find", lambda *_, **__: 1 / 0)
    with pytest.raises(RemoteError, match="ZeroDivisionError"):
        Mirrors([mirror]).first(None, lambda _: True)


@pytest.mark.parametrize(
    ("address", "parsed"),
    [
        ("s3://bucket/a/b", Address("s3://bucket/a/b", {})),
        ("s3://https://host:9000/bucket/a", Address("s3://bucket/a", {"endpoint_url": "https://host:9000"})),
        ("s3://http://host/bucket", Address("s3://bucket", {"endpoint_url": "http://host"})),
        ("s3://host:9000/bucket/a", Address("s3://bucket/a", {"endpoint_url": "https://host:9000"})),
        ("gs://bucket/a", Address("gs://bucket/a", {})),
        ("as://account/container/a", Address("az://container/a", {"account_name": "account"})),
    ],
)
def test_addresses_are_read_as_triton_writes_them(address, parsed):
    assert parse_address(address) == parsed


@pytest.mark.parametrize("address", ["ftp://host/x", "s3://", "s3://http://host:9000/", "file:///etc", "gs:///"])
def test_other_addresses_are_refused(address):
    with pytest.raises(ValueError, match="expected a folder|names no bucket|no bucket"):
        parse_address(address)
