"""A real server shares a model's requests among its versions, and takes a bad version back before it does harm."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from doors import DOORS, SteadyLoad, open_door
from figures import index, metric, wait_until
from harness import RunningServer, running
from headrace_protocol._generated import grpc_service_pb2 as pb
from traffic_models import ROW, add_version, add_versions, post, traffic, try_traffic, weights

FLAGS = ("--model-control-mode=explicit", "--load-model=m", "--backend-restart-limit=1000")
PYTHON_MODELS = Path(__file__).parents[1] / "python_models"
BODY = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 3], "data": [1, 1, 1]}]}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for models, which tests add."""
    return tmp_path_factory.mktemp("traffic")


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[RunningServer]:
    """A server with a model of three good versions."""
    add_versions(repository, "m", "good", "good", "good")
    with running(repository, *FLAGS) as started:
        yield started


@pytest.fixture
def fresh(server: RunningServer) -> Iterator[RunningServer]:
    """The same, without a policy."""
    yield server
    traffic(server, changes={"reset": True})


async def served(server: RunningServer, kind: str, count: int, clients: int = 8, **parameters: object) -> Counter[str]:
    """Return which versions answered so many requests, each of which has to be answered right."""
    left = [count]
    found: Counter[str] = Counter()

    async def ask() -> None:
        async with open_door(server, kind) as door:
            while left[0] > 0:
                left[0] -= 1
                outcome = await door.infer("m", ROW, parameters=parameters)
                np.testing.assert_array_equal(outcome.array, ROW + int(outcome.version))
                found[outcome.version] += 1

    await asyncio.gather(*(ask() for _ in range(clients)))
    return found


@pytest.mark.parametrize("kind", DOORS)
async def test_one_request_in_ten_goes_to_the_canary(fresh: RunningServer, kind: str) -> None:
    told = traffic(fresh, changes={"default": 2, "weights": {"3": 10}})
    assert weights(told) == {2: 90.0, 3: 10.0}
    assert metric(fresh, "headrace_traffic_weight", "m", version="3") == 10

    found = await served(fresh, kind, 2000)

    assert 160 < found["3"] < 240, "three standard deviations"
    assert found["2"] == 2000 - found["3"]


def version_of(server: RunningServer, door: str, who: str, parameters: dict[str, str] | None = None) -> str:
    """Return the version that answers a caller, by header or metadata; "" = by parameters alone."""
    headers = {"X-Headrace-Sticky": who} if who else {}
    if door == "http":
        status, told = post(server, "/v2/models/m/infer", {**BODY, "parameters": parameters or {}}, headers)
        assert status == 200, told
        return str(told["model_version"])
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        tensor = tritonclient.grpc.InferInput("INPUT0", ROW.shape, "FP32").set_data_from_numpy(ROW)
        lower = {name.lower(): value for name, value in headers.items()}
        return str(client.infer("m", [tensor], headers=lower, parameters=parameters).get_response().model_version)


def test_a_caller_stays_with_its_version_at_every_door(fresh: RunningServer) -> None:
    traffic(fresh, changes={"default": 2, "weights": {"3": 30}, "sticky_parameter": "user"})
    callers = [f"caller-{number}" for number in range(30)]
    before = {who: version_of(fresh, "http", who) for who in callers}
    assert set(before.values()) == {"2", "3"}
    for who in callers:
        by_parameter = version_of(fresh, "http", "", {"user": who})
        assert {by_parameter, version_of(fresh, "http", who)} == {before[who]}
    for who in callers[:8]:
        assert {version_of(fresh, "grpc", who), version_of(fresh, "grpc", "", {"user": who})} == {before[who]}

    traffic(fresh, changes={"weights": {"3": 60}})
    after = {who: version_of(fresh, "http", who) for who in callers}
    moved = {who for who in callers if after[who] != before[who]}
    assert moved
    assert {after[who] for who in moved} == {"3"}


def test_metadata_of_the_model_are_those_of_its_default(fresh: RunningServer) -> None:
    traffic(fresh, changes={"default": 1})
    assert version_of(fresh, "http", "") == "1"
    assert traffic(fresh)["default"] == 1
    assert post(fresh, "/v2/models/m/versions/3/infer", BODY)[1]["model_version"] == "3"


