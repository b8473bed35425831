"""Ensembles through a real server: what clients of both doors get, and what is counted of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from clients import ask, infer
from doors import DOORS, Door, open_door
from ensembles import Step, add_ensemble, ident
from figures import failures, figures, metric, wait_until
from harness import RunningServer, running
from headrace_protocol._generated import grpc_service_pb2 as pb
from repositories import add_identity, identity_config
from stock_doors import client, statistics

ROW = np.arange(4, dtype=np.float32)
BRANCHES = {"a": "FP32 -1", "b": "FP32 -1"}
WAYS = ("http json", "http binary", "grpc")


FLAKY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.calls = 0

    def execute(self, requests):
        answers = []
        for request in requests:
            self.calls += 1
            if self.calls % 2:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("not at the first try")))
            else:
                array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]))
        return answers
"""


def add_python(repository: Path, name: str, code: str) -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code)
    return folder


def branches(p: str, a: str, b: str) -> list[Step]:
    return [ident(p, "IN", "x"), ident(a, "x", "a"), ident(b, "x", "b")]


def write(repository: Path) -> None:
    for name in ("P", "A", "B"):
        add_identity(repository, name, max_batch_size=0, allow_misbehaviour="false")
    add_identity(repository, "failing", max_batch_size=0, fail="no b today")
    add_identity(repository, "keeping", max_batch_size=0, missing_output="true")
    add_identity(repository, "echo", max_batch_size=0, echo_request="true", echo_parameters="true")
    add_identity(repository, "strings_1", datatype="STRING", dims="-1, 1", max_batch_size=0)
    add_identity(
        repository, "strings_2", datatype="STRING", dims="-1, 1", max_batch_size=64, extra="dynamic_batching { }"
    )
    for number in range(3):
        delay = "dynamic_batching { max_queue_delay_microseconds: 2000 }"
        add_identity(repository, f"row_{number}", max_batch_size=8, extra=delay)
    add_identity(repository, "fragile", max_batch_size=0)
    flaky = add_python(repository, "flaky", FLAKY)
    (flaky / "config.pbtxt").write_text(identity_config("flaky", max_batch_size=0).replace('"identity"', '"python"'))
    two = {"IN": "FP32 -1"}
    add_ensemble(repository, "ens", branches("P", "A", "B"), two, BRANCHES)
    add_ensemble(repository, "half", branches("P", "A", "failing"), two, BRANCHES)
    add_ensemble(repository, "lacking", branches("P", "A", "keeping"), two, BRANCHES)
    add_ensemble(repository, "outer", [ident("single", "INPUT0", "m"), ident("half_b", "m", "OUTPUT0")])
    add_ensemble(repository, "half_b", [ident("P", "INPUT0", "x"), ident("failing", "x", "OUTPUT0")])
    add_ensemble(repository, "single", [ident("P", "INPUT0", "OUTPUT0")])
    add_ensemble(repository, "echoing", [ident("P", "INPUT0", "x"), ident("echo", "x", "OUTPUT0")])
    string = {"INPUT0": "STRING -1 1"}, {"OUTPUT0": "STRING -1 1"}
    add_ensemble(repository, "texts", [ident("strings_1", "INPUT0", "x"), ident("strings_1", "x", "OUTPUT0")], *string)
    string = {"INPUT0": "STRING -1 1"}, {"OUTPUT0": "STRING -1 1"}
    add_ensemble(
        repository,
        "batched_texts",
        [ident("strings_2", "INPUT0", "x"), ident("strings_2", "x", "OUTPUT0")],
        *string,
        extra="max_batch_size: 64",
    )
    rows = [ident("row_0", "INPUT0", "x"), ident("row_1", "x", "y"), ident("row_2", "y", "OUTPUT0")]
    add_ensemble(repository, "chain", rows, extra="max_batch_size: 8")
    fan = [ident("row_0", "INPUT0", "x"), *(ident("row_1", "x", f"OUTPUT{number}") for number in range(9))]
    add_ensemble(repository, "fan", fan, None, {f"OUTPUT{n}": "FP32 -1" for n in range(9)}, extra="max_batch_size: 8")
    add_ensemble(repository, "crashing", [ident("P", "INPUT0", "x"), ident("fragile", "x", "OUTPUT0")])
    limits = 'parameters { key: "step.1.retries" value { string_value: "1" } }'
    steps = [ident("P", "INPUT0", "x"), ident("flaky", "x", "OUTPUT0")]
    add_ensemble(repository, "impatient", steps)
    add_ensemble(repository, "patient", steps, extra=limits)
    limits = 'parameters { key: "step.1.timeout_ms" value { string_value: "100" } }'
    add_ensemble(repository, "hasty", [ident("P", "INPUT0", "x"), ident("fragile", "x", "OUTPUT0")], extra=limits)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("ensembles")
    write(repository)
    with running(repository, "--allow-client-shm=true", "--backend-restart-limit=100") as started:
        yield started


