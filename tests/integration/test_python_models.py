"""Models of the Python backend through a running server: every form of `execute`, and what each kind of fault becomes."""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from clients import DOORS, ask, call, infer
from harness import RunningServer, running

MODELS = Path(__file__).resolve().parents[1] / "python_models"
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(MODELS, "--log-verbose=1") as started:
        yield started


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc) as made:
        yield made


def tensor(name: str, array: np.ndarray, datatype: str | None = None) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), datatype or triton.np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def strings(*rows: Sequence[str | bytes]) -> np.ndarray:
    return np.array([[text if isinstance(text, bytes) else text.encode() for text in row] for row in rows], object)


def crashed(server: RunningServer, kind: int) -> tuple[int, str]:
    """Ask `crashy` to misbehave; return the status and the text of the error."""
    status, answer = infer(server, "crashy", ("INPUT0", "INT32", [1], [kind]))
    return status, answer.get("error", "")


def works(server: RunningServer, model: str = "crashy") -> None:
    status, answer = infer(server, model, ("INPUT0", "INT32", [1], [0]))
    assert (status, answer["outputs"][0]["data"]) == (200, [0])


class Stream:
    """One ModelStreamInfer call of the stock client."""

    def __init__(self, client: triton.InferenceServerClient) -> None:
        self._client = client
        self._outcomes: queue.Queue[tuple[triton.InferResult | None, Exception | None]] = queue.Queue()
        client.start_stream(lambda result, error: self._outcomes.put((result, error)))

    def ask(self, model: str, **arrays: np.ndarray) -> list[Any]:
        """Return the values of each response's first output, up to the end; an error is a text."""
        inputs = [tensor(name, array) for name, array in arrays.items()]
        self._client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        got: list[Any] = []
        while True:
            result, error = self._outcomes.get(timeout=LIMIT_S)
            if error is not None:
                return [*got, str(error)]
            assert result is not None
            response = result.get_response()
            if response.outputs:
                got.append(result.as_numpy(response.outputs[0].name).ravel().tolist())
            if response.parameters["triton_final_response"].bool_param:
                return got


# --- one response to a request ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS)
def test_add_sub_adds_and_subtracts(server: RunningServer, door: str) -> None:
    first, second = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones((2, 4), np.float32)
    outputs = ask(server, door, "add_sub", {"INPUT0": first, "INPUT1": second})
    np.testing.assert_array_equal(outputs["OUTPUT0"], first + second)
    np.testing.assert_array_equal(outputs["OUTPUT1"], first - second)


def test_requests_are_batched_and_each_gets_its_rows_and_its_error_alone(client: triton.InferenceServerClient) -> None:
    def ask_one(number: int) -> Any:
        array = np.full((1, 4), number, np.float32)
        try:
            result = client.infer(
                "add_sub", [tensor("INPUT0", array), tensor("INPUT1", array)], parameters={"say": True}
            )
        except InferenceServerException as error:
            return str(error)
        assert result.get_response().parameters["greeting"].string_param == "hello"
        assert result.get_response().parameters["instance"].string_param == "add_sub_0"
        assert result.get_response().parameters["batch"].int64_param == 4
        return result.as_numpy("OUTPUT0").ravel().tolist()

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask_one, [1, -1, 2, 3]))
    assert answers[0::2] == [[2] * 4, [4] * 4]
    assert answers[3] == [6] * 4
    assert answers[1] == "[StatusCode.INVALID_ARGUMENT] the first element is negative"


def test_a_whole_batch_of_equal_outputs_is_answered_row_by_row(client: triton.InferenceServerClient) -> None:
    def ask_one(number: int) -> list[float]:
        array = np.full((1, 4), number, np.float32)
        result = client.infer("add_sub", [tensor("INPUT0", array), tensor("INPUT1", array)])
        return result.as_numpy("OUTPUT0").ravel().tolist()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask_one, range(4))) == [[2 * number] * 4 for number in range(4)]


@pytest.mark.parametrize("shape", [(2, 3), (0, 4), (2, 0)])
@pytest.mark.parametrize("datatype", ["FP16", "FP32", "UINT8", "INT64", "BOOL"])
def test_every_type_comes_back_as_it_went(
    client: triton.InferenceServerClient, datatype: str, shape: tuple[int, int]
) -> None:
    array = (np.arange(np.prod(shape)).reshape(shape) % 2).astype(triton.triton_to_np_dtype(datatype))
    result = client.infer(f"ident_{datatype.lower()}", [tensor("INPUT0", array)])
    back = result.as_numpy("OUTPUT0")
    assert (back.dtype, back.shape, back.tolist()) == (array.dtype, shape, array.tolist())


