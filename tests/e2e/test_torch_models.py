"""PyTorch models behind a real server: what clients get over every door, instances at once, crashes, memory of clients."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.grpc as grpcclient

import torch_models as models
from clients import DOORS, ask, call, infer
from figures import wait_until
from harness import RunningServer, running
from regions import CLIENTS as REGION_CLIENTS
from regions import Client, objects
from repositories import add_identity
from voice import CONTEXT, RATE, detector_file, probabilities, speech_like

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pytorch.md"
ROW = np.arange(4, dtype=np.float32)[None]
EMPTY = [(name, shape) for name in ("fp32", "strings") for shape in [(0,)]] + [
    (f"fp32_{kind}", shape) for kind in ("script", "program") for shape in [(2, 0), (0, 3), (0, 0)]
]


def config(
    inputs: str, outputs: str, max_batch_size: int = 8, extra: str = "", instances: int = 1, **parameters: str
) -> str:
    """Return a config.pbtxt; tensors are written "NAME TYPE dims"."""

    def tensors(text: str) -> str:
        parts = [tensor.split(maxsplit=2) for tensor in text.split(";")]
        return ", ".join(f'{{ name: "{n}" data_type: TYPE_{t} dims: [ {d} ] }}' for n, t, d in parts)

    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
    return "\n".join(
        [
            f'backend: "pytorch" max_batch_size: {max_batch_size}',
            f"input [ {tensors(inputs)} ] output [ {tensors(outputs)} ]",
            f"instance_group [ {{ count: {instances} kind: KIND_CPU }} ]",
            *lines,
            extra,
        ]
    )


SLOW = models.source(
    "import ctypes, os, time",
    "class Slow(torch.nn.Module):",
    "    def forward(self, x):",
    "        if x.min() < 0:",
    "            ctypes.string_at(0)",
    "        if x.max() > 100:",
    "            time.sleep(1)",
    "        return x, torch.full((len(x), 1), os.getpid()), torch.full((len(x), 1), torch.get_num_threads())",
)


def write_shown(path: Path) -> None:
    """Write the program that docs/pytorch.md shows."""
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    folder = Path.cwd()
    os.chdir(path.parent)
    try:
        exec(compile(block, str(PAGE), "exec"), {})  # noqa: S102 - our own documentation
    finally:
        os.chdir(folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add = models.add_torch
    two = "INPUT__0 FP32 -1; INPUT__1 FP32 -1", "OUTPUT__0 FP32 -1; OUTPUT__1 FP32 -1"
    batching = config(*two, extra="dynamic_batching { }", instances=3)
    add(repository, "add_sub", lambda path: models.save_script(path, models.AddSub()), batching)
    add(
        repository,
        "perceptron",
        lambda path: models.save_exported(
            path, models.Perceptron(), torch.ones(2, 8), dynamic={"x": {0: models.BATCH}}
        ),
        filename="model.pt2",
    )
    for name in ("FP16", "BF16"):
        both = f"INPUT0 {name} -1", f"OUTPUT0 {name} -1"
        add(repository, name.lower(), lambda path: models.save_script(path, models.Identity()), config(*both))
    identity = config("INPUT0 FP32 -1", "OUTPUT0 FP32 -1", 0)
    add(repository, "fp32", lambda path: models.save_script(path, models.Identity()), identity)
    identity = config("INPUT0 FP32 -1, -1", "OUTPUT0 FP32 -1, -1", 0)
    add(repository, "fp32_script", lambda path: models.save_script(path, models.Identity()), identity)
    add(
        repository,
        "fp32_program",
        lambda path: models.save_exported(
            path, models.Identity(), torch.ones(2, 3), dynamic={"INPUT0": {0: torch.export.Dim("m"), 1: models.N}}
        ),
        "max_batch_size: 0",
        "model.pt2",
    )
    strings = config("texts STRING -1", "loud STRING -1", 0)
    add(repository, "strings", lambda path: models.save_script(path, models.Exclaim()), strings)
    lookup = config(
        "ids INT64 -1", "rows FP32 -1, 2", extra="dynamic_batching { max_queue_delay_microseconds: 200000 }"
    )
    add(repository, "lookup", lambda path: models.save_script(path, models.Lookup()), lookup)
    slow = config("x FP32 1", "y FP32 1; pid INT64 1; threads INT64 1", instances=2)
    add(repository, "apart", lambda path: path.write_text(SLOW), slow, "model.py")
    slow = config(
        "x FP32 1", "y FP32 1; pid INT64 1; threads INT64 1", instances=2, ENABLE_WEIGHT_SHARING="true", NUM_THREADS="3"
    )
    add(repository, "shared", lambda path: path.write_text(SLOW), slow, "model.py")
    add(
        repository,
        "doubled",
        lambda path: models.save_script(path, models.WritesInput()),
        config("INPUT0 FP32 -1", "OUTPUT0 FP32 -1", 0),
    )
    anywhere = config(*two).replace("KIND_CPU", "KIND_MODEL")
    add(repository, "anywhere", lambda path: models.save_script(path, models.AddSub()), anywhere)
    add(repository, "shown", write_shown, filename="model.pt2")
    add_identity(repository, "other")
    with running(repository, "--allow-client-shm=true") as started:
        yield started


@pytest.mark.parametrize("door", DOORS)
def test_torchscript_answers_over_every_door(server: RunningServer, door: str) -> None:
    outputs = ask(server, door, "add_sub", {"INPUT__0": ROW, "INPUT__1": 2 * ROW})
    np.testing.assert_array_equal(outputs["OUTPUT__0"], 3 * ROW)
    np.testing.assert_array_equal(outputs["OUTPUT__1"], -ROW)


def test_each_of_many_clients_gets_its_own_from_batches_and_instances_at_once(server: RunningServer) -> None:
    def one(client: int) -> None:
        random = np.random.default_rng(client)
        with grpcclient.InferenceServerClient(server.grpc) as calls:
            for _ in range(50):
                a, b = random.standard_normal((2, 1 + client % 3, 4 + client % 2)).astype(np.float32)
                tensors = [grpcclient.InferInput(f"INPUT__{i}", a.shape, "FP32") for i in (0, 1)]
                tensors[0].set_data_from_numpy(a)
                tensors[1].set_data_from_numpy(b)
                result = calls.infer("add_sub", tensors)
                np.testing.assert_array_equal(result.as_numpy("OUTPUT__0"), a + b)
                np.testing.assert_array_equal(result.as_numpy("OUTPUT__1"), a - b)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))


@pytest.mark.parametrize("door", DOORS)
def test_a_program_without_a_configuration_answers_as_the_module_does(server: RunningServer, door: str) -> None:
    x = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    outputs = ask(server, door, "perceptron", {"x": x})
    expected = models.Perceptron()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(outputs["OUTPUT__0"], expected, rtol=1e-5)


def test_the_program_that_the_documentation_shows_is_served(server: RunningServer) -> None:
    outputs = ask(server, "grpc", "shown", {"x": np.ones((3, 8), np.float32)})
    np.testing.assert_allclose(outputs["OUTPUT__0"].sum(1), [1, 1, 1], rtol=1e-5)


def test_a_model_that_chooses_its_devices_is_served(server: RunningServer) -> None:
    outputs = ask(server, "grpc", "anywhere", {"INPUT__0": ROW, "INPUT__1": ROW})
    np.testing.assert_array_equal(outputs["OUTPUT__0"], 2 * ROW)


def test_what_a_program_tells_completes_its_configuration(server: RunningServer) -> None:
    _, found = call(server, "/v2/models/perceptron/config")
    assert (found["backend"], found["platform"], found["max_batch_size"]) == ("pytorch", "torch_aoti", 4)
    assert "dynamic_batching" in found
    _, metadata = call(server, "/v2/models/perceptron")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}]


def test_a_torchscript_model_is_of_its_platform(server: RunningServer) -> None:
    _, metadata = call(server, "/v2/models/add_sub")
    assert metadata["platform"] == "pytorch_libtorch"


@pytest.mark.parametrize("door", ["http binary", "grpc"])
def test_half_precision_goes_there_and_back_bit_for_bit(server: RunningServer, door: str) -> None:
    array = np.array([[0.5, -0.0, 65504, np.inf, 6e-8]], np.float16)
    outputs = ask(server, door, "fp16", {"INPUT0": array})
    assert outputs["OUTPUT0"].tobytes() == array.tobytes()


@pytest.mark.parametrize("kind", REGION_CLIENTS)
def test_bfloat16_goes_there_and_back(server: RunningServer, kind: str) -> None:
    client_module = REGION_CLIENTS[kind]
    values = np.array([[1.5, -2, 3e38, 0]], ml_dtypes.bfloat16)
    given = client_module.InferInput("INPUT0", [1, 4], "BF16")
    given.set_data_from_numpy(values)
    with client_module.InferenceServerClient(server.http if kind == "http" else server.grpc) as client:
        got = client.infer("bf16", [given]).as_numpy("OUTPUT0")
    np.testing.assert_array_equal(got.astype(np.float32), values.astype(np.float32))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("model", "shape"), EMPTY)
def test_no_elements_come_back_as_no_elements(server: RunningServer, door: str, model: str, shape: tuple) -> None:
    name, dtype = ("texts", np.object_) if model == "strings" else ("INPUT0", np.float32)
    (output,) = ask(server, door, model, {name: np.empty(shape, dtype)}).values()
    assert output.shape == shape


@pytest.mark.parametrize("door", DOORS)
def test_strings_go_in_and_come_out(server: RunningServer, door: str) -> None:
    texts = np.array([text.encode() for text in ("né", "", "日本")], object)
    (output,) = ask(server, door, "strings", {"texts": texts}).values()
    assert [text if isinstance(text, bytes) else text.encode() for text in output] == [text + b"!" for text in texts]


def test_one_bad_request_of_a_batch_fails_alone(server: RunningServer) -> None:
    def one(number: int) -> tuple[int, object]:
        return infer(server, "lookup", ("ids", "INT64", [1, 1], [number]))

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(one, [1, 99, 2, 3]))
    assert [status for status, _ in answers] == [200, 500, 200, 200]
    assert answers[1][1] == {"error": "PyTorch failed: RuntimeError: index out of range in self"}


def at_once(server: RunningServer, model: str, requests: int = 2) -> tuple[set[int], set[int]]:
    """Return the processes that answered as many requests at once, a second each, and how many threads they had."""
    ready = threading.Barrier(requests)

    def one(_: int) -> dict[str, np.ndarray]:
        ready.wait()
        return ask(server, "grpc", model, {"x": np.array([[200]], np.float32)})

    with ThreadPoolExecutor(requests) as pool:
        answers = list(pool.map(one, range(requests)))
    return {int(got["pid"].item()) for got in answers}, {int(got["threads"].item()) for got in answers}


def test_instances_of_a_plain_module_run_in_processes_of_their_own_and_share_the_cores(server: RunningServer) -> None:
    processes, threads = at_once(server, "apart")
    assert len(processes) == 2
    assert threads == {max(1, len(os.sched_getaffinity(server.process.pid)) // 2)}


def test_instances_that_share_their_weights_run_in_one_process_with_as_many_threads_as_configured(
    server: RunningServer,
) -> None:
    processes, threads = at_once(server, "shared")
    assert len(processes) == 1
    assert threads == {3}


def test_a_model_that_crashes_fails_its_request_and_is_served_again(server: RunningServer) -> None:
    before = {process.pid for process in server.backends()}
    status, answer = infer(server, "shared", ("x", "FP32", [1, 1], [-1]))
    assert status == 503
    assert "backend process" in answer["error"]
    for model, name in (("other", "INPUT0"), ("apart", "x"), ("shared", "x")):
        assert infer(server, model, (name, "FP32", [1, 1], [1]))[0] == 200
    wait_until("one process took another's place", lambda: len({p.pid for p in server.backends()} - before) == 1)


@pytest.mark.parametrize("kind", REGION_CLIENTS)
def test_a_model_that_overwrites_its_input_does_not_overwrite_its_clients_memory(
    server: RunningServer, kind: str
) -> None:
    values = np.arange(4, dtype=np.float32)
    client = Client(server, kind)
    with objects(2 * values.nbytes) as (memory,), client.calls:
        memory.write(values)
        client.register(memory)
        given = client.input(memory, values.shape, np.float32, values.nbytes)
        client.infer("doubled", given, client.output(memory, values.nbytes, values.nbytes))
        np.testing.assert_array_equal(memory.read(np.float32, (4,)), values)
        np.testing.assert_array_equal(memory.read(np.float32, (4,), values.nbytes), 2 * values)
        client.unregister(memory.name)


# --- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[RunningServer]:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU that PyTorch can use")
    on_gpu = "kind: KIND_GPU"
    two = "INPUT__0 FP32 -1; INPUT__1 FP32 -1", "OUTPUT__0 FP32 -1; OUTPUT__1 FP32 -1"
    add_sub = config(*two, instances=2, ENABLE_CACHE_CLEANING="true").replace("kind: KIND_CPU", on_gpu)
    models.add_torch(tmp_path, "add_sub", lambda path: models.save_script(path, models.AddSub()), add_sub)
    lookup = config("ids INT64 -1", "rows FP32 -1, 2").replace("kind: KIND_CPU", on_gpu)
    models.add_torch(tmp_path, "lookup", lambda path: models.save_script(path, models.Lookup()), lookup)
    models.add_torch(
        tmp_path,
        "perceptron",
        lambda path: models.save_exported(
            path, models.Perceptron(), torch.ones(2, 8), dynamic={"x": {0: models.BATCH}}
        ),
        f"instance_group [ {{ {on_gpu} }} ]",
        "model.pt2",
    )
    with running(tmp_path) as started:
        yield started


@pytest.mark.gpu
def test_instances_on_a_gpu_answer_each_client_with_its_own(gpu: RunningServer) -> None:
    def one(number: int) -> bool:
        outputs = ask(gpu, "grpc", "add_sub", {"INPUT__0": ROW * number, "INPUT__1": ROW})
        return bool((outputs["OUTPUT__0"] == ROW * (number + 1)).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(200)))


@pytest.mark.gpu
def test_a_program_that_was_exported_on_a_cpu_runs_on_a_gpu(gpu: RunningServer) -> None:
    outputs = ask(gpu, "grpc", "perceptron", {"x": np.ones((1, 8), np.float32)})
    expected = models.Perceptron()(torch.ones(1, 8)).detach().numpy()
    np.testing.assert_allclose(outputs["OUTPUT__0"], expected, rtol=1e-3)


@pytest.mark.gpu
def test_a_fault_of_the_gpu_ends_the_process_and_the_next_one_serves(gpu: RunningServer) -> None:
    assert infer(gpu, "lookup", ("ids", "INT64", [1, 1], [99]))[0] != 200
    assert infer(gpu, "lookup", ("ids", "INT64", [1, 1], [1]))[0] == 200


# --- A voice detector whose state the client carries -----------------------------------------------------------------


class Detector(torch.nn.Module):
    """The detector's network, which takes and gives the state that the detector itself would keep."""

    def __init__(self, network: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.network = network

    def forward(self, sound: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.network(sound, state)


@pytest.fixture(scope="module")
def vad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("voice")
    whole = models.loaded_script(detector_file(".jit"))
    models.add_torch(
        repository,
        "vad",
        lambda path: models.save_script(path, Detector(whole._model)),
        config("sound FP32 -1, -1; state FP32 2, -1, 128", "OUTPUT__0 FP32 -1, 1; OUTPUT__1 FP32 2, -1, 128", 0),
    )
    with running(repository) as started:
        yield started


@pytest.mark.parametrize("door", DOORS)
def test_the_voice_detector_finds_over_the_door_what_it_finds_without_a_server(vad: RunningServer, door: str) -> None:
    sound = speech_like(50)
    whole = models.loaded_script(detector_file(".jit"))

    def alone(frame: np.ndarray, _: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            return whole(torch.from_numpy(frame[:, CONTEXT:]), RATE).numpy(), _

    def asked(frame: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        outputs = ask(vad, door, "vad", {"sound": frame, "state": state})
        return outputs["OUTPUT__0"], outputs["OUTPUT__1"]

    expected = probabilities(alone, sound)
    np.testing.assert_allclose(probabilities(asked, sound), expected, rtol=1e-4, atol=1e-6)
    assert np.ptp(expected) > 0.01, "the sound should move the detector, or the comparison says nothing"
