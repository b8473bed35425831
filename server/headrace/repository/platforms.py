"""Which backend runs which kind of model file: Triton's platform names, backends and default file names, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ENSEMBLE: Final = "ensemble"
"""The platform of a model that is a graph of other models; it has no backend."""
TENSORRT: Final = "tensorrt"


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A kind of model: what `platform`, `backend` and the default file name are."""

    backend: str
    platform: str
    filename: str


KINDS: Final = (
    ModelKind("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
    ModelKind("tensorflow", "tensorflow_graphdef", "model.graphdef"),
    ModelKind(TENSORRT, "tensorrt_plan", "model.plan"),
    ModelKind("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    ModelKind("openvino", "", "model.xml"),
    ModelKind("pytorch", "pytorch_libtorch", "model.pt"),
    ModelKind("pytorch", "torch_aoti", "model.pt2"),
    ModelKind("python", "", "model.py"),
    ModelKind("llm", "", "model.json"),
    ModelKind("vllm", "", "model.json"),
)
"""In the order in which a model's files are looked at; the first that fits is taken."""

BY_PLATFORM: Final = {kind.platform: kind for kind in KINDS if kind.platform}
