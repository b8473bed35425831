"""Versions come and go one by one, and a preference says which of them serves a request that names none."""

import pytest

from headrace.repository.model_config import ConfigError, Problem
from headrace.repository.registry import ModelRegistry
from headrace.repository.sources import Preference
from headrace_protocol.errors import ErrorCode, InferError
from held_models import ALL, put, until

LATEST_ALONE = 'backend: "identity"'


async def loaded(registry, repository, *versions, config=ALL):
    put(repository, "m", versions, config)
    await registry.start([])
    await registry.load("m")


async def test_a_version_is_loaded_beside_others_whatever_the_policy_says(registry, repository, loader):
    await loaded(registry, repository, 1, config=LATEST_ALONE)
    first = registry.get("m", 1)
    put(repository, "m", (1, 2), LATEST_ALONE)
    await registry.load_version("m", 2)
    assert registry.versions("m") == (1, 2)
    assert registry.get("m", 1) is first
    assert registry.get("m").version == 2
    assert loader.unloaded == []


async def test_the_next_plain_load_goes_by_the_policy_again(registry, repository, loader):
    await loaded(registry, repository, 1, config=LATEST_ALONE)
    put(repository, "m", (1, 2), LATEST_ALONE)
    await registry.load_version("m", 2)
    await registry.load("m")
    assert registry.versions("m") == (2,)


async def test_what_serves_stays_as_it_is_though_its_files_have_changed(registry, repository, loader):
    await loaded(registry, repository, 1, 2)
    before = registry.get("m", 1)
    (repository / "m" / "1" / "more").write_text("changed")
    (repository / "m" / "2" / "more").write_text("changed")
    await registry.load_version("m", 2)
    assert registry.get("m", 1) is before
    assert registry.versions("m") == (1, 2)


async def test_a_version_that_does_not_load_leaves_the_others(registry, repository, loader):
    await loaded(registry, repository, 1)
    put(repository, "m", (1, 2), ALL)
    loader.broken["m", 2] = "it is garbage"
    with pytest.raises(InferError, match="version 2: it is garbage"):
        await registry.load_version("m", 2)
    assert registry.versions("m") == (1,)


async def test_a_version_without_a_folder_is_not_found(registry, repository):
    await loaded(registry, repository, 1)
    for name, version in (("m", 7), ("ghost", 1)):
        with pytest.raises(InferError) as raised:
            await registry.load_version(name, version)
        assert raised.value.code is ErrorCode.NOT_FOUND


async def test_a_version_is_unloaded_once_nobody_is_in_it(registry, repository, loader):
    await loaded(registry, repository, 1, 2)
    model = registry.acquire("m", 2)
    await registry.unload_version("m", 2)
    assert registry.versions("m") == (1,)
    assert loader.unloaded == []
    registry.release(model)
    await until(lambda: loader.unloaded)


async def test_the_only_version_is_not_unloaded_so_nor_one_that_is_not_there(registry, repository):
    await loaded(registry, repository, 1)
    with pytest.raises(InferError, match="is the only one"):
        await registry.unload_version("m", 1)
    with pytest.raises(InferError, match="no version 2"):
        await registry.unload_version("m", 2)
    assert registry.versions("m") == (1,)


async def test_the_default_goes_first_and_those_on_trial_last(registry, repository):
    await loaded(registry, repository, 1, 2, 3)
    registry.prefer("m", Preference(1, frozenset({3})))
    assert registry.get("m").version == 1
    registry.get("m", 1).die("gone")
    leased = registry.acquire("m")
    assert (leased.version, registry.get("m").version) == (2, 2)
    registry.release(leased)
    registry.get("m", 2).die("gone")
    assert registry.get("m").version == 3
    registry.prefer("m", None)
    assert registry.get("m").version == 3


async def test_a_preference_outlives_reloads_and_unloads(registry, repository):
    put(repository, "m", (1, 2), ALL)
    await registry.start([])
    registry.prefer("m", Preference(1))
    await registry.load("m")
    assert registry.get("m").version == 1
    await registry.unload("m")
    await registry.load("m")
    assert registry.get("m").version == 1


async def test_another_preference_is_another_generation(registry, repository):
    await loaded(registry, repository, 1, 2)
    before = registry.generation
    registry.prefer("m", Preference(1))
    assert registry.generation != before


class Book:
    """Notes what configurations say."""

    def __init__(self):
        self.said = []

    def adopt(self, name, text):
        if text == "bad":
            raise ConfigError([Problem("parameters.traffic", "is bad")])
        self.said.append((name, text))


def with_traffic(text):
    return ALL + f" parameters {{ key: 'traffic' value {{ string_value: '{text}' }} }}"


async def test_what_a_configuration_says_of_traffic_is_no_content_of_the_model(repository, loader):
    book = Book()
    registry = ModelRegistry(loader, [repository], traffic=book)
    await loaded(registry, repository, 1)
    before = registry.get("m")
    written = repository / "m" / "config.pbtxt"
    written.write_text(with_traffic("{}"))
    await registry.load("m")
    assert registry.get("m") is before
    written.write_text(with_traffic("bad"))
    with pytest.raises(InferError, match=r"parameters\.traffic: is bad"):
        await registry.load("m")
    assert registry.get("m") is before
    assert book.said == [("m", None), ("m", "{}")]
    await registry.close(0)