@pytest.fixture(params=DOORS)
async def door(server: RunningServer, request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    async with open_door(server, request.param) as opened:
        yield opened


def told(server: RunningServer, model: str) -> pb.ModelStatistics:
    with client(server, "http") as api:
        (message,) = statistics(api, model)
    return message


def copied(server: RunningServer, model: str) -> tuple[int, int]:
    name = "headrace_tensor_bytes_copied_total"
    return metric(server, name, model, direction="in"), metric(server, name, model, direction="out")


# --- Which outputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_every_output_comes_where_none_is_named(server: RunningServer, way: str) -> None:
    outputs = ask(server, way, "ens", {"IN": ROW})
    assert {name: list(array) for name, array in outputs.items()} == {"a": list(ROW), "b": list(ROW)}


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_branch_whose_output_nobody_asks_for_does_not_run(server: RunningServer, name: str) -> None:
    other = {"a": "B", "b": "A"}[name]
    before = figures(server, other)
    status, answer = infer(server, "ens", ("IN", "FP32", [2], [1, 2]), outputs=[{"name": name}])
    assert (status, [output["name"] for output in answer["outputs"]]) == (200, [name])
    assert figures(server, other) == before


def test_fifty_clients_get_what_each_asked_for(server: RunningServer) -> None:
    async def one(number: int) -> None:
        wanted = [[{"name": "a"}], [{"name": "b"}], [{"name": "b"}, {"name": "a"}], None][number % 4]
        for turn in range(5):
            value = 100.0 * number + turn
            fields = {} if wanted is None else {"outputs": wanted}
            status, answer = await asyncio.to_thread(infer, server, "ens", ("IN", "FP32", [1], [value]), **fields)
            assert status == 200, answer
            got = {output["name"]: output["data"] for output in answer["outputs"]}
            names = {"a", "b"} if wanted is None else {output["name"] for output in wanted}
            assert got == {name: [value] for name in names}

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(50)))

    asyncio.run(all_of_them())


def test_a_failing_branch_is_named_with_its_own_error_and_code(server: RunningServer) -> None:
    status, answer = infer(server, "half", ("IN", "FP32", [1], [1]))
    assert status == 500
    assert answer["error"] == "in ensemble 'half', step model 'failing': no b today"
    assert "deadlock" not in answer["error"]
    status, answer = infer(server, "half", ("IN", "FP32", [1], [1]), outputs=[{"name": "a"}])
    assert status == 200, answer


def test_a_member_that_leaves_an_output_out_is_named(server: RunningServer) -> None:
    status, answer = infer(server, "lacking", ("IN", "FP32", [1], [1]))
    assert status == 500
    assert "step model 'keeping'" in answer["error"]
    assert "'OUTPUT0'" in answer["error"]


def test_ensembles_within_ensembles_name_every_step_on_the_way_to_a_failure(server: RunningServer) -> None:
    status, answer = infer(server, "outer", ("INPUT0", "FP32", [1], [1]))
    assert status == 500
    expected = "in ensemble 'outer', step model 'half_b': in ensemble 'half_b', step model 'failing': no b today"
    assert answer["error"] == expected


@pytest.mark.parametrize(
    ("tensor", "text"),
    [(("IN", "FP32", [1, 1], [1]), "shape"), (("IN", "INT32", [1], [1]), "FP32"), (("X", "FP32", [1], [1]), "'X'")],
)
def test_what_does_not_fit_the_ensemble_is_refused_by_it(server: RunningServer, tensor: tuple, text: str) -> None:
    before = figures(server, "P"), told(server, "ens")
    status, answer = infer(server, "ens", tensor)
    assert status == 400
    assert text in answer["error"]
    assert "model 'ens'" in answer["error"]
    assert (figures(server, "P"), told(server, "ens")) == before


