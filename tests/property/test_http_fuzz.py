"""Hostile bodies against a real HTTP door: whatever comes, the answer is 200 or 4xx (501 for what is not served), it
comes soon, and the next good request succeeds."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_planes import EchoDataPlane, NotingControlPlane
from headrace.gateway.http.app import HttpGateway, HttpSettings
from headrace.gateway.http.errors import HttpError
from headrace.gateway.http.generate_codec import decode_generate, encode_generated
from headrace.gateway.http.request_codec import decode_request
from headrace.gateway.http.response_codec import encode_response
from headrace.types import InferenceRequest, InferenceResponse, OutputTensor, TensorMetadata
from headrace_protocol import datatype as dt
from headrace_protocol.errors import InferError

INFER = "/v2/models/echo/infer"
HEADER_LENGTH = "Inference-Header-Content-Length"

JSON_TEXT = json.dumps(
    {
        "id": "1",
        "parameters": {"sequence_id": 3, "priority": 1, "mine": "x"},
        "inputs": [
            {"name": "INPUT0", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2.5], [-3e2, 0]]},
            {"name": "INPUT1", "shape": [2], "datatype": "BYTES", "data": ["a\\u00e9", "[{"]},
            {"name": "INPUT2", "shape": [3], "datatype": "INT64", "data": [1, -2, 9007199254740993]},
        ],
        "outputs": [{"name": "OUTPUT0"}, {"name": "OUTPUT1"}, {"name": "OUTPUT2", "parameters": {"binary_data": True}}],
    }
).encode()
BINARY_HEAD = json.dumps(
    {
        "inputs": [
            {"name": "INPUT0", "shape": [4], "datatype": "FP32", "parameters": {"binary_data_size": 16}},
            {"name": "INPUT1", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 7}},
        ],
        "parameters": {"binary_data_output": True},
    }
).encode()
BINARY = BINARY_HEAD + bytes(16) + struct.pack("<I", 3) + b"abc"

TOKENS = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"null", b"true", b"NaN", b"-Infinity", b"-1", b"1.5", b"1e999"),
    *(b"18446744073709551616", b'"data"', b'"shape"', b'"inputs"', b"\x00", b"\xff", b"[[[[", b"{}", b"[]", b'""'),
    *(
        b'"binary_data_size":8',
        b'"\\ud800"',
        b" ",
        b"9" * 400,
        b"[" * 5000,
        b'{"\\u0000":2}',
        b'"shared_memory_region":"r"',
        b'"shared_memory_byte_size":9223372036854775808',
    ),
]
GOOD = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "INT8", "data": [7]}]}).encode()


def mutated(rng: random.Random, body: bytes) -> bytes:
    """Return `body` with one to four edits: bytes flipped, cut, doubled, or a token put somewhere."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(body) + 1)
        to = min(len(body), at + rng.randint(0, 12))
        match rng.randrange(5):
            case 0:
                body = body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
            case 1:
                body = body[:at] + rng.choice(TOKENS) + body[to:]
            case 2:
                body = body[:at] + body[to:]
            case 3:
                body = body[:to] + body[at:]
            case _:
                body = body[:at] if rng.random() < 0.3 else body[:at] + rng.choice(TOKENS) + body[at:]
    return body


