"""ModelRegistry over real folders and a loader whose loads end when the test says so."""

import asyncio
import threading
from pathlib import Path

import pytest

from headrace.repository import layout
from headrace.repository.config_text import parse_json
from headrace.repository.layout import scan
from headrace.repository.overrides import OverrideRequest, UploadStore
from headrace.repository.registry import ModelRegistry
from headrace.repository.sources import LoadOverride, ModelSource
from headrace.types import IndexEntry
from headrace_protocol.errors import ErrorCode, InferError, invalid


class Model:
    """A served model that a test can kill."""

    def __init__(self, source: ModelSource, version: int) -> None:
        self.name = source.name
        self.version = version
        self.source = source
        self.config = None
        self.ready = True
        self.accepting = True
        self.not_ready_reason = ""
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def die(self, reason: str) -> None:
        """Give up: no backend will be started again."""
        self.ready, self.accepting, self.not_ready_reason = False, False, reason


class HeldLoad:
    """A load that waits for the test."""

    def __init__(self, source: ModelSource, version: int) -> None:
        self.source = source
        self.version = version
        self.result: asyncio.Future[Model] = asyncio.get_running_loop().create_future()

    def succeed(self) -> Model:
        model = Model(self.source, self.version)
        self.result.set_result(model)
        return model

    def fail(self, reason: str) -> None:
        self.result.set_exception(invalid(reason))


class Loader:
    """Loads at once; what is named in `hold` waits, what is named in `broken` fails."""

    def __init__(self) -> None:
        self.hold: set[str] = set()
        self.broken: dict[tuple[str, int], str] = {}
        self.loaded: list[tuple[str, int]] = []
        self.unloaded: list[Model] = []
        self.alive: set[Model] = set()
        self.most_at_once = 0
        self.at_once = 0
        self._held: asyncio.Queue[HeldLoad] = asyncio.Queue()
        self._unloads: asyncio.Queue[Model] = asyncio.Queue()

    async def load(self, source: ModelSource, version: int) -> Model:
        self.loaded.append((source.name, version))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if (source.name, version) in self.broken:
                raise invalid(self.broken[source.name, version])
            if source.name in self.hold:
                held = HeldLoad(source, version)
                self._held.put_nowait(held)
                model = await held.result
            else:
                await asyncio.sleep(0)
                model = Model(source, version)
        finally:
            self.at_once -= 1
        self.alive.add(model)
        return model

    async def unload(self, model: Model) -> None:
        self.alive.remove(model)
        self.unloaded.append(model)
        self._unloads.put_nowait(model)

    async def next_held(self) -> HeldLoad:
        return await asyncio.wait_for(self._held.get(), 5)

    async def next_unload(self) -> Model:
        return await asyncio.wait_for(self._unloads.get(), 5)


def put(repository: Path, name: str, versions=(1,), config: str = "") -> Path:
    directory = repository / name
    directory.mkdir(parents=True, exist_ok=True)
    for version in versions:
        (directory / str(version)).mkdir(parents=True, exist_ok=True)
        (directory / str(version) / "model.bin").write_text(f"{name} {version}")
    (directory / "config.pbtxt").write_text(config or 'backend: "identity"')
    return directory


ALL = 'backend: "identity" version_policy: { all {} }'


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


def refused(registry: ModelRegistry, name: str, version: int = -1) -> InferError:
    with pytest.raises(InferError) as raised:
        registry.acquire(name, version)
    return raised.value


async def ended(task: asyncio.Task) -> InferError:
    with pytest.raises(InferError) as raised:
        await asyncio.wait_for(task, 5)
    return raised.value


