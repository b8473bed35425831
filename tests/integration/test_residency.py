"""More models than memory: each is loaded when it is asked for, and what is in memory stays within the budget."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import yaml

from clients import infer
from doors import DOORS, GrpcDoor, HttpDoor, open_door
from ensembles import add_ensemble, ident
from harness import RunningServer, running
from headrace.access.table import key_hash
from headrace.observability.processes import process_usage
from repositories import add_decoupled, add_identity
from streaming import GrpcStream, HttpStream

BUDGET = 40 << 20
"""Five identity models and a bit."""
PYTHON_MODELS = Path(__file__).resolve().parents[1] / "python_models"
MANY = [f"m{number:02}" for number in range(20)]
PINNED = "m00"
KEY = "key-of-narrow-0123456789"
ONE = b'{"inputs":[{"name":"INPUT0","shape":[1,1],"datatype":"FP32","data":[1]}]}'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("many")
    for name in MANY:
        add_identity(repository, name, memory_bytes="6000000")
    for name in ("slow", "slower", "slowest"):
        add_identity(repository, name, creation_delay_sec="1.5", memory_bytes="6000000")
    add_identity(repository, "broken", fail_load="its weights are torn", memory_bytes="6000000")
    add_identity(repository, "broken_too", fail_load="its weights are torn", memory_bytes="6000000")
    add_identity(repository, "unasked", memory_bytes="6000000")
    add_identity(repository, "huge", memory_bytes="100000000")
    add_identity(repository, "odd", memory_bytes="much")
    add_decoupled(repository, "talk", memory_bytes="6000000")
    add_ensemble(
        repository,
        "chain",
        [ident("m01", "INPUT0", "middle"), ident("m02", "middle", "OUTPUT0")],
        extra="max_batch_size: 8",
    )
    flags = (
        f"--model-memory-budget={BUDGET}",
        f"--pin-model={PINNED}",
        "--model-control-mode=explicit",
        "--model-min-residence-secs=0.1",
    )
    with running(repository, *flags) as server:
        yield server


class Watch:
    """Looks again and again, while it is entered, at what the models' processes take."""

    def __init__(self, server) -> None:
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.most_bytes = self.most_processes = self.looks = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            usages = [usage for process in self._server.backends() if (usage := process_usage(process.pid)) is not None]
            self.most_bytes = max(self.most_bytes, sum(usage.pss_bytes or 0 for usage in usages))
            self.most_processes = max(self.most_processes, len(usages))
            self.looks += 1


def fetch(server, path, body=None):
    request = urllib.request.Request(f"http://{server.http}{path}", body)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")


def status_of(server, path, body=None):
    try:
        fetch(server, path, body)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"{}").get("error", "")
    return 200, ""


def state_of(server, name):
    entries = [entry for entry in fetch(server, "/v2/repository/index", b"{}") if entry["name"] == name]
    return [(entry["state"], entry.get("reason", "")) for entry in entries]


def gauge(server, name):
    return next(float(line.split()[1]) for line in server.metrics().splitlines() if line.startswith(f"{name} "))


def until_waiting(server, count, timeout=20):
    """Return once so many requests wait for their models."""
    end = time.monotonic() + timeout
    while (now := gauge(server, "headrace_model_waiting_requests")) != count:
        assert time.monotonic() < end, f"{now} requests wait, not {count}"
        time.sleep(0.02)


async def ask(door, model, value=1.0, **more):
    outcome = await door.infer(model, np.full((1, 2), value, np.float32), **more)
    if outcome.ok:
        assert outcome.array.tolist() == [[value, value]]
    return outcome


def pids_of(server, model):
    return {line for line in server.lines if f"loaded model {model} version" in line}


async def test_twenty_models_with_room_for_five_answer_each_and_stay_within_the_budget(server):
    pinned = pids_of(server, PINNED)
    assert len(pinned) == 1
    with Watch(server) as watch:
        async with HttpDoor(server.http) as http, GrpcDoor(server.grpc) as over_grpc:
            for number, name in enumerate([*MANY, *MANY]):
                assert (await ask((http, over_grpc)[number % 2], name, float(number))).ok
    assert watch.looks > 5
    assert watch.most_bytes <= BUDGET
    assert watch.most_processes < 10
    assert gauge(server, "headrace_model_evictions_total") >= 15
    assert gauge(server, "headrace_model_memory_budget_bytes") == BUDGET
    assert pids_of(server, PINNED) == pinned, "the pinned model was loaded again"