def hostile_value(rng: random.Random, depth: int = 0) -> object:
    """Return any JSON value, now and then one that looks like a part of a request."""
    leaves = [None, True, -1, 0, 1.5, 2**63, 2**64, -(2**70), 1e308, "", "x", "FP32", "BYTES", "é\0", "INPUT0"]
    if depth > 4 or rng.random() < 0.5:
        return rng.choice(leaves)
    if rng.random() < 0.5:
        return [hostile_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = [
        "inputs",
        "outputs",
        "name",
        "shape",
        "datatype",
        "data",
        "parameters",
        "id",
        "binary_data_size",
        "shared_memory_region",
        "shared_memory_byte_size",
        "priority",
    ]
    return {rng.choice(keys): hostile_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def hostile_request(rng: random.Random) -> bytes:
    """Return a request that is right but for the values of one or two members, at any level."""
    request = json.loads(JSON_TEXT)
    for _ in range(rng.randint(1, 2)):
        part = request
        while True:
            key = rng.choice(list(part) if isinstance(part, dict) else range(len(part)))
            if isinstance(part[key], (dict, list)) and part[key] and rng.random() < 0.7:
                part = part[key]
                continue
            part[key] = hostile_value(rng)
            break
    return json.dumps(request).encode()


def hostile_headers(rng: random.Random) -> dict[str, str]:
    headers = {}
    if rng.random() < 0.5:
        lengths = [
            str(len(BINARY_HEAD)),
            str(len(BINARY_HEAD) + rng.randint(-3, 3)),
            "0",
            "-1",
            "",
            "1e3",
            "99999",
            "9" * 40,
        ]
        headers[HEADER_LENGTH] = rng.choice(lengths)
    if rng.random() < 0.2:
        headers["Content-Encoding"] = rng.choice(["gzip", "deflate", "identity", "br", "gzip, gzip", ";"])
    if rng.random() < 0.2:
        headers["Accept-Encoding"] = rng.choice(["gzip", "gzip;q=x", ",,;", "deflate;q=0.1", "*"])
    return headers


@pytest_asyncio.fixture
async def door() -> AsyncIterator[aiohttp.ClientSession]:
    gateway = HttpGateway(EchoDataPlane(), NotingControlPlane(), HttpSettings(address="127.0.0.1", port=0))
    port = await gateway.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", auto_decompress=False) as client:
        yield client
    await gateway.stop(1)


async def check(client: aiohttp.ClientSession, path: str, body: bytes, headers: dict[str, str]) -> int:
    async with asyncio.timeout(5), client.post(path, data=body, headers=headers) as response:
        answer = await response.read()
    context = f"{response.status} for {headers} {body[:2000]!r}: {answer[:500]!r}"
    assert response.status == 200 or 400 <= response.status < 500 or response.status == 501, context
    if response.status != 200 and "Content-Encoding" not in response.headers:
        assert json.loads(answer)["error"], context
    return response.status


@pytest.mark.parametrize("seed", range(10))
async def test_mutated_and_hostile_infer_bodies_never_hurt_the_server(door, seed):
    rng = random.Random(seed)
    seen = set()
    for _ in range(400):
        kind = rng.randrange(4)
        if kind == 0:
            body, headers = mutated(rng, JSON_TEXT), {}
        elif kind == 1:
            body, headers = mutated(rng, BINARY), {HEADER_LENGTH: str(len(BINARY_HEAD))}
        elif kind == 2:
            body, headers = hostile_request(rng), {}
        else:
            body, headers = rng.choice([BINARY, JSON_TEXT, mutated(rng, BINARY)]), hostile_headers(rng)
        seen.add(await check(door, INFER, body, headers))
    assert {200, 400} <= seen
    assert await check(door, INFER, GOOD, {}) == 200


LOAD = {"parameters": {"config": "{}", "file:1/m": "AAAA", "unload_dependents": True}}
CONTROL = {
    "/v2/repository/index": {"ready": True},
    "/v2/repository/models/m/load": LOAD,
    "/v2/repository/models/m/unload": LOAD,
    "/v2/systemsharedmemory/region/r/register": {"key": "/k", "offset": 0, "byte_size": 64},
    "/v2/systemsharedmemory/unregister": {},
    "/v2/cudasharedmemory/region/r/register": {
        "raw_handle": {"b64": "AAAA" * 21 + "AA=="},
        "device_id": 0,
        "byte_size": 1,
    },
    "/v2/trace/setting": {"trace_level": ["OFF"], "trace_rate": "1", "trace_count": None},
    "/v2/models/m/trace/setting": {"trace_level": ["TIMESTAMPS"], "log_frequency": "10"},
    "/v2/logging": {"log_info": True, "log_verbose_level": 1, "log_format": "ISO8601", "log_error": None},
}


@pytest.mark.parametrize("path", CONTROL)
async def test_hostile_bodies_of_the_control_endpoints_never_hurt_the_server(door, path):
    rng = random.Random(1)
    good = json.dumps(CONTROL[path]).encode()
    seen = {await check(door, path, good, {})}
    for _ in range(150):
        body = mutated(rng, good) if rng.random() < 0.5 else json.dumps(hostile_value(rng)).encode()
        seen.add(await check(door, path, body, {}))
    assert 200 in seen
    assert await check(door, INFER, GOOD, {}) == 200


GENERATE = json.dumps(
    {
        "id": "7",
        "INPUT0": [[1, 2.5, -3e2, 0], [1, 2, 3, 4]],
        "max_tokens": 5,
        "stop": "\\u00e9[{",
        "parameters": {"temperature": 0.5, "flag": True, "priority": 1},
    }
).encode()


@pytest.mark.parametrize("kind", ["generate", "generate_stream"])
async def test_hostile_generate_bodies_never_hurt_the_server(door, kind):
    rng = random.Random(kind)
    path = f"/v2/models/echo/{kind}"
    seen = {await check(door, path, GENERATE, {})}
    for _ in range(500):
        if rng.random() < 0.7:
            body = mutated(rng, GENERATE)
        else:
            body = json.dumps(
                json.loads(GENERATE) | {rng.choice(["INPUT0", "id", "parameters", "x"]): hostile_value(rng)}
            )
        seen.add(await check(door, path, body if isinstance(body, bytes) else body.encode(), hostile_headers(rng)))
    assert {200, 400} <= seen
    assert await check(door, INFER, GOOD, {}) == 200


# --- the codecs alone, where many more cases are cheap --------------------------------------------------------------

FUZZ = settings(max_examples=300, deadline=None)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "\0", "name"]), inner, max_size=2)
    ),
    max_leaves=12,
)


