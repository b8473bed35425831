"""The first load, its limits, and the end of it all."""

import asyncio

import pytest

from headrace.repository.registry import ModelRegistry
from headrace_protocol.errors import ErrorCode, InferError
from held_models import ended, put, until


async def test_loads_run_side_by_side_up_to_the_limit(repository, loader):
    for index in range(6):
        put(repository, f"m{index}")
        loader.hold.add(f"m{index}")
    registry = ModelRegistry(loader, [repository], load_concurrency=3)
    start = asyncio.create_task(registry.start())
    for _ in range(6):
        (await loader.next_held()).succeed()
    await start
    assert loader.most_at_once <= 3
    assert len(registry.served()) == 6
    await registry.close(timeout=0)


async def test_a_load_is_tried_again_as_often_as_the_setting_says(repository, loader):
    put(repository, "m")
    loader.broken["m", 1] = "not yet"
    registry = ModelRegistry(loader, [repository], load_retries=2)
    assert set(await registry.start()) == {"m"}
    assert loader.loaded == [("m", 1)] * 3
    await registry.close(timeout=0)


async def test_the_star_loads_everything_but_stands_alone(registry, repository):
    put(repository, "a")
    put(repository, "b")
    with pytest.raises(InferError) as raised:
        await registry.start(["*", "a"])
    assert raised.value.code is ErrorCode.INVALID_ARG
    assert await registry.start(["*"]) == {}
    assert len(registry.served()) == 2


async def test_a_named_model_without_a_folder_keeps_the_server_from_being_ready(registry):
    assert set(await registry.start(["ghost"])) == {"ghost"}
    assert not registry.ready(strict=True)
    assert registry.ready(strict=False)


async def test_a_duplicate_model_is_refused_and_told(tmp_path, loader):
    for folder in ("one", "two"):
        put(tmp_path / folder, "m")
    registry = ModelRegistry(loader, [tmp_path / "one", tmp_path / "two"])
    assert set(await registry.start()) == {"m"}
    (entry,) = registry.index()
    assert (entry.version, entry.state) == ("", "UNAVAILABLE")
    assert "two or more repositories" in entry.reason
    await registry.close(timeout=0)


async def test_a_duplicate_that_nobody_asked_for_is_told_by_the_index_too(tmp_path, loader):
    for folder in ("one", "two"):
        put(tmp_path / folder, "m")
    registry = ModelRegistry(loader, [tmp_path / "one", tmp_path / "two"])
    await registry.start([])
    (entry,) = registry.index()
    assert (entry.version, entry.state) == ("", "UNAVAILABLE")
    assert "two or more repositories" in entry.reason
    assert registry.ready(strict=True), "it was not asked for"
    await registry.close(timeout=0)


async def test_a_loader_that_breaks_unexpectedly_fails_the_model_alone(registry, repository, loader, monkeypatch):
    put(repository, "m")

    async def explode(source, version):
        raise RuntimeError("boom")

    monkeypatch.setattr(loader, "load", explode)
    failures = await registry.start()
    assert "RuntimeError" in failures["m"]


async def test_close_waits_for_requests_but_not_for_ever(registry, repository, loader):
    put(repository, "m")
    await registry.start()
    model = registry.acquire("m")
    close = asyncio.create_task(registry.close(timeout=5))
    await until(lambda: registry.served() == [])
    assert loader.unloaded == []
    registry.release(model)
    await asyncio.wait_for(close, 1)
    assert loader.unloaded == [model]
    assert not registry.ready(strict=False)


async def test_close_takes_down_what_requests_will_not_leave(registry, repository, loader):
    put(repository, "m")
    await registry.start()
    model = registry.acquire("m")
    await registry.close(timeout=0.01)
    assert loader.unloaded == [model]
    registry.release(model)
    with pytest.raises(InferError) as raised:
        await registry.load("m")
    assert raised.value.code is ErrorCode.UNAVAILABLE


async def test_close_during_a_load_gives_it_up(registry, repository, loader):
    put(repository, "m")
    await registry.start([])
    loader.hold.add("m")
    load = asyncio.create_task(registry.load("m"))
    held = await loader.next_held()
    await registry.close(timeout=0)
    assert (await ended(load)).code is ErrorCode.UNAVAILABLE
    assert held.result.cancelled()
