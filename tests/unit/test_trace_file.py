"""Traces as text, and the files they go into: always JSON, for the owner alone, numbered, bounded, and never a link."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from headrace.observability import trace_file
from headrace.observability.trace import MAX_EVENTS, MAX_TENSOR_BYTES, Trace, TraceRecord, lines
from headrace.observability.trace_file import MAX_HELD, MAX_HELD_BYTES, TraceFile
from headrace_protocol import datatype as dt

BOTH = ("TIMESTAMPS", "TENSORS")


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[TraceRecord] = []

    def grant(self, nbytes: int) -> int:
        return nbytes

    def put(self, record: TraceRecord) -> None:
        self.records.append(record)


def record(number: int = 1, request_id: str = "", series: str = "", log_frequency: int = 0) -> TraceRecord:
    made = TraceRecord(number, "simple", 2, request_id, series, log_frequency)
    made.events.append(("REQUEST_START", 1000 + number))
    return made


def trace(sink: Kept, levels: tuple[str, ...] = BOTH) -> Trace:
    return Trace(TraceRecord(1, "simple", 2, "", "", 0), levels, lambda: 77, sink)


def objects(of: TraceRecord) -> list[dict]:
    return [json.loads(line) for line in lines(of)]


def ids(path: Path) -> list[int]:
    return [entry["id"] for entry in json.loads(path.read_text()) if "model_name" in entry]


# --- a trace ----------------------------------------------------------------------------------------------------------


def test_a_trace_ends_with_its_last_reference():
    sink = Kept()
    held = trace(sink)
    also = held
    del held
    assert not sink.records
    del also
    assert len(sink.records) == 1


def test_moments_are_written_by_their_time():
    sink = Kept()
    held = trace(sink)
    held.mark("REQUEST_START", 10)
    held.mark("REQUEST_END")
    held.computed(20, 5, 10, 2)
    del held
    head, *moments = objects(sink.records[0])
    assert head == {"id": 1, "model_name": "simple", "model_version": 2}
    assert [(entry["id"], *entry["timestamps"][0].values()) for entry in moments] == [
        (1, "REQUEST_START", 10),
        (1, "COMPUTE_START", 20),
        (1, "COMPUTE_INPUT_END", 25),
        (1, "COMPUTE_OUTPUT_START", 35),
        (1, "COMPUTE_END", 37),
        (1, "REQUEST_END", 77),
    ]


def test_a_level_that_is_off_writes_nothing():
    sink = Kept()
    for levels in (("TIMESTAMPS",), ("TENSORS",)):
        held = trace(sink, levels)
        held.mark("REQUEST_START")
        held.tensor("TENSOR_QUEUE_INPUT", "x", dt.INT8, (1,), b"\1")
        del held
    timestamps, tensors = (objects(each)[1:] for each in sink.records)
    assert [list(entry) for entry in timestamps] == [["id", "timestamps"]]
    assert [list(entry) for entry in tensors] == [["id", "activity", "tensor"]]


TEXTS = [
    (dt.BOOL, np.array([True, False]), "1,0"),
    (dt.INT8, np.array([-128, 127], np.int8), "-128,127"),
    (dt.UINT64, np.array([0, 2**64 - 1], np.uint64), "0,18446744073709551615"),
    (dt.FP16, np.array([0.1, np.inf], np.float16), "0.1,inf"),
    (dt.FP32, np.array([0.1, 1e-7, -np.inf, np.nan], np.float32), "0.1,1e-07,-inf,nan"),
    (dt.FP64, np.array([0.1, 1 / 3]), "0.1,0.3333333333333333"),
    (dt.BF16, dt.fp32_to_bf16(np.array([1.5, -2.0], np.float32)), "1.5,-2.0"),
    (dt.BYTES, np.array([b"", "grüße".encode(), b"\xff\n"], object), '"","grüße","\\xff\n"'),
]


@pytest.mark.parametrize(("datatype", "array", "text"), TEXTS, ids=[each[0].name for each in TEXTS])
def test_a_tensor_is_written_as_the_list_of_its_elements(datatype, array, text):
    sink = Kept()
    held = trace(sink)
    held.tensor("TENSOR_QUEUE_INPUT", "x", datatype, (1, len(array)), dt.from_numpy(array, datatype))
    del held
    assert objects(sink.records[0])[1] == {
        "id": 1,
        "activity": "TENSOR_QUEUE_INPUT",
        "tensor": {"name": "x", "data": text, "shape": f"1,{len(array)}", "dtype": datatype.name},
    }


@pytest.mark.parametrize(("datatype", "shape"), [(dt.FP32, (0, 4)), (dt.BYTES, (0,)), (dt.INT64, ())])
def test_shapes_without_elements_or_dimensions_can_be_written(datatype, shape):
    sink = Kept()
    held = trace(sink)
    held.tensor("TENSOR_BACKEND_OUTPUT", "x", datatype, shape, b"\0" * 8 if shape == () else b"")
    del held
    tensor = objects(sink.records[0])[1]["tensor"]
    assert tensor["shape"] == ",".join(map(str, shape))
    assert tensor["data"] == ("0" if shape == () else "")


def test_a_large_tensor_is_cut_and_says_so():
    sink = Kept()
    held = trace(sink)
    held.tensor("TENSOR_QUEUE_INPUT", "x", dt.INT64, (1 << 20,), bytes(8 << 20))
    held.tensor("TENSOR_QUEUE_INPUT", "s", dt.BYTES, (2,), dt.encode_bytes([b"a", b"b" * MAX_TENSOR_BYTES]))
    del held
    large, strings = (entry["tensor"] for entry in objects(sink.records[0])[1:])
    assert large["data"].count("0") == MAX_TENSOR_BYTES // 8
    assert large["truncated"] is True
    assert (strings["data"], strings["truncated"]) == ('"a"', True)


def test_a_tensor_in_the_memory_of_the_client_is_named_without_its_data():
    sink = Kept()
    held = trace(sink)
    held.tensor("TENSOR_QUEUE_INPUT", "x", dt.FP32, (4,), None)
    del held
    assert objects(sink.records[0])[1]["tensor"] == {
        "name": "x",
        "data": "",
        "shape": "4",
        "dtype": "FP32",
        "truncated": True,
    }


def test_what_is_noted_down_of_one_request_is_bounded():
    sink = Kept()
    held = trace(sink)
    for _ in range(10_000):
        held.responded()
        held.tensor("TENSOR_BACKEND_OUTPUT", "x", dt.INT8, (1 << 16,), bytes(1 << 16))
        held.sending("HTTP_SEND_START")
    held.mark("REQUEST_END")
    del held
    (kept,) = sink.records
    assert len(kept.events) == MAX_EVENTS + 1
    assert kept.events[-1][0] == "REQUEST_END", "the end is there however many responses there were"
    assert [name for name, _ in kept.events].count("HTTP_SEND_START") == 1
    assert len(kept.tensors) <= 256
    assert sum(len(note.data) for note in kept.tensors) <= 8 << 20


@pytest.mark.parametrize("hostile", ["\n#!/bin/sh\n", '","x":"', "\x1b[2J\0", "\ud800", "x" * 100_000])
def test_an_id_of_a_client_cannot_end_a_line_or_a_text(hostile):
    made = record(request_id=hostile)
    head = next(iter(lines(made)))
    assert head.isascii()
    assert head.isprintable()
    assert json.loads(head)["request_id"] == hostile[:1024]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "trace.json"


def written(path: Path, records: list[TraceRecord]) -> TraceFile:
    file = TraceFile(str(path), gather_s=0)
    file.start()
    for each in records:
        assert file.admit()
        file.put(each)
    file.close()
    return file


def test_all_traces_go_into_one_file_that_its_owner_alone_can_read(path):
    file = written(path, [record(number) for number in range(1, 1001)])
    assert ids(path) == list(range(1, 1001))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert file.lost == 0


def test_the_file_is_json_after_each_write(path):
    file = trace_file._Array(str(path))
    for number in (1, 2, 3):
        file.append([",\n".join(lines(record(number))).encode()])
        assert ids(path) == list(range(1, number + 1))
    file.close()


def test_nothing_is_made_where_nothing_is_traced(path):
    written(path, [])
    assert not path.exists()


def test_what_was_in_the_file_before_is_replaced(path):
    path.write_text("x" * 10_000)
    written(path, [record()])
    assert ids(path) == [1]


def test_a_new_file_begins_after_so_many_traces(path):
    written(path, [record(number, log_frequency=3) for number in range(1, 8)])
    assert sorted(each.name for each in path.parent.iterdir()) == ["trace.json.0", "trace.json.1", "trace.json.2"]
    assert [ids(path.with_name(f"trace.json.{number}")) for number in range(3)] == [[1, 2, 3], [4, 5, 6], [7]]


def test_models_with_settings_of_their_own_have_files_of_their_own(path):
    series = ["", "m", "", "m", "", "m"]
    written(path, [record(number, series=name, log_frequency=3) for number, name in enumerate(series)])
    assert [ids(path.with_name(f"trace.json.{number}")) for number in range(2)] == [[0, 2, 4], [1, 3, 5]]


def test_no_more_than_a_few_files_are_open_at_once(path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    file = TraceFile(str(path), gather_s=0)
    file._write([record(number, series=str(number), log_frequency=10) for number in range(100)])
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 16
    assert len(list(path.parent.iterdir())) == 100
    for each in file._numbered.values():
        each.close()


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_only_a_plain_file_is_written_to(path, tmp_path, kind, caplog):
    target = tmp_path / "precious"
    target.write_text("kept")
    if kind == "link":
        path.symlink_to(target)
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert written(path, [record()]).lost == 1
    assert target.read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()
    assert "traces are lost: they cannot be written to" in caplog.text


def test_a_failed_write_leaves_the_traces_before_it_and_later_ones_follow(path, monkeypatch, caplog):
    file = trace_file._Array(str(path))
    file.append([b'{"id": 1, "model_name": "m"}'])
    real = os.pwrite
    full = True

    def pwrite(fd, data, at):
        if full and len(data) > 10:
            real(fd, data[:10], at)
            raise OSError(28, "No space left on device")
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space"):
        file.append([b'{"id": 2, "model_name": "m"}'])
    assert ids(path) == [1]
    full = False
    file.append([b'{"id": 3, "model_name": "m"}'])
    assert ids(path) == [1, 3]
    file.close()


def test_lost_traces_are_told_once_and_so_is_the_end_of_it(path, caplog):
    path.mkdir()
    file = TraceFile(str(path), gather_s=0)
    file._write([record()])
    file._write([record(), record()])
    path.rmdir()
    file._write([record(4)])
    assert [each.getMessage() for each in caplog.records] == [
        f"traces are lost: they cannot be written to {path}: [Errno 21] Is a directory: '{path}'",
        "traces are written again, 3 were lost",
    ]
    assert ids(path) == [4]
    file._main.close()


def test_traces_that_wait_are_bounded_by_their_number_and_by_their_tensors(path):
    file = TraceFile(str(path), gather_s=0)
    assert all(file.admit() for _ in range(MAX_HELD))
    assert not file.admit()
    assert file.grant(MAX_HELD_BYTES - 3) == MAX_HELD_BYTES - 3
    assert file.grant(10) == 3
    assert file.grant(10) == 0


def test_room_comes_back_once_traces_are_written(path):
    file = TraceFile(str(path), gather_s=0)
    for number in range(MAX_HELD):
        file.admit()
        made = record(number)
        if not number:
            made.nbytes = file.grant(MAX_HELD_BYTES)
        file.put(made)
    file.start()
    file.close()
    assert file.admit()
    assert file.grant(10) == 10
    assert len(ids(path)) == MAX_HELD


def test_a_fault_of_ours_in_one_trace_ends_neither_the_thread_nor_the_file(path, monkeypatch, caplog):
    monkeypatch.setattr(trace_file, "_BATCH", 1)
    bad = record(1)
    bad.events.append(("REQUEST_END", None))
    assert written(path, [bad, record(2)]).lost == 1
    assert ids(path) == [2]
    assert "traces are lost" in caplog.text