def decoded(body: bytes, header: str | None = None) -> InferenceRequest | None:
    """Return the request, or None where it is refused with a sentence."""
    request = InferenceRequest("m")
    try:
        decode_request(request, body, header, 1 << 20)
    except (InferError, HttpError) as error:
        assert error.message
        return None
    return request


@FUZZ
@given(datatype=st.sampled_from(sorted(dt.BY_NAME)), data=VALUES, shape=st.lists(st.integers(-1, 3), max_size=3))
def test_any_json_as_data_is_read_or_refused(datatype, data, shape):
    tensor = {"name": "X", "shape": shape, "datatype": datatype, "data": data}
    request = decoded(json.dumps({"inputs": [tensor]}).encode())
    if request is not None:
        wire = request.inputs[0].data
        assert dt.to_numpy(dt.BY_NAME[datatype], shape, wire).shape == tuple(shape)


@FUZZ
@given(st.binary(max_size=200), st.none() | st.text(max_size=6) | st.integers(-5, 300).map(str))
def test_any_bytes_are_read_or_refused(body, header):
    decoded(body, header)


SIZES = st.integers(-2, 2**64) | st.sampled_from([2**63 - 1, 2**63, None, "1", 1.5, True, [], ""])
REGION = st.dictionaries(
    st.sampled_from(
        [
            "shared_memory_region",
            "shared_memory_offset",
            "shared_memory_byte_size",
            "binary_data_size",
            "binary_data",
            "classification",
        ]
    ),
    SIZES | st.sampled_from(["r", "é/\0"]),
)


@FUZZ
@given(parameters=REGION, data=st.booleans(), output=st.booleans())
def test_any_range_of_a_region_is_one_of_64_bits_or_refused(parameters, data, output):
    tensor: dict = {"name": "X", "shape": [1], "datatype": "INT8"} | ({"data": [1]} if data else {})
    body: dict = {"inputs": [tensor], "outputs": [{"name": "O"}]}
    body["outputs" if output else "inputs"][0]["parameters"] = parameters
    if output:
        tensor["data"] = [1]
    request = decoded(json.dumps(body).encode())
    if request is not None:
        regions = [request.inputs[0].region, *(asked.region for asked in request.outputs or ())]
        for region in filter(None, regions):
            assert region.name
            assert 0 <= region.offset <= region.offset + region.nbytes < 2**63


