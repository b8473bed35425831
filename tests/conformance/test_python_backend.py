"""The Python backend passes the suite of every backend, with each form of `execute`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_backends.conformance import Case, check_backend, loaded
from headrace_backends.python.backend import PythonBackend
from headrace_backends.python.process import PROCESS
from headrace_backends.python.streams import MAX_HELD
from headrace_protocol import datatype
from headrace_protocol.datatype import BYTES, DataType
from headrace_protocol.errors import ErrorCode, InferError

HEAD = """
import asyncio, json, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
"""
IDENTITY = """
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        asked = json.loads(request.parameters())
        while asked.get("hang") and not request.is_cancelled():
            time.sleep(0.001)
        if asked.get("hang"):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED))
        if "fail" in asked:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(asked["fail"]))
        tensors = []
        for tensor in request.inputs():
            name = "OUT" + tensor.name()[2:]
            if name in request.requested_output_names():
                tensors.append(pb_utils.Tensor.from_dlpack(name, tensor) if tensor.triton_dtype() == 14
                               else pb_utils.Tensor(name, tensor.as_numpy()))
        return pb_utils.InferenceResponse(tensors)
"""
ASYNC_IDENTITY = IDENTITY.replace("def execute", "async def execute").replace(
    "return [self", "await asyncio.sleep(0)\n        return [self"
)
SENDING_IDENTITY = IDENTITY.replace(
    "return [self.answer(request) for request in requests]",
    """
        for request in requests:
            threading.Thread(target=lambda r=request: r.get_response_sender().send(self.answer(r), FINAL)).start()
            request.get_response_sender()
        return [None] * len(requests)
""",
)
COUNTING = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = float(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().flat[0])
            threading.Thread(target=self.count, args=(sender, count), daemon=True).start()

    def count(self, sender, count):
        number = 0
        if count < 0:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
            count = 0
        while number < count and not sender.is_cancelled():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.full((1, 1), number, np.float32))]))
            number += 1
            time.sleep(0.001)
        sender.send(flags=FINAL)
"""
ASYNC_COUNTING = """
    async def execute(self, requests):
        await asyncio.gather(*(self.count(request) for request in requests))

    async def count(self, request):
        sender = request.get_response_sender()
        count = float(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().flat[0])
        number = 0
        if count < 0:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
            return sender.send(flags=FINAL)
        while number < count and not sender.is_cancelled():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.full((1, 1), number, np.float32))]))
            number += 1
            await asyncio.sleep(0.001)
        sender.send(flags=FINAL)
"""


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a model leaves in its process must not meet the next test."""
    monkeypatch.setattr(PROCESS, "server", None)
    monkeypatch.setattr(PROCESS, "model_file", None)
    before, paths, hooks = dict(sys.modules), list(sys.path), list(sys.path_hooks)
    yield
    for name in set(sys.modules) - set(before):
        if name.split(".")[0].isdecimal() or name.endswith("python_backend_utils"):
            del sys.modules[name]
    sys.path[:], sys.path_hooks[:] = paths, hooks


def case(folder: Path, code: str, element: DataType, max_batch_size: int, **more: Any) -> Case:
    (folder / "1").mkdir()
    (folder / "1" / "model.py").write_text(HEAD + code)
    dims = [-1] if max_batch_size else [-1, -1]
    names = ("0", "1") if "OUT" in code and "INPUT0" not in code else ("0",)
    config = {
        "name": "m",
        "max_batch_size": max_batch_size,
        "input": [{"name": f"INPUT{n}", "data_type": element.config_name, "dims": dims} for n in names],
        "output": [{"name": f"OUTPUT{n}", "data_type": element.config_name, "dims": dims} for n in names],
        **more.pop("config", {}),
    }
    count = 4 if len(names) > 1 else 1
    inputs = {f"INPUT{n}": example(element, (1, count)) for n in names}
    return Case(folder, config, more.pop("inputs", inputs), **more)


def example(element: DataType, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    if element is BYTES:
        values = np.empty(count, object)
        values[:] = [f"é{i}".encode() for i in range(count)]
        return values.reshape(shape)
    return (np.arange(count) % 2).astype(element.numpy).reshape(shape)


@pytest.mark.parametrize("name", [element.name for element in datatype.ALL])
@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_every_datatype(tmp_path: Path, name: str, max_batch_size: int) -> None:
    more = {"bad_parameters": {"fail": "not this one"}, "slow_parameters": {"hang": True}}
    check_backend(PythonBackend, case(tmp_path, IDENTITY, datatype.BY_NAME[name], max_batch_size, **more))


@pytest.mark.parametrize("code", [ASYNC_IDENTITY, SENDING_IDENTITY], ids=["coroutine", "senders"])
@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_forms_of_execute_with_one_response(tmp_path: Path, code: str, max_batch_size: int) -> None:
    more = {"bad_parameters": {"fail": "not this one"}, "slow_parameters": {"hang": True}}
    check_backend(PythonBackend, case(tmp_path, code, datatype.FP32, max_batch_size, **more))


@pytest.mark.parametrize("code", [COUNTING, ASYNC_COUNTING], ids=["threads", "coroutines"])
def test_forms_of_execute_with_many_responses(tmp_path: Path, code: str) -> None:
    made = case(
        tmp_path,
        code,
        datatype.FP32,
        8,
        config={"model_transaction_policy": {"decoupled": True}},
        inputs={"INPUT0": np.array([[3]], np.float32)},
        bad_inputs={"INPUT0": np.array([[-1]], np.float32)},
        slow_inputs={"INPUT0": np.array([[1e9]], np.float32)},
    )
    check_backend(PythonBackend, made)


def test_a_coroutine_that_does_not_mind_a_slow_client_is_bounded(tmp_path: Path) -> None:
    """Responses are held, in order, up to a bound; then that request fails, and the model is told."""
    heedless = """
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().flat[0])
            array = np.zeros((1, 1), np.float32)
            for number in range(count):
                if sender.is_cancelled():
                    break
                array[:] = number
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]))
            sender.send(flags=FINAL)
