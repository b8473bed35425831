"""Models that ask the server: other models, control, metrics; through a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from asking import ask
from asking_backend import add_asker, installed
from clients import call
from ensembles import Step, add_ensemble
from figures import failures, figures, wait_until
from harness import RunningServer, running
from repositories import add_decoupled, add_identity, add_sample


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a server that knows the backend which asks."""
    return installed(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, site: dict[str, str]) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_asker(repository, "asker")
    add_asker(repository, "twin", "instance_group [ { count: 2 kind: KIND_CPU } ]")
    add_asker(repository, "there")
    add_asker(repository, "back")
    add_identity(repository, "leaf", echo_request="true", echo_parameters="true")
    add_identity(repository, "held")
    add_identity(repository, "halves", datatype="BF16")
    add_decoupled(repository, "stream")
    add_sample(repository, "repeat")
    asks = [Step("asker", {"ASK": "ASK"}, {"ANSWER": "ANSWER"})]
    add_ensemble(repository, "around", asks, {"ASK": "STRING 1"}, {"ANSWER": "STRING 1"})
    with running(repository, env=site) as started:
        yield started


# --- requests -----------------------------------------------------------------------------------------------------


def test_a_model_calls_another_and_gets_its_outputs(server: RunningServer) -> None:
    assert ask(server, do="infer", model="leaf", values=[1, 2, 3])["outputs"] == {"OUTPUT0": [1, 2, 3]}


def test_every_field_of_a_call_arrives_at_the_called_model(server: RunningServer) -> None:
    told = ask(
        server,
        do="infer",
        model="leaf",
        correlation_id=7,
        flags=3,
        timeout_us=5_000_000,
        parameters={"mine": "x"},
        id="me",
    )["parameters"]
    assert {
        "mine": "x",
        "sequence_id": 7,
        "sequence_start": True,
        "sequence_end": True,
        "timeout": 5_000_000,
    }.items() <= (told.items())


def test_only_the_outputs_that_were_asked_for_come(server: RunningServer) -> None:
    told = ask(server, do="infer", model="leaf", outputs=["NONSUCH"])
    assert told["error"] == "INVALID_ARG"
    assert "NONSUCH" in told["message"]


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ({"model": "nonsuch"}, "NOT_FOUND", "nonsuch"),
        ({"model": "leaf", "version": 9}, "NOT_FOUND", "9"),
        ({"model": "repeat"}, "UNSUPPORTED", "decoupled"),
        ({"model": "asker"}, "INVALID_ARG", "INPUT0"),
        ({"model": "leaf", "parameters": {"fail": "on purpose"}}, "INTERNAL", "on purpose"),
    ],
)
def test_a_call_that_fails_gives_the_error_that_a_client_would_get(
    server: RunningServer, command: dict[str, Any], code: str, text: str
) -> None:
    told = ask(server, of="there", do="infer", **command)
    assert told["error"] == code
    assert text in told["message"]


def test_a_call_counts_in_the_statistics_of_the_called_model(server: RunningServer) -> None:
    before = figures(server, "leaf").requests
    ask(server, do="crowd", model="leaf", threads=4, count=10)
    assert figures(server, "leaf").requests == before + 10


def test_a_hundred_calls_at_once_from_an_event_loop_each_get_their_own_answer(server: RunningServer) -> None:
    answers = ask(server, do="gather", model="leaf", count=100)
    assert [answer["outputs"]["OUTPUT0"] for answer in answers] == [[number] for number in range(100)]


def test_a_thread_that_the_backend_started_may_call_while_nothing_else_does(server: RunningServer) -> None:
    assert ask(server, do="thread", what="infer", model="leaf", values=[4])["outputs"] == {"OUTPUT0": [4]}


def test_many_threads_may_call_at_once(server: RunningServer) -> None:
    assert ask(server, do="crowd", model="leaf", threads=16, count=64) == [[number] for number in range(64)]


def test_a_call_that_was_begun_is_answered_after_execute_has_returned(server: RunningServer) -> None:
    ask(server, do="keep", model="leaf", count=3)
    assert [kept["outputs"] for kept in ask(server, do="collect")] == [{"OUTPUT0": [1]}] * 3


