"""A voice detector that others made, served as a model of sequences: eight sounds at once, each with its own state."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest
import torch
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from clients import call
from figures import figures
from harness import RunningServer, running
from repositories import add_onnx
from torch_models import add_torch, loaded_script, save_script
from voice import CONTEXT, FRAME, RATE, detector_file, probabilities

FRAMES = 12
CLIENTS = range(1, 9)
INPUTS = """
    input [ { name: "input" data_type: TYPE_FP32 dims: [ 1, 576 ] },
            { name: "sr" data_type: TYPE_INT64 dims: [ 1 ] reshape: { shape: [ ] } } ]
    output [ { name: "output" data_type: TYPE_FP32 dims: [ 1, 1 ] } ]"""
ZEROS = 'initial_state { name: "silence" data_type: TYPE_FP32 dims: [ 2, 1, 128 ] zero_data: true }'
STRATEGIES = {"vad_oldest": "oldest { max_candidate_sequences: 8 }", "vad_direct": "direct { }"}
MODELS = (*STRATEGIES, "vad_torch")
TORCH = """max_batch_size: 8 backend: "pytorch"
    input [ { name: "input" data_type: TYPE_FP32 dims: [ 576 ] } ]
    output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1 ] } ]
    instance_group [ { kind: KIND_CPU count: 1 } ]
    sequence_batching {
        max_sequence_idle_microseconds: 30000000
        oldest { max_candidate_sequences: 8 max_queue_delay_microseconds: 20000 }
        state [ { input_name: "state" output_name: "OUTPUT__1" data_type: TYPE_FP32 dims: [ 2, 128 ]
                  initial_state { name: "silence" data_type: TYPE_FP32 dims: [ 2, 128 ] zero_data: true } } ] }"""


def config(strategy: str) -> str:
    state = f'input_name: "state" output_name: "stateN" data_type: TYPE_FP32 dims: [ 2, 1, 128 ] {ZEROS}'
    return f"""max_batch_size: 0 {INPUTS}
        instance_group [ {{ kind: KIND_CPU count: 3 }} ]
        sequence_batching {{ max_sequence_idle_microseconds: 30000000 {strategy} state [ {{ {state} }} ] }}"""


class RowsOfSounds(torch.nn.Module):
    """The detector's network with a row of state for each row of sound."""

    def __init__(self, network: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.network = network

    def forward(self, input: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: A002
        found, state = self.network(input, state.transpose(0, 1))
        return found, state.transpose(0, 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("voice")
    for name, strategy in STRATEGIES.items():
        add_onnx(repository, name, lambda path: shutil.copyfile(detector_file(".onnx"), path), config=config(strategy))
    network = loaded_script(detector_file(".jit"))._model
    add_torch(repository, "vad_torch", lambda path: save_script(path, RowsOfSounds(network)), TORCH)
    with running(repository) as started:
        yield started


def samples(number: int) -> np.ndarray:
    """Return noise that swells and beats."""
    count = np.arange(FRAMES * FRAME)
    noise = np.random.default_rng(number).standard_normal(count.size)
    return (noise * np.linspace(0, 0.3, count.size) * np.sin(count / (10 + 7 * number))).astype(np.float32)


def sound(number: int) -> list[np.ndarray]:
    """Return the frames of a sound, each with the samples before it."""
    padded = np.concatenate([np.zeros(CONTEXT, np.float32), samples(number)])
    return [padded[None, at : at + CONTEXT + FRAME] for at in range(0, FRAMES * FRAME, FRAME)]


@pytest.fixture(scope="module")
def expected() -> dict[int, np.ndarray]:
    """What the detector says of each sound where its caller keeps the state."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(detector_file(".onnx"), options, providers=["CPUExecutionProvider"])

    def step(frame: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return session.run(["output", "stateN"], {"input": frame, "state": state, "sr": np.array(RATE)})

    said = {number: probabilities(step, samples(number)) for number in CLIENTS}
    assert np.ptp([values[-1] for values in said.values()]) > 0.01, "the sounds should differ, or nothing is shown"
    return said


def tensors(module: object, model: str, frame: np.ndarray) -> list:
    samples, rate = module.InferInput("input", [1, 576], "FP32"), module.InferInput("sr", [1], "INT64")
    samples.set_data_from_numpy(frame)
    rate.set_data_from_numpy(np.array([RATE]))
    return [samples] if model == "vad_torch" else [samples, rate]


def probability(model: str, answer: object) -> float:
    return answer.as_numpy("OUTPUT__0" if model == "vad_torch" else "output").item()


def in_turn(server: RunningServer, door: str, model: str, number: int) -> list[float]:
    module, address = (grpcclient, server.grpc) if door == "grpc" else (httpclient, server.http)
    frames = sound(number)
    with module.InferenceServerClient(address) as client:
        answers = [
            client.infer(
                model,
                tensors(module, model, frame),
                sequence_id=number,
                sequence_start=at == 0,
                sequence_end=at == len(frames) - 1,
            )
            for at, frame in enumerate(frames)
        ]
        return [probability(model, answer) for answer in answers]


def in_one_stream(server: RunningServer, model: str) -> dict[int, list[float]]:
    answers: queue.Queue = queue.Queue()
    said: dict[int, list[float]] = {number: [] for number in CLIENTS}
    sounds = {number: sound(number) for number in CLIENTS}
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for at in range(FRAMES):
            for number in CLIENTS:
                client.async_stream_infer(
                    model,
                    tensors(grpcclient, model, sounds[number][at]),
                    request_id=str(number),
                    sequence_id=number,
                    sequence_start=at == 0,
                    sequence_end=at == FRAMES - 1,
                )
        for _ in range(FRAMES * len(CLIENTS)):
            result = answers.get(timeout=60)
            assert not isinstance(result, Exception), result
            said[int(result.get_response().id)].append(probability(model, result))
        client.stop_stream()
    return said


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("door", ["http", "grpc", "stream"])
def test_eight_sounds_at_once_are_judged_as_each_alone(
    server: RunningServer, expected: dict[int, np.ndarray], model: str, door: str
) -> None:
    if door == "stream":
        said = in_one_stream(server, model)
    else:
        with ThreadPoolExecutor(len(CLIENTS)) as pool:
            futures = {number: pool.submit(in_turn, server, door, model, number) for number in CLIENTS}
            said = {number: future.result() for number, future in futures.items()}
    for number in CLIENTS:
        np.testing.assert_allclose(said[number], expected[number], rtol=1e-4, atol=1e-6)


def test_sounds_of_one_stream_share_executions(server: RunningServer) -> None:
    before = figures(server, "vad_torch")
    in_one_stream(server, "vad_torch")
    added = figures(server, "vad_torch").since(before)
    assert added.rows == FRAMES * len(CLIENTS)
    assert added.executions <= added.rows / 2


def test_the_state_is_none_of_the_clients_business(server: RunningServer) -> None:
    _, metadata = call(server, "/v2/models/vad_oldest")
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["input", "sr"]
    assert [tensor["name"] for tensor in metadata["outputs"]] == ["output"]