async def until(condition) -> None:
    """Let the loop run until something holds that no event tells of."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the loop is the event
            await asyncio.sleep(0)


# What a request meets


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


# Versions


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", [3]),
        ("version_policy: { latest { num_versions: 2 } }", [2, 3]),
        ("version_policy: { all {} }", [1, 2, 3]),
        ("version_policy: { specific { versions: [ 1, 3, 7 ] } }", [1, 3]),
    ],
)
async def test_the_version_policy_chooses_what_is_loaded(registry, repository, policy, expected):
    put(repository, "m", [1, 2, 3], f'backend: "identity" {policy}')
    assert await registry.start() == {}
    assert [model.version for model in registry.served()] == expected


async def test_a_policy_that_chooses_no_version_is_an_error_that_names_it(registry, repository):
    put(repository, "m", [1], "version_policy: { specific { versions: [ 5 ] } }")
    put(repository, "empty", [])
    failures = await registry.start()
    assert "version policy" in failures["m"]
    assert "version" in failures["empty"]
    assert registry.index()[1].state == "UNAVAILABLE"


async def test_if_one_version_fails_none_of_the_operation_serves(registry, repository, loader):
    put(repository, "m", [1, 2], ALL)
    loader.broken["m", 2] = "too big"
    assert set(await registry.start()) == {"m"}
    assert registry.served() == []
    await until(lambda: not loader.alive)
    states = {entry.version: entry.reason for entry in registry.index()}
    assert states["2"] == "too big"
    assert "version 2" in states["1"]


# Reload


async def test_a_reload_leaves_no_hole_and_requests_on_the_old_one_end_in_peace(registry, repository, loader):
    directory = put(repository, "m")
    await registry.start([])
    await registry.load("m")
    loader.hold.add("m")
    old = registry.acquire("m", 1)
    (directory / "1" / "model.bin").write_text("another content")
    reload = asyncio.create_task(registry.load("m"))
    held = await loader.next_held()
    between = registry.acquire("m", 1)
    assert between is old
    assert registry.ready(strict=True)
    assert registry.index() == [IndexEntry("m", "1", "READY")]
    new = held.succeed()
    await reload
    assert registry.acquire("m", 1) is new
    assert registry.acquire("m") is new
    registry.release(between)
    assert loader.unloaded == [], "unloaded under a request"
    registry.release(old)
    assert await loader.next_unload() is old
    registry.release(new)
    registry.release(new)


async def test_a_failed_reload_keeps_the_old_one_serving_and_tells_the_reason(registry, repository, loader):
    directory = put(repository, "m")
    await registry.start([])
    await registry.load("m")
    old = registry.get("m")
    (directory / "1" / "model.bin").write_text("broken content")
    loader.broken["m", 1] = "cannot be parsed"
    error = await ended(asyncio.create_task(registry.load("m")))
    assert error.code is ErrorCode.INVALID_ARG
    assert "cannot be parsed" in error.message
    assert registry.get("m") is old
    (entry,) = registry.index()
    assert entry.state == "READY"
    assert "cannot be parsed" in entry.reason
    assert registry.ready(strict=True)
    del loader.broken["m", 1]
    await registry.load("m")
    assert registry.get("m") is not old, "the next load did not try again"
    assert registry.index() == [IndexEntry("m", "1", "READY")]


async def test_a_broken_configuration_keeps_the_old_one_serving(registry, repository):
    directory = put(repository, "m")
    await registry.start([])
    await registry.load("m")
    (directory / "config.pbtxt").write_text("max_batch_size: many")
    error = await ended(asyncio.create_task(registry.load("m")))
    assert error.code is ErrorCode.INVALID_ARG
    assert "config.pbtxt" in error.message
    assert registry.get("m").version == 1


async def test_loading_an_unchanged_model_does_nothing(registry, repository, loader):
    put(repository, "m")
    await registry.start([])
    await registry.load("m")
    (repository / "m" / "config.pbtxt").touch()
    await registry.load("m")
    assert loader.loaded == [("m", 1)]


async def test_only_changed_versions_are_loaded_anew_and_deselected_ones_end(registry, repository, loader):
    directory = put(repository, "m", [1, 2], "version_policy: { latest { num_versions: 2 } }")
    await registry.start([])
    await registry.load("m")
    kept = registry.get("m", 2)
    put(repository, "m", [3], (directory / "config.pbtxt").read_text())
    await registry.load("m")
    assert [model.version for model in registry.served()] == [2, 3]
    assert registry.get("m", 2) is kept
    assert (await loader.next_unload()).version == 1
    assert refused(registry, "m", 1).code is ErrorCode.NOT_FOUND


async def test_a_changed_file_beside_the_versions_loads_them_all_anew(registry, repository, loader):
    directory = put(repository, "m", [1, 2], ALL)
    await registry.start([])
    await registry.load("m")
    (directory / "labels.txt").write_text("cat")
    await registry.load("m")
    assert loader.loaded == [("m", 1), ("m", 2)] * 2


async def test_a_model_with_a_dead_backend_is_loaded_anew_though_nothing_changed(registry, repository):
    put(repository, "m")
    await registry.start([])
    await registry.load("m")
    registry.get("m").die("crashed 5 times in a minute")
    await registry.load("m")
    assert registry.get("m").ready


async def test_a_newer_load_takes_the_place_of_an_older_one(registry, repository, loader):
    directory = put(repository, "m")
    await registry.start([])
    loader.hold.add("m")
    first = asyncio.create_task(registry.load("m"))
    await loader.next_held()
    (directory / "1" / "model.bin").write_text("newer content")
    second = asyncio.create_task(registry.load("m"))
    held = await loader.next_held()
    error = await ended(first)
    assert error.code is ErrorCode.UNAVAILABLE
    assert "newer operation" in error.message
    model = held.succeed()
    await second
    assert registry.get("m") is model


async def test_two_loads_of_the_same_content_are_one(registry, repository, loader):
    put(repository, "m")
    await registry.start([])
    loader.hold.add("m")
    first = asyncio.create_task(registry.load("m"))
    held = await loader.next_held()
    second = asyncio.create_task(registry.load("m"))
    await until(lambda: registry._models["m"].pending == 2)
    held.succeed()
    await asyncio.gather(first, second)
    assert loader.loaded == [("m", 1)]


async def test_a_caller_that_leaves_does_not_stop_the_load(registry, repository, loader):
    put(repository, "m")
    await registry.start([])
    loader.hold.add("m")
    load = asyncio.create_task(registry.load("m"))
    held = await loader.next_held()
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    held.succeed()
    await until(lambda: registry.ready_versions("m") == (1,))


# Unload


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


# Start, limits, close


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


# Applying snapshots


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


# Ensembles and overrides

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


async def test_a_configuration_override_serves_until_the_next_plain_load(registry, repository, loader):
    put(repository, "m", [1, 2])
    await registry.start([])
    await registry.load("m")
    override = parse_json('{"version_policy":{"specific":{"versions":[1]}}}')
    await registry.load("m", LoadOverride(override))
    assert [model.version for model in registry.served()] == [1]
    assert registry.get("m").source.config is override
    await registry.load("m")
    assert [model.version for model in registry.served()] == [2]


async def test_uploaded_files_are_removed_with_the_last_version_that_uses_them(registry, loader, tmp_path):
    await registry.start([])
    store = UploadStore(tmp_path)
    request = OverrideRequest(parse_json("{}"), {"1/model.bin": b"uploaded"})
    override = store.write("m", request)
    await registry.load("m", override)
    model = registry.acquire("m")
    assert (model.source.versions[1] / "model.bin").read_bytes() == b"uploaded"
    await registry.unload("m")
    assert override.temporary.exists(), "removed under a request"
    registry.release(model)
    await loader.next_unload()
    await until(lambda: not override.temporary.exists())
    store.close()


async def test_uploaded_files_that_do_not_load_are_removed(registry, loader, tmp_path):
    await registry.start([])
    store = UploadStore(tmp_path)
    override = store.write("m", OverrideRequest(parse_json("{}"), {"1/model.bin": b"bad"}))
    loader.broken["m", 1] = "bad"
    await ended(asyncio.create_task(registry.load("m", override)))
    await until(lambda: not override.temporary.exists())
    store.close()