async def test_a_storm_over_all_models_loses_no_request(server):
    pinned = pids_of(server, PINNED)
    chooser = random.Random(7)

    async def client(door, count):
        return [await ask(door, chooser.choice([*MANY, "chain"]), float(number)) for number in range(count)]

    with Watch(server) as watch:
        async with HttpDoor(server.http) as http, GrpcDoor(server.grpc) as over_grpc:
            told = await asyncio.gather(*(client((http, over_grpc)[number % 2], 12) for number in range(12)))
    outcomes = [outcome for one in told for outcome in one]
    assert len(outcomes) == 144
    assert not [outcome for outcome in outcomes if not outcome.ok]
    assert watch.most_bytes <= BUDGET
    assert pids_of(server, PINNED) == pinned
    assert gauge(server, "headrace_model_waiting_requests") == 0


async def test_models_that_are_never_idle_take_turns_with_those_that_wait(server):
    over = asyncio.Event()
    seen = []

    async def busy(door, name):
        while not over.is_set():
            seen.append(await ask(door, name, parameters={"delay_ms": 50}))

    async with HttpDoor(server.http) as door:
        names = MANY[1:8]
        clients = [asyncio.create_task(busy(door, name)) for name in names for _ in range(2)]
        outcome = await ask(door, "m19", timeout=30)
        over.set()
        await asyncio.gather(*clients)
    assert outcome.ok
    assert not [one for one in seen if not one.ok]


@pytest.mark.parametrize("kind", DOORS)
async def test_an_ensemble_comes_with_its_members(server, kind):
    async with open_door(server, kind) as door:
        for name in MANY[8:16]:
            assert (await ask(door, name)).ok
        assert (await ask(door, "chain", 3.0)).ok
    assert state_of(server, "m01") == state_of(server, "m02") == [("READY", "")]


async def test_all_who_wait_for_a_model_that_fails_to_load_get_the_reason(server):
    async with HttpDoor(server.http) as door:
        outcomes = await asyncio.gather(*(ask(door, "broken") for _ in range(5)))
        later = await ask(door, "broken")
    for outcome in (*outcomes, later):
        assert outcome.code == "UNAVAILABLE"
        assert "its weights are torn" in outcome.text
    assert status_of(server, "/v2/models/broken/ready")[0] == 503
    assert status_of(server, "/v2/health/ready")[0] == 200


@pytest.mark.parametrize("kind", DOORS)
async def test_what_can_never_fit_and_what_is_set_wrong_is_refused_at_once(server, kind):
    async with open_door(server, kind) as door:
        huge, odd = await ask(door, "huge"), await ask(door, "odd")
    assert huge.code == odd.code == "UNAVAILABLE"
    assert f"about 100000000 bytes, and the memory for models is {BUDGET} bytes" in huge.text
    assert "parameters.memory_bytes: expected a number of bytes, got 'much'" in odd.text
    assert huge.seconds < 5


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(server):
    async with HttpDoor(server.http) as http, GrpcDoor(server.grpc) as over_grpc:
        asked = [asyncio.create_task(ask(door, "slow")) for door in (http, over_grpc)]
        await asyncio.to_thread(until_waiting, server, 2)
        for task in asked:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*asked)
        await asyncio.to_thread(until_waiting, server, 0)
        assert (await ask(http, "slow")).ok, "the load that it began goes on, for others"


async def test_a_request_waits_no_longer_than_its_own_deadline(server):
    async with HttpDoor(server.http) as http, GrpcDoor(server.grpc) as over_grpc:
        outcome = await ask(http, "slower", parameters={"timeout": 200_000})
        with pytest.raises(TimeoutError):
            await ask(over_grpc, "slowest", timeout=0.2)
        assert (await ask(http, "slower")).ok
    assert outcome.code == "UNAVAILABLE"
    assert "takes longer than the request may wait" in outcome.text
    assert outcome.seconds < 1.4


