"""Small ONNX models for tests: each function writes one and returns the file's path.

Opset 17 and IR version 8, which every supported ONNX Runtime reads. "batch" is the symbol of the batch dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Dims = Sequence[int | str | None] | None


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
    *,
    external_data: bool = False,
) -> Path:
    """Write a model; with external_data its weights go to a file beside it."""
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    if external_data:
        onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    else:
        onnx.save_model(model, path)
    return path


def tensor(name: str, dims: Dims, element_type: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """Return the declaration of a tensor; dims None = of unknown rank."""
    return helper.make_tensor_value_info(name, element_type, None if dims is None else list(dims))


def add_sub(
    path: Path, dims: Dims = ("batch", 16), element_type: int = TensorProto.FLOAT, output_dims: Dims = ()
) -> Path:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1; output_dims is what the model declares, if not `dims`."""
    return save(
        path,
        [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
        [tensor(name, dims, element_type) for name in ("INPUT0", "INPUT1")],
        [tensor(name, output_dims or dims, element_type) for name in ("OUTPUT0", "OUTPUT1")],
    )


def mlp(
    path: Path, features: int = 8, hidden: int = 32, classes: int = 4, *, seed: int = 0, external_data: bool = False
) -> Path:
    """A perceptron of one hidden layer: FP32 x [batch, features] -> y [batch, classes], softmax."""
    random = np.random.default_rng(seed)
    weights = {
        "w1": random.standard_normal((features, hidden)),
        "b1": np.zeros(hidden),
        "w2": random.standard_normal((hidden, classes)),
        "b2": np.zeros(classes),
    }
    return save(
        path,
        [
            helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("Gemm", ["r", "w2", "b2"], ["z"]),
            helper.make_node("Softmax", ["z"], ["y"], axis=1),
        ],
        [tensor("x", ("batch", features))],
        [tensor("y", ("batch", classes))],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
        external_data=external_data,
    )


def scalar(path: Path) -> Path:
    """OUTPUT0 = INPUT0 + 1, FP32 of rank 0."""
    return save(
        path,
        [helper.make_node("Add", ["INPUT0", "one"], ["OUTPUT0"])],
        [tensor("INPUT0", ())],
        [tensor("OUTPUT0", ())],
        [numpy_helper.from_array(np.array(1, np.float32), "one")],
    )


def item_mean(path: Path) -> Path:
    """One number an item: FP32 INPUT0 [batch, n] -> OUTPUT0 [batch]."""
    return save(
        path,
        [helper.make_node("ReduceMean", ["INPUT0"], ["OUTPUT0"], axes=[1], keepdims=0)],
        [tensor("INPUT0", ("batch", "n"))],
        [tensor("OUTPUT0", ("batch",))],
    )


def identity(
    path: Path, element_type: int = TensorProto.FLOAT, dims: Dims = ("batch", "n"), output_dims: Dims = ()
) -> Path:
    """OUTPUT0 = INPUT0, of any type and shape (TensorProto.STRING, ...); output_dims is what the model declares."""
    return save(
        path,
        [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])],
        [tensor("INPUT0", dims, element_type)],
        [tensor("OUTPUT0", output_dims or dims, element_type)],
    )


def nonzero(path: Path) -> Path:
    """OUTPUT0 = the indices of the non-zero elements of FP32 INPUT0 [n]: a shape that depends on the data."""
    return save(
        path,
        [helper.make_node("NonZero", ["INPUT0"], ["OUTPUT0"])],
        [tensor("INPUT0", ("n",))],
        [tensor("OUTPUT0", (1, None), TensorProto.INT64)],
    )


