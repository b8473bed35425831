"""Requests of any shapes, gathered and scattered: each gets its own elements, whichever way they lie in the batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import model, tensor
from headrace.instances.payload import Payload
from headrace.instances.signature import ModelSignature
from headrace.repository.model_config import Cut, Padding
from headrace.types import InferenceRequest, InputTensor
from headrace_backends.api import ModelDescription
from headrace_backends.batch import Batch
from headrace_backends.execution import model_memory
from headrace_protocol.arena import Arena
from headrace_protocol.datatype import BY_NAME, encode_bytes, to_numpy

SCATTER = {"batch_output": [{"target_name": ["Y"], "source_input": ["X"]}]}
shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=6)


def signature(way: str, datatype: str, sizes: tuple[int, ...] = ()) -> ModelSignature:
    ragged = way != "padded"
    padding = None if ragged else Padding({"X": 7}, sizes, not sizes, {"Y": (Cut(0, "X", 0), Cut(1, "X", 1))})
    config = model(
        [tensor("X", datatype, -1, -1, allow_ragged_batch=ragged)],
        [tensor("Y", datatype, -1, -1)],
        64,
        padding=padding,
        scattered={"Y": "X"} if way == "scattered" else {},
    )
    return ModelSignature(config, 1)


def asked(made: ModelSignature, number: int, shape: tuple[int, ...], datatype: str) -> tuple[object, np.ndarray]:
    """Return a request whose elements no other has."""
    count = int(np.prod(shape))
    if datatype == "BYTES":
        array = np.empty(count, np.object_)
        array[:] = [b"%d:%d" % (number, at) * (at % 3) for at in range(count)]
        data = encode_bytes(array.tolist())
    else:
        array = (1000 * number + np.arange(count)).astype(BY_NAME[datatype].numpy)
        data = array.tobytes()
    request = InferenceRequest("m")
    request.inputs = [InputTensor("X", BY_NAME[datatype], shape, data)]
    return made.prepare(request), array.reshape(shape)


@settings(max_examples=150, deadline=None)
@given(
    shapes,
    st.sampled_from(["ragged", "scattered", "padded"]),
    st.sampled_from(["INT32", "FP64", "BYTES"]),
    st.sampled_from([(), (2, 4)]),
    st.booleans(),
)
def test_each_request_gets_back_what_it_brought(
    given_shapes: list[tuple[int, ...]], way: str, datatype: str, sizes: tuple[int, ...], apart: bool
) -> None:
    if way == "padded" and datatype == "BYTES":
        datatype = "INT32"
    made = signature(way, datatype, sizes)
    pairs = [asked(made, number, shape, datatype) for number, shape in enumerate(given_shapes)]
    arena = Arena.create(1 << 20)
    payload = Payload(made, [request for request, _ in pairs])
    command = payload.gather(arena, 1, 0)
    config = {"max_batch_size": 64, **(SCATTER if way == "scattered" else {})}
    batch = Batch(command, model_memory(arena, config, ModelDescription()))
    batch.open_inputs()
    if way == "ragged" or apart:
        for request in batch.requests:
            request.respond({"Y": request.input("X")})
    else:
        batch.respond({"Y": batch.inputs["X"]})
    answer, descriptors = batch.finish(None)
    assert answer is not None
    assert not descriptors
    for result, (_, array) in zip(payload.scatter(answer.batched, answer.responses, []), pairs, strict=True):
        (output,) = result.outputs
        assert output.shape == array.shape
        assert np.array_equal(to_numpy(BY_NAME[datatype], output.shape, bytes(output.data)), array)
        result.release()
    payload.release()
    assert not arena.ranges.allocated_bytes
