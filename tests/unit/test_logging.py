"""Logging: one record a line, harmless text, levels, formats, and where it goes."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace.config import LogSettings
from headrace.observability.logging import LONGEST_MESSAGE, LogControl, configure, escape, reset
from headrace.observability.tables import models_table
from headrace.types import IndexEntry
from headrace_protocol.errors import ErrorCode, InferError

PLAIN = LogSettings(verbose=0, info=True, warning=True, error=True, format="default", file="")
LOG = logging.getLogger("headrace.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    reset()


def test_information_goes_to_stdout_and_the_rest_to_stderr(capsys):
    configure(PLAIN)
    LOG.info("one")
    LOG.warning("two")
    LOG.error("three")
    output = capsys.readouterr()
    assert re.fullmatch(r"I\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ headrace\.test\] one\n", output.out)
    first, second = output.err.splitlines()
    assert first[0] == "W"
    assert first.endswith("] two")
    assert second[0] == "E"
    assert second.endswith("] three")


def test_iso8601_begins_with_the_time_in_utc(capsys):
    configure(replace(PLAIN, format="ISO8601"))
    LOG.info("one")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I \d+ headrace\.test\] one\n", capsys.readouterr().out)


def test_json_is_one_object_a_line(capsys):
    configure(replace(PLAIN, format="json"))
    LOG.info("one\ntwo \x1b[31m \udc80 %s", "ü")
    (line,) = capsys.readouterr().out.splitlines()
    entry = json.loads(line)
    assert entry["message"] == "one\ntwo \x1b[31m \udc80 ü"
    assert entry["level"] == "info"
    assert entry["logger"] == "headrace.test"
    assert line.isascii()
    assert line.isprintable()


@pytest.mark.parametrize(
    ("level", "field"), [(logging.INFO, "info"), (logging.WARNING, "warning"), (logging.ERROR, "error")]
)
def test_each_level_can_be_switched_off_alone(capsys, level, field):
    configure(replace(PLAIN, **{field: False}))
    for each in (logging.INFO, logging.WARNING, logging.ERROR):
        LOG.log(each, "at %d", each)
    output = capsys.readouterr()
    written = {int(line.rsplit(" ", 1)[1]) for line in (output.out + output.err).splitlines()}
    assert written == {logging.INFO, logging.WARNING, logging.ERROR} - {level}


def test_verbose_opens_lower_levels(capsys):
    configure(PLAIN)
    LOG.debug("hidden")
    configure(replace(PLAIN, verbose=1))
    LOG.debug("shown")
    LOG.log(9, "hidden")
    configure(replace(PLAIN, verbose=2))
    LOG.log(9, "shown too")
    assert [line.rsplit("] ")[1] for line in capsys.readouterr().out.splitlines()] == ["shown", "shown too"]


def test_configuring_again_replaces_and_never_doubles(capsys):
    configure(PLAIN)
    configure(PLAIN)
    LOG.info("once")
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_file_takes_everything_and_keeps_what_it_held(tmp_path, capsys):
    file = tmp_path / "server.log"
    file.write_text("before\n")
    configure(replace(PLAIN, file=str(file)))
    LOG.info("one \udc80")
    LOG.error("two")
    reset()
    assert [line.rsplit("] ")[-1] for line in file.read_text().splitlines()] == ["before", "one \\udc80", "two"]
    assert capsys.readouterr() == ("", "")


def test_a_file_that_cannot_be_opened_leaves_logging_as_it_was(capsys):
    configure(PLAIN)
    with pytest.raises(OSError, match="/does/not/exist"):
        configure(replace(PLAIN, file="/does/not/exist/server.log"))
    LOG.info("still here")
    assert "still here" in capsys.readouterr().out


@pytest.mark.parametrize(
    "hostile", ["a\nI0101 forged", "a\rb", "a\x1b[2Jb", "a\0b", "a\u2028b", "a\u202eb", "a\x9bb", "a\x7fb"]
)
def test_text_from_clients_cannot_end_a_line_or_steer_a_terminal(capsys, hostile):
    configure(PLAIN)
    LOG.info("request id %s", hostile)
    output = capsys.readouterr().out
    assert output.endswith("\n")
    assert output[:-1].isprintable()


def test_other_scripts_are_left_readable():
    assert escape("größe 模型 🙂") == "größe 模型 🙂"


def test_a_long_message_is_cut_and_says_so(capsys):
    configure(PLAIN)
    LOG.info("x" * (LONGEST_MESSAGE + 100))
    line = capsys.readouterr().out
    assert line.endswith("x... (100 characters more)\n")
    assert len(line) < LONGEST_MESSAGE + 100


def test_an_exception_stays_on_the_records_line(capsys):
    configure(PLAIN)
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        LOG.exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "failed [ValueError: bad\\nvalue at test_logging.py:" in line


def test_json_keeps_the_whole_traceback(capsys):
    configure(replace(PLAIN, format="json"))
    try:
        raise ValueError("bad")
    except ValueError:
        LOG.exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["exception"].splitlines()[-1] == "ValueError: bad"


def test_what_libraries_warn_of_is_logged_too(capsys):
    configure(PLAIN)
    logging.getLogger("asyncio").error("Task exception was never retrieved")
    logging.getLogger("asyncio").info("chatter")
    output = capsys.readouterr()
    assert output.err.endswith("asyncio] Task exception was never retrieved\n")
    assert output.out == ""


def test_the_table_of_models_lines_up_and_tells_reasons():
    table = models_table(
        [
            IndexEntry("simple", "1", "READY"),
            IndexEntry("broken", "2", "UNAVAILABLE", "no such\nfile"),
            IndexEntry("idle"),
        ]
    )
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[1].strip("|").split("|")] == ["Model", "Version", "State", "Reason"]
    assert [cell.strip() for cell in lines[4].strip("|").split("|")] == ["broken", "2", "UNAVAILABLE", "no such\\nfile"]
    assert [cell.strip() for cell in lines[5].strip("|").split("|")] == ["idle", "-", "NOT LOADED", "-"]


def test_the_table_of_no_models_says_so():
    assert "no models" in models_table([])


# --- changes while the server runs -----------------------------------------------------------------------------------


def configured(settings: LogSettings = PLAIN) -> LogControl:
    configure(settings)
    return LogControl(settings)


ALL = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


def test_the_settings_are_told_by_the_names_of_the_protocol():
    control = configured()
    assert control.get() == ALL


@pytest.mark.parametrize(
    ("level", "name"),
    [(logging.INFO, "log_info"), (logging.WARNING, "log_warning"), (logging.ERROR, "log_error")],
)
def test_a_level_is_switched_off_and_on_again_by_a_call(capsys, level, name):
    control = configured()
    assert control.update({name: False}) == {**ALL, name: False}
    LOG.log(level, "hidden")
    assert control.update({name: True}) == ALL
    LOG.log(level, "shown")
    output = "".join(capsys.readouterr())
    assert "hidden" not in output
    assert "shown" in output


def test_what_a_higher_verbosity_shows_changes_with_the_call(capsys):
    control = configured()
    for verbose, expected in [(0, []), (1, ["details"]), (2, ["details", "more details"]), (0, [])]:
        control.update({"log_verbose_level": verbose})
        capsys.readouterr()
        LOG.debug("details")
        LOG.log(logging.DEBUG - 1, "more details")
        assert [line.rsplit("] ")[1] for line in capsys.readouterr().out.splitlines()] == expected


def test_the_format_changes_from_the_next_line_on(capsys):
    control = configured()
    control.update({"log_format": "json"})
    LOG.warning("one")
    control.update({"log_format": "ISO8601"})
    LOG.warning("two")
    control.update({"log_format": "default"})
    LOG.warning("three")
    first, second, third = capsys.readouterr().err.splitlines()
    assert json.loads(first)["message"] == "one"
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ W ", second)
    assert re.match(r"W\d{4} ", third)


def test_a_file_goes_on_through_a_change(tmp_path):
    settings = replace(PLAIN, file=str(tmp_path / "server.log"))
    control = configured(settings)
    LOG.info("one")
    control.update({"log_info": False})
    LOG.info("two")
    LOG.warning("three")
    reset()
    lines = (tmp_path / "server.log").read_text().splitlines()
    assert [line.rsplit("] ")[-1] for line in lines] == [
        "one",
        "log settings are changed by a call: log_info=False",
        "three",
    ]


def test_a_change_is_told_also_where_it_is_what_shows_it(capsys):
    control = configured()
    control.update({"log_info": False})
    control.update({"log_warning": False})
    control.update({"log_info": True})
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(": ")[-1] for line in lines] == ["log_info=False", "log_info=True"]


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("log_info", 1, "log_info: expected true or false, got 1"),
        ("log_warning", "true", "log_warning: expected true or false, got 'true'"),
        ("log_error", None, "log_error: expected true or false, got None"),
        ("log_verbose_level", -1, "log_verbose_level: expected an integer from 0 to 9, got -1"),
        ("log_verbose_level", 10, "log_verbose_level: expected an integer from 0 to 9, got 10"),
        ("log_verbose_level", 2**70, "got a number of more than 64 bits"),
        pytest.param("log_verbose_level", 10**5000, "got a number of more than 64 bits", id="huge"),
        ("log_verbose_level", True, "got True"),
        ("log_verbose_level", 1.0, "got 1.0"),
        ("log_format", "iso8601", "log_format: expected one of default, ISO8601, json, got 'iso8601'"),
        ("log_format", ["default"], "got ['default']"),
        ("log_format", "x\ny" + "z" * 10_000, "got 'x\\ny"),
        ("log_level", 1, "unknown log setting 'log_level', expected one of log_info, log_warning, log_error, "),
        ("l" * 10_000, 1, "unknown log setting 'llll"),
    ],
)
def test_a_bad_value_changes_nothing_and_the_error_names_what_is_allowed(name, value, sentence):
    control = configured()
    with pytest.raises(InferError) as caught:
        control.update({"log_error": False, "log_verbose_level": 3, name: value})
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert sentence in caught.value.message
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300
    assert control.get() == ALL
    assert logging.getLogger("headrace").level == logging.INFO


@pytest.mark.parametrize("file", ["/tmp/x.sh", ""])
def test_no_call_chooses_where_the_log_goes(file):
    control = configured()
    with pytest.raises(InferError, match="log_file") as caught:
        control.update({"log_info": False, "log_file": file})
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert control.get() == ALL
