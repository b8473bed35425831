"""From ModelInferRequest to the data plane: what well-formed messages become, and what is said about the others."""

import numpy as np
import pytest

from headrace.gateway.grpc import request_codec as codec
from headrace.gateway.grpc.request_codec import decode_infer
from headrace.types import LATEST, SEQUENCE_END, SEQUENCE_START, RegionRef
from headrace_protocol import datatype as dt
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol.errors import ErrorCode, InferError


def message(**fields):
    """A request for model `m` with one raw FP32 input of two elements, changed by `fields`."""
    values = {"model_name": "m", "inputs": [tensor()], "raw_input_contents": [bytes(8)]}
    return pb.ModelInferRequest(**(values | fields))


def tensor(name="X", datatype="FP32", shape=(2,), **fields):
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, **fields)


def typed(datatype, shape, **contents):
    return message(
        inputs=[tensor("X", datatype, shape, contents=pb.InferTensorContents(**contents))], raw_input_contents=[]
    )


def output(name="Y", **parameters):
    return pb.ModelInferRequest.InferRequestedOutputTensor(
        name=name, parameters={key: pb.InferParameter(**value) for key, value in parameters.items()}
    )


def with_parameter(key, **value):
    return message(parameters={key: pb.InferParameter(**value)})


def decode(request):
    return decode_infer(request.SerializeToString(), 7)


def refusal(request):
    with pytest.raises(InferError) as caught:
        decode_infer(request if isinstance(request, bytes) else request.SerializeToString(), 0)
    return caught.value


def test_names_version_id_and_time_are_taken_over():
    request = decode(message(model_version="3", id="é-1"))
    assert (request.model_name, request.model_version, request.id, request.received_ns) == ("m", 3, "é-1", 7)


def test_an_absent_version_means_the_latest():
    assert decode(message()).model_version == LATEST


def test_raw_entries_become_the_data_of_the_inputs_in_order():
    request = decode(message(inputs=[tensor("A", "UINT8"), tensor("B", "UINT8")], raw_input_contents=[b"ab", b"cd"]))
    assert [(one.name, one.datatype, one.shape, bytes(one.data)) for one in request.inputs] == [
        ("A", dt.UINT8, (2,), b"ab"),
        ("B", dt.UINT8, (2,), b"cd"),
    ]


def test_a_large_raw_entry_is_a_view_of_the_message():
    data = message(inputs=[tensor("X", "UINT8", (100_000,))], raw_input_contents=[b"x" * 100_000]).SerializeToString()
    (one,) = decode_infer(data, 0).inputs
    assert isinstance(one.data, memoryview)
    assert one.data.obj is data


@pytest.mark.parametrize(
    ("datatype", "contents", "wire"),
    [
        ("BOOL", {"bool_contents": [True, False]}, b"\x01\x00"),
        ("INT8", {"int_contents": [-128, 127]}, b"\x80\x7f"),
        ("INT16", {"int_contents": [-32768, 1]}, b"\x00\x80\x01\x00"),
        ("INT32", {"int_contents": [-1, 2]}, np.array([-1, 2], "<i4").tobytes()),
        ("INT64", {"int64_contents": [-(2**63), 9007199254740993]}, np.array([-(2**63), 2**53 + 1], "<i8").tobytes()),
        ("UINT8", {"uint_contents": [0, 255]}, b"\x00\xff"),
        ("UINT16", {"uint_contents": [65535, 1]}, b"\xff\xff\x01\x00"),
        ("UINT32", {"uint_contents": [2**32 - 1, 1]}, b"\xff\xff\xff\xff\x01\x00\x00\x00"),
        ("UINT64", {"uint64_contents": [2**64 - 1, 1]}, np.array([2**64 - 1, 1], "<u8").tobytes()),
        ("FP32", {"fp32_contents": [0.5, float("inf")]}, np.array([0.5, np.inf], "<f4").tobytes()),
        ("FP64", {"fp64_contents": [0.1, -0.0]}, np.array([0.1, -0.0], "<f8").tobytes()),
        ("BYTES", {"bytes_contents": [b"", b"a\0b"]}, b"\x00\x00\x00\x00\x03\x00\x00\x00a\x00b"),
    ],
)
def test_typed_contents_become_the_wire_form(datatype, contents, wire):
    (one,) = decode(typed(datatype, [2], **contents)).inputs
    assert bytes(one.data) == wire


@pytest.mark.parametrize(
    ("shape", "raw"), [((0,), [b""]), ((2, 0), [b""]), ((0, 3), [])], ids=["raw", "raw rank 2", "nothing at all"]
)
@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "FP16"])
def test_a_tensor_without_elements_needs_no_data(datatype, shape, raw):
    (one,) = decode(message(inputs=[tensor("X", datatype, shape)], raw_input_contents=raw)).inputs
    assert (one.shape, bytes(one.data)) == (shape, b"")


