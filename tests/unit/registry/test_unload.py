"""How a model ends that is not wanted any more."""

import asyncio
import threading

from headrace.repository import layout
from headrace.types import IndexEntry
from headrace_protocol.errors import ErrorCode
from held_models import ended, put, refused, until


async def test_unload_waits_for_requests_and_says_unloaded(registry, repository, loader):
    put(repository, "m")
    await registry.start([])
    await registry.load("m")
    model = registry.acquire("m")
    await registry.unload("m")
    assert registry.index() == [IndexEntry("m", "1", "UNLOADING", "unloaded")]
    assert refused(registry, "m", 1).code is ErrorCode.UNAVAILABLE
    assert loader.unloaded == []
    registry.release(model)
    await loader.next_unload()
    await until(lambda: registry.index() == [IndexEntry("m", "1", "UNAVAILABLE", "unloaded")])
    error = refused(registry, "m")
    assert error.code is ErrorCode.UNAVAILABLE
    assert "unloaded" in error.message
    assert registry.ready(strict=True), "an unload on purpose is no fault"
    await registry.load("m")
    assert registry.ready_versions("m") == (1,)


async def test_unload_during_a_load_stops_it(registry, repository, loader):
    put(repository, "m")
    await registry.start([])
    loader.hold.add("m")
    load = asyncio.create_task(registry.load("m"))
    held = await loader.next_held()
    await registry.unload("m")
    assert (await ended(load)).code is ErrorCode.UNAVAILABLE
    assert held.result.cancelled()
    assert registry.served() == []


async def test_an_unload_asked_for_after_a_load_comes_after_it_though_the_disk_is_slow(
    registry, repository, monkeypatch
):
    put(repository, "m")
    await registry.start([])
    disk = threading.Event()
    real = layout.scan_model

    def slow(*arguments):
        assert disk.wait(5)
        return real(*arguments)

    monkeypatch.setattr(layout, "scan_model", slow)
    load = asyncio.create_task(registry.load("m"))
    await until(lambda: "m" in registry._models)
    unload = asyncio.create_task(registry.unload("m"))
    await until(lambda: registry._models["m"].pending == 2)
    disk.set()
    await unload
    assert (await ended(load)).code is ErrorCode.UNAVAILABLE
    assert registry.index() == [IndexEntry("m", "1", "UNAVAILABLE", "unloaded")]


async def test_unloading_what_is_not_loaded_is_no_error(registry):
    await registry.start([])
    await registry.unload("nobody")
    assert registry.index() == []


async def test_loading_a_name_without_a_folder_is_not_found_and_leaves_nothing(registry):
    await registry.start([])
    error = await ended(asyncio.create_task(registry.load("nobody")))
    assert error.code is ErrorCode.NOT_FOUND
    await until(lambda: not registry._models)
    assert registry.ready(strict=True)


async def test_a_hundred_loads_and_unloads_leave_nothing(registry, repository, loader):
    put(repository, "m")
    await registry.start([])
    for _ in range(100):
        await registry.load("m")
        await registry.unload("m")
        await loader.next_unload()
    await until(lambda: not registry._tasks)
    assert not registry._copies
    assert not registry._models["m"]._copies
