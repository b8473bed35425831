"""The models that are measured, written into a repository at run time: the same bytes on every run.

All have one instance, one thread, and a dynamic batcher that waits for nobody, as the peers' models do.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MAX_BATCH_SIZE = 64
_SEED = 20
_FEATURES, _HIDDEN, _CLASSES = 512, 512, 10


@dataclass(frozen=True)
class Tensor:
    """An input or output; the shape is without the batch dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def config(self) -> str:
        return f'{{ name: "{self.name}" data_type: TYPE_{self.datatype} dims: {list(self.shape)} }}'

    def array(self) -> np.ndarray:
        """One row of input values."""
        random = np.random.default_rng(_SEED)
        if self.datatype == "INT32":
            return random.integers(-1000, 1000, (1, *self.shape)).astype(np.int32)
        return random.standard_normal((1, *self.shape)).astype(np.float32)


@dataclass(frozen=True)
class Model:
    """What a client sends and gets, whoever serves it."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


_IMAGE = (3, 224, 224)
_PYTORCH = 'backend: "pytorch"\nparameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "1" } }'
_ONNXRUNTIME = 'backend: "onnxruntime"\nparameters { key: "intra_op_thread_count" value { string_value: "1" } }'

ADD_SUB = Model(
    tuple(Tensor(name, "INT32", (16,)) for name in ("INPUT0", "INPUT1")),
    tuple(Tensor(name, "INT32", (16,)) for name in ("OUTPUT0", "OUTPUT1")),
)
MLP = Model((Tensor("INPUT0", "FP32", (_FEATURES,)),), (Tensor("OUTPUT0", "FP32", (_CLASSES,)),))
IDENTITY = Model((Tensor("INPUT0", "FP32", _IMAGE),), (Tensor("OUTPUT0", "FP32", _IMAGE),))

_PYTHON_MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inputs = [tensor.as_numpy() for tensor in request.inputs()]
            responses.append(pb_utils.InferenceResponse([{}]))
        return responses
"""
_ADD_SUB_BODY = """
                pb_utils.Tensor("OUTPUT0", inputs[0] + inputs[1]),
                pb_utils.Tensor("OUTPUT1", inputs[0] - inputs[1]),
            """
_IDENTITY_BODY = 'pb_utils.Tensor("OUTPUT0", inputs[0])'


def build(repository: Path) -> None:
    """Write every model: those of ONNX, PyTorch and the identity backend, and what the Python backend runs."""
    add_sub = [
        helper.make_node(op, ["INPUT0", "INPUT1"], [out]) for op, out in (("Add", "OUTPUT0"), ("Sub", "OUTPUT1"))
    ]
    _onnx_model(repository / "add_sub", ADD_SUB, add_sub)
    _onnx_model(repository / "mlp_onnx", MLP, *_perceptron())
    if importlib.util.find_spec("torch") is not None:
        _torch_perceptron(repository / "mlp_torch")
    _onnx_model(repository / "identity_onnx", IDENTITY, [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])])
    _configure(repository / "identity_img", IDENTITY, 'backend: "identity"')
    _python_model(repository / "add_sub_python", ADD_SUB, _ADD_SUB_BODY)
    _python_model(repository / "identity_python", IDENTITY, _IDENTITY_BODY)


def _perceptron() -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    random = np.random.default_rng(_SEED)
    weights = {
        "hidden_weights": random.normal(0, _FEATURES**-0.5, (_FEATURES, _HIDDEN)),
        "hidden_bias": random.normal(0, 1, _HIDDEN),
        "class_weights": random.normal(0, _HIDDEN**-0.5, (_HIDDEN, _CLASSES)),
        "class_bias": random.normal(0, 1, _CLASSES),
    }
    nodes = [
        helper.make_node("Gemm", ["INPUT0", "hidden_weights", "hidden_bias"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Gemm", ["active", "class_weights", "class_bias"], ["OUTPUT0"]),
    ]
    return nodes, [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]


def _torch_perceptron(directory: Path) -> None:
    version = _configure(directory, MLP, _PYTORCH)
    import torch  # not needed for what else is measured

    weights = [torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in _perceptron()[1]]
    module = torch.nn.Sequential(
        torch.nn.Linear(_FEATURES, _HIDDEN), torch.nn.ReLU(), torch.nn.Linear(_HIDDEN, _CLASSES)
    )
    with torch.no_grad():
        for parameter, values in zip(
            module.parameters(), (weights[0].T, weights[1], weights[2].T, weights[3]), strict=True
        ):
            parameter.copy_(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module.eval()).save(str(version / "model.pt"))


def _onnx_model(
    directory: Path, model: Model, nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto] | None = None
) -> None:
    version = _configure(directory, model, _ONNXRUNTIME)
    graph = helper.make_graph(
        nodes, directory.name, [_declare(t) for t in model.inputs], [_declare(t) for t in model.outputs], weights or []
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), version / "model.onnx"
    )


def _python_model(directory: Path, model: Model, tensors: str) -> None:
    (_configure(directory, model, 'backend: "python"') / "model.py").write_text(_PYTHON_MODEL.format(tensors))


def _declare(tensor: Tensor) -> onnx.ValueInfoProto:
    element_type = TensorProto.INT32 if tensor.datatype == "INT32" else TensorProto.FLOAT
    return helper.make_tensor_value_info(tensor.name, element_type, ["batch", *tensor.shape])


def _configure(directory: Path, model: Model, backend: str) -> Path:
    version = directory / "1"
    version.mkdir(parents=True)
    (directory / "config.pbtxt").write_text(
        f'name: "{directory.name}"\n'
        f"{backend}\n"
        f"max_batch_size: {MAX_BATCH_SIZE}\n"
        f"input [ {', '.join(t.config for t in model.inputs)} ]\n"
        f"output [ {', '.join(t.config for t in model.outputs)} ]\n"
        "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
        "dynamic_batching { }\n"
    )
    return version