def test_bf16_goes_through_dlpack(client: triton.InferenceServerClient) -> None:
    array = np.array([[0.5, -2.0]], ml_dtypes.bfloat16)
    result = client.infer("ident_bf16", [tensor("INPUT0", array, "BF16")])
    assert result.as_numpy("OUTPUT0").tolist() == [[0.5, -2.0]]


@pytest.mark.parametrize("door", DOORS)
def test_strings_come_back_byte_for_byte(server: RunningServer, door: str) -> None:
    array = strings(["", "안녕 🙂"], ["plain", "x" * 70000])
    if door != "http json":
        array = np.concatenate([array, strings([b"\xff\x00", b"\x00"])])
    back = ask(server, door, "ident_bytes", {"INPUT0": array})["OUTPUT0"]
    told = [[text.encode() if isinstance(text, str) else text for text in row] for row in back.tolist()]
    assert told == array.tolist()


def test_strings_are_not_mixed_under_load(server: RunningServer) -> None:
    def run(seed: int) -> None:
        random = np.random.default_rng(seed)
        with triton.InferenceServerClient(server.grpc) as own:
            for _ in range(40):
                texts = ["안🙂é"[: random.integers(0, 4)] * random.integers(0, 6) + str(seed) for _ in range(87)]
                array = strings(texts)
                assert (
                    own.infer("ident_bytes", [tensor("INPUT0", array)]).as_numpy("OUTPUT0").tolist() == array.tolist()
                )

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, range(8)))


def test_a_model_completes_its_configuration(server: RunningServer, client: triton.InferenceServerClient) -> None:
    _, config = call(server, "/v2/models/auto_complete/config")
    assert config["max_batch_size"] == 4
    assert "dynamic_batching" in config
    assert [entry["name"] for entry in config["input"]] == ["INPUT0", "INPUT1"]
    array = np.ones((3, 4), np.float32)
    result = client.infer("auto_complete", [tensor("INPUT0", array), tensor("INPUT1", array)])
    assert result.as_numpy("OUTPUT0").tolist() == [[2.0] * 4] * 3


def test_modules_beside_the_model_and_in_its_directory_are_imported(client: triton.InferenceServerClient) -> None:
    result = client.infer("several_files", [tensor("IN", np.zeros(1, np.int32))])
    assert result.as_numpy("OUT").tolist() == [b"beside", b"above", b"beside"]


def test_a_reload_takes_a_helper_module_that_was_replaced(tmp_path: Path) -> None:
    model = Path(shutil.copytree(MODELS / "several_files", tmp_path / "several_files"))
    flags = ("--model-control-mode=explicit", "--load-model=several_files")
    with running(tmp_path, *flags) as server:
        for word in ("beside", "afresh"):
            (model / "1" / "beside_the_model.py").write_text(f'WORD = "{word}"')
            os.utime(model / "1" / "beside_the_model.py", (1, 1))
            assert call(server, "/v2/repository/models/several_files/load", {})[0] == 200
            answer = infer(server, "several_files", ("IN", "INT32", [1], [0]))[1]
            assert answer["outputs"][0]["data"] == [word, "above", word]


def test_what_a_model_says_is_in_the_log(server: RunningServer) -> None:
    assert infer(server, "speaking", ("TEXT", "BYTES", [1], ["of bees"]))[0] == 200
    for text in ("printed of bees", "model speaking:1: chosen of bees", "model speaking:1: verbose of bees"):
        server.wait_for_log(text)
    said = {word: next(line for line in server.lines if f"{word} of bees" in line)[:1] for word in ("info", "plain")}
    assert said == {"info": "I", "plain": "I"}
    said = {word: next(line for line in server.lines if f"{word} of bees" in line)[:1] for word in ("warn", "chosen")}
    assert said == {"warn": "W", "chosen": "W"}
    assert next(line for line in server.lines if "error of bees" in line).startswith("E")
    assert any("model speaking:1: speaking is initialized" in line for line in server.lines)


