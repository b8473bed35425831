"""Our reading and writing of the inference messages against the message library, on random messages and on noise."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.grpc import request_codec as codec
from headrace.gateway.grpc.wire import byte_count, encode_varint, frame_outputs, split_raw
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.errors import InferError

names = st.text(max_size=8)
parameters = st.dictionaries(
    names,
    st.one_of(
        st.booleans().map(lambda value: pb.InferParameter(bool_param=value)),
        st.integers(-(2**63), 2**63 - 1).map(lambda value: pb.InferParameter(int64_param=value)),
        st.floats(allow_nan=False).map(lambda value: pb.InferParameter(double_param=value)),
        names.map(lambda value: pb.InferParameter(string_param=value)),
        st.integers(0, 2**64 - 1).map(lambda value: pb.InferParameter(uint64_param=value)),
    ),
    max_size=3,
)
contents = st.builds(
    pb.InferTensorContents,
    int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3),
    fp32_contents=st.lists(st.floats(width=32, allow_nan=False), max_size=3),
    bytes_contents=st.lists(st.binary(max_size=5), max_size=3),
)
shapes = st.lists(st.one_of(st.integers(0, 4), st.integers(-(2**63), 2**63 - 1)), max_size=4)
datatypes = st.sampled_from(["FP32", "INT8", "INT32", "BYTES", "FP16", "BOOL", "nope"])
tensors = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=names,
    datatype=datatypes,
    shape=shapes,
    parameters=parameters,
    contents=st.one_of(st.none(), contents),
)
outputs = st.builds(pb.ModelInferRequest.InferRequestedOutputTensor, name=names, parameters=parameters)
requests = st.builds(
    pb.ModelInferRequest,
    model_name=names,
    model_version=st.sampled_from(["", "1", "x"]),
    id=names,
    parameters=parameters,
    inputs=st.lists(tensors, max_size=3),
    outputs=st.lists(outputs, max_size=3),
    raw_input_contents=st.lists(st.binary(max_size=300), max_size=4),
)


@st.composite
def mutations(draw):
    """A message with bytes changed, dropped, repeated or added."""
    data = bytearray(draw(requests).SerializeToString())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["set", "cut", "insert", "repeat"])):
            case "set" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at : at + draw(st.integers(0, 8))]
            case "insert":
                data[at:at] = draw(st.binary(max_size=12))
            case _:
                data += data[at:]
    return bytes(data)


@pytest.fixture(params=["whole", "split"], autouse=True, scope="module")
def path(request):
    """Run every test on both ways of decoding, whatever the size."""
    before = codec._SPLIT_ABOVE
    codec._SPLIT_ABOVE = 0 if request.param == "split" else 2**31
    yield
    codec._SPLIT_ABOVE = before


@given(requests, requests)
def test_a_split_message_holds_what_the_library_reads(first, second):
    """Two messages one after the other are one: repeated fields go on, in any order."""
    data = first.SerializeToString() + second.SerializeToString()
    split = split_raw(data)
    assert split is not None
    rest, raw = split
    whole = pb.ModelInferRequest.FromString(data)
    assert [bytes(entry) for entry in raw] == list(whole.raw_input_contents)
    del whole.raw_input_contents[:]
    assert pb.ModelInferRequest.FromString(rest) == whole


@given(st.one_of(mutations(), st.binary(max_size=60)))
def test_splitting_never_changes_the_verdict_or_the_content(data):
    """What the library refuses whole it refuses in parts; what it accepts it reads alike."""
    split = split_raw(data)
    if split is None:
        return
    rest, raw = split
    try:
        whole = pb.ModelInferRequest.FromString(data)
    except Exception as error:
        with pytest.raises(type(error)):
            pb.ModelInferRequest.FromString(rest)
        return
    assert [bytes(entry) for entry in raw] == list(whole.raw_input_contents)
    del whole.raw_input_contents[:]
    assert pb.ModelInferRequest.FromString(rest).SerializeToString(deterministic=True) == whole.SerializeToString(
        deterministic=True
    )


@given(st.one_of(requests.map(lambda request: request.SerializeToString()), mutations(), st.binary(max_size=200)))
def test_decoding_raises_nothing_but_infer_errors(data):
    with contextlib.suppress(InferError):
        codec.decode_infer(data, 0)


@given(st.integers(0, 2**64 - 1))
def test_varints_are_those_of_the_library(value):
    expected = pb.StatisticDuration(count=value).SerializeToString()
    assert (b"\x08" + encode_varint(value) if value else b"") == expected


@given(
    st.builds(
        pb.ModelInferResponse,
        model_name=names,
        model_version=names,
        id=names,
        parameters=parameters,
        outputs=st.lists(
            st.builds(pb.ModelInferResponse.InferOutputTensor, name=names, datatype=datatypes, shape=shapes), max_size=3
        ),
    ),
    st.lists(st.binary(max_size=300), max_size=3),
)
def test_framed_outputs_are_what_the_library_would_write(header, data):
    pieces = frame_outputs(header.SerializeToString(), [memoryview(entry) for entry in data])
    joined = b"".join(pieces)
    assert byte_count(pieces) == len(joined)
    header.raw_output_contents.extend(data)
    assert pb.ModelInferResponse.FromString(joined) == header


def test_a_message_of_very_many_fields_is_left_to_the_library():
    assert split_raw(b"\x3a\x00" * 4097) is None


def test_a_message_of_many_fields_is_split():
    split = split_raw(b"\x3a\x00" * 4096)
    assert split is not None
    assert len(split[1]) == 4096
