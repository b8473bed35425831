"""The same fragile model in every backend that runs here: INT32 rows go through it, and some values are its end.

A row holds one number, or some of which the first counts. What is not named below comes back at once.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from onnx_models import identity, save, tensor
from repositories import add_identity, add_onnx
from sequence_models import START_CONTROL, STATE, accumulator, oldest

EXIT, KILL, FAULT, ABORT, MEMORY, LIMITED, LONG = -1, -2, -3, -4, -5, -6, -7
"""os._exit; SIGKILL, SIGSEGV and SIGABRT sent to itself; more memory than there is; no more memory from now on; a
minute of work."""
BACKENDS = ("identity", "onnxruntime", "python", "pytorch")
OWN_CODE = ("python", "pytorch")
"""Those whose models are code that can do anything."""
FAULTS = {"os._exit": EXIT, "SIGKILL": KILL, "SIGSEGV": FAULT, "SIGABRT": ABORT}
IDENTITY_FAULTS = {
    EXIT: {"crash": True},
    KILL: {"signal": "SIGKILL"},
    FAULT: {"signal": "SIGSEGV"},
    ABORT: {"signal": "SIGABRT"},
    LONG: {"delay_ms": 60_000},
}
"""How the identity backend is told the same, by parameters of a request."""

_MISCHIEF = f"""
import os, resource, signal, time
import numpy as np


def used():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()


def do(value):
    if value == {EXIT}:
        os._exit(3)
    if value in ({KILL}, {FAULT}, {ABORT}):
        signal.raise_signal({{{KILL}: signal.SIGKILL, {FAULT}: signal.SIGSEGV, {ABORT}: signal.SIGABRT}}[value])
    if value in ({MEMORY}, {LIMITED}):
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used() + (16 << 20), before[1]))
    if value == {MEMORY}:
        taken = []
        try:
            while True:
                taken.append(bytearray(1 << 20))
        finally:
            taken.clear()
            resource.setrlimit(resource.RLIMIT_AS, before)
    if value == {LONG}:
        time.sleep(60)
"""
_PYTHON = (
    _MISCHIEF
    + """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        for array in arrays:
            do(int(array.flat[0]))
            room = np.empty(16 * array.size, np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array[:, :1])]) for array in arrays]
"""
)
_TORCH = (
    _MISCHIEF
    + """
import torch


class Fragile(torch.nn.Module):
    def forward(self, INPUT0):
        do(int(INPUT0.flatten()[0]))
        room = torch.empty(16 * INPUT0.numel())
        return INPUT0[:, :1]
"""
)


_PYTHON_SUMS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.add(request) for request in requests]

    def add(self, request):
        value, start, state = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "START", "STATE_IN")
        )
        total = value if start.flat[0] else value + state
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, total) for name in ("OUTPUT0", "STATE_OUT")])
"""
_TORCH_SUMS = """
import torch


class Sums(torch.nn.Module):
    def forward(self, INPUT0, START, STATE_IN):
        total = torch.where(START == 1, INPUT0, INPUT0 + STATE_IN)
        return {"OUTPUT0": total, "STATE_OUT": total}
"""
_PYTHON_STREAM = """
import json, time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            value = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            asked = json.loads(request.parameters())
            for _ in range(int(asked["responses"])):
                if sender.is_cancelled():
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]))
                time.sleep(int(asked.get("response_delay_ms", 0)) / 1000)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_PYTHON_ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]
"""
_TORCH_ECHO = """
import torch


class Echo(torch.nn.Module):
    def forward(self, INPUT0):
        return INPUT0
"""
_CALLER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        asked = pb_utils.InferenceRequest(
            model_name=CALLEE, requested_output_names=["OUTPUT0"], inputs=request.inputs()
        )
        response = asked.exec()
        if response.has_error():
            return pb_utils.InferenceResponse(error=response.error())
        return pb_utils.InferenceResponse(response.output_tensors())
"""
STREAMING = ("identity", "python")


def fragile_config(
    backend: str, *, dims: str = "1", max_batch_size: int = 1, instances: int = 1, datatype: str = "INT32"
) -> str:
    return f"""backend: "{backend}" max_batch_size: {max_batch_size}
        input [ {{ name: "INPUT0" data_type: TYPE_{datatype} dims: [ {dims} ] }} ]
        output [ {{ name: "OUTPUT0" data_type: TYPE_{datatype} dims: [ {dims} ] }} ]
        instance_group [ {{ kind: KIND_CPU count: {instances} }} ]"""


def add_fragile(repository: Path, name: str, backend: str, *, dims: str = "1", instances: int = 1) -> Path:
    """Write a fragile model whose rows are of `dims`; what is code needs 64 bytes for each number, and gives back
    the first alone.
    """
    if backend == "identity":
        group = f"instance_group [ {{ kind: KIND_CPU count: {instances} }} ]"
        return add_identity(repository, name, datatype="INT32", dims=dims, max_batch_size=1, extra=group)
    config = fragile_config(backend, dims=dims, instances=instances)
    if backend == "onnxruntime":
        return add_onnx(repository, name, fragile_onnx, config=config)
    return add_code(repository, name, config, _PYTHON if backend == "python" else _TORCH)


def add_code(repository: Path, name: str, config: str, code: str) -> Path:
    """Write a model that is a file of Python."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.py").write_text(textwrap.dedent(code))
    return folder


