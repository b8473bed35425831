"""Trace settings: ranges, fallbacks, all or none, and which requests they pick."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.observability.trace_settings import Sampler, TraceBook, TraceValues, shown
from headrace_protocol.errors import ErrorCode, InferError

ON = TraceValues(level=("TIMESTAMPS",), rate=1)
FILE = "/var/log/trace.json"


def book(values: TraceValues = ON, *, has_file: bool = True) -> TraceBook:
    return TraceBook(values, has_file=has_file)


def settings(of: TraceBook, model: str = "") -> dict[str, object]:
    return shown(of.sampler(model), FILE)


def picks(sampler: Sampler, requests: int) -> list[int]:
    return [number for number in range(1, requests + 1) if sampler.pick()]


def test_settings_are_shown_as_texts():
    assert settings(book(TraceValues())) == {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": FILE,
        "trace_mode": "triton",
    }


def test_one_of_so_many_requests_is_picked():
    assert picks(Sampler(TraceValues(level=("TIMESTAMPS",), rate=3)), 10) == [3, 6, 9]


def test_nothing_is_picked_where_the_level_is_off():
    assert picks(Sampler(TraceValues(rate=1)), 5) == []


def test_the_count_goes_down_with_each_picked_request_and_ends_them():
    traced = book(TraceValues(level=("TENSORS",), rate=2, count=2))
    assert picks(traced.sampler("m"), 3) == [2]
    assert settings(traced)["trace_count"] == "1"
    assert picks(traced.sampler("m"), 10) == [1]
    assert settings(traced)["trace_count"] == "0"
    assert not traced.live


def test_models_without_settings_share_the_counting():
    traced = book(TraceValues(level=("TIMESTAMPS",), rate=2))
    assert [traced.sampler(model).pick() for model in ("a", "b", "a", "b")] == [False, True, False, True]


def test_a_model_with_a_setting_counts_on_its_own():
    traced = book(TraceValues(level=("TIMESTAMPS",), rate=2, count=4))
    traced.update("m", {"trace_rate": ["3"]})
    assert picks(traced.sampler("m"), 6) == [3, 6]
    assert settings(traced, "m")["trace_count"] == "2"
    assert picks(traced.sampler("other"), 2) == [2]
    assert settings(traced)["trace_count"] == "3"


def test_what_is_not_set_for_a_model_follows_the_global_setting():
    traced = book()
    traced.update("m", {"trace_rate": ["7"]})
    traced.update("", {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": ["5"], "trace_count": ["9"]})
    assert settings(traced, "m") == {
        **settings(traced),
        "trace_level": ["TIMESTAMPS", "TENSORS"],
        "trace_rate": "7",
        "trace_count": "9",
    }


@pytest.mark.parametrize("nothing", [None, []])
def test_a_cleared_setting_falls_back_to_the_global_one_and_that_to_the_command_line(nothing):
    traced = book(TraceValues(level=("TIMESTAMPS",), rate=10, count=20))
    traced.update("", {"trace_rate": ["11"], "trace_count": ["21"]})
    traced.update("m", {"trace_rate": ["12"], "trace_count": ["22"], "trace_level": ["OFF"]})
    traced.update("m", {"trace_rate": nothing, "trace_count": nothing})
    assert settings(traced, "m") == {**settings(traced), "trace_level": ["OFF"]}
    assert (settings(traced, "m")["trace_rate"], settings(traced, "m")["trace_count"]) == ("11", "21")
    traced.update("m", {"trace_level": nothing})
    assert traced.sampler("m") is traced.sampler("other")
    assert traced.models == ()
    traced.update("", {"trace_rate": nothing, "trace_count": nothing})
    assert (settings(traced)["trace_rate"], settings(traced)["trace_count"]) == ("10", "20")


def test_a_change_of_another_setting_leaves_what_is_left_of_the_count():
    traced = book(TraceValues(level=("TIMESTAMPS",), rate=1, count=5))
    traced.update("m", {"trace_count": ["3"]})
    picks(traced.sampler("m"), 2)
    picks(traced.sampler(""), 1)
    traced.update("", {"log_frequency": ["10"]})
    traced.update("m", {"trace_rate": ["2"]})
    assert settings(traced, "m")["trace_count"] == "1"
    assert settings(traced)["trace_count"] == "4"


def test_a_call_that_changes_nothing_leaves_the_counting_alone():
    traced = book(TraceValues(level=("TIMESTAMPS",), rate=2))
    traced.sampler("").pick()
    traced.update("", {})
    traced.update("m", {})
    assert traced.sampler("").pick()
    assert traced.models == ()


def test_what_a_client_got_it_may_send_back_but_for_the_file():
    traced = book()
    got = settings(traced)
    del got["trace_file"]
    traced.update("", {name: [value] if isinstance(value, str) else value for name, value in got.items()})
    assert settings(traced) == {**got, "trace_file": FILE}


BAD = [
    ("trace_rate", ["10000000000"], "trace_rate: expected an integer from 0 to 4294967295, got '10000000000'"),
    ("trace_rate", ["-5"], "from 0 to 4294967295, got '-5'"),
    ("trace_rate", [""], "from 0 to 4294967295, got ''"),
    ("trace_rate", ["1.5"], "got '1.5'"),
    ("trace_rate", ["1_0"], "got '1_0'"),
    ("trace_rate", [" 1"], "got ' 1'"),
    ("trace_rate", ["+1"], "got '+1'"),
    ("trace_rate", ["٣"], r"got '\u0663'"),
    ("trace_rate", ["9" * 10_000], "got '9999"),
    ("trace_rate", ["1", "2"], "trace_rate: expected one value, got 2"),
    ("trace_rate", ["0"], "trace_rate: 0 is for trace_level OFF alone"),
    ("trace_count", ["-2"], "trace_count: expected an integer from -1 to 2147483647, got '-2'"),
    ("trace_count", ["2147483648"], "got '2147483648'"),
    ("log_frequency", ["4294967296"], "log_frequency: expected an integer from 0 to 4294967295, got '4294967296'"),
    ("log_frequency", ["x\n\x1b"], r"got 'x\n\x1b'"),
    ("trace_level", ["NOPE"], "trace_level: expected OFF, TIMESTAMPS or TENSORS, got 'NOPE'"),
    ("trace_level", ["TIMESTAMPS", "OFF"], "trace_level: OFF stands alone, got 2 levels"),
    ("trace_level", ["MAX"], "got 'MAX'"),
    ("trace_speed", ["1"], "unknown trace setting 'trace_speed', expected one of trace_level, trace_rate, "),
    ("t" * 10_000, ["1"], "unknown trace setting 'tttt"),
]


@pytest.mark.parametrize("model", ["", "m"])
@pytest.mark.parametrize(("name", "values", "sentence"), BAD, ids=range(len(BAD)))
def test_a_bad_value_changes_nothing_and_the_error_names_what_is_allowed(model, name, values, sentence):
    traced = book()
    before = settings(traced, model)
    with pytest.raises(InferError) as caught:
        traced.update(model, {"trace_count": ["3"], "log_frequency": ["4"], name: values})
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert sentence in caught.value.message
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300
    assert settings(traced, model) == before
    assert traced.models == ()


@pytest.mark.parametrize(
    ("name", "values"),
    [("trace_file", ["/etc/x"]), ("trace_file", [FILE]), ("trace_file", None), ("trace_mode", ["opentelemetry"])],
)
def test_neither_file_nor_mode_is_chosen_by_a_client(name, values):
    traced = book()
    with pytest.raises(InferError, match=name) as caught:
        traced.update("", {"trace_rate": ["3"], name: values})
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert settings(traced)["trace_rate"] == "1"


def test_nothing_is_traced_where_no_file_was_given():
    traced = book(TraceValues(), has_file=False)
    with pytest.raises(InferError, match="--trace-config triton,file=PATH") as caught:
        traced.update("m", {"trace_level": ["TIMESTAMPS"]})
    assert caught.value.code is ErrorCode.INVALID_ARG
    traced.update("m", {"trace_rate": ["0"]})
    assert settings(traced, "m")["trace_rate"] == "0"


def test_a_global_change_that_a_model_cannot_follow_is_refused_as_a_whole():
    traced = book(TraceValues())
    traced.update("m", {"trace_level": ["TENSORS"]})
    with pytest.raises(InferError, match=r"model 'm', .* trace_rate: 0 is for trace_level OFF alone"):
        traced.update("", {"trace_rate": ["0"]})
    assert settings(traced)["trace_rate"] == settings(traced, "m")["trace_rate"] == "1000"


LEVEL = st.one_of(st.none(), st.sampled_from([["OFF"], ["TIMESTAMPS"], ["TENSORS"], ["TIMESTAMPS", "TENSORS"], ["X"]]))
NUMBER = st.one_of(st.none(), st.integers(-2, 4).map(lambda number: [str(number)]))
CHANGES = st.fixed_dictionaries(
    {}, optional={"trace_level": LEVEL, "trace_rate": NUMBER, "trace_count": NUMBER, "log_frequency": NUMBER}
)
STEPS = st.lists(st.one_of(st.tuples(st.sampled_from(["", "a", "b"]), CHANGES), st.sampled_from(["a", "b", "c"])))


@given(STEPS)
def test_after_any_calls_each_setting_is_the_one_given_last_at_the_nearest_place(steps):
    traced = book(TraceValues(rate=1))
    given: dict[str, dict[str, object]] = {"": {}, "a": {}, "b": {}}
    for step in steps:
        if isinstance(step, str):
            traced.sampler(step).pick()
            continue
        model, changes = step
        before = {name: settings(traced, name) for name in given}
        try:
            traced.update(model, changes)
        except InferError:
            assert {name: settings(traced, name) for name in given} == before
            continue
        given[model] |= changes
        for name in ("", "a", "b"):
            expected = {"trace_level": ["OFF"], "trace_rate": "1", "log_frequency": "0"}
            for place in ("", name):
                for setting, value in given[place].items():
                    if value is not None and setting != "trace_count":
                        expected[setting] = value if setting == "trace_level" else value[0]
            assert {setting: settings(traced, name)[setting] for setting in expected} == expected
        if changes.get("trace_count"):
            assert settings(traced, model)["trace_count"] == changes["trace_count"][0]
        assert traced.live == any(traced.sampler(name).live for name in ("", "a", "b"))
