"""One repository, one loader, one registry; nothing may be left of them."""

import pytest

from headrace.repository.registry import ModelRegistry
from held_models import Loader


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture
def loader():
    return Loader()


@pytest.fixture
async def registry(repository, loader):
    registry = ModelRegistry(loader, [repository])
    yield registry
    await registry.close(timeout=0)
    assert not loader.alive, "models outlived the registry"
    assert not registry._tasks
    assert not registry._copies
