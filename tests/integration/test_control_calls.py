"""Models that load, unload and ask after others; through a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asking import ask
from asking_backend import add_asker, installed
from clients import call
from figures import wait_until
from harness import RunningServer, running
from repositories import add_identity


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_asker(repository, "asker")
    add_asker(repository, "early", first=json.dumps({"do": "infer", "model": "leaf", "values": [5]}))
    add_asker(repository, "hasty", first=json.dumps({"do": "load", "model": "leaf"}))
    add_identity(repository, "leaf")
    flags = ["--model-control-mode=explicit", "--load-model=asker", "--allow-model-upload=true"]
    with running(repository, *flags, env=installed(tmp_path_factory.mktemp("site"))) as started:
        yield started


def test_a_model_loads_another_calls_it_and_unloads_it(server: RunningServer) -> None:
    assert ask(server, do="ready", model="leaf") is False
    assert ask(server, do="load", model="leaf") == "loaded"
    assert ask(server, do="ready", model="leaf", version=1) is True
    assert ask(server, do="ready", model="leaf", version=2) is False
    assert ask(server, do="infer", model="leaf")["outputs"] == {"OUTPUT0": [1]}
    assert ask(server, do="unload", model="leaf") == "unloaded"
    assert ask(server, do="ready", model="leaf") is False
    assert ask(server, do="infer", model="leaf")["error"] in {"NOT_FOUND", "UNAVAILABLE"}


def test_a_model_may_be_loaded_with_another_configuration(server: RunningServer) -> None:
    config = json.dumps({"backend": "identity", "max_batch_size": 8, "parameters": {"fail": {"string_value": "ours"}}})
    assert ask(server, do="load", model="leaf", config=config)["error"] == "INVALID_ARG"
    tensors = {
        kind: [{"name": name, "data_type": "TYPE_FP32", "dims": [-1]}]
        for kind, name in (("input", "INPUT0"), ("output", "OUTPUT0"))
    }
    parameters = {name: {"string_value": value} for name, value in (("fail", "ours"), ("allow_misbehaviour", "true"))}
    config = json.dumps({"backend": "identity", "max_batch_size": 8, **tensors, "parameters": parameters})
    assert ask(server, do="load", model="leaf", config=config) == "loaded"
    assert ask(server, do="infer", model="leaf")["message"] == "ours"
    ask(server, do="unload", model="leaf")


def test_a_model_may_be_loaded_from_files_that_come_with_the_call(server: RunningServer) -> None:
    files = {"1/weights.bin": "x" * 100_000, "file:1/empty": ""}
    config = json.dumps(
        {
            "backend": "identity",
            "max_batch_size": 8,
            "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
            "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
        }
    )
    assert ask(server, do="load", model="brought", config=config, files=files) == "loaded"
    assert ask(server, do="infer", model="brought")["outputs"] == {"OUTPUT0": [1]}
    ask(server, do="unload", model="brought")


def test_loading_what_is_not_there_fails_as_it_does_for_clients(server: RunningServer) -> None:
    assert ask(server, do="load", model="nonsuch")["error"] == "NOT_FOUND"
    assert ask(server, do="load", model="../leaf")["error"] == "INVALID_ARG"


def test_a_model_may_call_others_while_it_is_loaded_itself(server: RunningServer) -> None:
    ask(server, do="load", model="leaf")
    assert ask(server, do="load", model="early") == "loaded"
    assert ask(server, of="early", do="first")["outputs"] == {"OUTPUT0": [5]}
    ask(server, do="unload", model="early")
    ask(server, do="unload", model="leaf")


def test_a_model_cannot_load_others_while_it_is_loaded_itself(server: RunningServer) -> None:
    """Loads wait for a turn, so that models which load one another would all wait for ever."""
    assert ask(server, do="load", model="hasty") == "loaded"
    told = ask(server, of="hasty", do="first")
    assert told["error"] == "UNAVAILABLE"
    assert "once it is loaded itself" in told["message"]
    ask(server, do="unload", model="hasty")


def test_a_model_may_load_itself_anew(server: RunningServer) -> None:
    ask(server, do="load", model="leaf")
    ask(server, do="load", model="early")
    before = ask(server, of="early", do="pid")
    config = call(server, "/v2/models/early/config")[1]
    config["parameters"] = {}
    assert ask(server, of="early", do="load", model="early", config=json.dumps(config)) == "loaded"
    wait_until("the old process is gone", lambda: not psutil.pid_exists(before))
    assert ask(server, of="early", do="first") is None


def test_where_models_are_not_loaded_by_calls_a_model_cannot_do_so_either(tmp_path: Path) -> None:
    add_asker(tmp_path / "models", "asker")
    with running(tmp_path / "models", env=installed(tmp_path / "site")) as server:
        told = ask(server, do="load", model="asker")
        assert told["error"] == "UNAVAILABLE"
        assert "'explicit'" in told["message"]
        assert ask(server, do="ready", model="asker") is True
