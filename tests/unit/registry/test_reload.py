"""Which versions serve, and how others take their place."""

import asyncio

import pytest

from headrace.types import IndexEntry
from headrace_protocol.errors import ErrorCode
from held_models import ALL, ended, put, refused, until


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", [3]),
        ("version_policy: { latest { num_versions: 2 } }", [2, 3]),
        ("version_policy: { all {} }", [1, 2, 3]),
        ("version_policy: { specific { versions: [ 1, 3, 7 ] } }", [1, 3]),
    ],
)
async def test_the_version_policy_chooses_what_is_loaded(registry, repository, policy, expected):
    put(repository, "m", [1, 2, 3], f'backend: "identity" {policy}')
    assert await registry.start() == {}
    assert [model.version for model in registry.served()] == expected


async def test_a_policy_that_chooses_no_version_is_an_error_that_names_it(registry, repository):
    put(repository, "m", [1], "version_policy: { specific { versions: [ 5 ] } }")
    put(repository, "empty", [])
    failures = await registry.start()
    assert "version policy" in failures["m"]
    assert "version" in failures["empty"]
    assert registry.index()[1].state == "UNAVAILABLE"


async def test_if_one_version_fails_none_of_the_operation_serves(registry, repository, loader):
    put(repository, "m", [1, 2], ALL)
    loader.broken["m", 2] = "too big"
    assert set(await registry.start()) == {"m"}
    assert registry.served() == []
    await until(lambda: not loader.alive)
    states = {entry.version: entry.reason for entry in registry.index()}
    assert states["2"] == "too big"
    assert "version 2" in states["1"]


async def test_a_reload_leaves_no_hole_and_requests_on_the_old_one_end_in_peace(registry, repository, loader):
    directory = put(repository, "m")
    await registry.start([])
    await registry.load("m")
    loader.hold.add("m")
    old = registry.acquire("m", 1)
    (directory / "1" / "model.bin").write_text("another content")
    reload = asyncio.create_task(registry.load("m"))
    held = await loader.next_held()
    between = registry.acquire("m", 1)
    assert between is old
    assert registry.ready(strict=True)
    assert registry.index() == [IndexEntry("m", "1", "READY")]
    new = held.succeed()
    await reload
    assert registry.acquire("m", 1) is new
    assert registry.acquire("m") is new
    registry.release(between)
    assert loader.unloaded == [], "unloaded under a request"
    registry.release(old)
    assert await loader.next_unload() is old
    registry.release(new)
    registry.release(new)


async def test_a_failed_reload_keeps_the_old_one_serving_and_tells_the_reason(registry, repository, loader):
    directory = put(repository, "m")
    await registry.start([])
    await registry.load("m")
    old = registry.get("m")
    (directory / "1" / "model.bin").write_text("broken content")
    loader.broken["m", 1] = "cannot be parsed"
    error = await ended(asyncio.create_task(registry.load("m")))
    assert error.code is ErrorCode.INVALID_ARG
    assert "cannot be parsed" in error.message
    assert registry.get("m") is old
    (entry,) = registry.index()
    assert entry.state == "READY"
    assert "cannot be parsed" in entry.reason
    assert registry.ready(strict=True)
    del loader.broken["m", 1]
    await registry.load("m")
    assert registry.get("m") is not old, "the next load did not try again"
    assert registry.index() == [IndexEntry("m", "1", "READY")]


async def test_a_broken_configuration_keeps_the_old_one_serving(registry, repository):
    directory = put(repository, "m")
    await registry.start([])
    await registry.load("m")
    (directory / "config.pbtxt").write_text("max_batch_size: many")
    error = await ended(asyncio.create_task(registry.load("m")))
    assert error.code is ErrorCode.INVALID_ARG
    assert "config.pbtxt" in error.message
    assert registry.get("m").version == 1


async def test_loading_an_unchanged_model_does_nothing(registry, repository, loader):
    put(repository, "m")
    await registry.start([])
    await registry.load("m")
    (repository / "m" / "config.pbtxt").touch()
    await registry.load("m")
    assert loader.loaded == [("m", 1)]


async def test_only_changed_versions_are_loaded_anew_and_deselected_ones_end(registry, repository, loader):
    directory = put(repository, "m", [1, 2], "version_policy: { latest { num_versions: 2 } }")
    await registry.start([])
    await registry.load("m")
    kept = registry.get("m", 2)
    put(repository, "m", [3], (directory / "config.pbtxt").read_text())
    await registry.load("m")
    assert [model.version for model in registry.served()] == [2, 3]
    assert registry.get("m", 2) is kept
    assert (await loader.next_unload()).version == 1
    assert refused(registry, "m", 1).code is ErrorCode.NOT_FOUND


async def test_a_changed_file_beside_the_versions_loads_them_all_anew(registry, repository, loader):
    directory = put(repository, "m", [1, 2], ALL)
    await registry.start([])
    await registry.load("m")
    (directory / "labels.txt").write_text("cat")
    await registry.load("m")
    assert loader.loaded == [("m", 1), ("m", 2)] * 2


async def test_a_model_with_a_dead_backend_is_loaded_anew_though_nothing_changed(registry, repository):
    put(repository, "m")
    await registry.start([])
    await registry.load("m")
    registry.get("m").die("crashed 5 times in a minute")
    await registry.load("m")
    assert registry.get("m").ready


async def test_a_newer_load_takes_the_place_of_an_older_one(registry, repository, loader):
    directory = put(repository, "m")
    await registry.start([])
    loader.hold.add("m")
    first = asyncio.create_task(registry.load("m"))
    await loader.next_held()
    (directory / "1" / "model.bin").write_text("newer content")
    second = asyncio.create_task(registry.load("m"))
    held = await loader.next_held()
    error = await ended(first)
    assert error.code is ErrorCode.UNAVAILABLE
    assert "newer operation" in error.message
    model = held.succeed()
    await second
    assert registry.get("m") is model


async def test_two_loads_of_the_same_content_are_one(registry, repository, loader):
    put(repository, "m")
    await registry.start([])
    loader.hold.add("m")
    first = asyncio.create_task(registry.load("m"))
    held = await loader.next_held()
    second = asyncio.create_task(registry.load("m"))
    await until(lambda: registry._models["m"].pending == 2)
    held.succeed()
    await asyncio.gather(first, second)
    assert loader.loaded == [("m", 1)]


async def test_a_caller_that_leaves_does_not_stop_the_load(registry, repository, loader):
    put(repository, "m")
    await registry.start([])
    loader.hold.add("m")
    load = asyncio.create_task(registry.load("m"))
    held = await loader.next_held()
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    held.succeed()
    await until(lambda: registry.ready_versions("m") == (1,))