# --- Counting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
async def test_the_counters_of_a_fan_of_nine_add_up(server: RunningServer, door: Door, rows: int) -> None:
    names = ("fan", "row_0", "row_1")
    before = {name: told(server, name) for name in names}
    array = np.ones((rows, 3), np.float32)
    outcomes = await asyncio.gather(*(door.infer("fan", array) for _ in range(100)))
    assert all(outcome.ok for outcome in outcomes), outcomes[0]
    after = {name: told(server, name) for name in names}
    for name, requests in (("fan", 100), ("row_0", 100), ("row_1", 900)):
        gained = after[name].inference_stats.success.count - before[name].inference_stats.success.count
        assert gained == requests, name
        assert after[name].inference_count - before[name].inference_count == requests * rows, name
        stats = after[name].inference_stats
        parts = stats.queue.ns + stats.compute_input.ns + stats.compute_infer.ns + stats.compute_output.ns
        assert 0 < parts <= stats.success.ns, f"{name}: its parts are more than the whole"
        assert stats.queue.count == stats.compute_infer.count == stats.success.count
        batches = after[name].batch_stats
        assert sum(batch.batch_size * batch.compute_infer.count for batch in batches) == after[name].inference_count
    assert after["fan"].execution_count - before["fan"].execution_count == 100
    assert metric(server, "nv_inference_pending_request_count", "fan") == 0


def test_a_failure_is_counted_with_the_member_and_with_the_ensemble(server: RunningServer) -> None:
    before = failures(server, "failing", "BACKEND"), failures(server, "half", "OTHER"), figures(server, "P")
    infer(server, "half", ("IN", "FP32", [1], [1]))
    assert failures(server, "failing", "BACKEND") == before[0] + 1
    assert failures(server, "half", "OTHER") == before[1] + 1
    assert figures(server, "P").since(before[2]).requests == 1


# --- Tensors on their way -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["http binary", "grpc"])
def test_tensors_pass_between_members_without_a_copy(server: RunningServer, way: str) -> None:
    array = np.arange(147 * 1024, dtype=np.float32).reshape(1, -1)
    before = {name: copied(server, name) for name in ("row_0", "row_1", "row_2", "chain")}
    outputs = ask(server, way, "chain", {"INPUT0": array})
    np.testing.assert_array_equal(outputs["OUTPUT0"], array)
    after = {name: copied(server, name) for name in before}
    moved = {name: tuple(np.subtract(after[name], before[name])) for name in before}
    assert moved == {
        "row_0": (array.nbytes, 0),
        "row_1": (0, 0),
        "row_2": (0, 0),
        "chain": (0, array.nbytes),
    }


async def test_requests_of_several_ensembles_share_the_batches_of_their_members(
    server: RunningServer, door: Door
) -> None:
    before = figures(server, "row_2")
    arrays = [np.full((1 + number % 3, 5), number, np.float32) for number in range(60)]
    outcomes = await asyncio.gather(*(door.infer("chain", array) for array in arrays))
    for outcome, array in zip(outcomes, arrays, strict=True):
        np.testing.assert_array_equal(outcome.array, array)
    since = figures(server, "row_2").since(before)
    assert since.requests == 60
    assert since.executions < 60


@pytest.mark.parametrize("model", ["texts", "batched_texts"])
async def test_strings_of_many_clients_keep_every_byte(server: RunningServer, door: Door, model: str) -> None:
    letters = "가나다라마바사아자차카타파하한국어🙂🚀👩‍👩‍👧‍👦é\0a"

    async def one(number: int) -> None:
        rng = random.Random(number)
        for _ in range(8):
            rows = [[rng.choice(letters) for _ in range(rng.randint(0, 10))] for _ in range(87)]
            sent = np.array(["".join(row).encode()[:40] for row in rows], object)
            array = np.empty((87, 1), object)
            array[:, 0] = sent
            if model == "batched_texts":
                array = array.reshape(1, 87, 1)
            outcome = await door.infer(model, array)
            assert outcome.ok, outcome
            assert outcome.array.ravel().tolist() == sent.tolist()

    await asyncio.gather(*(one(number) for number in range(32)))