# --- senders of a model that is not decoupled --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["plain", "now", "in two", "later"])
def test_a_sender_answers_like_a_returned_response(client: triton.InferenceServerClient, how: str) -> None:
    assert client.infer("senders", [tensor("HOW", strings([how]))]).as_numpy("OUT").tolist() == [[how.encode()]]


def test_a_batch_may_be_answered_in_every_way_at_once(client: triton.InferenceServerClient) -> None:
    def ask_one(how: str) -> Any:
        try:
            return client.infer("senders", [tensor("HOW", strings([how]))]).as_numpy("OUT").tolist()
        except InferenceServerException as error:
            return str(error)

    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(ask_one, ["plain", "later", "dropped"]))
    assert answers[:2] == [[[b"plain"]], [[b"later"]]]
    assert "dropped this request's sender" in answers[2]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("end first", b"has to send a response before, or with, the final flag"),
        ("bad flag", b"the only flag is TRITONSERVER_RESPONSE_COMPLETE_FINAL"),
        ("nothing", b"neither a response nor the final flag"),
    ],
)
def test_a_sender_refuses(client: triton.InferenceServerClient, how: str, text: bytes) -> None:
    (said,) = client.infer("senders", [tensor("HOW", strings([how]))]).as_numpy("OUT").ravel()
    assert text in said


# --- decoupled ----------------------------------------------------------------------------------------------------------


def test_repeat_sends_a_response_for_each_element_after_execute_has_returned(
    client: triton.InferenceServerClient,
) -> None:
    stream = Stream(client)
    values = {"IN": np.array([4, 2, 0, 1], np.int32), "DELAY": np.zeros(4, np.uint32), "WAIT": np.zeros(1, np.uint32)}
    assert stream.ask("repeat", **values) == [[4], [2], [0], [1]]


@pytest.mark.parametrize("model", ["square", "auto_decoupled"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_decoupled_model_sends_any_number_of_responses(
    client: triton.InferenceServerClient, model: str, count: int
) -> None:
    if model == "square":
        assert Stream(client).ask("square", IN=np.array([[count]], np.int32)) == [[count]] * count
    else:
        assert Stream(client).ask(model, N=np.array([count], np.int32)) == [[index] for index in range(count)]


def test_an_error_ends_a_stream_after_its_responses(client: triton.InferenceServerClient) -> None:
    assert Stream(client).ask("square", IN=np.array([[13]], np.int32)) == [[13], "thirteen"]


def test_an_exception_ends_every_open_request_of_the_batch(client: triton.InferenceServerClient) -> None:
    (text,) = Stream(client).ask("square", IN=np.array([[77]], np.int32))
    assert "ValueError: seventy-seven" in text
    assert "square/1/model.py(14): execute" in text


def test_a_request_whose_sender_is_dropped_without_an_end_is_ended(client: triton.InferenceServerClient) -> None:
    got = Stream(client).ask("square", IN=np.array([[99]], np.int32))
    assert got[0] == [99]
    assert "dropped this request's sender" in got[1]


def test_many_coroutines_of_a_decoupled_model_run_at_once(server: RunningServer) -> None:
    """One coroutine sleeps a millisecond for each of its 200 responses: 16 of them in turn would take over 3 s."""

    def one(_: int) -> list[Any]:
        with triton.InferenceServerClient(server.grpc) as own:
            return Stream(own).ask("auto_decoupled", N=np.array([200], np.int32))

    started = time.monotonic()
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(one, range(16))) == [[[index] for index in range(200)]] * 16
    assert time.monotonic() - started < 16 * 0.2


# --- cancelling -----------------------------------------------------------------------------------------------------------


def test_a_model_is_told_that_its_request_was_cancelled(
    server: RunningServer, client: triton.InferenceServerClient
) -> None:
    ended = threading.Event()
    future = client.async_infer("patient", [tensor("IN", np.ones(1, np.int32))], lambda **_: ended.set())
    server.wait_for_log("patient waits")
    future.cancel()
    server.wait_for_log("patient was cancelled")
    assert ended.wait(LIMIT_S)
    assert infer(server, "patient", ("IN", "INT32", [1], [0]))[0] == 200


def test_a_stream_is_told_that_its_client_has_gone(server: RunningServer, client: triton.InferenceServerClient) -> None:
    first = threading.Event()
    client.start_stream(lambda result, error: first.set())
    client.async_stream_infer("stream", [tensor("INPUT0", np.array([10000], np.int32))])
    assert first.wait(LIMIT_S)
    client.stop_stream(cancel_requests=True)
    server.wait_for_log("stream was cancelled before")
    assert Stream(client).ask("stream", INPUT0=np.array([1], np.int32)) == [[0]]


# --- faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (5, ["OUTPUT0", "INT64", "INT32"]),
        (6, ["OUTPUT9"]),
        (7, ["crashy_0", "ValueError: planned", "crashy/1/model.py(28): execute"]),
        (8, ["planned"]),
        (9, ["OUTPUT0", "[2, 3]"]),
        (10, ["crashy_0", "list", "str"]),
        (11, ["crashy_0", "0 InferenceResponse objects for 1"]),
        (12, ["InferenceResponse", "ndarray"]),
        (13, ["None"]),
        (14, ["crashy_0", "SystemExit: 3"]),
    ],
)
def test_what_a_model_does_wrongly_is_named_in_the_error(server: RunningServer, kind: int, texts: list[str]) -> None:
    pids = call(server, "/v2/models/crashy/ready")
    status, text = crashed(server, kind)
    assert status == 500
    for part in texts:
        assert part in text
    assert "headrace_backends" not in text
    works(server)
    assert call(server, "/v2/models/crashy/ready") == pids


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_a_model_that_ends_its_process_fails_its_request_and_the_next_waits_for_a_new_one(
    server: RunningServer, kind: int
) -> None:
    status, text = crashed(server, kind)
    assert status == 503
    assert "process" in text
    works(server)


