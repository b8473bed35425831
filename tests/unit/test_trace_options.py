"""The options about traces: the new one, the old ones, and what contradicts itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.config import load_config
from headrace.observability.trace_settings import TraceValues
from headrace.options import UsageError
from headrace.trace_options import TraceSettings


@pytest.fixture
def load(tmp_path: Path):
    def load(*argv: str):
        return load_config([f"--model-repository={tmp_path}", *argv], {})

    return load


def problems(load, *argv: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load(*argv)
    return caught.value.problems


def test_nothing_is_traced_unless_it_is_asked_for(load):
    config = load()
    assert config.trace == TraceSettings(TraceValues(level=(), rate=1000, count=-1, log_frequency=0), "")
    assert config.warnings == ()


def test_trace_config_gives_all_settings(load, tmp_path):
    file = str(tmp_path / "trace.json")
    config = load(
        f"--trace-config=triton,file={file}",
        "--trace-config=triton,log-frequency=50",
        "--trace-config=rate=100",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config",
        "level=tensors",
        "--trace-config=count=7",
        "--trace-config=mode=triton",
    )
    assert config.trace == TraceSettings(TraceValues(("TIMESTAMPS", "TENSORS"), 100, 7, 50), file)
    assert config.warnings == ()


def test_the_old_options_mean_the_same_and_say_what_to_use_instead(load, tmp_path):
    file = str(tmp_path / "trace.json")
    config = load(
        f"--trace-file={file}",
        "--trace-level=MAX",
        "--trace-level=TENSORS",
        "--trace-rate=100",
        "--trace-count=7",
        "--trace-log-frequency=50",
    )
    assert config.trace == TraceSettings(TraceValues(("TIMESTAMPS", "TENSORS"), 100, 7, 50), file)
    assert "--trace-file is deprecated: use --trace-config triton,file=..." in config.warnings
    assert len(config.warnings) == 5


def test_of_a_setting_given_twice_the_last_one_counts(load):
    assert load("--trace-config=rate=5", "--trace-config=rate=6").trace.values.rate == 6


def test_level_off_is_the_default_and_may_be_said(load):
    assert load("--trace-level=OFF").trace.values.level == ()


WRONG = [
    ("--trace-config=rate=-1", "--trace-config: rate: expected an integer from 0 to 4294967295, got '-1'"),
    ("--trace-config=rate=10000000000", "got '10000000000'"),
    ("--trace-config=count=-2", "--trace-config: count: expected an integer from -1 to 2147483647, got '-2'"),
    ("--trace-count=x", "--trace-count: expected an integer from -1 to 2147483647, got 'x'"),
    ("--trace-config=triton,log-frequency=1.5", "--trace-config: log-frequency: expected an integer from 0 to"),
    ("--trace-config=level=ALL", "--trace-config: level: expected OFF, TIMESTAMPS or TENSORS, got 'ALL'"),
    ("--trace-config=mode=jaeger", "mode: expected triton or opentelemetry, got 'jaeger'"),
    ("--trace-config=opentelemetry,url=http://x", "opentelemetry,url: has no effect without mode=opentelemetry"),
    ("--trace-config=jaeger,url=http://x", "--trace-config: unknown mode 'jaeger', expected triton"),
    ("--trace-config=speed=1", "unknown setting speed, expected one of rate, level, count, mode, triton,file, triton,"),
    ("--trace-config=triton,rate=1", "unknown setting triton,rate, expected one of rate,"),
    ("--trace-config=rate", "--trace-config: expected <key>=<value>, got 'rate'"),
    ("--trace-config=level=TIMESTAMPS", "there is no file for traces; it is given when the server is started"),
    ("--trace-config=triton,file=/does/not/exist/trace.json", "--trace-config: file: '/does/not/exist' is no folder"),
    ("--trace-config=triton,file=/dev/null", "'/dev/null' is there already, and no plain file"),
]


@pytest.mark.parametrize(("option", "sentence"), WRONG, ids=[option for option, _ in WRONG])
def test_what_is_wrong_is_said_with_what_is_allowed(load, option, sentence):
    (problem,) = problems(load, option)
    assert sentence in problem


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_a_plain_file_is_taken_for_traces(load, tmp_path, kind):
    file = tmp_path / "trace.json"
    make = {"link": lambda: file.symlink_to("/etc/passwd"), "pipe": lambda: os.mkfifo(file), "folder": file.mkdir}
    make[kind]()
    (problem,) = problems(load, f"--trace-config=triton,file={file}")
    assert "is there already, and no plain file" in problem


def test_levels_that_contradict_each_other_are_refused(load):
    assert problems(load, "--trace-level=OFF", "--trace-level=TENSORS") == [
        "--trace-level: OFF stands alone, got 2 levels"
    ]


def test_a_rate_of_0_is_refused_where_something_is_to_be_traced(load, tmp_path):
    argv = (f"--trace-config=triton,file={tmp_path}/t", "--trace-config=level=TENSORS", "--trace-config=rate=0")
    assert problems(load, *argv) == ["--trace-config: trace_rate: 0 is for trace_level OFF alone"]


def test_the_old_and_the_new_way_cannot_give_the_same_setting(load):
    assert problems(load, "--trace-config=rate=5", "--trace-rate=5") == ["--trace-rate: --trace-config gives rate too"]


def test_all_problems_are_told_at_once(load):
    assert len(problems(load, "--trace-config=rate=x", "--trace-config=count=y", "--trace-config=level=z")) == 3
