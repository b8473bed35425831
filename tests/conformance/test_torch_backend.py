"""The PyTorch backend passes the suite for backends, with models of every kind and tensors of every datatype."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_models as models
from headrace_backends.conformance import Case, check_backend
from headrace_backends.pytorch.backend import PyTorchBackend
from headrace_backends.pytorch.tensors import TORCH_TYPES
from headrace_protocol import datatype
from headrace_protocol.datatype import BYTES, DataType


def io(name: str, config_type: str, *dims: int) -> dict:
    return {"name": name, "data_type": config_type, "dims": list(dims)}


def config(inputs: list[dict], outputs: list[dict], max_batch_size: int = 8, **more: object) -> dict:
    return {"name": "m", "max_batch_size": max_batch_size, "input": inputs, "output": outputs, **more}


def example(element: DataType, shape: tuple[int, ...]) -> np.ndarray:
    return (np.arange(int(np.prod(shape))) % 2).astype(element.numpy).reshape(shape)


NUMERIC = [element.name for element in datatype.ALL if element is not BYTES]


@pytest.mark.parametrize("name", NUMERIC)
@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_torchscript_passes_with_an_identity_of(tmp_path: Path, name: str, max_batch_size: int) -> None:
    element = datatype.BY_NAME[name]
    models.save_script(tmp_path / "1" / "model.pt", models.Identity())
    dims = [-1] if max_batch_size else [-1, -1]
    tensors = [io("INPUT0", element.config_name, *dims)], [io("OUTPUT0", element.config_name, *dims)]
    check_backend(
        PyTorchBackend, Case(tmp_path, config(*tensors, max_batch_size), {"INPUT0": example(element, (1, 3))})
    )


@pytest.mark.parametrize("name", ["BF16", "FP16", "BOOL", "INT64"])
def test_a_program_passes_with_an_identity_of(tmp_path: Path, name: str) -> None:
    element = datatype.BY_NAME[name]
    given = torch.ones(2, 3).to(TORCH_TYPES[element])
    dynamic = {"INPUT0": {0: models.BATCH, 1: models.N}}
    models.save_exported(tmp_path / "1" / "model.pt2", models.Identity(), given, dynamic=dynamic)
    tensors = [io("INPUT0", element.config_name, -1)], [io("OUTPUT0", element.config_name, -1)]
    values = config(*tensors, default_model_filename="model.pt2")
    check_backend(PyTorchBackend, Case(tmp_path, values, {"INPUT0": example(element, (1, 3))}))


def add_sub_case(tmp_path: Path, elements: int, **more: object) -> Case:
    tensors = [io(f"{kind}{i}", "TYPE_FP32", -1) for kind in ("INPUT", "OUTPUT") for i in (0, 1)]
    inputs = {f"INPUT{i}": np.arange(elements, dtype=np.float32)[None] for i in (0, 1)}
    return Case(tmp_path, config(tensors[:2], tensors[2:], **more), inputs)


@pytest.mark.parametrize("elements", [16, 200_000])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_torchscript_passes_with_small_outputs_and_large_ones(tmp_path: Path, elements: int, threads: str) -> None:
    models.save_script(tmp_path / "1" / "model.pt", models.AddSub())
    parameters = {"INTRA_OP_THREAD_COUNT": {"string_value": threads}}
    check_backend(PyTorchBackend, add_sub_case(tmp_path, elements, parameters=parameters))


@pytest.mark.parametrize("mode", ["true", "false"])
def test_torchscript_passes_with_and_without_inference_mode(tmp_path: Path, mode: str) -> None:
    models.save_script(tmp_path / "1" / "model.pt", models.AddSub())
    check_backend(PyTorchBackend, add_sub_case(tmp_path, 16, parameters={"INFERENCE_MODE": {"string_value": mode}}))


def test_torchscript_passes_where_the_model_overwrites_its_inputs(tmp_path: Path) -> None:
    models.save_script(tmp_path / "1" / "model.pt", models.WritesInput())
    case = add_sub_case(tmp_path, 16)
    values = {**case.config, "input": case.config["input"][:1], "output": case.config["output"][:1]}
    check_backend(PyTorchBackend, Case(tmp_path, values, {"INPUT0": case.inputs["INPUT0"]}))


def test_torchscript_passes_with_requests_that_it_refuses(tmp_path: Path) -> None:
    models.save_script(tmp_path / "1" / "model.pt", models.Lookup())
    values = config([io("ids", "TYPE_INT64", -1)], [io("rows", "TYPE_FP32", -1, 2)])
    good, bad = np.array([[1, 2]]), np.array([[1, 99]])
    check_backend(PyTorchBackend, Case(tmp_path, values, {"ids": good}, bad_inputs={"ids": bad}))


def test_torchscript_passes_with_strings(tmp_path: Path) -> None:
    models.save_script(tmp_path / "1" / "model.pt", models.Exclaim())
    scalar = {"dims": [1], "reshape": {"shape": []}}
    values = config(
        [{"name": "texts", "data_type": "TYPE_STRING", **scalar}],
        [
            {"name": "loud", "data_type": "TYPE_STRING", **scalar},
            {"name": "length", "data_type": "TYPE_INT64", **scalar},
        ],
    )
    good, bad = np.array(["é".encode()], object), np.array([b"\xff"], object)
    check_backend(PyTorchBackend, Case(tmp_path, values, {"texts": good}, bad_inputs={"texts": bad}))


def test_torchscript_passes_with_a_scalar(tmp_path: Path) -> None:
    models.save_script(tmp_path / "1" / "model.pt", models.Identity())
    scalar = {"dims": [1], "reshape": {"shape": []}, "data_type": "TYPE_FP32"}
    values = config([{"name": "INPUT0", **scalar}], [{"name": "OUTPUT0", **scalar}], 0)
    check_backend(PyTorchBackend, Case(tmp_path, values, {"INPUT0": np.array(3, np.float32)}))


def test_torchscript_passes_with_a_decoupled_model(tmp_path: Path) -> None:
    models.save_script(tmp_path / "1" / "model.pt", models.AddSub())
    check_backend(PyTorchBackend, add_sub_case(tmp_path, 16, model_transaction_policy={"decoupled": True}))


def test_a_plain_module_passes(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.py").write_text(models.ADD_SUB_SOURCE)
    path = list(sys.path)
    try:
        check_backend(PyTorchBackend, add_sub_case(tmp_path, 16))
    finally:
        sys.path[:] = path
        del sys.modules["headrace_model"]
