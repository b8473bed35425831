"""Keys tell apart what may have different answers, entries give back what went in, the local store keeps to its size."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from configs import model, tensor
from headrace.instances.signature import ModelSignature
from headrace.response_cache import (
    ENTRY_OVERHEAD,
    DamagedEntryError,
    LocalCache,
    decode_entry,
    encode_entry,
    request_key,
)
from headrace.types import InferenceRequest, InputTensor, OutputTensor, RequestedOutput
from headrace_protocol.datatype import BY_NAME, encode_bytes

SIGNATURE = ModelSignature(
    model(
        [tensor("A", "FP32", -1, -1), tensor("B", "INT32", -1, optional=True)],
        [tensor("X", "FP32", -1), tensor("Y", "FP32", -1)],
    ),
    1,
)
DATA = np.arange(6, dtype=np.float32).tobytes()


def key(
    shape=(2, 3),
    data=DATA,
    b=None,
    outputs=(),
    identity=b"m:1:1",
    order=1,
    signature=SIGNATURE,
    datatype="FP32",
    **fields,
) -> bytes:
    request = InferenceRequest("m")
    request.inputs = [InputTensor("A", BY_NAME[datatype], shape, data)]
    if b is not None:
        request.inputs.append(InputTensor("B", BY_NAME["INT32"], (len(b) // 4,), b))
    request.inputs = request.inputs[::order]
    request.outputs = [RequestedOutput(**output) for output in outputs]
    for name, value in fields.items():
        setattr(request, name, value)
    return request_key(identity, signature.prepare(request))


@pytest.mark.parametrize(
    "other",
    [
        {"identity": b"m:1:2"},
        {"shape": (3, 2)},
        {"data": DATA[::-1]},
        {"b": b""},
        {"b": bytes(4)},
        {"outputs": [{"name": "X"}]},
        {"outputs": [{"name": "Y"}]},
        {"parameters": {"p": 1}},
        {"correlation_id": 7},
        {"flags": 1},
    ],
    ids=str,
)
def test_what_an_answer_may_depend_on_is_in_the_key(other):
    assert key(**other) != key()


def test_the_same_bytes_of_another_datatype_are_another_request():
    integers = ModelSignature(model([tensor("A", "INT32", -1, -1)], [tensor("X", "FP32", -1)]), 1)
    floats = ModelSignature(model([tensor("A", "FP32", -1, -1)], [tensor("X", "FP32", -1)]), 1)
    assert key(signature=integers, datatype="INT32") != key(signature=floats)


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations([1, True, 1.0, "1"], 2)), ids=str)
def test_parameters_of_different_types_are_different(one, other):
    assert key(parameters={"p": one}) != key(parameters={"p": other})


@pytest.mark.parametrize(
    "same",
    [{"id": "other"}, {"priority": 3}, {"timeout_us": 5}, {"model_version": 1}, {"received_ns": 9}],
    ids=str,
)
def test_what_no_answer_depends_on_is_not_in_the_key(same):
    assert key(**same) == key()


def test_the_order_of_inputs_outputs_and_parameters_does_not_matter():
    assert key(b=bytes(4), order=-1) == key(b=bytes(4))
    assert key(outputs=[{"name": "Y"}, {"name": "X"}]) == key(outputs=[{"name": "X"}, {"name": "Y"}])
    assert key(parameters={"a": 1, "b": 2}) == key(parameters={"b": 2, "a": 1})


def test_classes_are_made_of_the_answer_and_need_no_entry_of_their_own():
    assert key(outputs=[{"name": "X", "classification": 2}]) == key(outputs=[{"name": "X"}])


def test_bytes_of_one_input_do_not_pass_for_those_of_the_next():
    assert key(shape=(1, 2), data=bytes(8), b=bytes(16)) != key(shape=(1, 4), data=bytes(16), b=bytes(8))


def test_a_parameter_that_no_text_encoding_takes_has_a_key():
    assert key(parameters={"p": "\ud800"}) != key(parameters={"p": "\ud801"})


OUTPUTS = [
    OutputTensor("X", BY_NAME["FP32"], (2, 3), DATA),
    OutputTensor("S", BY_NAME["BYTES"], (2,), encode_bytes([b"", b"two"])),
    OutputTensor("E", BY_NAME["INT64"], (0, 4), b""),
]


def test_an_entry_gives_back_outputs_and_parameters():
    parameters = {"s": "t", "i": -1, "b": True, "f": 0.5}
    outputs, found = decode_entry(encode_entry(OUTPUTS, parameters))
    assert found == parameters
    assert [(o.name, o.datatype, o.shape, bytes(o.data), o.in_region) for o in outputs] == [
        (o.name, o.datatype, o.shape, bytes(o.data), False) for o in OUTPUTS
    ]
    assert decode_entry(encode_entry([], None)) == ([], None)


def test_a_damaged_entry_is_no_answer():
    block = encode_entry(OUTPUTS, {"p": 1})
    for cut in range(len(block)):
        with pytest.raises(DamagedEntryError):
            decode_entry(block[:cut])
    with pytest.raises(DamagedEntryError):
        decode_entry(block + b"\0")
    with pytest.raises(DamagedEntryError):
        decode_entry(os.urandom(64))
    wrong = [OutputTensor("X", BY_NAME["FP64"], (2, 3), DATA), OutputTensor("X", BY_NAME["FP32"], (-2, -3), DATA)]
    for output in wrong:
        with pytest.raises(DamagedEntryError):
            decode_entry(encode_entry([output], None))


def test_the_answer_used_least_recently_makes_room():
    cache = LocalCache(3 * (100 + ENTRY_OVERHEAD))
    for name in (b"a", b"b", b"c"):
        cache.put(name, name * 100)
    assert cache.get(b"a") == b"a" * 100
    cache.put(b"d", b"d" * 100)
    assert cache.get(b"b") is None
    assert [cache.get(name) is not None for name in (b"a", b"c", b"d")] == [True] * 3
    assert cache.counts.evictions == 1


def test_an_answer_larger_than_the_store_displaces_nothing():
    cache = LocalCache(1000)
    cache.put(b"a", bytes(100))
    cache.put(b"b", bytes(1000))
    assert cache.get(b"a") is not None
    assert cache.get(b"b") is None
    assert (cache.counts.skipped, cache.counts.evictions, cache.entries) == (1, 0, 1)


def test_an_answer_that_is_kept_anew_counts_once():
    cache = LocalCache(1000)
    cache.put(b"a", bytes(500))
    cache.put(b"a", bytes(100))
    cache.check_integrity()
    assert (cache.used, cache.entries) == (100 + ENTRY_OVERHEAD, 1)