@pytest.mark.parametrize(
    ("changes", "status", "told"),
    [
        ({"default": 9}, 404, "no version 9"),
        ({"weights": {"3": 101}}, 400, "weights.3: expected a number from 0 to 100"),
        ({"colour": "blue"}, 400, "colour: is unknown"),
        ({"promote": 3, "default": 2}, 400, "'promote' stands alone"),
        ({"promote": "x"}, 400, "promote: expected a version"),
        ({"switch": {"version": 9, "timeout_secs": 0}}, 404, "no version 9"),
        ({"switch": {"version": 2, "soon": 1}}, 400, "switch.soon: is unknown"),
        ({"rollback": True}, 400, "no version of model 'm' has a weight"),
        ({"reset": 1}, 400, "reset: expected true"),
        ({"weights": {"1": 1, "2": 1, "3": 1}}, 400, "no version beside these"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(fresh: RunningServer, changes: object, status: int, told: str) -> None:
    before = traffic(fresh)
    assert (try_traffic(fresh, "m", changes)[0], told in try_traffic(fresh, "m", changes)[1]["error"]) == (status, True)
    assert traffic(fresh) == before


def test_an_unknown_model_has_no_traffic(server: RunningServer) -> None:
    assert try_traffic(server, "ghost", None)[0] == 404
    assert try_traffic(server, "ghost", {"default": 1})[0] == 404


def test_a_policy_outlives_reloads_until_it_is_reset(fresh: RunningServer) -> None:
    traffic(fresh, changes={"weights": {"3": 0}, "default": 2})
    assert post(fresh, "/v2/repository/models/m/unload", {})[0] == 200
    assert post(fresh, "/v2/repository/models/m/load", {})[0] == 200
    assert (traffic(fresh)["default"], version_of(fresh, "http", "")) == (2, "2")
    assert traffic(fresh, changes={"reset": True})["default"] == 3


def versions(server: RunningServer, model: str) -> set[str]:
    return {version for version, (state, _) in index(server, model).items() if state == "READY"}


def control(server: RunningServer, verb: str, model: str, **parameters: object) -> tuple[int, str]:
    """Load or unload; return the status and the words of a refusal."""
    status, told = post(server, f"/v2/repository/models/{model}/{verb}", {"parameters": parameters})
    return status, told["error"] if told else ""


async def test_one_version_is_loaded_and_unloaded_while_the_others_serve(
    server: RunningServer, repository: Path
) -> None:
    folder = add_versions(repository, "one", "good")
    (folder / "config.pbtxt").write_text((folder / "config.pbtxt").read_text().replace("all {}", "latest {}"))
    assert await asyncio.to_thread(control, server, "load", "one") == (200, "")
    async with SteadyLoad(server, "one", ROW, version="1") as first, SteadyLoad(server, "one", ROW) as load:
        add_version(folder, 2)
        assert await asyncio.to_thread(control, server, "load", "one", version=2) == (200, "")
        assert versions(server, "one") == {"1", "2"}, "the version policy is not asked"
        assert (await asyncio.to_thread(traffic, server, "one"))["default"] == 1, "a load moves nobody"
        assert {outcome.version for outcome in await load.more()} == {"1"}
        await asyncio.to_thread(traffic, server, "one", {"default": 2})
        assert (await asyncio.to_thread(control, server, "load", "one", version="9"))[0] == 404
        assert {outcome.version for outcome in await load.more()} == {"2"}
        status, text = await asyncio.to_thread(control, server, "unload", "one", version=2)
        assert (status, "is the default" in text) == (400, True)
        await asyncio.to_thread(traffic, server, "one", {"default": 1})
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            request = pb.RepositoryModelUnloadRequest(model_name="one")
            request.parameters["version"].int64_param = 2
            client._client_stub.RepositoryModelUnload(request)
        assert versions(server, "one") == {"1"}
        await asyncio.to_thread(traffic, server, "one", {"reset": True})
        status, text = await asyncio.to_thread(control, server, "unload", "one", version=1)
        assert (status, "the only one" in text) == (400, True)
    assert [*first.failures(), *load.failures()] == []
    assert {outcome.version for outcome in load.outcomes} == {"1", "2"}


@pytest.mark.parametrize(
    ("mood", "guard", "reason"),
    [
        ("failing", {"max_error_rate": 0.1}, "error_rate"),
        ("slow", {"max_p99_ratio": 5}, "p99"),
        ("crashing", {"max_error_rate": 0.1, "min_requests": 1000}, "crashes"),
    ],
)
async def test_a_bad_canary_is_taken_back_by_itself(
    fresh: RunningServer, repository: Path, mood: str, guard: object, reason: str
) -> None:
    add_versions(repository, mood, "good", mood)
    assert await asyncio.to_thread(control, fresh, "load", mood) == (200, "")
    await asyncio.to_thread(traffic, fresh, mood, {"default": 1})

    def back() -> list[dict[str, object]]:
        return traffic(fresh, mood)["rollbacks"]

    async with SteadyLoad(fresh, mood, ROW, clients=5) as load, SteadyLoad(fresh, "m", ROW) as others:
        assert load.failures() == []
        began = time.monotonic()
        await asyncio.to_thread(traffic, fresh, mood, {"weights": {"2": 20}, "guard": guard})
        took = await asyncio.to_thread(wait_until, "it is taken back", back, 10)
        after = await load.more(100)
    assert {outcome.version for outcome in after} == {"1"}
    assert others.failures() == [], "nobody else is hurt"
    assert all("broken on purpose" in o.text or "process" in o.text for o in load.failures()), load.failures()[:3]
    assert max((outcome.started for outcome in load.failures()), default=0) < began + took + 0.5
    told = traffic(fresh, mood)
    assert [(rollback["version"], rollback["reason"]) for rollback in told["rollbacks"]] == [(2, reason)]
    assert weights(told) == {1: 100.0}
    assert metric(fresh, "headrace_rollbacks_total", mood, reason=reason) == 1
    assert any(f"model {mood} version 2 is rolled back from 20 %" in line for line in fresh.lines)
    assert control(fresh, "unload", mood)[0] == 200


@pytest.mark.parametrize("mood", ["failing", "hanging", "crashing"])
async def test_a_shadow_is_never_seen(server: RunningServer, repository: Path, mood: str) -> None:
    name = f"over_{mood}"
    add_versions(repository, name, "good", mood)
    assert await asyncio.to_thread(control, server, "load", name) == (200, "")
    await asyncio.to_thread(traffic, server, name, {"default": 1})
    async with SteadyLoad(server, name, ROW) as load:
        shadow = {"version": 2, "percent": 50, "max_in_flight": 4, "timeout_secs": 0.5}
        await asyncio.to_thread(traffic, server, name, {"shadow": shadow})
        await load.more(200)
        told = await asyncio.to_thread(traffic, server, name)
    assert load.failures() == []
    assert {outcome.version for outcome in load.outcomes} == {"1"}
    for outcome in load.outcomes:
        np.testing.assert_array_equal(outcome.array, ROW + 1)
    counts = told["shadows"]["2"]
    assert counts["ok"] == 0
    assert counts["timeout" if mood == "hanging" else "error"] > 0, counts
    assert told["shadow_in_flight"] <= 4
    if mood == "hanging":
        assert counts["full"] > 0
    assert metric(server, "headrace_shadow_requests_total", name, version="2") >= sum(counts.values())
    assert control(server, "unload", name)[0] == 200


async def test_blue_becomes_green_in_one_call_and_nothing_is_lost(server: RunningServer, repository: Path) -> None:
    folder = add_versions(repository, "green", "good")
    assert await asyncio.to_thread(control, server, "load", "green") == (200, "")
    async with SteadyLoad(server, "green", ROW, clients=4) as load:
        add_version(folder, 2)
        switch = {"version": 2, "load": True, "unload_old": True}
        told = await asyncio.to_thread(traffic, server, "green", {"switch": switch})
        after = await load.more()
    assert told["default"] == 2
    assert load.failures() == []
    assert {outcome.version for outcome in after} == {"2"}
    for outcome in load.outcomes:
        np.testing.assert_array_equal(outcome.array, ROW + int(outcome.version))
    assert versions(server, "green") == {"2"}


def test_a_switch_to_a_version_that_does_not_load_changes_nothing(server: RunningServer, repository: Path) -> None:
    folder = add_versions(repository, "red", "good")
    (folder / "2").mkdir()
    (folder / "2" / "model.py").write_text("no python")
    assert control(server, "load", "red")[0] == 400
    assert control(server, "load", "red", version=1)[0] == 200
    status, told = try_traffic(server, "red", {"switch": {"version": 2, "load": True, "unload_old": True}})
    assert status == 400
    assert "version 2" in told["error"]
    assert traffic(server, "red")["default"] == 1


OVERLAY = """\
models:
  "*":
    max_batch_size: 2
  m:
    instance_group: [{count: 2, kind: KIND_CPU}]
    parameters: {colour: blue}
    traffic: {default: 1, weights: {2: 50}}
"""


def test_an_overlay_changes_a_deployment_and_no_repository(tmp_path: Path) -> None:
    models = tmp_path / "models"
    folder = add_versions(models, "m", "good", "good")
    before = (folder / "config.pbtxt").read_text()
    (tmp_path / "overlay.yaml").write_text(OVERLAY)
    with running(models, f"--model-overlay={tmp_path / 'overlay.yaml'}") as server:
        told = post(server, "/v2/models/m/config", None)[1]
        assert told["max_batch_size"] == 2
        assert told["instance_group"][0]["count"] == 2
        assert told["parameters"]["colour"] == {"string_value": "blue"}
        assert "traffic" not in told["parameters"]
        assert weights(traffic(server)) == {1: 50.0, 2: 50.0}
        assert traffic(server)["set_by"] == "configuration"
        found = Counter(version_of(server, "http", "") for _ in range(40))
        assert abs(found["1"] - 20) <= 2
        assert {"1", "2"} == set(found)
    assert (folder / "config.pbtxt").read_text() == before


def rollout(server: RunningServer, *words: str) -> tuple[int, str]:
    argv = [sys.executable, "-m", "headrace", "rollout", f"http://{server.http}", "m", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_the_command_does_what_the_calls_do(fresh: RunningServer) -> None:
    traffic(fresh, changes={"default": 2})
    status, text = rollout(fresh, "canary", "3", "--weight", "10", "--max-error-rate", "0.1")
    assert status == 0, text
    assert "version 3: 10 % of the requests, ready" in text
    assert "guard: max_error_rate 0.1" in text
    assert rollout(fresh, "rollback")[0] == 0
    status, text = rollout(fresh, "--json", "status")
    assert weights(json.loads(text)) == {2: 100.0}
    assert "3" in json.dumps(json.loads(text)["rollbacks"])
    assert rollout(fresh, "promote", "9") == (
        1,
        "the server says: model 'm' has no version 9; it has 1, 2, 3 (HTTP 404)\n",
    )


def test_a_stream_s_requests_are_shared_too(fresh: RunningServer) -> None:
    traffic(fresh, changes={"default": 1, "weights": {"2": 50}})
    found: list[str] = []
    with tritonclient.grpc.InferenceServerClient(fresh.grpc) as client:

        def take(result: tritonclient.grpc.InferResult, error: InferenceServerException | None) -> None:
            assert error is None
            found.append(result.get_response().model_version)

        client.start_stream(take)
        tensor = tritonclient.grpc.InferInput("INPUT0", ROW.shape, "FP32").set_data_from_numpy(ROW)
        for _ in range(20):
            client.async_stream_infer("m", [tensor])
        client.stop_stream()
    assert 8 <= found.count("2") <= 12


def test_a_sequence_stays_with_its_version_while_weights_change(server: RunningServer, repository: Path) -> None:
    folder = Path(shutil.copytree(PYTHON_MODELS / "seq_acc", repository / "sums"))
    shutil.copytree(folder / "1", folder / "2")
    written = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(
        written.replace("max_candidate_sequences: 2", "max_candidate_sequences: 16").replace("1000000", "60000000")
        + "version_policy { all {} }"
    )
    assert control(server, "load", "sums") == (200, "")
    traffic(server, "sums", {"default": 1, "weights": {"2": 50}})

    def add(sequence: int, number: int, **flags: bool) -> tuple[str, int]:
        tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [number]}
        body = {"inputs": [tensor], "parameters": {"sequence_id": sequence, **flags}}
        status, told = post(server, "/v2/models/sums/infer", body)
        assert status == 200, told
        return told["model_version"], told["outputs"][0]["data"][0]

    begun = {sequence: add(sequence, sequence, sequence_start=True)[0] for sequence in range(1, 13)}
    assert set(begun.values()) == {"1", "2"}
    traffic(server, "sums", {"rollback": True})
    for sequence, version in begun.items():
        assert add(sequence, 100) == (version, sequence + 100)
        assert add(sequence, 1, sequence_end=True) == (version, sequence + 101)
    assert {add(sequence, 1, sequence_start=True, sequence_end=True)[0] for sequence in range(50, 60)} == {"1"}