def test_a_model_that_loops_for_ever_is_ended_once_nobody_waits() -> None:
    """The processes of other models are not touched, and what waited behind it is served."""
    flags = ("--model-control-mode=explicit", "--load-model=crashy", "--backend-config=python,cancel-grace-seconds=0.2")
    with running(MODELS, *flags) as server, triton.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="Deadline"):
            client.infer("crashy", [tensor("INPUT0", np.array([4], np.int32))], client_timeout=0.3)
        works(server)
        server.wait_for_log("goes on 0.2 s after its requests were cancelled")


def test_a_slow_request_that_was_cancelled_may_end_in_peace(server: RunningServer) -> None:
    with triton.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException, match="Deadline"):
            client.infer("crashy", [tensor("INPUT0", np.array([15], np.int32))], client_timeout=0.05)
        works(server)


MOODY = """
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def {}is_ready(self):
        return os.path.exists(os.path.join(pb_utils.get_model_dir(), "ready"))

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


def test_a_model_says_whether_it_is_ready(tmp_path: Path) -> None:
    """It is asked as soon as it is loaded, and every few seconds from then on; requests are served all the same."""
    io = '{ name: "%s" data_type: TYPE_INT32 dims: [ 1 ] }'
    forms = {"moody": "def ", "moody_coroutine": "async def "}
    for name, form in forms.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(
            f'backend: "python" input [ {io % "IN"} ] output [ {io % "OUT"} ]'
        )
        (tmp_path / name / "1" / "model.py").write_text(MOODY.replace("def {}", form))
    with running(tmp_path, ready=False) as server:
        for name in forms:
            server.wait_for_log(f"model {name}:1: the model is not ready: it says so")
            server.wait_status(f"/v2/models/{name}/ready", 503)
            assert infer(server, name, ("IN", "INT32", [1], [3]))[0] == 200
        assert server.status("/v2/health/ready") == 400
        for name in forms:
            (tmp_path / name / "1" / "ready").touch()
        for name in forms:
            server.wait_status(f"/v2/models/{name}/ready", 200)
        assert server.status("/v2/health/ready") == 200


def test_the_class_of_the_guide_runs(tmp_path: Path) -> None:
    guide = (MODELS.parents[1] / "docs" / "python_models.md").read_text()
    io = '{ name: "%s" data_type: TYPE_INT32 dims: [ 1 ] }'
    (tmp_path / "mine" / "1").mkdir(parents=True)
    (tmp_path / "mine" / "config.pbtxt").write_text(f'backend: "python" input [ {io % "IN"} ] output [ {io % "OUT"} ]')
    (tmp_path / "mine" / "1" / "model.py").write_text(guide.split("```python\n")[1].split("```")[0])
    with running(tmp_path) as server:
        assert infer(server, "mine", ("IN", "INT32", [1], [21]))[1]["outputs"][0]["data"] == [42]
        server.stop()
        assert any("mine_0 ends" in line for line in server.lines)
