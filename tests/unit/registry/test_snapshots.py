"""What a look at the repositories brings about."""

import asyncio

from headrace.repository.layout import scan
from headrace_protocol.errors import ErrorCode
from held_models import put, refused, until


async def test_applying_a_snapshot_adds_changes_and_removes(registry, repository, loader):
    put(repository, "stays")
    changed = put(repository, "changes")
    gone = put(repository, "goes")
    await registry.start()
    stays = registry.get("stays")
    old = registry.get("changes")
    (changed / "1" / "model.bin").write_text("other")
    gone.rename(repository / ".goes")
    put(repository, "comes")
    begun = registry.apply(scan([repository]))
    await asyncio.gather(*begun.values())
    assert set(begun) == {"changes", "goes", "comes"}
    assert registry.get("stays") is stays
    assert registry.get("changes") is not old
    assert registry.ready_versions("comes") == (1,)
    await until(lambda: "goes" not in registry._models)
    assert refused(registry, "goes").code is ErrorCode.NOT_FOUND
    assert registry.apply(scan([repository])) == {}


async def test_a_broken_model_is_not_tried_again_until_it_changes(registry, repository, loader):
    directory = put(repository, "m")
    loader.broken["m", 1] = "bad"
    await registry.start()
    assert registry.apply(scan([repository])) == {}
    del loader.broken["m", 1]
    (directory / "1" / "model.bin").write_text("mended")
    await asyncio.gather(*registry.apply(scan([repository])).values())
    assert registry.ready_versions("m") == (1,)
