"""Warm-up samples are run by every instance before a model serves, are counted nowhere, and fail the load where they fail."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from clients import call, infer
from harness import RunningServer, running
from repositories import add_decoupled, add_identity, add_onnx
from sequence_models import DIRECT, accumulator, accumulator_config, add, oldest

TENSOR = ("INPUT0", "FP32", [1, 1], [1])


def sample(name: str = "s", data: str = "zero_data: true", batch_size: int = 1, dims: str = "4", **more: object) -> str:
    """Return one model_warmup entry for the input of an identity model."""
    fields = " ".join(f"{key}: {value}" for key, value in more.items())
    given = f'{{ key: "INPUT0" value {{ data_type: TYPE_FP32 dims: [ {dims} ] {data} }} }}'
    return f'model_warmup [ {{ name: "{name}" batch_size: {batch_size} inputs {given} {fields} }} ]'


def load(server: RunningServer, name: str = "m") -> tuple[int, str]:
    status, body = call(server, f"/v2/repository/models/{name}/load", {})
    return status, (body or {}).get("error", "")


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(repository):
    with running(repository, "--model-control-mode=explicit", "--model-load-timeout-secs=3") as started:
        yield started


def failure(server: RunningServer, repository: Path, name: str, extra: str, **config: object) -> str:
    """Return the reason for which a model with this configuration fails to load."""
    add_identity(repository, name, extra=extra, **config)
    status, error = load(server, name)
    assert status == 400, error
    return error


def test_every_instance_runs_every_sample_before_the_model_serves(server, repository):
    """The model takes 100 ms: two instances, two samples and three runs of the second."""
    extra = f"{sample('one')} {sample('two', batch_size=2, count=3)} instance_group {{ count: 2 }}"
    add_identity(repository, "counted", extra=extra, execute_delay_ms="100")
    started = time.monotonic()
    assert load(server, "counted")[0] == 200
    assert time.monotonic() - started >= 0.8
    statistics = call(server, "/v2/models/counted/stats")[1]["model_stats"][0]
    assert (statistics["execution_count"], statistics["inference_count"]) == (0, 0)
    assert statistics["inference_stats"]["success"]["count"] == 0
    assert 'nv_inference_request_success{model="counted",version="1"} 0.0' in server.metrics()
    assert infer(server, "counted", TENSOR, parameters={})[0] == 200


def test_a_model_that_fails_in_its_warm_up_is_not_loaded_and_says_why(server, repository):
    error = failure(server, repository, "broken", sample("first"), fail="the model is cold")
    assert "warm-up sample 'first' failed in instance 'broken_0': the model is cold" in error
    assert call(server, "/v2/models/broken/ready")[0] == 503


def test_a_process_that_dies_in_its_warm_up_fails_the_load(server, repository):
    error = failure(server, repository, "crash", sample("deadly"), crash="true")
    assert "warm-up sample 'deadly' failed" in error
    assert "the backend process" in error


def test_a_warm_up_that_never_ends_is_cut_off_by_the_time_for_a_load(server, repository):
    started = time.monotonic()
    error = failure(server, repository, "endless", sample("endless"), hang="forever")
    assert "warm-up sample 'endless' was not over in instance 'endless_0'" in error
    assert time.monotonic() - started < 15


def test_countless_runs_are_cut_off_too(server, repository):
    error = failure(server, repository, "countless", sample(count=4294967295))
    assert "was not over" in error


def test_a_sample_of_batch_size_0_is_left_out(server, repository):
    add_identity(repository, "empty", extra=sample(batch_size=0), fail="never run")
    assert load(server, "empty")[0] == 200


def test_data_come_from_a_file_of_the_folder_warmup(server, repository):
    folder = add_identity(repository, "filed", extra=sample(data='input_data_file: "raw"'))
    (folder / "warmup").mkdir()
    data = folder / "warmup" / "raw"
    data.write_bytes(np.ones(3, np.float32).tobytes())
    status, error = load(server, "filed")
    assert status == 400
    assert "warm-up sample 's': input 'INPUT0': 16 bytes are needed, the file 'raw' has 12" in error
    data.write_bytes(np.ones(4, np.float32).tobytes())
    assert load(server, "filed") == (200, "")


def test_strings_come_from_files_as_on_the_wire(server, repository):
    text = sample(data='input_data_file: "raw"', dims="2").replace("TYPE_FP32", "TYPE_STRING")
    folder = add_identity(repository, "texts", extra=text, datatype="STRING")
    (folder / "warmup").mkdir()
    (folder / "warmup" / "raw").write_bytes(b"\2\0\0\0ab\0\0\0\0")
    assert load(server, "texts") == (200, "")
    (folder / "warmup" / "raw").write_bytes(b"\2\0\0\0ab\x09\0\0\0")
    assert "input 'INPUT0'" in load(server, "texts")[1]


@pytest.mark.parametrize("kind", ["BOOL", "UINT8", "INT64", "FP16", "BF16", "FP64", "STRING"])
def test_random_data_are_of_any_datatype(server, repository, kind):
    extra = sample(data="random_data: true", batch_size=2).replace("TYPE_FP32", f"TYPE_{kind}")
    add_identity(repository, f"random_{kind}", extra=extra, datatype=kind)
    assert load(server, f"random_{kind}") == (200, "")


def test_a_decoupled_model_is_waited_for_to_its_last_response(server, repository):
    folder = add_decoupled(repository, "stream", responses="3", response_delay_ms="100")
    with (folder / "config.pbtxt").open("a") as config:
        config.write("\n" + sample())
    started = time.monotonic()
    assert load(server, "stream") == (200, "")
    assert time.monotonic() - started >= 0.2


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (sample(name=""), "model_warmup[0].name: the sample has no name"),
        (sample(batch_size=9), "model_warmup[0].batch_size: expected at most 8, got 9"),
        (sample(dims="-1"), "model_warmup[0].inputs.INPUT0.dims[0]: expected a size"),
        (sample(data=""), "model_warmup[0].inputs.INPUT0: the input has no data"),
        (sample().replace("data_type: TYPE_FP32 ", ""), "model_warmup[0].inputs.INPUT0.data_type: missing"),
        (sample(dims="1048576, 1048576, 2"), "model_warmup[0].inputs.INPUT0.dims: expected at most"),
        (sample(dims="1048576, 1048576"), "bytes are more than the"),
        ('model_warmup [ { name: "s" batch_size: 1 } ]', "model_warmup[0].inputs: the sample has no inputs"),
        (sample(data='input_data_file: "no"'), "there is no file 'no' in the model's folder 'warmup'"),
        (sample(data='input_data_file: "../config.pbtxt"'), "lies outside the model's folder 'warmup'"),
        (sample(data='input_data_file: "/etc/passwd"'), "lies outside the model's folder 'warmup'"),
        (sample().replace("TYPE_FP32", "TYPE_INT8"), "warm-up sample 's': input 'INPUT0' has the datatype INT8"),
        (sample(dims="2, 2"), "warm-up sample 's': input 'INPUT0' has the shape [1, 2, 2]"),
        (sample().replace("INPUT0", "INPUT7"), "warm-up sample 's': model"),
    ],
    ids=str,
)
def test_a_sample_that_cannot_be_is_refused(server, repository, extra, problem, request):
    assert problem in failure(server, repository, f"wrong_{request.node.callspec.indices['extra']}", extra)


def test_an_instance_that_is_started_again_is_warmed_again(tmp_path):
    """The process that takes the place of one that was killed is not ready before its warm-up has run."""
    add_identity(tmp_path, "m", extra=sample(), execute_delay_ms="500")
    with running(tmp_path) as server:
        (process,) = server.backends()
        os.kill(process.pid, signal.SIGKILL)
        server.wait_status("/v2/models/m/ready", 503)
        assert server.wait_status("/v2/models/m/ready", 200) > 0.4


def controls(name: str, batch_size: int, **given: str) -> str:
    """Return a model_warmup entry for the accumulator."""
    tensors = {"INPUT0": ("INT32", "zero_data: true"), **{key: ("INT32", value) for key, value in given.items()}}
    inputs = " ".join(
        f'inputs {{ key: "{key}" value {{ data_type: TYPE_{kind} dims: [ 1 ] {data} }} }}'
        for key, (kind, data) in tensors.items()
    )
    return f'model_warmup [ {{ name: "{name}" batch_size: {batch_size} {inputs} }} ]'


@pytest.mark.parametrize("strategy", [DIRECT, oldest(4)], ids=["direct", "oldest"])
def test_a_model_that_takes_sequences_is_warmed_up_and_no_state_is_left_of_it(tmp_path, strategy):
    """Rows are sequences of their own, with the controls that the sample gives, and the first sequences find nothing."""
    samples = f"{controls('one', 1)} {controls('four', 4)} {controls('going on', 2, START='zero_data: true')}"
    config = accumulator_config(strategy, extra=samples)
    add_onnx(tmp_path, "sums", accumulator, config=config)
    with running(tmp_path) as server:
        assert [add(server, "sums", 7, 5, start=True), add(server, "sums", 7, 6, end=True)] == [(200, 5), (200, 11)]
        assert call(server, "/v2/models/sums/stats")[1]["model_stats"][0]["execution_count"] == 2


def test_a_sample_does_not_give_what_the_server_makes(tmp_path):
    config = accumulator_config(extra=controls("s", 1, STATE_IN="zero_data: true"))
    add_onnx(tmp_path, "sums", accumulator, config=config)
    with running(tmp_path, "--model-control-mode=explicit") as server:
        assert "warm-up sample 's': model 'sums' has no input 'STATE_IN'" in load(server, "sums")[1]