async def responses_of(stream):
    found = []
    while len(found) < 3:
        found.append(await stream.next())
    await stream.cancel()
    return np.concatenate(found).tolist()


@pytest.mark.parametrize("kind", DOORS)
async def test_a_stream_waits_for_its_model_too(server, kind):
    async with HttpDoor(server.http) as door:
        for name in MANY[3:13]:
            assert (await ask(door, name)).ok
    assert state_of(server, "talk") == [("UNAVAILABLE", "loaded on demand")]
    given = np.ones((1, 1), np.float32)
    if kind == "http":
        stream = await HttpStream.open(server, "talk", given, {"responses": 3})
        assert await responses_of(stream) == [1, 1, 1]
        return
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        stream = await GrpcStream.open(channel, "talk", given, {"responses": 3})
        assert await responses_of(stream) == [1, 1, 1]


async def test_generate_waits_for_a_model_of_which_nothing_is_known(server):
    told = await asyncio.to_thread(fetch, server, "/v2/models/unasked/generate", b'{"INPUT0": [4.0]}')
    assert told["OUTPUT0"] == 4.0
    code, text = await asyncio.to_thread(status_of, server, "/v2/models/broken_too/generate", b'{"INPUT0": [4.0]}')
    assert code == 503
    assert "its weights are torn" in text


async def test_what_a_call_unloads_stays_away_until_a_call_loads_it(server):
    async with HttpDoor(server.http) as door:
        assert (await ask(door, "m17")).ok
        assert (await door.control("unload", "m17")).ok
        refused = await ask(door, "m17")
        assert refused.code == "UNAVAILABLE"
        assert "unloaded" in refused.text
        assert status_of(server, "/v2/models/m17/ready")[0] == 503
        assert (await door.control("load", "m17")).ok
        assert (await ask(door, "m17")).ok


async def test_what_a_call_loads_with_a_configuration_of_its_own_stays(server):
    config = {"backend": "identity", "max_batch_size": 2, "parameters": {"memory_bytes": {"string_value": "6000000"}}}
    config["input"] = [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}]
    config["output"] = [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}]
    body = json.dumps({"parameters": {"config": json.dumps(config)}}).encode()
    assert status_of(server, "/v2/repository/models/m16/load", body)[0] == 200
    async with HttpDoor(server.http) as door:
        for name in MANY[1:15]:
            assert (await ask(door, name)).ok
        assert state_of(server, "m16") == [("READY", "")]
        assert fetch(server, "/v2/models/m16/config")["max_batch_size"] == 2
        assert status_of(server, "/v2/repository/models/m16/load", b"{}")[0] == 200
        assert fetch(server, "/v2/models/m16/config")["max_batch_size"] == 8
        for name in MANY[1:15]:
            assert (await ask(door, name)).ok
        assert state_of(server, "m16") == [("UNAVAILABLE", "loaded on demand")]


def test_a_load_call_that_fails_leaves_nothing_and_bars_nobody(server):
    code, text = status_of(server, "/v2/repository/models/nowhere/load", b"{}")
    assert (code, "no folder" in text) == (404, True)
    bad = json.dumps({"parameters": {"config": "{"}}).encode()
    assert status_of(server, "/v2/repository/models/m15/load", bad)[0] == 400
    assert status_of(server, "/v2/models/m15/infer", ONE)[0] == 200
    assert status_of(server, "/v2/models/nowhere/infer", ONE)[0] == 404
    assert status_of(server, "/v2/repository/models/huge/load", b"{}")[0] == 503


async def test_what_is_away_says_that_it_comes_on_demand(server):
    async with HttpDoor(server.http) as door:
        assert (await ask(door, "m03")).ok
        for name in MANY[4:16]:
            assert (await ask(door, name)).ok
        assert state_of(server, "m03") == [("UNAVAILABLE", "loaded on demand")]
        assert status_of(server, "/v2/models/m03/ready")[0] == 200
        assert status_of(server, "/v2/models/m03/versions/9/ready")[0] == 404
        assert (await ask(door, "m03", version="9")).code == "NOT_FOUND"
        assert fetch(server, "/v2/models/m03")["inputs"][0]["name"] == "INPUT0"
        assert (await ask(door, "nobody")).code == "NOT_FOUND"


