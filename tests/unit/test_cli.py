"""The headrace command: its subcommands, its help, and how it tells mistakes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace import __version__
from headrace.cli import main
from headrace.flags import SERVED

HEAVY = ("numpy", "aiohttp", "grpc", "google.protobuf", "opentelemetry", "prometheus_client", "yaml", "asyncio")


def test_version_is_printed(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"headrace {__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["check", "--help"], ["infer", "--help"]])
def test_help_goes_to_stdout_with_status_0(capsys, words):
    assert main(words) == 0
    output = capsys.readouterr()
    assert output.out.startswith("usage: headrace")
    assert output.err == ""


def test_no_words_at_all_is_a_mistake_that_shows_the_commands(capsys):
    assert main([]) == 1
    assert "serve    serve the models" in capsys.readouterr().err


def test_help_of_serve_lists_every_served_option(capsys):
    main(["serve", "--help"])
    text = capsys.readouterr().out
    assert [flag.name for flag in SERVED if f"  --{flag.name} " not in text] == []


def test_an_unknown_option_is_named_with_a_suggestion_and_status_1(capsys):
    assert main(["serve", "--model-repositry=/tmp"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("usage: headrace serve")
    assert "unknown option --model-repositry; did you mean --model-repository?" in error


def test_an_unknown_command_is_named_with_a_suggestion(capsys):
    assert main(["sreve"]) == 1
    assert "unknown command 'sreve'; did you mean serve?" in capsys.readouterr().err


def test_options_before_a_command_are_explained(capsys):
    assert main(["--model-repository=/tmp"]) == 1
    assert "options follow a command: headrace serve" in capsys.readouterr().err


def test_check_takes_its_repositories_as_words(capsys):
    assert main(["check", "/does/not/exist", "--print-config"]) == 1
    assert "'/does/not/exist' is no directory" in capsys.readouterr().err


def test_infer_without_a_model_is_a_mistake_with_status_1(capsys):
    assert main(["infer"]) == 1
    assert "required: model" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["serve", "--nope"], ["version"]])
def test_help_and_mistakes_import_nothing_heavy(words):
    code = f"""
import sys
from headrace.cli import main
main({words!r})
print("imported:", [name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "imported: []"


def test_a_reader_that_stops_reading_makes_no_traceback():
    command = [sys.executable, "-c", "import sys; from headrace.cli import main; sys.exit(main(['serve', '--help']))"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={"PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1
    assert error == ""