def test_a_rank_0_tensor_has_one_element():
    (one,) = decode(typed("INT32", [], int_contents=[5])).inputs
    assert (one.shape, bytes(one.data)) == ((), b"\x05\x00\x00\x00")


BAD_INPUTS = {
    "raw on one input, typed on the other": (
        message(inputs=[tensor("A"), tensor("B", contents=pb.InferTensorContents(fp32_contents=[1, 2]))]),
        "'B'",
    ),
    "raw and typed on one input": (
        message(inputs=[tensor(contents=pb.InferTensorContents(fp32_contents=[1, 2]))]),
        "'X'",
    ),
    "one raw entry for two inputs": (message(inputs=[tensor("A"), tensor("B")]), "'B'"),
    "three raw entries for two inputs": (
        message(inputs=[tensor("A"), tensor("B")], raw_input_contents=[bytes(8)] * 3),
        "'A', 'B'",
    ),
    "raw entries for no input": (message(inputs=[]), "has 1 entries, expected 0"),
    "no data": (message(raw_input_contents=[]), "'X'"),
    "empty contents": (typed("FP32", [2]), "contents.fp32_contents, got none"),
    "wrong field for the datatype": (typed("INT64", [2], fp32_contents=[1, 2]), "contents.int64_contents"),
    "two fields": (typed("FP32", [1], fp32_contents=[1], int_contents=[1]), "contents.int_contents"),
    "too many elements": (typed("FP32", [2], fp32_contents=[1, 2, 3]), "needs 2 elements"),
    "too few elements": (typed("BYTES", [2], bytes_contents=[b"a"]), "needs 2 elements"),
    "elements for a shape of none": (typed("FP32", [0], fp32_contents=[1]), "needs 0 elements"),
    "INT8 300": (typed("INT8", [1], int_contents=[300]), "holds 300, INT8 takes -128 to 127"),
    "INT8 -129": (typed("INT8", [2], int_contents=[0, -129]), "-129"),
    "INT16 40000": (typed("INT16", [1], int_contents=[40000]), "40000"),
    "UINT8 256": (typed("UINT8", [1], uint_contents=[256]), "256"),
    "UINT16 65536": (typed("UINT16", [1], uint_contents=[65536]), "65536"),
    "FP16 typed": (typed("FP16", [1], fp32_contents=[1]), "FP16 has no typed contents"),
    "BF16 typed": (typed("BF16", [1], fp32_contents=[1]), "BF16 has no typed contents"),
    "the same input twice": (message(inputs=[tensor(), tensor()], raw_input_contents=[bytes(8)] * 2), "more than once"),
    "unknown datatype": (message(inputs=[tensor(datatype="STRING")]), "'STRING'"),
    "no datatype": (message(inputs=[tensor(datatype="")]), "unknown datatype ''"),
    "dimension -1": (message(inputs=[tensor(shape=[-1, 4])]), "got -1 in [-1, 4]"),
    "negative dimensions with a positive product": (message(inputs=[tensor(shape=[-1, -4])]), "got -1"),
    "the lowest dimension": (message(inputs=[tensor(shape=[-(2**63)])]), "-9223372036854775808"),
    "a negative dimension beside 0": (message(inputs=[tensor(shape=[0, -3])]), "got -3"),
    "65 dimensions": (message(inputs=[tensor(shape=[1] * 65)]), "at most 64 dimensions"),
}