@pytest.fixture
def polled(tmp_path):
    repository = tmp_path / "models"
    for name in ("first", "second", "third"):
        add_identity(repository, name, echo_parameters="true", memory_bytes="6000000")
    add_identity(repository, "kept", pinned="true", memory_bytes="6000000")
    flags = (
        f"--model-memory-budget={BUDGET}",
        "--model-control-mode=poll",
        "--repository-poll-secs=1",
        "--model-min-residence-secs=0",
    )
    with running(repository, *flags) as server:
        yield server, repository


async def test_changes_on_disk_reach_models_in_memory_and_those_that_are_away(polled):
    server, repository = polled
    assert state_of(server, "kept") == [("READY", "")]
    assert state_of(server, "first") == [("UNAVAILABLE", "loaded on demand")]
    async with HttpDoor(server.http) as door:
        assert (await ask(door, "first")).ok
        for name in ("first", "second", "kept"):
            (repository / name / "2").mkdir()
        add_identity(repository, "new", memory_bytes="6000000")
        shutil.rmtree(repository / "third")
        await asyncio.to_thread(server.wait_for_log, "'first' version 2: serves")
        await asyncio.to_thread(server.wait_for_log, "'kept' version 2: serves")
        assert state_of(server, "second") == [("UNAVAILABLE", "loaded on demand")]
        for name, version in (("first", "2"), ("second", "2"), ("kept", "2"), ("new", "1")):
            outcome = await ask(door, name)
            assert (outcome.code, outcome.version) == ("OK", version)
        assert (await ask(door, "third")).code == "NOT_FOUND"


def test_a_pinned_model_that_cannot_be_had_ends_the_start(tmp_path):
    add_identity(tmp_path, "kept", pinned="true", memory_bytes="50000000")
    server = RunningServer(tmp_path, f"--model-memory-budget={BUDGET}")
    assert server.process.wait(30) == 1
    server.stop()
    assert "kept: model 'kept' takes about 50000000 bytes" in server.log()


def test_who_may_not_ask_a_model_does_not_have_it_loaded(tmp_path):
    add_identity(tmp_path / "models", "secret")
    callers = [{"name": "narrow", "roles": ["infer", "observe"], "models": ["other"], "keys": [key_hash(KEY)]}]
    (tmp_path / "access.yaml").write_text(yaml.safe_dump({"callers": callers}))
    access = f"--access-file={tmp_path / 'access.yaml'}"
    with running(tmp_path / "models", f"--model-memory-budget={BUDGET}", access) as server:
        for path, body in (
            ("/v2/models/secret/infer", ONE),
            ("/v2/models/secret/generate", b'{"INPUT0": [1.0]}'),
            ("/v2/models/secret/generate_stream", b'{"INPUT0": [1.0]}'),
            ("/v1/embeddings", b'{"model": "secret", "input": "x"}'),
            ("/v1/chat/completions", b'{"model": "secret", "messages": [{"role": "user", "content": "x"}]}'),
        ):
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            request = urllib.request.Request(f"http://{server.http}{path}", body, headers)
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=20)
            caught.value.close()
            assert caught.value.code in (403, 404), path
        assert "loaded model" not in server.log()


def test_a_call_of_a_model_waits_for_the_model_that_it_asks():
    with running(PYTHON_MODELS, "--model-memory-budget=150M", "--model-control-mode=explicit") as server:
        given = ("MODEL", "BYTES", [1], ["stream"]), ("INPUT0", "INT32", [1], [3])
        status, body = infer(server, "bls_sync", *given)
        assert status == 200, body
        assert body["outputs"][0]["data"] == [0, 1, 2]
        assert state_of(server, "bls_sync") == state_of(server, "stream") == [("READY", "")]


def test_a_stop_answers_those_who_wait(tmp_path):
    add_identity(tmp_path, "slow", creation_delay_sec="5")
    with running(tmp_path, f"--model-memory-budget={BUDGET}") as server:
        told = []
        thread = threading.Thread(target=lambda: told.append(status_of(server, "/v2/models/slow/infer", ONE)))
        thread.start()
        until_waiting(server, 1)
        server.process.send_signal(signal.SIGTERM)
        thread.join(20)
        assert server.process.wait(20) == 0
    assert told == [(503, "the server is shutting down")]
