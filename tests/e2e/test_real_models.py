"""Models that others made, dropped in as bare folders without a configuration, answer as ONNX Runtime itself does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from clients import DOORS, ask, call
from harness import RunningServer, running
from repositories import add_onnx
from voice import CONTEXT, FRAME, RATE, detector_file, probabilities, speech_like

DATASETS = Path(onnxruntime.__file__).parent / "datasets"
RANDOM = np.random.default_rng(7)
DATA_MODELS = {
    "mul_1": {"X": RANDOM.standard_normal((3, 2)).astype(np.float32)},
    "sigmoid": {"x": RANDOM.standard_normal((3, 4, 5)).astype(np.float32)},
    "logreg_iris": {"float_input": np.array([[5.0, 1.6], [6.4, 4.5], [7.2, 6.1]], np.float32)},
}


def add_file(repository: Path, name: str, file: Path) -> None:
    add_onnx(repository, name, lambda path: shutil.copyfile(file, path))


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    for name in DATA_MODELS:
        add_file(repository, name, DATASETS / f"{name}.onnx")
    with running(repository) as started:
        yield started


@pytest.fixture(scope="module")
def vad(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("voice")
    add_file(repository, "vad", detector_file(".onnx"))
    with running(repository) as started:
        yield started


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", DATA_MODELS)
def test_a_bare_file_answers_as_onnx_runtime_does(server: RunningServer, name: str, door: str) -> None:
    inputs = DATA_MODELS[name]
    outputs = ask(server, door, name, inputs)
    expected = session(DATASETS / f"{name}.onnx").run(list(outputs), inputs)
    assert outputs
    for got, want in zip(outputs.values(), expected, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_an_output_that_no_protocol_can_carry_is_left_out_and_told(server: RunningServer) -> None:
    """Classifiers converted from scikit-learn have a sequence of maps beside the tensor of classes."""
    _, metadata = call(server, "/v2/models/logreg_iris")
    assert [output["name"] for output in metadata["outputs"]] == ["label"]
    assert "'probabilities' of the model has the ONNX type seq(map(int64,tensor(float)))" in server.log()


# --- A voice detector with a state that the client carries, and a scalar -------------------------------------------


@pytest.mark.parametrize("door", DOORS)
def test_the_voice_detector_finds_over_the_door_what_it_finds_without_a_server(vad: RunningServer, door: str) -> None:
    sound = speech_like(50)
    detector = session(detector_file(".onnx"))
    rate = np.array(RATE)

    def asked(frame: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        outputs = ask(vad, door, "vad", {"input": frame, "state": state, "sr": rate})
        return outputs["output"], outputs["stateN"]

    alone = probabilities(
        lambda frame, state: detector.run(["output", "stateN"], {"input": frame, "state": state, "sr": rate}), sound
    )
    served = probabilities(asked, sound)
    np.testing.assert_allclose(served, alone, rtol=1e-4, atol=1e-6)
    assert np.ptp(alone) > 0.01, "the sound should move the detector, or the comparison says nothing"


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("shape", [(), (1,)], ids=["as the model declares it", "as the metadata shows it"])
def test_a_scalar_is_taken_with_and_without_a_dimension(vad: RunningServer, door: str, shape: tuple[int, ...]) -> None:
    inputs = {
        "input": RANDOM.standard_normal((3, CONTEXT + FRAME)).astype(np.float32),
        "state": np.zeros((2, 3, 128), np.float32),
        "sr": np.array(RATE),
    }
    outputs = ask(vad, door, "vad", inputs, {"sr": shape})
    (expected,) = session(detector_file(".onnx")).run(["output"], inputs)
    np.testing.assert_allclose(outputs["output"], expected, rtol=1e-4, atol=1e-6)


def test_the_metadata_of_the_voice_detector_tells_what_to_send(vad: RunningServer) -> None:
    _, metadata = call(vad, "/v2/models/vad")
    assert metadata["inputs"] == [
        {"name": "input", "datatype": "FP32", "shape": [-1, -1]},
        {"name": "state", "datatype": "FP32", "shape": [2, -1, 128]},
        {"name": "sr", "datatype": "INT64", "shape": [1]},
    ]
    _, config = call(vad, "/v2/models/vad/config")
    assert (config["max_batch_size"], config["input"][2]["reshape"]) == (0, {"shape": []})