def test_more_calls_at_once_than_the_limit_are_refused(server: RunningServer) -> None:
    told = ask(server, do="keep", model="held", count=1025, parameters={"hang": True})
    assert told["error"] == "UNAVAILABLE"
    assert "1024" in told["message"]
    assert ask(server, do="infer", model="leaf")["outputs"] == {"OUTPUT0": [1]}


def test_tensors_of_ten_megabytes_pass_and_the_answer_is_the_callers_own(server: RunningServer) -> None:
    data = np.arange(10 << 18, dtype=np.float32)
    assert ask(server, data=data, do="data", model="leaf") is True


def test_bf16_keeps_its_type(server: RunningServer) -> None:
    assert ask(server, do="half", model="halves", bits=[1, 0x3F80]) == ["BF16", [1, 0x3F80]]


# --- streams ------------------------------------------------------------------------------------------------------


def test_a_streamed_call_brings_every_response_in_order(server: RunningServer) -> None:
    assert ask(server, do="stream", model="repeat", length=300) == list(range(300))


def test_a_streamed_call_to_a_model_that_answers_once_brings_one_response(server: RunningServer) -> None:
    assert ask(server, do="told", model="leaf") == [{"OUTPUT0": [1.0]}]


def test_an_error_in_a_stream_comes_after_its_responses(server: RunningServer) -> None:
    told = ask(server, do="told", model="stream", parameters={"responses": 2, "fail": "half way"})
    assert told[:2] == [{"OUTPUT0": [1.0]}] * 2
    assert told[2]["message"] == "half way"


def test_many_streamed_calls_at_once_from_an_event_loop(server: RunningServer) -> None:
    for _ in range(5):
        streams = ask(server, do="streams", model="repeat", count=50, length=20)
        assert streams == [list(range(number, number + 20)) for number in range(50)]


def test_a_reader_at_leisure_holds_the_called_model_back(server: RunningServer) -> None:
    """Without that, all would lie in the caller's memory long before it has read the first few."""
    assert ask(server, do="stream", model="repeat", length=20_000, pause_ms=1, most=300) == list(range(300))
    counts = call(server, "/v2/models/repeat/stats")[1]["model_stats"][0]["response_stats"]
    assert "300" in counts
    assert "1000" not in counts


def test_a_stream_of_large_responses_goes_on_as_they_are_read(server: RunningServer) -> None:
    """Ten of ten megabytes are more than may be unread at once."""
    assert ask(server, do="large", model="stream", nbytes=10 << 20, responses=10) == 10


def test_a_stream_that_is_dropped_is_cancelled(server: RunningServer) -> None:
    before = failures(server, "repeat", "CANCELED")
    assert ask(server, do="drop", model="repeat", length=100_000) == "dropped"
    wait_until("the stream is cancelled", lambda: failures(server, "repeat", "CANCELED") == before + 1)


# --- waiting ------------------------------------------------------------------------------------------------------


def test_a_model_that_calls_itself_on_its_only_instance_is_told_so(server: RunningServer) -> None:
    told = ask(server, do="ask", model="asker", what={"do": "pid"})
    assert told["error"] == "UNAVAILABLE"
    assert "wait for ever" in told["message"]


def test_a_model_with_a_free_instance_may_call_itself(server: RunningServer) -> None:
    assert isinstance(ask(server, of="twin", do="ask", model="twin", what={"do": "pid"}), int)


def test_two_instances_that_call_their_own_model_at_once_do_not_wait_for_ever(server: RunningServer) -> None:
    deeper = {"do": "ask", "model": "twin", "what": {"do": "pid"}}
    told = ask(server, of="twin", do="ask", model="twin", what=deeper)
    assert told["error"] == "UNAVAILABLE"


def test_a_model_that_calls_an_ensemble_around_itself_is_told_so(server: RunningServer) -> None:
    told = ask(server, do="ask", model="around", what={"do": "pid"})
    assert "wait for ever" in told["message"]
    assert isinstance(ask(server, of="there", do="ask", model="around", what={"do": "pid"}), int)


def test_models_that_call_each_other_in_a_circle_are_told_so(server: RunningServer) -> None:
    there = {"do": "ask", "model": "there", "what": {"do": "pid"}}
    assert "wait for ever" in ask(server, of="there", do="ask", model="back", what=there)["message"]
    assert isinstance(ask(server, of="back", **there), int)
