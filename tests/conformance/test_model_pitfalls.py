"""Tests of what pitfalls.py tells of models and their processes, those that have no other place."""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from clients import ask, infer
from ensembles import add_ensemble, ident
from figures import backend_pid, metric, wait_until
from harness import RunningServer, named_shared_memory, running
from victims import add_code

INT32 = 'input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ] output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]'
SLEEPY = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            time.sleep(int(array.flat[0]) / 1000)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]))
        return responses
"""
EMPTY = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        rows = pb_utils.Tensor("ROWS", np.zeros((0, 4), np.float32))
        planes = pb_utils.Tensor.from_dlpack("PLANES", np.zeros((1, 0, 2), np.float32))
        return [pb_utils.InferenceResponse([rows, planes]) for _ in requests]
"""
ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]
"""


def python(io: str, instances: int = 1, max_batch_size: int = 0) -> str:
    group = f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]"
    return f'backend: "python" max_batch_size: {max_batch_size} {io} {group}'


def tensors(datatype: str, dims: str) -> str:
    return " ".join(
        f'{kind} [ {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dims} ] }} ]'
        for kind, name in (("input", "INPUT0"), ("output", "OUTPUT0"))
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_code(repository, "sleepy", python(INT32, instances=2), SLEEPY)
    outputs = (
        'input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ] output [ '
        '{ name: "ROWS" data_type: TYPE_FP32 dims: [ -1, 4 ] }, { name: "PLANES" data_type: TYPE_FP32 dims: [ -1, -1, 2 ] } ]'
    )
    add_code(repository, "empty", python(outputs), EMPTY)
    for name in ("texts_1", "texts_2"):
        add_code(repository, name, python(tensors("STRING", "-1, 1"), instances=2), ECHO)
    steps = [ident("texts_1", "INPUT0", "x"), ident("texts_2", "x", "OUTPUT0")]
    add_ensemble(repository, "texts", steps, {"INPUT0": "STRING -1 1"}, {"OUTPUT0": "STRING -1 1"})
    with running(repository) as started:
        yield started


# --- Tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["http json", "http binary", "grpc"])
def test_a_python_model_may_answer_with_no_elements(server: RunningServer, door: str) -> None:
    outputs = ask(server, door, "empty", {"INPUT0": np.zeros(1, np.int32)})
    assert {name: array.shape for name, array in outputs.items()} == {"ROWS": (0, 4), "PLANES": (1, 0, 2)}


def test_strings_of_many_clients_stay_whole_through_two_python_models(server: RunningServer) -> None:
    def client(number: int) -> None:
        chance = random.Random(number)
        with grpcclient.InferenceServerClient(server.grpc) as own:
            for _ in range(15):
                texts = ["".join(chance.choices("안녕é🙂x", k=chance.randrange(10))).encode() for _ in range(87)]
                sent = np.array(texts, np.object_).reshape(87, 1)
                tensor = grpcclient.InferInput("INPUT0", [87, 1], "BYTES")
                tensor.set_data_from_numpy(sent)
                assert own.infer("texts", [tensor]).as_numpy("OUTPUT0").tolist() == sent.tolist()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(client, range(16)))


# --- Clients that do not wait ------------------------------------------------------------------------------------------


def sleep(client: grpcclient.InferenceServerClient, ms: int, timeout: float | None = None) -> None:
    tensor = grpcclient.InferInput("INPUT0", [1], "INT32")
    tensor.set_data_from_numpy(np.array([ms], np.int32))
    assert client.infer("sleepy", [tensor], client_timeout=timeout).as_numpy("OUTPUT0").tolist() == [ms]


def test_clients_that_give_up_leave_both_instances_to_those_that_wait(server: RunningServer) -> None:
    before = {process.pid for process in server.backends()}
    with grpcclient.InferenceServerClient(server.grpc) as client:

        def gives_up(ms: int, after: float) -> None:
            with pytest.raises(InferenceServerException, match="Deadline"):
                sleep(client, ms, after)

        with ThreadPoolExecutor(50) as pool:
            list(pool.map(lambda _: gives_up(200, 0.01), range(50)))
        started = time.monotonic()
        sleep(client, 0)
        assert time.monotonic() - started < 1.0, "only what ran already may come before it"
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: gives_up(1500, 0.5), range(2)))
        for _ in range(20):
            sleep(client, 0)
    wait_until("nobody waits", lambda: metric(server, "nv_inference_pending_request_count", "sleepy") == 0)
    assert {process.pid for process in server.backends()} == before, "no process had to end for it"


# --- What a death leaves ------------------------------------------------------------------------------------------------


def stop(server: RunningServer) -> None:
    assert server.stop() == 0


def cut_off(server: RunningServer) -> None:
    assert server.stop() == 1


def kill_backend(server: RunningServer) -> None:
    os.kill(backend_pid(server, "echo"), signal.SIGKILL)
    server.wait_for_log("model echo:1 serves again")
    assert infer(server, "echo", ("INPUT0", "INT32", [2], [1, 2]))[0] == 200
    stop(server)


@pytest.mark.parametrize(
    ("end", "flags"),
    [
        (stop, ()),
        (RunningServer.kill, ()),
        (kill_backend, ()),
        (cut_off, ("--exit-timeout-secs=0",)),
    ],
    ids=["SIGTERM", "SIGKILL of the server", "SIGKILL of a backend", "a stop that outlives its timeout"],
)
def test_nothing_with_a_name_is_used_and_nothing_is_left_whatever_ends(
    tmp_path: Path, end: Callable[[RunningServer], object], flags: tuple[str, ...]
) -> None:
    """Under load of every size, and with requests inside; then the next server starts at once and serves."""
    repository = tmp_path / "models"
    add_code(repository, "echo", python(tensors("INT32", "-1")), ECHO)
    add_code(repository, "sleepy", python(INT32), SLEEPY)
    shared = set(names_in("/dev/shm"))
    server = RunningServer(repository, *flags)
    try:
        server.wait_ready()
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(lambda seed: sizes(server, seed), range(4)))
        assert not [path for process in server.descendants() for path in named_shared_memory(process)]
        children = server.descendants()
        lost: queue.Queue = queue.Queue()
        with grpcclient.InferenceServerClient(server.grpc) as client:
            tensor = grpcclient.InferInput("INPUT0", [1], "INT32")
            tensor.set_data_from_numpy(np.array([1_000], np.int32))
            long = client.async_infer("sleepy", [tensor], lambda result, error: lost.put((result, error)))
            behind = client.async_infer("sleepy", [tensor], lambda result, error: lost.put((result, error)))
            wait_until("it runs", lambda: metric(server, "nv_inference_pending_request_count", "sleepy") == 1)
            if end is stop:
                long.cancel()
                behind.cancel()
            ender = threading.Thread(target=end, args=[server])
            ender.start()
            lost.get(timeout=30)
            lost.get(timeout=30)
            ender.join()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
    finally:
        if server.process.poll() is None:
            server.kill()
    assert not {name for name in set(names_in("/dev/shm")) - shared if "headrace" in name or "triton" in name}
    with running(repository) as again:
        assert sizes(again, 1)


def names_in(folder: str) -> list[str]:
    return [path.name for path in Path(folder).iterdir()]


def sizes(server: RunningServer, seed: int) -> bool:
    """Whether arrays of 1 kB to 4 MB come back as they went."""
    chance = random.Random(seed)
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for number in range(15):
            array = np.full(int(256 * 4096 ** chance.random()), number, np.int32)
            tensor = grpcclient.InferInput("INPUT0", array.shape, "INT32")
            tensor.set_data_from_numpy(array)
            if not np.array_equal(client.infer("echo", [tensor]).as_numpy("OUTPUT0"), array):
                return False
    return True