"""
    config = {"model_transaction_policy": {"decoupled": True}}
    with loaded(PythonBackend, case(tmp_path, heedless, datatype.FP32, 8, config=config)) as model:
        for count in (MAX_HELD - 1, 10 * MAX_HELD):
            batch = model.batch([{"INPUT0": np.array([[count]], np.float32)}])
            batch.flow(0, paused=True)
            model.execute(batch)
            other = model.stream(model.batch([{"INPUT0": np.array([[2]], np.float32)}]))
            assert [answer.outputs["OUTPUT0"].item() for answer in other[0][:-1]] == [0, 1]
            batch.flow(0, paused=False)
            (answers,) = model.ended(batch)
            if count < MAX_HELD:
                assert [answer.outputs["OUTPUT0"].item() for answer in answers[:-1]] == list(range(count))
                assert answers[-1].empty
            else:
                assert [answer.code for answer in answers] == ["UNAVAILABLE"]


def test_a_held_request_whose_client_goes_away_is_ended(tmp_path: Path) -> None:
    config = {"model_transaction_policy": {"decoupled": True}}
    with loaded(PythonBackend, case(tmp_path, ASYNC_COUNTING, datatype.FP32, 8, config=config)) as model:
        batch = model.batch([{"INPUT0": np.array([[3]], np.float32)}])
        batch.flow(0, paused=True)
        model.execute(batch)
        assert not model.streams.wait(batch, lambda answers: bool(answers[0]), 0.1)
        batch.cancel(0)
        (answers,) = model.ended(batch)
    assert [answer.code for answer in answers] == ["CANCELLED"]


def test_an_array_that_a_model_keeps_and_writes_into_stays_its_own(tmp_path: Path) -> None:
    keeping = """
    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        responses = []
        for request in requests:
            self.kept.append(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())
            self.kept[-1] += 1
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", self.kept[0])]))
        return responses
"""
    with loaded(PythonBackend, case(tmp_path, keeping, datatype.FP32, 0)) as model:
        for number in range(50):
            (answer,) = model.run(model.batch([{"INPUT0": np.full((1, 4), number, np.float32)}]))
            assert answer.outputs["OUTPUT0"].tolist() == [[1] * 4]


def test_inputs_that_were_not_read_in_time_are_gone_and_never_another_s(tmp_path: Path) -> None:
    late = """
    before = None

    def execute(self, requests):
        request, self.before = self.before, requests[0]
        if request is not None:
            pb_utils.get_input_tensor_by_name(request, "INPUT0")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.zeros((1, 1), np.float32))])]
"""
    with loaded(PythonBackend, case(tmp_path, late, datatype.FP32, 0)) as model:
        first, second = (model.run(model.batch([{"INPUT0": np.ones((1, 1), np.float32)}]))[0] for _ in range(2))
    assert not first.code
    assert "input 'INPUT0' was not read before its request was answered" in second.message


def test_batches_that_were_cancelled_leave_no_threads_behind(tmp_path: Path) -> None:
    """Each left one that waited for half a minute to see whether the model's code was stuck."""
    made = case(tmp_path, IDENTITY, datatype.FP32, 0)
    with loaded(PythonBackend, made) as model:
        before = threading.active_count()
        for _ in range(20):
            batch = model.batch([made.inputs])
            batch.cancel(0)
            model.run(batch)
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join(1)
        assert threading.active_count() == before