@FUZZ
@given(
    body=st.dictionaries(st.sampled_from(["x", "s", "id", "parameters", "k", "é"]), VALUES, max_size=4),
    datatype=st.sampled_from(sorted(dt.BY_NAME)),
    shape=st.lists(st.sampled_from([-1, 1, 2, 3]), max_size=3),
)
def test_any_generate_body_makes_tensors_of_the_models_shape_or_is_refused(body, datatype, shape):
    request = InferenceRequest("m")
    inputs = (TensorMetadata("x", datatype, tuple(shape)), TensorMetadata("s", "BYTES", (-1, 1)))
    try:
        decode_generate(request, json.dumps(body).encode(), inputs, 1 << 20)
    except (InferError, HttpError) as error:
        assert error.message
        return
    for tensor in request.inputs:
        wanted = next(known.shape for known in inputs if known.name == tensor.name)
        assert dt.to_numpy(tensor.datatype, tensor.shape, tensor.data).shape == tensor.shape
        assert len(tensor.shape) == len(wanted)
        assert all(dim in (-1, got) for dim, got in zip(wanted, tensor.shape, strict=True))


@FUZZ
@given(st.binary(max_size=200))
def test_any_bytes_are_read_as_generate_or_refused(body):
    try:
        decode_generate(InferenceRequest("m"), body, (TensorMetadata("x", "FP32", (-1,)),), 1 << 20)
    except (InferError, HttpError) as error:
        assert error.message


@FUZZ
@given(
    datatype=st.sampled_from([t for t in dt.ALL if t not in (dt.BYTES, dt.FP16, dt.BF16)]), raw=st.binary(max_size=96)
)
def test_numbers_survive_generate_both_ways_bit_by_bit(datatype, raw):
    size = datatype.itemsize
    wire = bytes(b & 1 for b in raw) if datatype is dt.BOOL else raw[: len(raw) // size * size]
    if datatype in (dt.FP32, dt.FP64):
        array = np.frombuffer(wire, datatype.numpy)
        wire = np.where(np.isnan(array), np.array(np.nan, datatype.numpy), array).tobytes()
    output = OutputTensor("x", datatype, (len(wire) // size,), wire)
    text = encode_generated(InferenceResponse("m", 1, [output]), None)
    request = InferenceRequest("m")
    decode_generate(request, text, (TensorMetadata("x", datatype.name, (-1,)),), 1 << 20)
    assert bytes(request.inputs[0].data) == wire


NUMERIC = [t for t in dt.ALL if t not in (dt.BYTES, dt.FP16, dt.BF16)]


def nested(rng: random.Random, elements: list) -> list:
    """Return `elements` in their order, put into arrays at random, empty ones among them."""
    result: list = []
    while elements:
        size = rng.randint(0, len(elements))
        group, elements = elements[:size], elements[size:]
        result += (
            [nested(rng, group) if rng.random() < 0.4 and len(group) > 1 else group] if rng.random() < 0.6 else group
        )
    return result


@FUZZ
@given(datatype=st.sampled_from(NUMERIC), raw=st.binary(max_size=96), seed=st.integers(0, 1000))
def test_numbers_survive_json_both_ways_bit_by_bit_however_they_are_nested(datatype, raw, seed):
    size = datatype.itemsize
    wire = bytes(b & 1 for b in raw) if datatype is dt.BOOL else raw[: len(raw) // size * size]
    if datatype in (dt.FP32, dt.FP64):
        array = np.frombuffer(wire, datatype.numpy)
        wire = np.where(np.isnan(array), np.array(np.nan, datatype.numpy), array).tobytes()
    count = len(wire) // size
    body, _ = encode_response(InferenceResponse("m", 1, [OutputTensor("X", datatype, (count,), wire)]), form())
    output = json.loads(body)["outputs"][0]
    for data in (output["data"], nested(random.Random(seed), output["data"])):
        request = decoded(json.dumps({"inputs": [output | {"data": data}]}).encode())
        assert request is not None
        assert bytes(request.inputs[0].data) == wire


@FUZZ
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=6))
def test_strings_survive_json_both_ways_byte_by_byte(texts):
    wire = dt.encode_bytes([text.encode() for text in texts])
    body, _ = encode_response(InferenceResponse("m", 1, [OutputTensor("X", dt.BYTES, (len(texts),), wire)]), form())
    request = decoded(json.dumps({"inputs": json.loads(body)["outputs"]}).encode())
    assert request is not None
    assert bytes(request.inputs[0].data) == wire


def form():
    return decode_request(InferenceRequest("m"), b'{"inputs":[]}', None, 1 << 20)
