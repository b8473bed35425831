"""Ensembles with a decoupled member through a real server: each of its responses goes on through the other steps."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import grpc.aio
import numpy as np
import pytest
import requests
import tritonclient.grpc as triton

from clients import call, infer
from ensembles import Step, add_ensemble, ident
from figures import failures, figures, metric, wait_until
from harness import RunningServer, running
from repositories import add_decoupled, add_identity, add_sample
from stock_streams import Stream, inputs, is_final, streaming
from streaming import GrpcStream, HttpStream, Link

ROW = {"INPUT0": np.array([1, 2], np.float32)}
REPEAT = Step("repeat", {"IN": "IN", "DELAY": "DELAY"}, {"OUT": "value", "IDX": "INDEX"})
IN = {"IN": "INT32 -1", "DELAY": "UINT32 -1 ?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_sample(repository, "repeat")
    # The second instance is slower, so that later elements overtake earlier ones.
    uneven = {"extra": "instance_group { count: 3 kind: KIND_CPU }", "instance_wise_delay_multiplier": "5"}
    plain = {"max_batch_size": 0, "allow_misbehaviour": "false"}
    add_identity(repository, "ints", datatype="INT32", dims="1", execute_delay_ms="1", **uneven, **plain)
    add_identity(repository, "root", **plain)
    add_decoupled(repository, "many", max_batch_size=0)
    add_decoupled(repository, "more_ints", datatype="INT32", dims="1", max_batch_size=0)
    add_identity(repository, "plain", **plain)
    out = {"VALUE": "INT32 1", "INDEX": "UINT32 1"}
    add_ensemble(repository, "repeated", [REPEAT, ident("ints", "value", "VALUE")], IN, out)
    add_ensemble(repository, "one_by_one", [REPEAT, ident("ints", "value", "VALUE")], IN, out, max_inflight=1)
    add_ensemble(repository, "streamed", [ident("many", "INPUT0", "x"), ident("plain", "x", "OUTPUT0")])
    add_ensemble(repository, "outer", [ident("streamed", "INPUT0", "x"), ident("plain", "x", "OUTPUT0")])
    both = [ident("root", "INPUT0", "once"), ident("many", "INPUT0", "OUTPUT0")]
    add_ensemble(repository, "both", both, None, {"once": "FP32 -1", "OUTPUT0": "FP32 -1"})
    add_ensemble(
        repository,
        "twice",
        [REPEAT._replace(outputs={"OUT": "value"}), ident("more_ints", "value", "VALUE")],
        IN,
        {"VALUE": "INT32 1"},
    )
    with running(repository) as server:
        yield server


def answers(stream: Stream) -> list[triton.InferResult]:
    """Return the responses of a request. The last of them is final, or else an end without outputs follows it."""
    return [result for result in stream.to_final() if result.get_response().outputs]


def events(server: RunningServer, model: str, **members: object) -> list[dict]:
    """Return the objects of a generate_stream."""
    answer = requests.post(f"http://{server.http}/v2/models/{model}/generate_stream", json=members, timeout=30)
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("model", ["repeated", "one_by_one"])
def test_every_response_goes_through_the_other_steps_and_keeps_its_place(server: RunningServer, model: str) -> None:
    elements = np.arange(40, dtype=np.int32)[::-1].copy()
    with streaming(server) as stream:
        stream.send(model, {"IN": elements})
        parts = answers(stream)
    assert [part.as_numpy("VALUE").item() for part in parts] == elements.tolist()
    assert [part.as_numpy("INDEX").item() for part in parts] == list(range(40))
    told = events(server, model, IN=elements.tolist())
    assert [event["VALUE"] for event in told] == elements.tolist()


def test_the_last_response_of_the_member_is_the_last_of_the_ensemble(server: RunningServer) -> None:
    with streaming(server) as stream:
        stream.send("streamed", ROW, parameters={"responses": 3})
        parts = stream.to_final()
        assert [list(part.as_numpy("OUTPUT0")) for part in parts] == [[1, 2]] * 3
        stream.send("streamed", ROW, parameters={"responses": 0})
        (end,) = stream.to_final()
        assert not end.get_response().outputs


def test_an_ensemble_is_decoupled_exactly_where_a_member_is(server: RunningServer) -> None:
    _, config = call(server, "/v2/models/outer/config")
    assert config["model_transaction_policy"] == {"decoupled": True}, "also by way of another ensemble"
    status, answer = infer(server, "streamed", ("INPUT0", "FP32", [1], [1]))
    assert status == 501
    assert "decoupled" in answer["error"]


def test_responses_go_through_ensembles_within_ensembles(server: RunningServer) -> None:
    with streaming(server) as stream:
        stream.send("outer", ROW, parameters={"responses": 4, "empty_final": True})
        parts = answers(stream)
    assert [list(part.as_numpy("OUTPUT0")) for part in parts] == [[1, 2]] * 4


def test_what_comes_once_comes_with_every_response_or_alone_where_there_is_none(server: RunningServer) -> None:
    with streaming(server) as stream:
        stream.send("both", ROW, parameters={"responses": 2})
        parts = stream.to_final()
        names = [sorted(output.name for output in part.get_response().outputs) for part in parts]
        assert names == [["OUTPUT0", "once"]] * 2
        stream.send("both", ROW, parameters={"responses": 0})
        (part,) = stream.to_final()
        assert [output.name for output in part.get_response().outputs] == ["once"]
        stream.send("both", ROW, outputs=[triton.InferRequestedOutput("once")], parameters={"responses": 9})
        (part,) = stream.to_final()
        assert list(part.as_numpy("once")) == [1, 2]


def test_decoupled_members_one_behind_the_other_keep_the_order_of_both(server: RunningServer) -> None:
    with streaming(server) as stream:
        stream.send("twice", {"IN": np.array([7, 8, 9], np.int32)}, parameters={"responses": 2})
        parts = answers(stream)
    assert [part.as_numpy("VALUE").item() for part in parts] == [7, 7, 8, 8, 9, 9]


def test_an_error_comes_after_the_responses_before_it_and_ends_its_request_alone(server: RunningServer) -> None:
    before = failures(server, "many", "BACKEND"), failures(server, "streamed", "OTHER")
    with streaming(server) as stream:
        stream.send("streamed", ROW, parameters={"responses": 3, "fail": "enough"})
        for _ in range(3):
            assert not is_final(stream.next())
        with pytest.raises(triton.InferenceServerException) as caught:
            stream.next()
        assert "in ensemble 'streamed', step model 'many': enough" in caught.value.message()
        stream.send("streamed", ROW)
        assert is_final(stream.next())
    assert (failures(server, "many", "BACKEND"), failures(server, "streamed", "OTHER")) == (
        before[0] + 1,
        before[1] + 1,
    )


def test_many_streams_at_once_do_not_mix(server: RunningServer) -> None:
    with streaming(server) as stream:
        for number in range(50):
            elements = np.arange(number, number + 6, dtype=np.int32)
            stream.send("repeated", {"IN": elements}, request_id=str(number))
        got: dict[str, list[int]] = {}
        ended = 0
        while ended < 50:
            result = stream.next()
            ended += is_final(result)
            if result.get_response().outputs:
                got.setdefault(result.get_response().id, []).append(result.as_numpy("VALUE").item())
    assert got == {str(number): list(range(number, number + 6)) for number in range(50)}


def test_requests_and_responses_are_counted_with_the_ensemble_and_with_each_member(server: RunningServer) -> None:
    names = ("repeated", "repeat", "ints")
    before = {name: figures(server, name) for name in names}
    with streaming(server) as stream:
        stream.send("repeated", {"IN": np.arange(5, dtype=np.int32)})
        stream.to_final()
    since = {name: figures(server, name).since(before[name]).requests for name in names}
    assert since == {"repeated": 1, "repeat": 1, "ints": 5}
    _, told = call(server, "/v2/models/repeated/stats")
    assert told["model_stats"][0]["response_stats"]["4"]["success"]["count"] >= 1


def test_a_client_that_does_not_read_holds_back_the_member_that_streams(server: RunningServer) -> None:
    large = {"INPUT0": np.zeros(1 << 16, np.float32)}
    reads = threading.Event()
    with triton.InferenceServerClient(server.grpc) as client:
        before = produced(client)
        client.start_stream(lambda result, error: reads.wait())
        client.async_stream_infer("streamed", inputs(large), parameters={"responses": 2000})
        with streaming(server) as stream:
            stream.send("streamed", ROW, parameters={"responses": 200})
            assert len(stream.to_final()) == 200
        assert produced(client) - before < 1200
        reads.set()
        client.stop_stream(cancel_requests=True)


def produced(client: triton.InferenceServerClient) -> int:
    (told,) = client.get_inference_statistics("many").model_stats
    return sum(figure.success.count for figure in told.response_stats.values())


async def test_a_stream_whose_client_goes_is_ended_in_the_member(server: RunningServer) -> None:
    before = failures(server, "many", "CANCELED"), failures(server, "streamed", "CANCELED")
    endless = {"responses": 100_000, "response_delay_ms": 20}
    array = np.ones(1, np.float32)
    one = await HttpStream.open(server, "streamed", array, endless)
    await one.next()
    await one.cut()
    async with Link.to(server.grpc) as (link, address):
        channel = grpc.aio.insecure_channel(address)
        other = await GrpcStream.open(channel, "streamed", array, endless, link=link)
        await other.next()
        await other.cut()
    for model, count in zip(("many", "streamed"), before, strict=True):
        await asyncio.to_thread(
            wait_until,
            f"the streams of {model} are cancelled",
            lambda m=model, c=count: failures(server, m, "CANCELED") == c + 2,
        )
    assert metric(server, "headrace_queue_depth", "plain") == 0
