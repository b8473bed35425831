"""Write the sample model `simple`: OUTPUT0 = INPUT0 + INPUT1 and OUTPUT1 = INPUT0 - INPUT1, INT32 [N, 16]."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

MODEL = Path(__file__).resolve().parents[2] / "model_repository" / "simple" / "1" / "model.onnx"


def tensor(name: str) -> onnx.ValueInfoProto:
    """Describe an INT32 tensor of 16 elements a row."""
    return helper.make_tensor_value_info(name, TensorProto.INT32, ["N", 16])


def main() -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
        "simple",
        [tensor("INPUT0"), tensor("INPUT1")],
        [tensor("OUTPUT0"), tensor("OUTPUT1")],
    )
    model = helper.make_model(graph, producer_name="headrace", opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8  # read by every ONNX Runtime that the project supports
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, MODEL)


if __name__ == "__main__":
    main()
