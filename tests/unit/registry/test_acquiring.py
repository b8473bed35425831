"""What a request meets when it asks for a model."""

import asyncio

import pytest

from headrace.types import IndexEntry
from headrace_protocol.errors import ErrorCode, InferError
from held_models import ALL, put, refused


async def test_an_unknown_model_is_not_found(registry):
    await registry.start()
    error = refused(registry, "nobody")
    assert error.code is ErrorCode.NOT_FOUND
    assert "'nobody'" in error.message


async def test_before_the_repositories_were_read_no_model_is_called_unknown(registry):
    assert refused(registry, "nobody").code is ErrorCode.UNAVAILABLE


async def test_an_unknown_version_is_not_found_and_the_known_ones_are_named(registry, repository):
    put(repository, "m", [1, 2], ALL)
    await registry.start()
    error = refused(registry, "m", 99)
    assert error.code is ErrorCode.NOT_FOUND
    assert "1, 2" in error.message


async def test_a_model_that_loads_is_unavailable_and_the_server_not_ready(registry, repository, loader):
    put(repository, "m")
    loader.hold.add("m")
    start = asyncio.create_task(registry.start())
    held = await loader.next_held()
    for version in (-1, 1):
        error = refused(registry, "m", version)
        assert error.code is ErrorCode.UNAVAILABLE
        assert "LOADING" in error.message
    assert not registry.ready(strict=False)
    held.succeed()
    assert await start == {}
    assert registry.ready(strict=True)
    model = registry.acquire("m")
    assert (model.name, model.version) == ("m", 1)
    registry.release(model)


async def test_the_highest_version_whose_backend_lives_is_the_latest(registry, repository):
    put(repository, "m", [1, 2], ALL)
    await registry.start()
    newest = registry.acquire("m")
    assert newest.version == 2
    newest.die("its backend ended by signal 9")
    second = registry.acquire("m")
    assert second.version == 1
    error = refused(registry, "m", 2)
    assert error.code is ErrorCode.UNAVAILABLE
    assert "signal 9" in error.message
    assert registry.ready_versions("m") == (1,)
    assert not registry.ready(strict=True)
    assert registry.ready(strict=False)
    assert registry.get("m", 2) is newest
    registry.release(newest)
    registry.release(second)


async def test_a_model_whose_backend_starts_again_takes_requests_but_is_not_called_ready(registry, repository):
    put(repository, "m", [1, 2], ALL)
    await registry.start()
    newest = registry.get("m", 2)
    newest.ready, newest.not_ready_reason = False, "its backend is being started again"
    assert registry.acquire("m") is newest
    registry.release(newest)
    assert not registry.model_ready("m", 2)
    assert registry.model_ready("m", 1)
    assert not registry.ready(strict=True)
    assert registry.index()[1] == IndexEntry("m", "2", "UNAVAILABLE", "its backend is being started again")
    assert [entry.version for entry in registry.index(ready_only=True)] == ["1"]


async def test_model_readiness_tells_unknown_from_not_ready(registry, repository):
    put(repository, "m")
    await registry.start([])
    assert registry.model_ready("m") is False
    with pytest.raises(InferError) as raised:
        registry.model_ready("nobody")
    assert raised.value.code is ErrorCode.NOT_FOUND


async def test_a_model_that_failed_is_unavailable_with_the_reason(registry, repository, loader):
    put(repository, "m")
    loader.broken["m", 1] = "the model file is no ONNX"
    failures = await registry.start()
    assert "no ONNX" in failures["m"]
    error = refused(registry, "m")
    assert error.code is ErrorCode.UNAVAILABLE
    assert "no ONNX" in error.message
    assert registry.index() == [IndexEntry("m", "1", "UNAVAILABLE", "the model file is no ONNX")]
    assert not registry.ready(strict=True)
    assert registry.ready(strict=False)


async def test_one_broken_model_leaves_the_others_alone(registry, repository, loader):
    for name in ("a", "b", "c"):
        put(repository, name)
    (repository / "b" / "config.pbtxt").write_text("no such field: 1")
    failures = await registry.start()
    assert set(failures) == {"b"}
    assert [model.name for model in registry.served()] == ["a", "c"]


async def test_a_model_not_loaded_on_demand_says_so(registry, repository):
    put(repository, "m")
    await registry.start([])
    error = refused(registry, "m")
    assert error.code is ErrorCode.UNAVAILABLE
    assert "not loaded" in error.message
    assert registry.index() == [IndexEntry("m")]
    assert registry.ready(strict=True)
