"""The tracer: which requests get a trace, what is said about settings of models, and that all of it ends in the file."""

from __future__ import annotations

import json
import logging

import pytest

from headrace.clock import SystemClock
from headrace.observability.trace_file import MAX_HELD
from headrace.observability.trace_settings import TraceValues
from headrace.observability.tracing import Tracer
from headrace.types import InferenceRequest, InputTensor, RegionRef
from headrace_protocol import datatype as dt
from headrace_protocol.errors import ErrorCode, InferError, not_found, unavailable

ON = TraceValues(level=("TIMESTAMPS",), rate=1)


class Models:
    """Stands for the registry: looks models up."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.loading: set[str] = set()

    def find(self, name: str) -> object:
        if name in self.loading:
            raise unavailable(f"model '{name}' is loading")
        if name not in self.names:
            raise not_found(f"there is no model '{name}'")
        return name


@pytest.fixture
def models() -> Models:
    return Models("m", "other")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


@pytest.fixture
def make(models, path):
    made: list[Tracer] = []

    def tracer(values: TraceValues = ON) -> Tracer:
        made.append(Tracer(values, str(path), models.find, SystemClock()))
        made[-1].start()
        return made[-1]

    yield tracer
    for each in made:
        each.close()


def traced(tracer: Tracer, model: str = "m", request_id: str = "") -> bool:
    """Send one request through: the trace is held by nothing else, and so it ends here."""
    request = InferenceRequest(model)
    request.id = request_id
    request.inputs = [
        InputTensor("x", dt.INT8, (2,), b"\1\2"),
        InputTensor("y", dt.INT8, (2,), b"", RegionRef("shared", 0, 2)),
    ]
    return tracer.pick(request, model, 3) is not None


def test_a_picked_request_is_in_the_file_with_its_model_and_its_tensors(make, path):
    tracer = make(TraceValues(level=("TIMESTAMPS", "TENSORS"), rate=1))
    assert traced(tracer, request_id="mine")
    tracer.close()
    head, start, x, y = json.loads(path.read_text())
    assert head == {"id": 1, "model_name": "m", "model_version": 3, "request_id": "mine"}
    assert start["timestamps"][0]["name"] == "REQUEST_START"
    assert x["tensor"] == {"name": "x", "data": "1,2", "shape": "2", "dtype": "INT8"}
    assert (y["tensor"]["data"], y["tensor"]["truncated"]) == ("", True)


def test_a_tracer_is_active_while_some_request_may_be_picked(make):
    tracer = make(TraceValues(rate=1))
    assert not tracer.active
    tracer.update("m", {"trace_level": ["TIMESTAMPS"], "trace_count": ["2"]})
    assert tracer.active
    assert [traced(tracer), traced(tracer, "other"), traced(tracer), traced(tracer)] == [True, False, True, False]
    assert not tracer.active
    tracer.update("m", {"trace_count": ["1"]})
    assert tracer.active
    tracer.update("m", {"trace_level": ["OFF"]})
    assert not tracer.active


def test_settings_of_a_model_that_there_is_not_are_neither_shown_nor_changed(make):
    tracer = make()
    for call in (lambda: tracer.get("nobody"), lambda: tracer.update("nobody", {"trace_rate": ["2"]})):
        with pytest.raises(InferError) as caught:
            call()
        assert caught.value.code is ErrorCode.NOT_FOUND


def test_a_model_that_does_not_serve_yet_can_be_set_already(make, models):
    models.loading.add("m")
    tracer = make()
    assert tracer.update("m", {"trace_rate": ["2"]})["trace_rate"] == "2"
    assert tracer.get("m")["trace_rate"] == "2"


def test_settings_of_a_model_that_has_gone_are_forgotten(make, models):
    tracer = make()
    tracer.update("m", {"trace_rate": ["2"]})
    models.names.remove("m")
    tracer.update("", {"trace_count": ["9"]})
    models.names.add("m")
    assert tracer.get("m")["trace_rate"] == "1"


def test_a_change_is_told_in_the_log_and_a_look_is_not(make, caplog):
    caplog.set_level(logging.INFO)
    tracer = make()
    tracer.get("m")
    tracer.update("m", {})
    tracer.update("m", {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": None})
    assert [each.getMessage() for each in caplog.records] == [
        "trace settings of model 'm' are changed by a call: trace_level=TIMESTAMPS+TENSORS, trace_rate=none"
    ]


def test_a_request_for_whose_trace_there_is_no_room_is_served_without(models, path):
    tracer = Tracer(ON, str(path), models.find, SystemClock())  # never started: nothing is written
    assert all(traced(tracer) for _ in range(MAX_HELD))
    assert not traced(tracer)
    assert (tracer.picked, tracer.skipped) == (MAX_HELD, 1)


def test_a_trace_that_ends_after_the_tracer_is_let_go(make, path):
    tracer = make()
    trace = tracer.pick(InferenceRequest("m"), "m", 1)
    tracer.close()
    del trace
    assert not path.exists()


def test_without_a_file_there_is_no_thread_and_nothing_to_close(models):
    tracer = Tracer(TraceValues(), "", models.find, SystemClock())
    tracer.start()
    tracer.close()
    assert tracer.get("")["trace_file"] == ""
