"""A hundred small models, the sample repository, large requests: how soon they serve, how much memory they take.

Limits are for two cores with other work on them; the figures themselves are printed (pytest -rP shows them).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.http as httpclient

import onnx_models
from clients import ask
from harness import RunningServer, running
from repositories import SAMPLES, add_onnx

MODELS = 100
READY_S = 30.0
PSS_OF_A_MODEL = 15e6
SAMPLES_READY_S = 10.0
RSS_OF_A_SERVER = 120e6
LEFT_OF_A_PEAK = 40e6
"""The native gRPC transport's own threads keep ten to twenty megabytes."""
GIVEN_BACK_S = 30.0


def memory(process: psutil.Process) -> psutil._pslinux.pfullmem:
    return process.memory_full_info()


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, float, Path]]:
    repository = tmp_path_factory.mktemp("hundred")
    for number in range(MODELS):
        add_onnx(repository, f"mlp{number:03}", lambda path: onnx_models.mlp(path, 16, 32, 4, seed=number))  # noqa: B023
    started = time.monotonic()
    with running(repository) as server:
        yield server, time.monotonic() - started, repository


def test_a_hundred_models_are_ready_soon(hundred: tuple[RunningServer, float, Path]) -> None:
    server, seconds, _ = hundred
    print(f"{MODELS} models ready after {seconds:.1f} s")
    assert len(server.backends()) == MODELS
    assert seconds < READY_S


def test_each_of_a_hundred_models_answers_with_its_own_weights(hundred: tuple[RunningServer, float, Path]) -> None:
    server, _, repository = hundred
    x = np.linspace(-1, 1, 16, dtype=np.float32)[None]

    def answer(number: int) -> np.ndarray:
        tensor = httpclient.InferInput("x", x.shape, "FP32")
        tensor.set_data_from_numpy(x)
        with httpclient.InferenceServerClient(server.http) as client:
            return client.infer(f"mlp{number:03}", [tensor]).as_numpy("y")

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(answer, range(MODELS)))
    for number, got in enumerate(answers):
        np.testing.assert_allclose(got, perceptron(number, x), rtol=1e-4, atol=1e-6)


def perceptron(seed: int, x: np.ndarray) -> np.ndarray:
    """What onnx_models.mlp computes for these sizes."""
    random = np.random.default_rng(seed)
    first, second = random.standard_normal((16, 32)), random.standard_normal((32, 4))
    scores = np.exp(np.maximum(x @ first, 0) @ second)
    return scores / scores.sum(axis=1, keepdims=True)


def test_a_small_model_takes_little_memory(hundred: tuple[RunningServer, float, Path]) -> None:
    server, _, repository = hundred
    weights = (repository / "mlp000" / "1" / "model.onnx").stat().st_size
    backends = [memory(process) for process in server.backends()]
    beyond = sorted(found.pss - weights for found in backends)
    unique = sum(found.uss for found in backends) / len(backends)
    print(
        f"PSS of a backend process beyond its weights: median {beyond[len(beyond) // 2] / 1e6:.1f} MB, "
        f"largest {beyond[-1] / 1e6:.1f} MB, of its own {unique / 1e6:.1f} MB; "
        f"server RSS {psutil.Process(server.process.pid).memory_info().rss / 1e6:.0f} MB"
    )
    assert beyond[-1] < PSS_OF_A_MODEL


def test_the_server_imports_no_heavy_package_that_it_may_not_need() -> None:
    code = "import sys, headrace.app, headrace.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "headrace" in found
    assert not {"opentelemetry", "onnxruntime", "torch", "headrace_backends", "psutil", "unittest"} & set(found)


def test_the_sample_repository_is_ready_soon_in_little_memory() -> None:
    started = time.monotonic()
    with running(SAMPLES) as server:
        seconds = time.monotonic() - started
        rss = psutil.Process(server.process.pid).memory_info().rss
        print(f"sample repository ready after {seconds:.1f} s, server RSS {rss / 1e6:.0f} MB")
        assert seconds < SAMPLES_READY_S
        assert rss < RSS_OF_A_SERVER


@pytest.mark.parametrize("door", ["http binary", "grpc"])
def test_what_large_requests_took_is_given_back_when_they_are_over(door: str) -> None:
    sizes = np.random.default_rng(3).integers(1, 6, 60) * 1_000_000
    with running(SAMPLES) as server:

        def own() -> float:
            processes = [psutil.Process(server.process.pid), *server.descendants()]
            return sum(memory(process).uss for process in processes)

        def send(size: int) -> None:
            data = np.zeros(size, np.float32)
            assert ask(server, door, "identity", {"INPUT_FP32": data})["OUTPUT_FP32"].nbytes == data.nbytes

        before = own()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(send, sizes))
        at_once = own()
        deadline = time.monotonic() + GIVEN_BACK_S
        while (left := own() - before) > LEFT_OF_A_PEAK and time.monotonic() < deadline:
            time.sleep(0.5)
        print(f"{door}: {(at_once - before) / 1e6:.0f} MB more just after the last request, {left / 1e6:.0f} MB later")
        assert left <= LEFT_OF_A_PEAK
