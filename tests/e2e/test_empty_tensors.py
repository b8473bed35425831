"""Tensors with no elements go through every door and backend: graph networks have empty index lists by nature."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from onnx import TensorProto

import onnx_models
from clients import DOORS, ask, infer
from harness import RunningServer, running
from repositories import add_identity, add_onnx

KINDS = {"fp32": (np.float32, TensorProto.FLOAT), "bytes": (np.object_, TensorProto.STRING)}
SHAPES = {1: [(0,)], 2: [(2, 0), (0, 3), (0, 0)]}
CASES = [
    (f"{backend}_{kind}_{rank}", shape)
    for backend in ("onnx", "identity")
    for kind in KINDS
    for rank in SHAPES
    for shape in SHAPES[rank]
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    for kind, (_, element_type) in KINDS.items():
        datatype = {"fp32": "FP32", "bytes": "STRING"}[kind]
        for rank in SHAPES:
            dims = ", ".join(["-1"] * rank)
            add_identity(repository, f"identity_{kind}_{rank}", datatype=datatype, dims=dims, max_batch_size=0)
            add_onnx(
                repository,
                f"onnx_{kind}_{rank}",
                lambda path: onnx_models.identity(path, element_type, ("n", "m")[:rank]),  # noqa: B023
                config="max_batch_size: 0",
            )
    add_onnx(repository, "rows", onnx_models.identity)
    add_onnx(repository, "nonzero", onnx_models.nonzero)
    with running(repository) as started:
        yield started


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("model", "shape"), CASES)
def test_no_elements_come_back_as_no_elements(
    server: RunningServer, door: str, model: str, shape: tuple[int, ...]
) -> None:
    dtype = KINDS[model.split("_")[1]][0]
    outputs = ask(server, door, model, {"INPUT0": np.empty(shape, dtype)})
    assert {name: array.shape for name, array in outputs.items()} == {"OUTPUT0": shape}


@pytest.mark.parametrize("door", DOORS)
def test_rows_without_elements_are_a_batch(server: RunningServer, door: str) -> None:
    outputs = ask(server, door, "rows", {"INPUT0": np.empty((2, 0), np.float32)})
    assert outputs["OUTPUT0"].shape == (2, 0)


@pytest.mark.parametrize("door", DOORS)
def test_a_batch_of_no_rows_is_refused(server: RunningServer, door: str) -> None:
    with pytest.raises(Exception, match="batch size 0 is outside 1 to 4"):
        ask(server, door, "rows", {"INPUT0": np.empty((0, 3), np.float32)})


@pytest.mark.parametrize("door", DOORS)
def test_an_output_that_turns_out_empty_is_an_answer(server: RunningServer, door: str) -> None:
    outputs = ask(server, door, "nonzero", {"INPUT0": np.zeros(5, np.float32)})
    assert outputs["OUTPUT0"].shape == (1, 0)


def test_an_empty_answer_in_json_has_an_empty_list(server: RunningServer) -> None:
    status, answer = infer(server, "onnx_fp32_2", ("INPUT0", "FP32", [0, 3], []))
    assert status == 200
    assert answer["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [0, 3], "data": []}]
