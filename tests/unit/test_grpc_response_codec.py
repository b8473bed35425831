"""From the data plane to the two response messages of gRPC."""

import pytest

from headrace.gateway.grpc.response_codec import (
    encode_infer,
    encode_stream_end,
    encode_stream_error,
    encode_stream_response,
)
from headrace.types import InferenceResponse, OutputTensor
from headrace_protocol import datatype as dt
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.errors import ErrorCode, InferError

LIMIT = 2**31 - 1


def response(**fields):
    one = InferenceResponse("m", 3, [OutputTensor("Y", dt.FP32, (1, 2), memoryview(bytes(8)))], **fields)
    one.id = "é-1"
    return one


def test_a_response_is_encoded_with_raw_contents():
    message_ = pb.ModelInferResponse.FromString(encode_infer(response(), LIMIT))
    assert (message_.model_name, message_.model_version, message_.id) == ("m", "3", "é-1")
    (one,) = message_.outputs
    assert (one.name, one.datatype, list(one.shape), one.HasField("contents")) == ("Y", "FP32", [1, 2], False)
    assert list(message_.raw_output_contents) == [bytes(8)]


def test_response_parameters_keep_their_types():
    parameters = {"b": True, "i": -1, "s": "x", "d": 0.5, "u": 2**64 - 1}
    message_ = pb.ModelInferResponse.FromString(encode_infer(response(parameters=parameters), LIMIT))
    got = {
        key: (value.WhichOneof("parameter_choice"), getattr(value, value.WhichOneof("parameter_choice")))
        for key, value in message_.parameters.items()
    }
    assert got == {
        "b": ("bool_param", True),
        "i": ("int64_param", -1),
        "s": ("string_param", "x"),
        "d": ("double_param", 0.5),
        "u": ("uint64_param", 2**64 - 1),
    }


def test_a_response_parameter_beyond_64_bits_is_our_error():
    with pytest.raises(InferError, match="'big'") as caught:
        encode_infer(response(parameters={"big": 2**64}), LIMIT)
    assert caught.value.code is ErrorCode.INTERNAL


def test_a_response_above_the_limit_is_refused_with_both_sizes():
    size = len(encode_infer(response(), LIMIT))
    assert len(encode_infer(response(), size)) == size
    with pytest.raises(InferError, match=f"{size} bytes, above the {size - 1}") as caught:
        encode_infer(response(), size - 1)
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_an_output_in_shared_memory_has_an_empty_raw_entry():
    outputs = [
        OutputTensor("A", dt.FP32, (2,), b"", in_region=True),
        OutputTensor("B", dt.UINT8, (1,), b"b"),
        OutputTensor("C", dt.FP32, (2,), b"", in_region=True),
    ]
    answer = pb.ModelInferResponse.FromString(encode_infer(InferenceResponse("m", 1, outputs), LIMIT))
    assert [one.name for one in answer.outputs] == ["A", "B", "C"]
    assert list(answer.raw_output_contents) == [b"", b"b", b""]


@pytest.mark.parametrize("final", [True, False])
def test_a_response_of_a_stream_tells_whether_it_is_the_last(final):
    one = response(parameters={"k": 1, "triton_final_response": "the model's own"})
    one.final = final
    message_ = pb.ModelStreamInferResponse.FromString(encode_stream_response(one, "id", LIMIT))
    assert message_.error_message == ""
    answer = message_.infer_response
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "3", "id")
    assert answer.parameters["triton_final_response"] == pb.InferParameter(bool_param=final)
    assert answer.parameters["k"].int64_param == 1
    assert list(answer.raw_output_contents) == [bytes(8)]


def test_a_response_of_a_stream_above_the_limit_is_refused():
    size = len(encode_stream_response(response(), "id", LIMIT))
    assert len(encode_stream_response(response(), "id", size)) == size
    with pytest.raises(InferError, match=f"{size} bytes"):
        encode_stream_response(response(), "id", size - 1)


def test_an_end_without_a_response_names_what_was_asked():
    message_ = pb.ModelStreamInferResponse.FromString(encode_stream_end("id", "m", ""))
    answer = message_.infer_response
    assert (answer.id, answer.model_name, answer.model_version) == ("id", "m", "")
    assert answer.parameters["triton_final_response"].bool_param
    assert not answer.outputs


def test_a_failure_in_a_stream_names_what_was_asked():
    error = InferError(ErrorCode.NOT_FOUND, "é\0 \udc80")
    message_ = pb.ModelStreamInferResponse.FromString(encode_stream_error(error, "id", "m", "v1"))
    assert message_.error_message == "é\0 ?"
    answer = message_.infer_response
    assert (answer.id, answer.model_name, answer.model_version) == ("id", "m", "v1")
    assert not answer.parameters
