"""A configuration that differs in instances or versions alone changes what serves, and loads nothing anew."""

import asyncio

import pytest

from headrace_protocol.errors import ErrorCode, InferError
from held_models import put

TWO = "instance_group { count: 2 }"


def rewrite(directory, config: str) -> None:
    (directory / "config.pbtxt").write_text(f'backend: "identity" {config}')


async def test_other_instances_are_given_to_what_serves(registry, repository, loader):
    directory = put(repository, "m")
    await registry.start()
    model = registry.get("m")
    rewrite(directory, TWO)
    await registry.load("m")
    await registry.load("m")
    assert loader.resized == [("m", 1)], "once: the second load finds nothing to do"
    assert registry.get("m") is model
    assert loader.loaded == [("m", 1)]


async def test_a_version_policy_loads_what_it_adds_and_tells_what_serves(registry, repository, loader):
    directory = put(repository, "m", [1, 2])
    await registry.start()
    model = registry.get("m", 2)
    rewrite(directory, "version_policy { all { } }")
    await registry.load("m")
    assert loader.loaded == [("m", 2), ("m", 1)]
    assert loader.resized == [("m", 2)]
    assert registry.get("m", 2) is model


async def test_a_change_beside_them_loads_anew_and_changes_nothing_in_place(registry, repository, loader):
    directory = put(repository, "m")
    await registry.start()
    rewrite(directory, f"{TWO} max_batch_size: 3")
    await registry.load("m")
    assert (loader.loaded, loader.resized) == ([("m", 1)] * 2, [])


async def test_a_model_that_takes_sequences_is_loaded_anew(registry, repository, loader):
    directory = put(repository, "m", config='backend: "identity" sequence_batching { }')
    await registry.start()
    rewrite(directory, f"sequence_batching {{ }} {TWO}")
    await registry.load("m")
    assert (loader.loaded, loader.resized) == ([("m", 1)] * 2, [])


async def test_a_loader_that_cannot_has_it_loaded_anew_once(registry, repository, loader):
    loader.rigid.add("m")
    directory = put(repository, "m")
    await registry.start()
    rewrite(directory, TWO)
    await registry.load("m")
    assert loader.loaded == [("m", 1)] * 2
    await registry.load("m")
    assert loader.loaded == [("m", 1)] * 2, "nothing has changed"
    rewrite(directory, "")
    await registry.load("m")
    assert (len(loader.loaded), len(loader.resized)) == (3, 1), "it is not asked again"


async def test_a_change_that_fails_is_told_leaves_what_serves_and_is_tried_again(registry, repository, loader):
    directory = put(repository, "m")
    await registry.start()
    model = registry.get("m")
    rewrite(directory, TWO)
    loader.broken["m", 1] = "no such place"
    for _ in range(2):
        with pytest.raises(InferError, match="no such place") as raised:
            await registry.load("m")
        assert raised.value.code is ErrorCode.INVALID_ARG
        assert registry.get("m") is model
    loader.broken.clear()
    await registry.load("m")
    assert len(loader.resized) == 3
    assert registry.get("m") is model


async def test_of_two_changes_at_once_the_newer_counts(registry, repository, loader):
    directory = put(repository, "m")
    await registry.start()
    rewrite(directory, TWO)
    first = asyncio.create_task(registry.load("m"))
    await asyncio.sleep(0)
    second = asyncio.create_task(registry.load("m"))
    await asyncio.gather(first, second)
    assert loader.resized == [("m", 1)]
