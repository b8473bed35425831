"""Polling: what has come to rest is applied, what moves is not, and nothing ends the watch."""

import asyncio
from pathlib import Path

import pytest

from headrace.repository.layout import RepositorySnapshot, scan
from headrace.repository.watcher import RepositoryWatcher, Settling

SECOND = 10**9


class FakeClock:
    def __init__(self) -> None:
        self.now = 0

    def now_ns(self) -> int:
        return self.now

    def wall_ns(self) -> int:
        return self.now


class AppliedSnapshots:
    """Stands where the registry stands, and keeps what it was given."""

    def __init__(self, snapshot: RepositorySnapshot) -> None:
        self.snapshot = snapshot
        self.applied: asyncio.Queue[RepositorySnapshot] = asyncio.Queue()

    def apply(self, snapshot: RepositorySnapshot) -> dict:
        self.snapshot = snapshot
        self.applied.put_nowait(snapshot)
        return {}


def put(repository: Path, name: str, content: str = "weights") -> Path:
    file = repository / name / "1" / "model.bin"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


def test_a_new_folder_counts_after_two_equal_looks_a_settling_time_apart(tmp_path):
    settling = Settling(RepositorySnapshot(), SECOND)
    put(tmp_path, "m")
    seen = scan([tmp_path])
    assert settling.observe(seen, 0).models == {}
    assert settling.moving
    assert settling.observe(seen, SECOND - 1).models == {}
    assert settling.observe(seen, SECOND).models == seen.models
    assert not settling.moving


def test_a_folder_that_is_being_copied_does_not_count_until_it_is_whole(tmp_path):
    settling = Settling(RepositorySnapshot(), SECOND)
    for number in range(5):
        put(tmp_path, "m", "x" * number)
        assert settling.observe(scan([tmp_path]), number * SECOND).models == {}
    whole = scan([tmp_path])
    assert settling.observe(whole, 5 * SECOND).models == whole.models


def test_a_model_that_changes_stays_as_it_was_until_the_change_is_at_rest(tmp_path):
    put(tmp_path, "m")
    old = scan([tmp_path])
    settling = Settling(old, SECOND)
    put(tmp_path, "m", "half of the new we")
    assert settling.observe(scan([tmp_path]), 0).models == old.models
    put(tmp_path, "m", "all of the new weights")
    new = scan([tmp_path])
    assert settling.observe(new, SECOND).models == old.models
    assert settling.observe(new, 2 * SECOND).models == new.models


def test_a_folder_away_for_one_look_is_not_taken_for_deleted(tmp_path):
    put(tmp_path, "m")
    old = scan([tmp_path])
    settling = Settling(old, SECOND)
    assert settling.observe(RepositorySnapshot(), 0).models == old.models
    assert settling.observe(old, SECOND).models == old.models
    assert not settling.moving
    settling.observe(RepositorySnapshot(), 2 * SECOND)
    assert settling.observe(RepositorySnapshot(), 3 * SECOND).models == {}


def test_models_of_a_repository_that_cannot_be_read_stay(tmp_path):
    put(tmp_path, "m")
    old = scan([tmp_path])
    settling = Settling(old, SECOND)
    unreadable = RepositorySnapshot({}, frozenset({tmp_path}))
    for second in range(5):
        assert settling.observe(unreadable, second * SECOND).models == old.models
    assert not settling.moving


async def test_a_look_applies_what_is_at_rest(tmp_path):
    clock = FakeClock()
    registry = AppliedSnapshots(scan([tmp_path]))
    watcher = RepositoryWatcher(registry, [tmp_path], 15, clock=clock)
    put(tmp_path, "m")
    await watcher.look()
    assert registry.applied.get_nowait().models == {}
    clock.now = 2 * SECOND
    await watcher.look()
    assert set(registry.applied.get_nowait().models) == {"m"}


async def test_nothing_is_applied_before_the_initial_load_has_begun(tmp_path):
    registry = AppliedSnapshots(None)
    await RepositoryWatcher(registry, [tmp_path], 15, clock=FakeClock()).look()
    assert registry.applied.empty()


async def test_a_look_that_fails_does_not_end_the_watch(tmp_path, caplog):
    looks = 0

    def broken_once(repositories):
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RuntimeError("boom")
        return scan(repositories)

    registry = AppliedSnapshots(scan([tmp_path]))
    watcher = RepositoryWatcher(registry, [tmp_path], 0.001, look=broken_once)
    async with watcher.watching():
        await asyncio.wait_for(registry.applied.get(), 5)
    assert looks >= 2
    assert "boom" in caplog.text


async def test_the_watch_ends_with_its_block(tmp_path):
    registry = AppliedSnapshots(scan([tmp_path]))
    with pytest.raises(ZeroDivisionError):
        async with RepositoryWatcher(registry, [tmp_path], 0.001).watching():
            await asyncio.wait_for(registry.applied.get(), 5)
            raise ZeroDivisionError
    assert [task for task in asyncio.all_tasks() if "watch" in task.get_name()] == []


async def test_an_interval_of_zero_never_looks(tmp_path):
    await asyncio.wait_for(RepositoryWatcher(AppliedSnapshots(scan([tmp_path])), [tmp_path], 0).run(), 5)


async def test_a_standing_warning_is_logged_once(tmp_path, caplog):
    missing = tmp_path / "missing"
    registry = AppliedSnapshots(RepositorySnapshot())
    watcher = RepositoryWatcher(registry, [missing], 15, clock=FakeClock())
    for _ in range(3):
        await watcher.look()
    assert caplog.text.count("cannot be listed") == 1