def countdown(path: Path) -> Path:
    """OUTPUT0 = FP32 INPUT0 [batch, n] after as many steps of a loop as INT64 STEPS [1] says: slow on demand."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_in"], ["go_out"]),
            helper.make_node("Mul", ["carried_in", "one"], ["carried_out"]),
        ],
        "body",
        [
            tensor("step", (), TensorProto.INT64),
            tensor("go_in", (), TensorProto.BOOL),
            tensor("carried_in", ("batch", "n")),
        ],
        [tensor("go_out", (), TensorProto.BOOL), tensor("carried_out", ("batch", "n"))],
    )
    return save(
        path,
        [
            helper.make_node("Squeeze", ["STEPS"], ["steps"]),
            helper.make_node("Loop", ["steps", "go", "INPUT0"], ["OUTPUT0"], body=body),
        ],
        [tensor("INPUT0", ("batch", "n")), tensor("STEPS", (1,), TensorProto.INT64)],
        [tensor("OUTPUT0", ("batch", "n"))],
        [
            numpy_helper.from_array(np.array(1, np.float32), "one"),
            numpy_helper.from_array(np.array(True), "go"),
        ],
    )


def with_default(path: Path) -> Path:
    """OUTPUT0 = INPUT0 + BIAS, where BIAS [4] is an optional input that is 1 where it is not given."""
    return save(
        path,
        [helper.make_node("Add", ["INPUT0", "BIAS"], ["OUTPUT0"])],
        [tensor("INPUT0", ("batch", 4)), tensor("BIAS", (4,))],
        [tensor("OUTPUT0", ("batch", 4))],
        [numpy_helper.from_array(np.ones(4, np.float32), "BIAS")],
    )


def reshaped(path: Path) -> Path:
    """OUTPUT0 = FP32 INPUT0 [batch, n] in the INT64 shape SHAPE [r]: not even the rank is known beforehand."""
    return save(
        path,
        [helper.make_node("Reshape", ["INPUT0", "SHAPE"], ["OUTPUT0"])],
        [tensor("INPUT0", ("batch", "n")), tensor("SHAPE", ("r",), TensorProto.INT64)],
        [tensor("OUTPUT0", None)],
    )


def sequence(path: Path) -> Path:
    """OUTPUT0 = a sequence that holds FP32 INPUT0 [n], which is no tensor; OUTPUT1 = INPUT0."""
    return save(
        path,
        [
            helper.make_node("SequenceConstruct", ["INPUT0"], ["OUTPUT0"]),
            helper.make_node("Identity", ["INPUT0"], ["OUTPUT1"]),
        ],
        [tensor("INPUT0", ("n",))],
        [helper.make_tensor_sequence_value_info("OUTPUT0", TensorProto.FLOAT, None), tensor("OUTPUT1", ("n",))],
    )


def endless(path: Path) -> Path:
    """OUTPUT0 = FP32 INPUT0 [batch, n], after a loop within a condition that takes hours where INPUT0 is positive."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go_in"], ["go_out"]), helper.make_node("Mul", ["at_in", "one"], ["at_out"])],
        "body",
        [tensor("step", (), TensorProto.INT64), tensor("go_in", (), TensorProto.BOOL), tensor("at_in", ("batch", "n"))],
        [tensor("go_out", (), TensorProto.BOOL), tensor("at_out", ("batch", "n"))],
    )
    loop = helper.make_node("Loop", ["steps", "go", "INPUT0"], ["looped"], body=body)
    long = helper.make_graph([loop], "long", [], [tensor("looped", ("batch", "n"))])
    same = helper.make_node("Identity", ["INPUT0"], ["same"])
    short = helper.make_graph([same], "short", [], [tensor("same", ("batch", "n"))])
    return save(
        path,
        [
            helper.make_node("ReduceMin", ["INPUT0"], ["least"], keepdims=0),
            helper.make_node("Greater", ["least", "zero"], ["positive"]),
            helper.make_node("If", ["positive"], ["OUTPUT0"], then_branch=long, else_branch=short),
        ],
        [tensor("INPUT0", ("batch", "n"))],
        [tensor("OUTPUT0", ("batch", "n"))],
        [
            numpy_helper.from_array(np.array(10**12, np.int64), "steps"),
            numpy_helper.from_array(np.array(True), "go"),
            numpy_helper.from_array(np.array(1, np.float32), "one"),
            numpy_helper.from_array(np.array(0, np.float32), "zero"),
        ],
    )


