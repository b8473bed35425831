"""TensorRT models behind a real server, on two stand-ins for GPUs (fake_gpu on the backend processes' PYTHONPATH)."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as client
from tritonclient.utils import InferenceServerException

from harness import RunningServer, running
from tensorrt_engines import FAKE_GPU, INSTALLED, add_model, add_sub, engine, profile, tensor

ENV = {"PYTHONPATH": str(FAKE_GPU)}
GPUS = "--gpu-count=2"


def inputs_of(**arrays: np.ndarray) -> list[client.InferInput]:
    inputs = []
    for name, array in arrays.items():
        datatype = {"float32": "FP32", "int32": "INT32"}[array.dtype.name]
        given = client.InferInput(name, list(array.shape), datatype)
        given.set_data_from_numpy(array)
        inputs.append(given)
    return inputs


def ask(server: RunningServer, model: str, **arrays: np.ndarray) -> client.InferResult:
    with client.InferenceServerClient(server.http) as asker:
        return asker.infer(model, inputs_of(**arrays))


def config_of(server: RunningServer, model: str) -> dict:
    with client.InferenceServerClient(server.http) as asker:
        return asker.get_model_config(model)


def rows(count: int, start: int = 0) -> dict[str, np.ndarray]:
    first = np.arange(start, start + count * 4, dtype=np.float32).reshape(count, 4)
    return {"INPUT0": first, "INPUT1": np.full((count, 4), 2, np.float32)}


def test_a_folder_with_an_engine_alone_is_served_on_every_gpu(tmp_path: Path) -> None:
    add_model(tmp_path, "plain", add_sub(8))
    tensors = [tensor("INPUT0", (-1, 4)), tensor("OUTPUT0", (-1, 1), "INT64")]
    add_model(tmp_path, "where", engine("device", tensors, profile(INPUT0=((1, 4), (1, 4), (1, 4)))))
    with running(tmp_path, GPUS, env=ENV) as server:
        config = config_of(server, "plain")
        assert (config["platform"], config["backend"]) == ("tensorrt_plan", "tensorrt")
        assert config["max_batch_size"] == 8
        assert config["dynamic_batching"]["preferred_batch_size"] == [8]
        assert [(group["kind"], group["gpus"]) for group in config["instance_group"]] == [("KIND_GPU", [0, 1])]
        assert [(given["name"], given["dims"]) for given in config["input"]] == [("INPUT0", [4]), ("INPUT1", [4])]
        answer = ask(server, "plain", **rows(3))
        assert np.array_equal(answer.as_numpy("OUTPUT0"), rows(3)["INPUT0"] + 2)

        def where(_: int) -> int:
            return int(ask(server, "where", INPUT0=np.ones((1, 4), np.float32)).as_numpy("OUTPUT0")[0, 0]) % 10000

        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(where, range(100))) == {0, 1000}


def test_requests_of_one_batch_each_get_their_rows(tmp_path: Path) -> None:
    config = (
        'name: "m" max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 50000 } '
        "instance_group { gpus: 1 count: 2 } optimization { cuda { graphs: true } }"
    )
    add_model(tmp_path, "m", add_sub(8), config)
    with running(tmp_path, GPUS, env=ENV) as server:

        def one(number: int) -> bool:
            inputs = rows(1 + number % 3, start=number)
            return np.array_equal(ask(server, "m", **inputs).as_numpy("OUTPUT1"), inputs["INPUT0"] - 2)

        with ThreadPoolExecutor(16) as threads:
            assert all(threads.map(one, range(120)))
        with client.InferenceServerClient(server.http) as asker:
            (statistics,) = asker.get_inference_statistics("m")["model_stats"]
        assert statistics["execution_count"] < statistics["inference_count"]


def test_values_of_shape_tensors_keep_requests_apart(tmp_path: Path) -> None:
    tensors = [
        tensor("INPUT0", (-1, -1)),
        tensor("SHAPE", (2,), "INT32", shape_tensor=True),
        tensor("OUTPUT0", (-1, -1)),
    ]
    shapes = profile(INPUT0=((1, 1), (2, 2), (8, 8)), SHAPE=((2,), (2,), (2,)), SHAPE_values=((1, 1), (4, 4), (8, 8)))
    add_model(tmp_path, "m", engine("fill", tensors, shapes))
    with running(tmp_path, GPUS, env=ENV) as server:
        (_, shape) = config_of(server, "m")["input"]
        assert (shape["dims"], shape["is_shape_tensor"]) == ([1], True)

        def one(number: int) -> tuple[int, ...]:
            given = {"INPUT0": np.full((1, 2), number, np.float32), "SHAPE": np.array([1 + number % 4], np.int32)}
            output = ask(server, "m", **given).as_numpy("OUTPUT0")
            return output.shape

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(one, range(40))) == [(1, 1 + number % 4) for number in range(40)]
        with pytest.raises(InferenceServerException, match=r"'SHAPE' has the values \[1, 9\]"):
            ask(server, "m", INPUT0=np.ones((1, 2), np.float32), SHAPE=np.array([9], np.int32))


def test_a_process_that_lost_its_gpu_is_replaced(tmp_path: Path) -> None:
    tensors = [tensor("INPUT0", (-1, 4)), tensor("OUTPUT0", (-1, 4))]
    add_model(
        tmp_path,
        "m",
        engine("fault", tensors, profile(INPUT0=((1, 4), (1, 4), (8, 4)))),
        "instance_group { gpus: 0 }",
    )
    with running(tmp_path, GPUS, env=ENV) as server:
        good = np.ones((1, 4), np.float32)
        for _ in range(2):
            with pytest.raises(InferenceServerException, match="backend process failed"):
                ask(server, "m", INPUT0=-good)
            assert np.array_equal(ask(server, "m", INPUT0=good).as_numpy("OUTPUT0"), good)
        assert "an illegal memory access" in server.log()


def test_a_group_of_cpu_instances_is_refused_with_what_the_engine_is(tmp_path: Path) -> None:
    add_model(tmp_path, "m", add_sub(8, version="10.3.0.26"))
    argv = [sys.executable, "-m", "headrace", "check", str(tmp_path), "--gpu-count=0"]
    checked = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, **ENV})
    assert checked.returncode == 1, checked
    assert "run on GPUs alone" in checked.stdout
    assert "built by TensorRT 10.3.0.26" in checked.stdout


def test_check_explains_an_engine_of_another_version(tmp_path: Path) -> None:
    add_model(tmp_path, "old", add_sub(8, version="10.3.0.26"))
    add_model(tmp_path, "good", add_sub(8))
    argv = [sys.executable, "-m", "headrace", "check", str(tmp_path), GPUS]
    checked = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, **ENV})
    assert checked.returncode == 1, checked
    assert f"was built by TensorRT 10.3.0.26, and this is {INSTALLED}" in checked.stdout
    assert "1 of 2 models can serve" in checked.stdout
    assert "max_batch_size was completed: 8" in checked.stdout
