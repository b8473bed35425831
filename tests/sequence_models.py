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


CONTROLS = """control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } ] },
    { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } ] }
]"""


def control_echo(path: Path, id_type: int = TensorProto.UINT64) -> Path:
    """Outputs are the controls, INPUT0, and in ROWS how many rows the batch has and how many of them are ready."""
    types = {
        "START": TensorProto.FLOAT,
        "READY": TensorProto.INT32,
        "END": TensorProto.BOOL,
        "ID": id_type,
        "INPUT0": TensorProto.INT32,
    }
    nodes = [helper.make_node("Identity", [name], [f"{name}_SEEN"]) for name in types]
    nodes += [
        helper.make_node("Shape", ["READY"], ["rows"], start=0, end=1),
        helper.make_node("Cast", ["READY"], ["ready64"], to=TensorProto.INT64),
        helper.make_node("ReduceSum", ["ready64"], ["ready"], keepdims=0),
        helper.make_node("Reshape", ["ready", "one"], ["ready1"]),
        helper.make_node("Concat", ["rows", "ready1"], ["pair"], axis=0),
        helper.make_node("Unsqueeze", ["pair", "zero"], ["wide"]),
        helper.make_node("Concat", ["rows", "two"], ["target"], axis=0),
        helper.make_node("Expand", ["wide", "target"], ["ROWS"]),
    ]
    constants = {"zero": [0], "one": [1], "two": [2]}
    return save(
        path,
        nodes,
        [tensor(name, ("batch", 1), kind) for name, kind in types.items()],
        [
            *(tensor(f"{name}_SEEN", ("batch", 1), kind) for name, kind in types.items()),
            tensor("ROWS", ("batch", 2), TensorProto.INT64),
        ],
        [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items()],
    )


def history(path: Path) -> Path:
    """OUTPUT0 = SEEN = all values of the sequence so far: a state that grows with each request."""
    nodes = [
        helper.make_node("Concat", ["SEEN_IN", "INPUT0"], ["SEEN"], axis=1),
        helper.make_node("Identity", ["SEEN"], ["OUTPUT0"]),
    ]
    return save(
        path,
        nodes,
        [tensor("INPUT0", ("batch", 1), TensorProto.INT32), tensor("SEEN_IN", ("batch", "before"), TensorProto.INT32)],
        [tensor(name, ("batch", "after"), TensorProto.INT32) for name in ("OUTPUT0", "SEEN")],
    )


HISTORY_CONFIG = """
    max_batch_size: 4
    input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]
    output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
    sequence_batching { max_sequence_idle_microseconds: 60000000 %s
        state [ { input_name: "SEEN_IN" output_name: "SEEN" data_type: TYPE_INT32 dims: [ -1 ] } ] }"""