def products(path: Path, side: int, times: int) -> Path:
    """OUTPUT0 = the square matrix INPUT0 multiplied `times` times with itself: work for a while, in all threads."""
    names = ["INPUT0", *(f"product{i}" for i in range(times - 1)), "OUTPUT0"]
    nodes = [helper.make_node("MatMul", [names[i], "INPUT0"], [names[i + 1]]) for i in range(times)]
    return save(path, nodes, [tensor("INPUT0", [side, side])], [tensor("OUTPUT0", [side, side])])


def ragged_sums(path: Path) -> Path:
    """Flat FP32 INPUT0 [n] of many requests, whose ends INT32 ENDS [requests + 1] tells (0 first).

    OUTPUT0 = INPUT0 doubled, flat; SUM [requests, 1] = what each request's elements add up to.
    """
    constants = {"two": np.array(2, np.float32), "axis": np.array(0), "column": np.array([-1, 1])}
    bounds = {"zero": np.array([0]), "one": np.array([1]), "last": np.array([-1]), "far": np.array([2**31])}
    return save(
        path,
        [
            helper.make_node("Mul", ["INPUT0", "two"], ["OUTPUT0"]),
            helper.make_node("CumSum", ["INPUT0", "axis"], ["running"]),
            helper.make_node("Pad", ["running", "before"], ["padded"]),
            helper.make_node("Gather", ["padded", "ENDS"], ["at"], axis=0),
            helper.make_node("Slice", ["at", "one", "far"], ["ends"]),
            helper.make_node("Slice", ["at", "zero", "last"], ["starts"]),
            helper.make_node("Sub", ["ends", "starts"], ["sums"]),
            helper.make_node("Reshape", ["sums", "column"], ["SUM"]),
        ],
        [tensor("INPUT0", ("n",)), tensor("ENDS", ("ends",), TensorProto.INT32)],
        [tensor("OUTPUT0", ("n",)), tensor("SUM", ("requests", 1))],
        [
            numpy_helper.from_array(array, name)
            for name, array in {**constants, **bounds, "before": np.array([1, 0])}.items()
        ],
    )


def masked_mean(path: Path) -> Path:
    """FP32 INPUT0 [batch, n] and MASK [batch, n]: OUTPUT0 = INPUT0 + 1, MEAN [batch, 1] = of where MASK is not 0."""
    return save(
        path,
        [
            helper.make_node("Add", ["INPUT0", "one"], ["OUTPUT0"]),
            helper.make_node("Mul", ["INPUT0", "MASK"], ["kept"]),
            helper.make_node("ReduceSum", ["kept", "axes"], ["sum"]),
            helper.make_node("ReduceSum", ["MASK", "axes"], ["count"]),
            helper.make_node("Div", ["sum", "count"], ["MEAN"]),
        ],
        [tensor("INPUT0", ("batch", "n")), tensor("MASK", ("batch", "n"))],
        [tensor("OUTPUT0", ("batch", "n")), tensor("MEAN", ("batch", 1))],
        [
            numpy_helper.from_array(np.array(1, np.float32), "one"),
            numpy_helper.from_array(np.array([1]), "axes"),
        ],
    )


def defaulted_rows(path: Path) -> Path:
    """FP32 OUTPUT0 [batch, n] = INPUT0 + BIAS [batch, 1], an optional input that is 1 where it is not given."""
    return save(
        path,
        [helper.make_node("Add", ["INPUT0", "BIAS"], ["OUTPUT0"])],
        [tensor("INPUT0", ("batch", "n")), tensor("BIAS", (None, 1))],
        [tensor("OUTPUT0", ("batch", "n"))],
        [numpy_helper.from_array(np.ones((1, 1), np.float32), "BIAS")],
    )


def adder(path: Path, number: float) -> Path:
    """Write OUTPUT0 = INPUT0 + number, rows of three."""
    return save(
        path,
        [helper.make_node("Add", ["INPUT0", "number"], ["OUTPUT0"])],
        [tensor("INPUT0", ("batch", 3))],
        [tensor("OUTPUT0", ("batch", 3))],
        [numpy_helper.from_array(np.array(number, np.float32), "number")],
    )
