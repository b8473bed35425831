"""Which tensors of an ONNX model are served, from what ONNX Runtime says of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from headrace_backends.onnxruntime.signature import OnnxSignature
from headrace_protocol.errors import ErrorCode, InferError


@dataclass(frozen=True)
class Arg:
    name: str
    type: str
    shape: list


X = Arg("x", "tensor(float)", ["batch", 4])
LABEL = Arg("label", "tensor(int64)", ["batch"])
MAPS = Arg("scores", "seq(map(int64,tensor(float)))", [])


def test_an_output_without_a_datatype_is_left_out_where_nobody_names_it() -> None:
    signature = OnnxSignature([X], [], [LABEL, MAPS], {})
    assert list(signature.outputs) == ["label"]
    assert signature.left_out == ("tensor 'scores' of the model has the ONNX type seq(map(int64,tensor(float)))",)
    assert signature.batching


@pytest.mark.parametrize(
    ("outputs", "config"),
    [([LABEL, MAPS], {"output": [{"name": "scores"}]}), ([MAPS], {})],
    ids=["named in the configuration", "the model's only output"],
)
def test_an_output_without_a_datatype_is_refused_where_it_is_needed(outputs: list, config: dict) -> None:
    with pytest.raises(InferError, match="'scores' of the model has the ONNX type seq.*no datatype") as raised:
        OnnxSignature([X], [], outputs, config)
    assert raised.value.code is ErrorCode.UNSUPPORTED


def test_an_input_without_a_datatype_is_refused() -> None:
    with pytest.raises(InferError, match="'scores'"):
        OnnxSignature([MAPS], [], [LABEL], {})


def test_outputs_that_the_configuration_does_not_name_are_not_mentioned() -> None:
    signature = OnnxSignature([X], [], [LABEL, MAPS], {"output": [{"name": "label"}]})
    assert (list(signature.outputs), signature.left_out) == (["label"], ())
