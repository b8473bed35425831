"""Loads that bring a configuration or files."""

import asyncio

from headrace.repository import registry as registries
from headrace.repository.config_text import parse_json
from headrace.repository.overrides import OverrideRequest
from headrace.repository.sources import LoadOverride
from headrace.repository.uploads import UploadStore
from held_models import ended, put, until


async def test_a_configuration_override_serves_until_the_next_plain_load(registry, repository, loader):
    put(repository, "m", [1, 2])
    await registry.start([])
    await registry.load("m")
    override = parse_json('{"version_policy":{"specific":{"versions":[1]}}}')
    await registry.load("m", LoadOverride(override))
    assert [model.version for model in registry.served()] == [1]
    assert registry.get("m").source.config is override
    await registry.load("m")
    assert [model.version for model in registry.served()] == [2]


async def test_uploaded_files_are_removed_with_the_last_version_that_uses_them(registry, loader, tmp_path):
    await registry.start([])
    store = UploadStore(1_000_000, tmp_path)
    request = OverrideRequest(parse_json("{}"), {"1/model.bin": b"uploaded"})
    override = store.write("m", request)
    await registry.load("m", override)
    model = registry.acquire("m")
    assert (model.source.versions[1] / "model.bin").read_bytes() == b"uploaded"
    await registry.unload("m")
    assert override.directory.exists(), "removed under a request"
    registry.release(model)
    await loader.next_unload()
    await until(lambda: not override.directory.exists())
    store.close()


async def test_uploaded_files_that_do_not_load_are_removed(registry, loader, tmp_path):
    await registry.start([])
    store = UploadStore(1_000_000, tmp_path)
    override = store.write("m", OverrideRequest(parse_json("{}"), {"1/model.bin": b"bad"}))
    loader.broken["m", 1] = "bad"
    await ended(asyncio.create_task(registry.load("m", override)))
    await until(lambda: not override.directory.exists())
    store.close()


async def test_a_plain_load_after_an_override_reloads_though_both_say_the_same(registry, repository, loader):
    put(repository, "m", config='backend: "identity"')
    await registry.start([])
    await registry.load("m")
    for _ in range(2):  # a retry of the same call changes nothing
        await registry.load("m", LoadOverride(parse_json('{"backend": "identity"}')))
    assert len(loader.loaded) == 2
    await registry.load("m")
    assert len(loader.loaded) == 3
    await registry.load("m")
    assert len(loader.loaded) == 3


async def test_names_that_only_uploads_brought_are_forgotten_in_the_end(registry, repository, tmp_path, monkeypatch):
    put(repository, "m")
    monkeypatch.setattr(registries, "MOST_STRANGERS", 3)
    await registry.start([])
    await registry.load("m")
    await registry.unload("m")
    store = UploadStore(1_000_000, tmp_path)
    for number in range(10):
        name = f"stranger{number}"
        await registry.load(name, store.write(name, OverrideRequest(parse_json("{}"), {"1/model.bin": b"x"})))
        await registry.unload(name)
        await until(lambda: store.used == 0)
    await registry.unload("stranger9")
    assert [entry.name for entry in registry.index()] == ["m", "stranger7", "stranger8", "stranger9"]
    store.close()