def test_what_the_client_says_of_its_request_reaches_the_members(server: RunningServer) -> None:
    parameters = {"sequence_id": 7, "sequence_start": True, "timeout": 5_000_000, "priority": 1, "mine": "yes"}
    status, answer = infer(server, "echoing", ("INPUT0", "FP32", [1], [1]), id="é-1", parameters=parameters)
    assert status == 200, answer
    assert answer["id"] == "é-1"
    got = answer["parameters"]
    assert (got["sequence_id"], got["sequence_start"], got["timeout"], got["mine"]) == (7, True, 5_000_000, "yes")


# --- What goes wrong ----------------------------------------------------------------------------------------------


async def test_a_client_that_goes_away_ends_the_step_that_runs(server: RunningServer, door: Door) -> None:
    before = failures(server, "fragile", "CANCELED"), failures(server, "crashing", "CANCELED")
    calls = [asyncio.ensure_future(door.infer("crashing", ROW, parameters={"hang": True})) for _ in range(4)]
    await reach(server, "headrace_queue_depth", "fragile", 3)
    for one in calls:
        one.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    for model, count in zip(("fragile", "crashing"), before, strict=True):
        await reach(server, "nv_inference_request_failure", model, count + 4, reason="CANCELED")
    outcome = await door.infer("crashing", ROW)
    assert outcome.ok, "the members are free again"


async def test_a_deadline_of_the_client_ends_the_step_that_runs(server: RunningServer, door: Door) -> None:
    before = failures(server, "fragile", "CANCELED")
    with pytest.raises(TimeoutError):
        await door.infer("crashing", ROW, parameters={"hang": True}, timeout=0.2)
    await reach(server, "nv_inference_request_failure", "fragile", before + 1, reason="CANCELED")


async def test_a_member_that_dies_fails_its_requests_alone_and_serves_again(server: RunningServer, door: Door) -> None:
    others = [asyncio.ensure_future(door.infer("single", ROW)) for _ in range(20)]
    outcome = await door.infer("crashing", ROW, parameters={"crash": True})
    assert outcome.code == "UNAVAILABLE"
    assert outcome.text.startswith("in ensemble 'crashing', step model 'fragile': ")
    assert all(other.ok for other in await asyncio.gather(*others))
    outcome = await door.infer("crashing", ROW)
    assert outcome.ok, outcome


async def test_one_bad_request_costs_no_other_of_its_batch_anything(server: RunningServer, door: Door) -> None:
    bad = [door.infer("chain", np.ones((1, 3), np.float32), parameters={"fail": "me"}) for _ in range(5)]
    good = [door.infer("chain", np.full((1, 3), number, np.float32)) for number in range(15)]
    outcomes = await asyncio.gather(*good, *bad)
    assert [float(outcome.array[0, 0]) for outcome in outcomes[:15]] == list(range(15))
    assert {(outcome.code, outcome.text) for outcome in outcomes[15:]} == {
        ("INTERNAL", "in ensemble 'chain', step model 'row_0': me")
    }


async def test_a_step_is_tried_again_as_often_as_the_configuration_says(server: RunningServer, door: Door) -> None:
    outcome = await door.infer("impatient", ROW)
    assert outcome.code == "INTERNAL"
    assert "not at the first try" in outcome.text
    assert (await door.infer("impatient", ROW)).ok
    outcome = await door.infer("patient", ROW)
    assert outcome.ok, outcome
    np.testing.assert_array_equal(outcome.array, ROW)


async def test_a_step_that_takes_longer_than_its_limit_is_ended(server: RunningServer, door: Door) -> None:
    before = failures(server, "fragile", "CANCELED")
    outcome = await door.infer("hasty", ROW, parameters={"hang": True})
    assert outcome.code == "UNAVAILABLE"
    assert outcome.text == "in ensemble 'hasty', step model 'fragile': no answer within the 100 ms that the step has"
    assert outcome.seconds < 5
    await reach(server, "nv_inference_request_failure", "fragile", before + 1, reason="CANCELED")
    assert (await door.infer("hasty", ROW)).ok


async def reach(server: RunningServer, name: str, model: str, wanted: int, **labels: str) -> None:
    """Wait until a metric has this value."""
    what = f"{name} of {model} is {wanted}"
    await asyncio.to_thread(wait_until, what, lambda: metric(server, name, model, **labels) == wanted)
