"""Ensembles as their members come, go, change and die; and what else a server does with a model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import onnx_models
from clients import ask, call, infer
from doors import DOORS, SteadyLoad, open_door
from ensembles import Step, add_ensemble, ident
from figures import backend_pid, figures, index, metric, wait_until
from harness import RunningServer, named_shared_memory, running
from regions import CLIENTS, Client, objects
from repositories import add_identity, add_onnx, add_sample, identity_config
from sequence_models import accumulator, accumulator_config, add

ROW = np.ones((1, 3), np.float32)
EXPLICIT = "--model-control-mode=explicit"
TWO = [ident("first", "INPUT0", "x"), ident("second", "x", "OUTPUT0")]
BATCHED = {"extra": "max_batch_size: 8"}


def write_two(repository: Path, **second: str) -> None:
    add_identity(repository, "first")
    add_identity(repository, "second", **second)
    add_ensemble(repository, "ens", TWO, **BATCHED)


def load(server: RunningServer, model: str) -> tuple[int, object]:
    return call(server, f"/v2/repository/models/{model}/load", {})


def unload(server: RunningServer, model: str, *, dependents: bool = False) -> None:
    status, _ = call(server, f"/v2/repository/models/{model}/unload", {"parameters": {"unload_dependents": dependents}})
    assert status == 200


def ready(server: RunningServer, model: str) -> bool:
    return server.status(f"/v2/models/{model}/ready") == 200


def copied(server: RunningServer, model: str, direction: str) -> int:
    return metric(server, "headrace_tensor_bytes_copied_total", model, direction=direction)


# --- Members ------------------------------------------------------------------------------------------------------


def test_an_ensemble_brings_its_members_and_takes_those_along_that_nobody_asked_for(tmp_path: Path) -> None:
    write_two(tmp_path)
    with running(tmp_path, EXPLICIT, "--load-model=second") as server:
        assert load(server, "ens") == (200, None)
        assert all(ready(server, name) for name in ("first", "second", "ens"))
        unload(server, "ens", dependents=True)
        wait_until("what was loaded for it alone is gone", lambda: not ready(server, "first"))
        assert ready(server, "second")
        status, answer = infer(server, "ens", ("INPUT0", "FP32", [1, 1], [1]))
        assert status == 503, answer


async def test_members_and_ensemble_are_reloaded_under_load_and_no_request_fails(tmp_path: Path) -> None:
    write_two(tmp_path, creation_delay_sec="0.2")
    with running(tmp_path, EXPLICIT, "--load-model=ens") as server:
        async with SteadyLoad(server, "ens", ROW) as clients:
            for number in range(3):
                for name in ("first", "second"):
                    path = tmp_path / name / "config.pbtxt"
                    path.write_text(identity_config(name, changed=str(number), creation_delay_sec="0.2"))
                    assert (await asyncio.to_thread(load, server, name))[0] == 200
                (tmp_path / "ens" / "1" / "note").write_text(str(number))
                assert (await asyncio.to_thread(load, server, "ens"))[0] == 200
                await clients.more()
        assert not clients.failures(), clients.failures()[0]


async def test_an_ensemble_that_a_member_no_longer_fits_says_why_and_returns_with_it(tmp_path: Path) -> None:
    write_two(tmp_path)
    with running(tmp_path, EXPLICIT, "--load-model=ens") as server:
        path = tmp_path / "second" / "config.pbtxt"
        path.write_text(identity_config("second", datatype="INT32"))
        assert load(server, "second") == (200, None)
        why = "inconsistent datatype of tensor 'x'"
        assert not ready(server, "ens")
        assert server.status("/v2/health/ready") != 200
        state, reason = index(server, "ens")["1"]
        assert state == "UNAVAILABLE"
        assert why in reason
        for kind in DOORS:
            async with open_door(server, kind) as door:
                outcome = await door.infer("ens", ROW)
                assert outcome.code == "UNAVAILABLE"
                assert why in outcome.text
        path.write_text(identity_config("second"))
        assert load(server, "second") == (200, None)
        assert ready(server, "ens")
        assert index(server, "ens") == {"1": ("READY", "")}
        assert infer(server, "ens", ("INPUT0", "FP32", [1, 1], [1]))[0] == 200


def test_an_ensemble_without_a_member_names_it_and_returns_with_it(tmp_path: Path) -> None:
    write_two(tmp_path)
    with running(tmp_path, EXPLICIT, "--load-model=ens") as server:
        unload(server, "second")
        status, answer = infer(server, "ens", ("INPUT0", "FP32", [1, 1], [1]))
        assert status == 503
        assert "'second'" in answer["error"]
        assert not ready(server, "ens")
        load(server, "second")
        assert ready(server, "ens")
        assert infer(server, "ens", ("INPUT0", "FP32", [1, 1], [1]))[0] == 200


def test_a_member_that_becomes_decoupled_makes_the_ensemble_so(tmp_path: Path) -> None:
    write_two(tmp_path)
    with running(tmp_path, EXPLICIT, "--load-model=ens") as server:
        path = tmp_path / "second" / "config.pbtxt"
        path.write_text(identity_config("second", extra="model_transaction_policy { decoupled: true }"))
        load(server, "second")
        assert infer(server, "ens", ("INPUT0", "FP32", [1, 1], [1]))[0] == 501
        _, config = call(server, "/v2/models/ens/config")
        assert config["model_transaction_policy"]["decoupled"]
        path.write_text(identity_config("second"))
        load(server, "second")
        assert infer(server, "ens", ("INPUT0", "FP32", [1, 1], [1]))[0] == 200


def test_an_ensemble_waits_for_a_member_that_is_started_again_and_is_not_ready_meanwhile(tmp_path: Path) -> None:
    write_two(tmp_path, creation_delay_sec="1")
    with running(tmp_path) as server:
        os.kill(backend_pid(server, "second"), signal.SIGKILL)
        wait_until("its end is noticed", lambda: not ready(server, "ens"))
        assert server.status("/v2/health/ready") != 200
        status, answer = infer(server, "ens", ("INPUT0", "FP32", [1, 1], [5]))
        assert (status, answer["outputs"][0]["data"]) == (200, [5])
        assert ready(server, "ens")


async def test_what_a_member_wrote_is_there_for_the_next_though_it_has_died_meanwhile(tmp_path: Path) -> None:
    write_two(tmp_path, execute_delay_ms="700")
    array = np.random.default_rng(5).random((4, 50_000), np.float32)
    with running(tmp_path) as server:
        first = backend_pid(server, "first")
        async with open_door(server, "grpc") as door:
            call = asyncio.ensure_future(door.infer("ens", array))
            await asyncio.to_thread(wait_until, "it has answered", lambda: figures(server, "first").requests == 1)
            os.kill(first, signal.SIGKILL)
            outcome = await call
        np.testing.assert_array_equal(outcome.array, array)
        assert copied(server, "second", "in") == 0, "it read what the dead process wrote"
        wait_until("it is started again", lambda: ready(server, "ens"))
        assert infer(server, "ens", ("INPUT0", "FP32", [1, 1], [5]))[0] == 200


async def test_a_sequence_goes_on_through_an_ensemble_while_its_member_is_reloaded(tmp_path: Path) -> None:
    add_onnx(tmp_path, "sums", accumulator, config=accumulator_config(idle_us=60_000_000))
    add_identity(tmp_path, "ints", datatype="INT32", dims="1")
    steps = [ident("ints", "INPUT0", "x"), ident("sums", "x", "OUTPUT0")]
    add_ensemble(tmp_path, "ens", steps, {"INPUT0": "INT32 1"}, {"OUTPUT0": "INT32 1"}, extra="max_batch_size: 1")
    with running(tmp_path, EXPLICIT, "--load-model=ens") as server:
        sums = [add(server, "ens", 1, 1, start=True)[1], add(server, "ens", 2, 10, start=True)[1]]
        (tmp_path / "sums" / "1" / "note").write_text("changed")
        assert load(server, "sums") == (200, None)
        sums += [add(server, "ens", 1, 1)[1], add(server, "ens", 2, 10)[1], add(server, "ens", 1, 1, end=True)[1]]
        assert sums == [1, 10, 2, 20, 3]
        status, answer = add(server, "ens", 1, 1)
        assert status == 400
        assert "step model 'sums'" in answer
        assert add(server, "ens", 2, 10, end=True)[1] == 30


def test_a_step_may_ask_for_a_version_of_its_member(tmp_path: Path) -> None:
    for version, number in ((1, 10), (2, 20)):
        add_onnx(tmp_path, "add", lambda path, number=number: onnx_models.adder(path, number), version)
    (tmp_path / "add" / "config.pbtxt").write_text('backend: "onnxruntime" version_policy { all { } }')
    steps = [ident("add", "INPUT0", "x", version=1), ident("add", "x", "OUTPUT0")]
    add_ensemble(tmp_path, "ens", steps, {"INPUT0": "FP32 3"}, {"OUTPUT0": "FP32 3"}, extra="max_batch_size: 2")
    with running(tmp_path) as server:
        status, answer = infer(server, "ens", ("INPUT0", "FP32", [1, 3], [0, 0, 0]))
        assert (status, answer["outputs"][0]["data"]) == (200, [30, 30, 30])


def test_what_does_not_fit_is_told_whole_when_the_server_starts_and_by_check(tmp_path: Path) -> None:
    write_two(tmp_path)
    steps = [Step("first", {"INPUT0": "INPUT0"}, {"WRONG": "x"}), ident("second", "x", "OUTPUT0")]
    add_ensemble(tmp_path, "bad", steps, {"INPUT0": "INT32 -1"}, extra="max_batch_size: 16")
    add_ensemble(tmp_path, "lost", [ident("nowhere", "INPUT0", "OUTPUT0")])
    add_ensemble(tmp_path, "self", [ident("self", "INPUT0", "OUTPUT0")])
    facts = (
        "ensemble_scheduling.step[0].output_map.WRONG: model 'first' has no output 'WRONG'; its outputs are OUTPUT0",
        "inconsistent datatype of tensor 'INPUT0': the ensemble says INT32, model 'first' says FP32",
        "max_batch_size: the ensemble allows batches of 16, and model 'first' only of 8 (step 0)",
    )
    with running(tmp_path, "--exit-on-error=false", ready=False) as server:
        server.wait_for_log("| bad ")
        _, reason = index(server, "bad")["1"]
        assert all(fact in reason for fact in facts), reason
        assert "'nowhere'" in index(server, "lost")["1"][1]
        assert ready(server, "ens")
    words = [sys.executable, "-m", "headrace", "check", str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert all(fact in ended.stdout for fact in facts), ended.stdout
    assert "OK   ens\n     version 1 fits its members" in ended.stdout
    assert "its member 'nowhere' is not there, or cannot serve" in ended.stdout
    assert "2 of" not in ended.stdout.splitlines()[-1]
    assert ended.stdout.splitlines()[-1] == "3 of 6 models can serve"


# --- The end ------------------------------------------------------------------------------------------------------


async def test_a_request_under_way_goes_through_all_its_steps_while_the_server_stops(tmp_path: Path) -> None:
    write_two(tmp_path, execute_delay_ms="300")
    (tmp_path / "first" / "config.pbtxt").write_text(identity_config("first", execute_delay_ms="500"))
    with running(tmp_path) as server:
        async with open_door(server, "grpc") as door:
            call = asyncio.ensure_future(door.infer("ens", ROW))
            await asyncio.to_thread(wait_until, "it runs", lambda: copied(server, "first", "in") > 0)
            server.process.send_signal(signal.SIGTERM)
            outcome = await call
            assert outcome.ok, outcome
        assert await asyncio.to_thread(server.process.wait, 30) == 0


# --- What else there is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", sorted(CLIENTS))
def test_tensors_in_the_client_s_memory_are_read_and_written_there_by_the_members(tmp_path: Path, door: str) -> None:
    write_two(tmp_path)
    array = np.random.default_rng(3).random((4, 1000), np.float32)
    with (
        running(tmp_path, "--allow-client-shm=true") as server,
        objects(array.nbytes, array.nbytes) as (source, target),
    ):
        client = Client(server, door)
        source.write(array)
        client.register(source)
        client.register(target)
        tensor = client.input(source, array.shape, np.float32, array.nbytes)
        result = client.infer("ens", tensor, client.output(target, array.nbytes))
        assert client.shape(result) == [4, 1000]
        np.testing.assert_array_equal(target.read(np.float32, array.shape), array)
        for model in ("first", "second", "ens"):
            for direction in ("in", "out"):
                assert copied(server, model, direction) == 0
        small = client.infer("ens", client.wire_input(array[:1]), client.output(target, array[:1].nbytes))
        assert client.shape(small) == [1, 1000]
        with pytest.raises(Exception, match="'OUTPUT0' has 4000 bytes"):
            client.infer("ens", client.wire_input(array[:1]), client.output(target, 3999))
        client.unregister("")
        client.calls.close()
        wait_until("all have let go of it", lambda: not any(map(named_shared_memory, server.backends())))


@pytest.mark.parametrize("way", ["http json", "http binary", "grpc"])
def test_the_sample_doubles_its_inputs(tmp_path: Path, way: str) -> None:
    add_sample(tmp_path, "simple")
    add_sample(tmp_path, "double")
    a, b = np.arange(32, dtype=np.int32).reshape(2, 16), np.full((2, 16), -7, np.int32)
    with running(tmp_path) as server:
        outputs = ask(server, way, "double", {"INPUT0": a, "INPUT1": b})
    np.testing.assert_array_equal(outputs["OUTPUT0"], 2 * a)
    np.testing.assert_array_equal(outputs["OUTPUT1"], 2 * b)


def test_steps_are_traced_as_children_of_the_ensemble(tmp_path: Path) -> None:
    repository, file = tmp_path / "models", tmp_path / "trace.json"
    write_two(repository)
    flags = (f"--trace-config=triton,file={file}", "--trace-config=rate=2", "--trace-config=level=TIMESTAMPS")
    with running(repository, *flags) as server:
        for _ in range(2):
            infer(server, "ens", ("INPUT0", "FP32", [1, 1], [1]), id="mine")
    heads = [entry for entry in json.loads(file.read_text()) if "model_name" in entry]
    (ensemble,) = [head for head in heads if head["model_name"] == "ens"]
    assert "parent_id" not in ensemble
    children = [head for head in heads if head["model_name"] != "ens"]
    assert [child["model_name"] for child in children] == ["first", "second"]
    assert {child["parent_id"] for child in children} == {ensemble["id"]}
    assert {child["request_id"] for child in children} == {"mine"}
    assert len({head["id"] for head in heads}) == 3


def test_the_labels_of_a_member_are_those_of_the_ensemble(tmp_path: Path) -> None:
    add_sample(tmp_path, "digits")
    step = Step("digits", {"image": "image"}, {"scores": "scores"})
    add_ensemble(tmp_path, "ens", [step], {"image": "FP32 64"}, {"scores": "FP32 10"}, extra="max_batch_size: 4")
    request = json.loads((Path(__file__).parent.parent.parent / "docs/first-request.json").read_text())
    with running(tmp_path) as server:
        _, direct = call(server, "/v2/models/digits/infer", request)
        status, answer = call(server, "/v2/models/ens/infer", request)
    assert status == 200, answer
    assert answer["outputs"] == direct["outputs"]
    assert answer["outputs"][0]["data"][0].endswith(":seven")


@pytest.mark.parametrize("way", ["http binary", "grpc"])
def test_an_input_may_be_left_out_and_what_depends_on_it_is(tmp_path: Path, way: str) -> None:
    add_sample(tmp_path, "repeat")
    add_identity(tmp_path, "first", max_batch_size=0)
    add_identity(tmp_path, "second", max_batch_size=0)
    steps = [ident("first", "IN", "a"), ident("second", "MAYBE", "b")]
    add_ensemble(tmp_path, "ens", steps, {"IN": "FP32 -1", "MAYBE": "FP32 -1 ?"}, {"a": "FP32 -1", "b": "FP32 -1"})
    with running(tmp_path) as server:
        one = np.array([1, 2], np.float32)
        assert set(ask(server, way, "ens", {"IN": one, "MAYBE": one})) == {"a", "b"}
        assert set(ask(server, way, "ens", {"IN": one})) == {"a"}
        assert figures(server, "second").requests == 1
        status, answer = infer(server, "ens", ("IN", "FP32", [1], [1]), outputs=[{"name": "b"}])
        assert status == 400
        assert answer["error"].endswith("cannot give its output 'b' without some of the inputs ['MAYBE']")


def test_answers_of_an_ensemble_are_kept_until_a_member_changes(tmp_path: Path) -> None:
    add_onnx(tmp_path, "second", lambda path: onnx_models.adder(path, 10))
    add_identity(tmp_path, "first", dims="3")
    cached = "max_batch_size: 4 response_cache { enable: true }"
    add_ensemble(tmp_path, "ens", TWO, {"INPUT0": "FP32 3"}, {"OUTPUT0": "FP32 3"}, extra=cached)
    with running(tmp_path, EXPLICIT, "--load-model=ens", "--cache-config=local,size=1048576") as server:

        def answer() -> list[float]:
            return infer(server, "ens", ("INPUT0", "FP32", [1, 3], [1, 2, 3]))[1]["outputs"][0]["data"]

        assert [answer(), answer()] == [[11, 12, 13]] * 2
        assert figures(server, "second").requests == 1
        onnx_models.adder(tmp_path / "second" / "1" / "model.onnx", 20)
        load(server, "second")
        assert answer() == [21, 22, 23]
