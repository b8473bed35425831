"""Ensembles bring their members and take them along."""

import asyncio

from headrace.repository.layout import scan
from headrace.repository.registry import ModelRegistry
from held_models import put, until

ENSEMBLE = """
platform: "ensemble"
ensemble_scheduling { step [
  { model_name: "A" model_version: -1 }, { model_name: "B" model_version: -1 } ] }
"""


async def test_an_ensemble_brings_its_members_and_takes_them_along(registry, repository, loader):
    for name in ("A", "B"):
        put(repository, name)
    put(repository, "ens", config=ENSEMBLE)
    await registry.start(["B"])
    await registry.load("ens")
    assert [model.name for model in registry.served()] == ["A", "B", "ens"]
    assert loader.loaded[-1] == ("ens", 1), "loaded before its members"
    await registry.unload("ens", unload_dependents=True)
    assert [model.name for model in registry.served()] == ["B"], "B was asked for by name"


async def test_an_ensemble_waits_for_its_members_at_start_even_with_one_slot(repository, loader):
    put(repository, "ens", config=ENSEMBLE)
    for name in ("A", "B"):
        put(repository, name)
    registry = ModelRegistry(loader, [repository], load_concurrency=1)
    assert await registry.start() == {}
    assert loader.loaded[-1] == ("ens", 1)
    await registry.close(timeout=0)


async def test_an_ensemble_with_a_broken_member_names_it(registry, repository, loader):
    put(repository, "ens", config=ENSEMBLE)
    put(repository, "A")
    failures = await registry.start()
    assert "'B'" in failures["ens"]


async def test_ensembles_in_a_circle_are_refused_and_nothing_hangs(registry, repository):
    put(repository, "A", config='platform: "ensemble" ensemble_scheduling { step [ { model_name: "B" } ] }')
    put(repository, "B", config='platform: "ensemble" ensemble_scheduling { step [ { model_name: "A" } ] }')
    failures = await asyncio.wait_for(registry.start(), 5)
    assert set(failures) == {"A", "B"}
    assert any("holds itself" in reason for reason in failures.values())


async def test_an_ensemble_that_lacked_a_member_is_loaded_once_the_member_serves(registry, repository, loader):
    put(repository, "ens", config=ENSEMBLE)
    put(repository, "A")
    loader.broken["B", 1] = "torn"
    put(repository, "B")
    assert set(await registry.start()) == {"B", "ens"}
    del loader.broken["B", 1]
    put(repository, "B", versions=(1, 2))
    registry.apply(scan([repository]))
    await until(lambda: [model.name for model in registry.served()] == ["A", "B", "ens"])


async def test_an_ensemble_that_failed_of_itself_is_tried_again_only_when_a_member_was_loaded(
    registry, repository, loader
):
    put(repository, "ens", config=ENSEMBLE)
    put(repository, "A")
    put(repository, "B")
    loader.broken["ens", 1] = "torn"
    await registry.start()
    assert loader.loaded.count(("ens", 1)) == 1
    put(repository, "C")
    await asyncio.wait(registry.apply(scan([repository])).values())
    assert loader.loaded.count(("ens", 1)) == 1, "C is no member of it"
    put(repository, "A", versions=(1, 2))
    await asyncio.wait(registry.apply(scan([repository])).values())
    await until(lambda: loader.loaded.count(("ens", 1)) == 2)