def test_a_line_that_a_model_prints_is_written_in_one_piece() -> None:
    """Where PYTHONUNBUFFERED is set its end came apart, and lines of the server got between."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = (
        "from headrace_backends.python.backend import _flush_lines; _flush_lines(); print('said', 1); print('said', 2)"
    )
    with ours, theirs:
        subprocess.run(
            [sys.executable, "-c", code], stdout=theirs, env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=True
        )
        assert [ours.recv(100) for _ in range(2)] == [b"said 1\n", b"said 2\n"]


# --- loading -------------------------------------------------------------------------------------------------------------


def refused(folder: Path, code: str | None, **config: Any) -> InferError:
    (folder / "1").mkdir(exist_ok=True)
    if code is not None:
        (folder / "1" / "model.py").write_text(code)
    made = Case(folder, {"name": "m", "max_batch_size": 0, "input": [], "output": [], **config}, {})
    with pytest.raises(InferError) as caught, loaded(PythonBackend, made):
        pass
    return caught.value


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        (None, ["there is no file", "1/model.py"]),
        ("x = 1", ["has no class TritonPythonModel"]),
        ("class TritonPythonModel: pass", ["has no method execute"]),
        ("x = (", ["cannot be imported", "SyntaxError", "model.py"]),
        ("import nothing_of_that_name", ["ModuleNotFoundError: No module named 'nothing_of_that_name'", "model.py(1)"]),
        (HEAD + "    execute = print\n    def initialize(self, args):\n        raise KeyError('gone')", ["m_0", "KeyError: 'gone'", "model.py(10): initialize"]),
        (HEAD + "    execute = print\n    def __init__(self):\n        raise SystemExit(1)", ["m_0", "SystemExit: 1"]),
    ],
)  # fmt: skip
def test_why_a_model_does_not_load_is_told(tmp_path: Path, code: str | None, texts: list[str]) -> None:
    error = refused(tmp_path, code)
    for text in texts:
        assert text in error.message
    assert "headrace_backends" not in error.message


def test_the_file_may_have_another_name(tmp_path: Path) -> None:
    made = case(tmp_path, IDENTITY, datatype.FP32, 0, config={"default_model_filename": "other.py"})
    (tmp_path / "1" / "model.py").rename(tmp_path / "1" / "other.py")
    check_backend(PythonBackend, made)


def test_initialize_is_told_of_the_model(tmp_path: Path) -> None:
    telling = """
    def initialize(self, args):
        self.args = dict(args, dir=pb_utils.get_model_dir(), name=__name__, thread=threading.get_ident())

    def execute(self, requests):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError(json.dumps(self.args)))]
"""
    made = case(tmp_path, telling, datatype.FP32, 0)
    with loaded(PythonBackend, made) as model:
        (answer,) = model.run(model.batch([made.inputs]))

    told = json.loads(answer.message)
    assert json.loads(told.pop("model_config")) == made.config
    assert told.pop("thread")
    assert told == {
        "model_instance_kind": "CPU",
        "model_instance_name": "m_0",
        "model_instance_device_id": "0",
        "model_repository": str(tmp_path),
        "model_version": "1",
        "model_name": "m",
        "dir": str(tmp_path / "1"),
        "name": "1.model",
    }


def test_a_replaced_helper_is_read_anew_though_size_and_date_are_the_same(tmp_path: Path) -> None:
    helper = tmp_path / "1" / "a_helper_of_the_model.py"
    code = "    import a_helper_of_the_model\n\n" + IDENTITY.replace('asked["fail"]', "self.a_helper_of_the_model.V")
    made = case(tmp_path, code, datatype.FP32, 0)
    said = []
    for value in ("v1", "v2"):
        helper.write_text(f"V = '{value}'")

        os.utime(helper, (1, 1))
        with loaded(PythonBackend, made) as model:
            (answer,) = model.run(model.batch([made.inputs], [{"fail": "x"}]))
        said.append(answer.message)
        for name in ("a_helper_of_the_model", "1.model", "1"):
            sys.modules.pop(name, None)
    assert said == ["v1", "v2"]
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_setting_that_is_none_is_refused(tmp_path: Path) -> None:
    made = case(tmp_path, IDENTITY, datatype.FP32, 0, backend_config={"cancel-grace-seconds": "soon"})
    with pytest.raises(InferError, match="expected seconds >= 0, got 'soon'") as caught, loaded(PythonBackend, made):
        pass
    assert caught.value.code is ErrorCode.INVALID_ARG
