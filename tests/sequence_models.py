"""Models that take sequences: an accumulator with its state kept by the server, and clients that talk to them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from harness import RunningServer
from onnx_models import Dims, save, tensor

START_CONTROL = (
    'control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ]'
)
STATE = 'state [ { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]'
DIRECT = "direct { }"


def oldest(candidates: int) -> str:
    return f"oldest {{ max_candidate_sequences: {candidates} }}"


def accumulator(path: Path, batch: bool = True) -> Path:
    """OUTPUT0 = STATE_OUT = INPUT0 + STATE_IN, but INPUT0 where START is 1."""
    dims: Dims = ("batch", 1) if batch else (1,)
    nodes = [
        helper.make_node("Cast", ["START"], ["starts"], to=TensorProto.BOOL),
        helper.make_node("Where", ["starts", "zero", "STATE_IN"], ["before"]),
        helper.make_node("Add", ["before", "INPUT0"], ["STATE_OUT"]),
        helper.make_node("Identity", ["STATE_OUT"], ["OUTPUT0"]),
    ]
    inputs = [tensor(name, dims, TensorProto.INT32) for name in ("INPUT0", "START", "STATE_IN")]
    outputs = [tensor(name, dims, TensorProto.INT32) for name in ("OUTPUT0", "STATE_OUT")]
    return save(path, nodes, inputs, outputs, [numpy_helper.from_array(np.zeros(1, np.int32), "zero")])


def accumulator_config(
    strategy: str = "",
    *,
    idle_us: int = 1_000_000,
    max_batch_size: int = 4,
    instances: int = 1,
    state: str = STATE,
    controls: str = START_CONTROL,
    extra: str = "",
) -> str:
    """Return the config.pbtxt of the accumulator."""
    return f"""
        max_batch_size: {max_batch_size}
        input [ {{ name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] }} ]
        output [ {{ name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 1 ] }} ]
        instance_group [ {{ count: {instances} kind: KIND_CPU }} ]
        sequence_batching {{ max_sequence_idle_microseconds: {idle_us} {strategy} {controls} {state} }}
        {extra}"""


def add(
    server: RunningServer,
    model: str,
    sequence: int | str,
    value: int,
    *,
    start: bool = False,
    end: bool = False,
    shape: Sequence[int] = (1, 1),
    **parameters: Any,
) -> tuple[int, Any]:
    """Add `value` in a sequence over HTTP; return (200, the sum) or the status and the message."""
    named = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end, **parameters}
    body = {
        "inputs": [
            {"name": "INPUT0", "datatype": "INT32", "shape": list(shape), "data": [value] * int(np.prod(shape))}
        ],
        "parameters": named,
    }
    url = f"http://{server.http}/v2/models/{model}/infer"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=60) as answer:
            return 200, json.loads(answer.read())["outputs"][0]["data"][0]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"]
