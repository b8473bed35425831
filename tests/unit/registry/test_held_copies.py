"""A copy of a model that somebody holds stays, and is found, though it is replaced or unloaded."""

from held_models import put, until


async def test_a_held_copy_outlives_its_unload_until_it_is_let_go(registry, repository, loader):
    put(repository, "m")
    await registry.start([])
    await registry.load("m")
    model = registry.acquire("m")
    registry.hold(model)
    registry.release(model)
    await registry.unload("m")
    assert loader.unloaded == []
    again = registry.acquire_where("m", -1, lambda found: found is model)
    assert again is model
    registry.release(again)
    registry.release(model)
    await loader.next_unload()
    await until(lambda: not loader.alive)
    assert registry.acquire_where("m", -1, lambda _: True) is None


async def test_a_copy_is_found_by_what_it_is_and_by_its_version(registry, repository):
    put(repository, "m")
    await registry.start([])
    await registry.load("m")
    model = registry.acquire("m")
    for version, found in ((-1, model), (1, model), (2, None)):
        got = registry.acquire_where("m", version, lambda _: True)
        assert got is found
        if got is not None:
            registry.release(got)
    assert registry.acquire_where("m", -1, lambda _: False) is None
    assert registry.acquire_where("none", -1, lambda _: True) is None
    registry.release(model)
