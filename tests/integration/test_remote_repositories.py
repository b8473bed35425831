"""Models served out of a real S3 server: taken, followed, kept through the store's absence, never in halves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import boto3
import numpy as np
import pytest
from moto.server import ThreadedMotoServer
from onnx import helper, numpy_helper

import onnx_models
from figures import index
from harness import running

KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}
CONFIG = b"version_policy { latest { num_versions: 2 } }"
POLL = ("--model-control-mode=poll", "--repository-poll-secs=1")


class Bucket:
    """A bucket of a local S3 server."""

    def __init__(self):
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, self._port = self._server.get_host_and_port()
        self.client = boto3.client(
            "s3", endpoint_url=f"http://{host}:{self._port}", aws_access_key_id="test", aws_secret_access_key="test",
            region_name="us-east-1",
        )  # fmt: skip
        self._name = f"bucket-{self._port}"  # what one server of the process has, all have
        self.client.create_bucket(Bucket=self._name)
        self.address = f"s3://http://{host}:{self._port}/{self._name}/models"

    def stop(self):
        self._server.stop()

    def put(self, path, content):
        self.client.put_object(Bucket=self._name, Key=f"models/{path}", Body=content)

    def delete(self, path):
        self.client.delete_object(Bucket=self._name, Key=f"models/{path}")

    def clear(self):
        for entry in self.client.list_objects_v2(Bucket=self._name).get("Contents", []):
            self.client.delete_object(Bucket=self._name, Key=entry["Key"])

    def put_version(self, model, version, number):
        self.put(f"{model}/{version}/model.onnx", adder(number))


def adder(number):
    """Return the bytes of OUTPUT0 = INPUT0 + number."""
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        onnx_models.save(
            Path(file.name),
            [helper.make_node("Add", ["INPUT0", "number"], ["OUTPUT0"])],
            [onnx_models.tensor("INPUT0", ("batch", 1))],
            [onnx_models.tensor("OUTPUT0", ("batch", 1))],
            [numpy_helper.from_array(np.array(number, np.float32), "number")],
        )
        return Path(file.name).read_bytes()


@pytest.fixture(scope="module")
def store():
    bucket = Bucket()
    yield bucket
    bucket.stop()


@pytest.fixture
def bucket(store):
    store.clear()
    return store


def ask(server, model="m", value=1.0):
    body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [value]}]}).encode()
    with urllib.request.urlopen(f"http://{server.http}/v2/models/{model}/infer", body, timeout=20) as answer:
        found = json.loads(answer.read())
    return found["outputs"][0]["data"][0], found["model_version"]


def wait_for(server, expected, timeout=40):
    deadline = time.monotonic() + timeout
    while True:
        try:
            found = ask(server)
        except urllib.error.HTTPError as error:
            found = error.code
        if found == expected:
            return
        assert time.monotonic() < deadline, (found, server.log())
        time.sleep(0.1)


def serving(bucket, tmp_path, *flags, ready=True):
    cache = f"--model-repository-cache={tmp_path / 'cache'}"
    return running(bucket.address, cache, "--model-repository-settle-secs=0.5", *flags, ready=ready, env=KEYS)


def test_models_of_a_bucket_are_served_and_followed(bucket, tmp_path):
    bucket.put("m/config.pbtxt", CONFIG)
    bucket.put_version("m", 1, 10)
    with serving(bucket, tmp_path, *POLL) as server:
        assert ask(server) == (11.0, "1")
        first = [entry for entry in server.lines if "loaded model m" in entry]
        bucket.put_version("m", 2, 20)
        wait_for(server, (21.0, "2"))
        loaded = [entry for entry in server.lines if "loaded model m" in entry]
        assert len(loaded) == len(first) + 1, "version 1, which did not change, was loaded again"
        bucket.put_version("m", 2, 30)
        wait_for(server, (31.0, "2"))
        bucket.delete("m/2/model.onnx")
        wait_for(server, (11.0, "1"))
        assert "2 files" in server.log()


def test_what_is_uploaded_bit_by_bit_is_not_taken_in_halves(bucket, tmp_path):
    bucket.put("m/config.pbtxt", CONFIG)
    bucket.put_version("m", 1, 10)
    with serving(bucket, tmp_path, *POLL) as server:
        bucket.put("m/.uploading", b"")
        bucket.put("m/2/notes.txt", b"the model comes later")
        since = len(server.lines)
        looked = time.monotonic()
        while time.monotonic() < looked + 4:  # three looks and more
            assert ask(server) == (11.0, "1")
        assert not [line for line in server.lines[since:] if "version 2" in line]
        bucket.put_version("m", 2, 20)
        bucket.delete("m/.uploading")
        wait_for(server, (21.0, "2"))


def test_a_server_outlives_its_store_and_starts_without_it(tmp_path):
    bucket = Bucket()
    bucket.put("m/config.pbtxt", CONFIG)
    bucket.put_version("m", 1, 10)
    with serving(bucket, tmp_path, *POLL) as server:
        bucket.stop()
        server.wait_for_log("cannot be listed", 60)
        assert ask(server) == (11.0, "1")
        with serving(bucket, tmp_path) as second:
            assert ask(second) == (11.0, "1")
            assert "what was fetched before is served" in second.log()


def test_a_load_call_takes_what_is_there_now(bucket, tmp_path):
    bucket.put("m/config.pbtxt", CONFIG)
    bucket.put_version("m", 1, 10)
    bucket.put_version("other", 1, 1)
    with serving(bucket, tmp_path, "--model-control-mode=explicit", ready=False) as server:
        server.wait_for_log("Started HTTPService")
        urllib.request.urlopen(f"http://{server.http}/v2/repository/models/m/load", b"{}", timeout=60).read()
        assert ask(server) == (11.0, "1")
        bucket.put_version("m", 2, 20)
        urllib.request.urlopen(f"http://{server.http}/v2/repository/models/m/load", b"{}", timeout=60).read()
        assert ask(server) == (21.0, "2")
        assert {version: state for version, (state, _) in index(server, "m").items()} == {"1": "READY", "2": "READY"}


def test_a_store_that_is_not_there_is_named_at_the_start(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "serve", "--model-repository=s3://http://127.0.0.1:9/bucket/models",
         f"--model-repository-cache={tmp_path}", "--http-port=0", "--grpc-port=0", "--metrics-port=0"],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **KEYS},
    )  # fmt: skip
    assert done.returncode == 1
    assert "s3://http://127.0.0.1:9/bucket/models cannot be listed" in done.stdout + done.stderr