@pytest.mark.parametrize(("request_", "says"), BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
def test_bad_inputs_are_refused_by_name(request_, says):
    error = refusal(request_)
    assert error.code is ErrorCode.INVALID_ARG
    assert says in error.message


def test_too_many_inputs_are_refused():
    count = codec.MAX_ITEMS + 1
    request = message(inputs=[tensor(f"i{i}") for i in range(count)], raw_input_contents=[b""] * count)
    assert "at most" in refusal(request).message


def region(name="r", nbytes=8, offset=None):
    values = {"shared_memory_region": {"string_param": name}, "shared_memory_byte_size": {"int64_param": nbytes}}
    if offset is not None:
        values["shared_memory_offset"] = {"int64_param": offset}
    return values


def in_region(name="X", values=None, **fields):
    parameters = {key: pb.InferParameter(**value) for key, value in (values or region()).items()}
    return tensor(name, parameters=parameters, **fields)


def test_an_input_in_shared_memory_names_its_range_and_has_no_data():
    request = decode(message(inputs=[in_region(values=region("ré", 2**40, 2**62))], raw_input_contents=[]))
    (one,) = request.inputs
    assert (one.region, bytes(one.data)) == (RegionRef("ré", 2**62, 2**40), b"")


def test_an_offset_is_zero_where_none_is_given():
    assert decode(message(inputs=[in_region()], raw_input_contents=[])).inputs[0].region == RegionRef("r", 0, 8)


@pytest.mark.parametrize("size", [8, 100_000])
def test_inputs_in_shared_memory_take_no_raw_entry(size):
    """Large and small messages are read by different code."""
    data = [b"a" * size, b"c" * size]
    request = decode(
        message(
            inputs=[
                in_region("S"),
                tensor("A", "UINT8", (size,)),
                in_region("B"),
                tensor("C", "UINT8", (size,)),
            ],
            raw_input_contents=data,
        )
    )
    assert [(one.name, bytes(one.data), one.region is not None) for one in request.inputs] == [
        ("S", b"", True),
        ("A", data[0], False),
        ("B", b"", True),
        ("C", data[1], False),
    ]


def test_typed_contents_and_shared_memory_may_stand_beside_each_other():
    inputs = [in_region("A"), tensor("B", "BOOL", (1,), contents=pb.InferTensorContents(bool_contents=[True]))]
    request = decode(message(inputs=inputs, raw_input_contents=[]))
    assert [bytes(one.data) for one in request.inputs] == [b"", b"\1"]


def test_an_output_may_go_to_shared_memory():
    request = decode(message(outputs=[output("A", **region("r", 16, 4), k={"bool_param": True}), output("B")]))
    assert [(one.name, one.region, one.parameters) for one in request.outputs] == [
        ("A", RegionRef("r", 4, 16), {"k": True}),
        ("B", None, None),
    ]


BAD_REGIONS = {
    "offset without region": ({"shared_memory_offset": {"int64_param": 0}}, "'shared_memory_offset'"),
    "size without region": ({"shared_memory_byte_size": {"int64_param": 8}}, "'shared_memory_byte_size'"),
    "region without size": ({"shared_memory_region": {"string_param": "r"}}, "'shared_memory_byte_size'"),
    "region a number": (region() | {"shared_memory_region": {"int64_param": 1}}, "takes a string_param"),
    "region without a name": (region(""), "empty text"),
    "size a string": (region() | {"shared_memory_byte_size": {"string_param": "8"}}, "takes an int64_param"),
    "size unsigned": (region() | {"shared_memory_byte_size": {"uint64_param": 8}}, "takes an int64_param"),
    "size negative": (region(nbytes=-1), "got -1"),
    "offset a bool": (region() | {"shared_memory_offset": {"bool_param": True}}, "takes an int64_param"),
    "offset without a value": (region() | {"shared_memory_offset": {}}, "got no value"),
    "offset negative": (region(offset=-(2**63)), "got -9223372036854775808"),
}


@pytest.mark.parametrize(("values", "said"), BAD_REGIONS.values(), ids=BAD_REGIONS.keys())
@pytest.mark.parametrize("where", ["input", "output"])
def test_a_bad_range_of_shared_memory_is_refused_by_name(where, values, said):
    fields = {"inputs": [in_region("T", values)]} if where == "input" else {"outputs": [output("T", **values)]}
    error = refusal(message(**({"raw_input_contents": []} | fields)))
    assert error.code is ErrorCode.INVALID_ARG
    assert f"{where} 'T'" in error.message
    assert said in error.message


@pytest.mark.parametrize("contents", [{}, {"fp32_contents": [1, 2]}])
def test_contents_beside_shared_memory_are_refused(contents):
    inputs = [in_region("T", contents=pb.InferTensorContents(**contents))]
    assert "input 'T' has contents" in refusal(message(inputs=inputs, raw_input_contents=[])).message


def test_a_raw_entry_for_an_input_in_shared_memory_is_refused():
    error = refusal(message(inputs=[in_region("S"), tensor("A")], raw_input_contents=[bytes(8), bytes(8)]))
    assert "has 2 entries, expected 1" in error.message
    assert "'A'" in error.message


def test_classes_do_not_go_to_shared_memory():
    error = refusal(message(outputs=[output("A", **region(), classification={"int64_param": 1})]))
    assert error.code is ErrorCode.INVALID_ARG
    assert "output 'A'" in error.message


def test_parameters_that_nobody_reserves_reach_the_model_with_their_types():
    request = decode(
        message(
            parameters={
                "b": pb.InferParameter(bool_param=True),
                "i": pb.InferParameter(int64_param=-5),
                "s": pb.InferParameter(string_param=""),
                "d": pb.InferParameter(double_param=0.5),
            }
        )
    )
    assert request.parameters == {"b": True, "i": -5, "s": "", "d": 0.5}
    assert type(request.parameters["b"]) is bool


def test_no_parameters_are_none():
    assert decode(message()).parameters is None


@pytest.mark.parametrize(
    ("value", "expected"), [({"int64_param": 9}, 9), ({"string_param": "s1"}, "s1"), ({"string_param": ""}, 0)]
)
def test_a_correlation_id_is_a_number_or_a_string(value, expected):
    assert decode(with_parameter("sequence_id", **value)).correlation_id == expected


def test_a_correlation_id_above_the_signed_range_arrives_as_a_negative_number():
    assert decode(with_parameter("sequence_id", int64_param=-1)).correlation_id == 2**64 - 1


def test_sequence_flags_are_collected():
    request = decode(
        message(
            parameters={
                "sequence_start": pb.InferParameter(bool_param=True),
                "sequence_end": pb.InferParameter(bool_param=True),
            }
        )
    )
    assert request.flags == SEQUENCE_START | SEQUENCE_END
    assert decode(with_parameter("sequence_start", bool_param=False)).flags == 0


@pytest.mark.parametrize("value", [{"int64_param": 4}, {"uint64_param": 4}])
def test_priority_is_signed_or_unsigned(value):
    assert decode(with_parameter("priority", **value)).priority == 4


def test_timeout_is_in_microseconds():
    assert decode(with_parameter("timeout", int64_param=2500)).timeout_us == 2500


@pytest.mark.parametrize("value", [True, False])
def test_the_empty_final_switch_is_no_parameter_of_the_model(value):
    request = decode(with_parameter("triton_enable_empty_final_response", bool_param=value))
    assert (request.empty_final, request.parameters) == (value, None)


BAD_PARAMETERS = {
    "sequence_id a bool": ("sequence_id", {"bool_param": True}),
    "sequence_id unsigned": ("sequence_id", {"uint64_param": 1}),
    "sequence_id too long": ("sequence_id", {"string_param": "x" * 129}),
    "sequence_start a number": ("sequence_start", {"int64_param": 1}),
    "sequence_end a string": ("sequence_end", {"string_param": "true"}),
    "priority negative": ("priority", {"int64_param": -1}),
    "priority a string": ("priority", {"string_param": "1"}),
    "timeout unsigned": ("timeout", {"uint64_param": 1}),
    "timeout negative": ("timeout", {"int64_param": -1}),
    "custom unsigned": ("mine", {"uint64_param": 1}),
    "custom without a value": ("mine", {}),
    "reserved prefix": ("triton_x", {"bool_param": True}),
    "empty final not a bool": ("triton_enable_empty_final_response", {"int64_param": 1}),
    "headers": ("headers", {"string_param": "x"}),
    "binary_data_output": ("binary_data_output", {"bool_param": True}),
}


@pytest.mark.parametrize(("key", "value"), BAD_PARAMETERS.values(), ids=BAD_PARAMETERS.keys())
def test_bad_parameters_are_refused_by_name(key, value):
    error = refusal(with_parameter(key, **value))
    assert error.code is ErrorCode.INVALID_ARG
    assert f"'{key}'" in error.message


def test_outputs_carry_classification_and_other_parameters():
    request = decode(
        message(outputs=[output("A", classification={"int64_param": 3}), output("B", k={"int64_param": 1})])
    )
    assert [(one.name, one.classification, one.parameters) for one in request.outputs] == [
        ("A", 3, None),
        ("B", 0, {"k": 1}),
    ]


def test_no_outputs_mean_all():
    assert not decode(message()).outputs


@pytest.mark.parametrize(
    "value", [{"int64_param": 0}, {"int64_param": -1}, {"string_param": "3"}, {"uint64_param": 3}, {}]
)
def test_a_bad_classification_is_refused_with_the_name_of_the_output(value):
    error = refusal(message(outputs=[output("A", classification=value)]))
    assert error.code is ErrorCode.INVALID_ARG
    assert "output 'A'" in error.message


def test_the_same_output_twice_is_refused():
    assert "output 'A'" in refusal(message(outputs=[output("A"), output("A")])).message


@pytest.mark.parametrize("version", ["x", "-1", "1.0", "9223372036854775808"])
def test_a_bad_version_is_refused(version):
    assert refusal(message(model_version=version)).code is ErrorCode.INVALID_ARG


@pytest.mark.parametrize(
    "data",
    [b"\x0a", b"\x0a\x05ab", b"\xff" * 11, b"\x0a\x02\xff\xfe", message().SerializeToString()[:-1], b"\x3b\x3c\x3c"],
    ids=["length missing", "cut short", "overlong varint", "bad UTF-8", "cut raw entry", "unbalanced group"],
)
def test_what_is_no_message_is_refused(data):
    error = refusal(data)
    assert error.code is ErrorCode.INVALID_ARG
    assert "ModelInferRequest" in error.message


def test_a_large_message_that_is_cut_short_is_refused():
    data = message(inputs=[tensor("X", "UINT8", (100_000,))], raw_input_contents=[b"x" * 100_000]).SerializeToString()
    assert refusal(data[:-1]).code is ErrorCode.INVALID_ARG
