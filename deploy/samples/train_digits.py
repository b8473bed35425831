"""Train the sample model `digits` and write it as ONNX, with its labels and a request that holds a real image.

The data are the 1797 images of handwritten digits that scikit-learn carries: 8 by 8 pixels, each 0 (white) to 16
(black). The images of the request and of the printed accuracy were not trained on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "model_repository" / "digits"
REQUEST = ROOT / "docs" / "first-request.json"

LABELS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIDE = 8
DARKEST = 16.0
SEED = 0
WANTED_ACCURACY = 0.97
SHOWN = 7
"""The digit of the request."""

Floats = npt.NDArray[np.float32]


def to_onnx(classifier: MLPClassifier) -> onnx.ModelProto:
    """Return `image` FP32 [N, 64] -> Gemm, Relu, Gemm, Softmax -> `scores` FP32 [N, 10].

    The division by DARKEST that training saw is folded into the first layer's weights.
    """
    (weights1, weights2), (bias1, bias2) = classifier.coefs_, classifier.intercepts_
    constants = {"W1": weights1 / DARKEST, "B1": bias1, "W2": weights2, "B2": bias2}
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["image", "W1", "B1"], ["hidden"]),
            helper.make_node("Relu", ["hidden"], ["active"]),
            helper.make_node("Gemm", ["active", "W2", "B2"], ["logits"]),
            helper.make_node("Softmax", ["logits"], ["scores"], axis=1),
        ],
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", SIDE * SIDE])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", len(LABELS)])],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, producer_name="headrace", opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8  # read by every ONNX Runtime that the project supports
    onnx.checker.check_model(model, full_check=True)
    return model


def request_text(image: Floats) -> str:
    """Return an inference request for `image` as JSON, laid out so that the digit can be seen in it."""
    rows = [", ".join(f"{pixel:2.0f}" for pixel in row) for row in image.reshape(SIDE, SIDE)]
    data = ",\n".join(f"      {row}" for row in rows)
    text = f"""{{
  "inputs": [
    {{"name": "image", "datatype": "FP32", "shape": [1, {SIDE * SIDE}], "data": [
{data}
    ]}}
  ],
  "outputs": [{{"name": "scores", "parameters": {{"classification": 1}}}}]
}}
"""
    json.loads(text)
    return text


def accuracy(model: onnx.ModelProto, images: Floats, labels: npt.NDArray[np.int64]) -> float:
    """Return the share of `images` that the ONNX model, as ONNX Runtime runs it, labels right."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (scores,) = session.run(["scores"], {"image": images})
    return float(np.mean(scores.argmax(axis=1) == labels))


def main() -> None:
    digits = load_digits()
    images, labels = digits.data.astype(np.float32), digits.target
    train, held_out, train_labels, held_out_labels = train_test_split(
        images, labels, test_size=0.25, random_state=SEED, stratify=labels
    )
    classifier = MLPClassifier((128,), alpha=1e-3, max_iter=400, random_state=SEED)
    classifier.fit(train / DARKEST, train_labels)

    model = to_onnx(classifier)
    reached = accuracy(model, held_out, held_out_labels)
    sys.stdout.write(f"accuracy on {len(held_out)} held-out images: {reached:.4f}\n")
    if reached <= WANTED_ACCURACY:
        raise SystemExit(f"expected more than {WANTED_ACCURACY}; nothing was written")

    (FOLDER / "1").mkdir(parents=True, exist_ok=True)
    onnx.save(model, FOLDER / "1" / "model.onnx")
    (FOLDER / "labels.txt").write_text("\n".join(LABELS) + "\n")
    REQUEST.write_text(request_text(held_out[held_out_labels == SHOWN][0]))


if __name__ == "__main__":
    main()