def add_echo(repository: Path, name: str, backend: str) -> Path:
    """Write a model that gives INT32 rows of any length back, of several requests at once."""
    batching = "dynamic_batching { max_queue_delay_microseconds: 1000 }"
    if backend == "identity":
        return add_identity(
            repository, name, datatype="INT32", max_batch_size=8, extra=batching, allow_misbehaviour="false"
        )
    config = fragile_config(backend, dims="-1", max_batch_size=8) + batching
    if backend == "onnxruntime":
        return add_onnx(repository, name, lambda path: identity(path, TensorProto.INT32), config=config)
    return add_code(repository, name, config, _PYTHON_ECHO if backend == "python" else _TORCH_ECHO)


def add_caller(repository: Path, name: str, callee: str) -> Path:
    """Write a Python model that asks another, and gives what it answers, or its error."""
    return add_code(repository, name, fragile_config("python"), _CALLER.replace("CALLEE", repr(callee)))


def add_accumulator(repository: Path, name: str, backend: str, idle_s: float = 60) -> Path:
    """Write a model whose answers are the sums of the numbers of a sequence; the server keeps them."""
    idle = f"max_sequence_idle_microseconds: {round(idle_s * 1e6)}"
    batching = f"sequence_batching {{ {idle} {oldest(4)} {START_CONTROL} {STATE} }}"
    if backend == "identity":
        batching = batching.replace(START_CONTROL, "")
        return add_identity(
            repository, name, datatype="INT32", dims="1", max_batch_size=4, extra=batching, accumulate="true"
        )
    config = fragile_config(backend, max_batch_size=4) + batching
    if backend == "onnxruntime":
        return add_onnx(repository, name, accumulator, config=config)
    return add_code(repository, name, config, _PYTHON_SUMS if backend == "python" else _TORCH_SUMS)


def add_streaming(repository: Path, name: str, backend: str) -> Path:
    """Write a decoupled model that gives a number back `responses` times, `response_delay_ms` apart, as parameters say."""
    decoupled = "model_transaction_policy { decoupled: true }"
    if backend == "identity":
        return add_identity(repository, name, dims="1", max_batch_size=1, extra=decoupled)
    return add_code(repository, name, fragile_config(backend, datatype="FP32") + decoupled, _PYTHON_STREAM)


def fragile_onnx(path: Path) -> Path:
    """OUTPUT0 = INPUT0 [batch, n]; a loop of hours where the first number is LONG, an array of petabytes for MEMORY."""
    numbers = TensorProto.INT32
    step = helper.make_graph(
        [helper.make_node("Identity", ["go_in"], ["go_out"]), helper.make_node("Mul", ["at_in", "one"], ["at_out"])],
        "step",
        [
            tensor("number", (), TensorProto.INT64),
            tensor("go_in", (), TensorProto.BOOL),
            tensor("at_in", ("batch", "n"), numbers),
        ],
        [tensor("go_out", (), TensorProto.BOOL), tensor("at_out", ("batch", "n"), numbers)],
    )
    constants: dict[str, np.ndarray] = {
        "hours": np.array(10**12, np.int64),
        "petabytes": np.array([10**15], np.int64),
        "go": np.array(True),
        "one": np.array(1, np.int32),
        "long": np.array(LONG, np.int32),
        "memory": np.array(MEMORY, np.int32),
        "first": np.array([0], np.int64),
    }
    nodes = [
        *same_number("long", "is_long"),
        *same_number("memory", "is_memory"),
        *choice("is_long", "after_long", [helper.make_node("Loop", ["hours", "go", "INPUT0"], ["looped"], body=step)]),
        *choice(
            "is_memory",
            "OUTPUT0",
            [
                helper.make_node("ConstantOfShape", ["petabytes"], ["much"]),
                helper.make_node("ReduceMax", ["much"], ["most"], keepdims=0),
                helper.make_node("Cast", ["most"], ["number"], to=numbers),
                helper.make_node("Mul", ["after_long", "number"], ["looped"]),
            ],
            "after_long",
        ),
    ]
    nodes.insert(0, helper.make_node("Reshape", ["INPUT0", "flat"], ["taken"]))
    constants["flat"] = np.array([-1], np.int64)
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    io = [[tensor(name, ("batch", "n"), numbers)] for name in ("INPUT0", "OUTPUT0")]
    return save(path, nodes, *io, weights)


def same_number(of: str, result: str) -> list:
    """Return nodes that compare the first number with a constant."""
    return [
        helper.make_node("Gather", ["taken", "first"], [f"{result}_number"]),
        helper.make_node("Squeeze", [f"{result}_number"], [f"{result}_one"]),
        helper.make_node("Equal", [f"{result}_one", of], [result]),
    ]


def choice(condition: str, result: str, then: list, other: str = "INPUT0") -> list:
    """Return a node that gives what `then` makes, named `looped`, or else `other`."""
    value = lambda name: tensor(name, ("batch", "n"), TensorProto.INT32)  # noqa: E731
    branches = {
        "then_branch": helper.make_graph(then, f"{result}_then", [], [value("looped")]),
        "else_branch": helper.make_graph(
            [helper.make_node("Identity", [other], [f"{result}_same"])], f"{result}_else", [], [value(f"{result}_same")]
        ),
    }
    return [helper.make_node("If", [condition], [result], **branches)]


def sent(backend: str, value: int) -> tuple[np.ndarray, dict[str, str | int | bool]]:
    """Return the row and the parameters that have a fragile model do this."""
    parameters = IDENTITY_FAULTS.get(value, {}) if backend == "identity" else {}
    return np.array([[value]], np.int32), parameters
