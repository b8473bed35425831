"""The module that Python models import: tensors, DLPack, requests, responses, errors, conversions, configuration."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import numpy as np
import pytest
import torch

from headrace_backends.python import dlpack, pb_utils
from headrace_backends.python.pb_utils import InferenceRequest, InferenceResponse, ModelConfig, Tensor, TritonError
from headrace_protocol.errors import invalid

PUBLIC = """
InferenceRequest InferenceResponse InferenceTrace Logger MetricFamily ModelConfig PreferredMemory
TRITONSERVER_MEMORY_CPU TRITONSERVER_MEMORY_GPU TRITONSERVER_REQUEST_FLAG_SEQUENCE_END
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START TRITONSERVER_REQUEST_RELEASE_ALL TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
TRITONSERVER_RESPONSE_COMPLETE_FINAL TRITON_STRING_TO_NUMPY Tensor TritonError TritonModelException
deserialize_bytes_tensor get_input_config_by_name get_input_tensor_by_name get_model_dir get_output_config_by_name
get_output_tensor_by_name is_model_ready load_model numpy_to_triton_type serialize_byte_tensor triton_string_to_numpy
triton_to_numpy_type unload_model using_decoupled_model_transaction_policy
""".split()


def config(**fields: Any) -> ModelConfig:
    return ModelConfig(json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": [], **fields}))


def io(name: str, datatype: str, *dims: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": datatype, "dims": list(dims), **more}


# --- names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_that_models_use_is_there(name: str) -> None:
    assert hasattr(pb_utils, name)


def test_numbers_are_triton_s() -> None:
    assert (pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL, pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL) == (1, 1)
    assert pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE == 2
    assert (pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END) == (
        1,
        2,
    )
    names = ["UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS"]
    assert [getattr(TritonError, name) for name in [*names, "CANCELLED"]] == list(range(8))


# --- tensors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "number"),
    [
        (np.zeros((2, 3), np.float32), 11),
        (np.zeros(0, np.int64), 9),
        (np.array(True), 1),
        (np.zeros((1, 0, 2), np.float16), 10),
        (np.array([b"a"], object), 13),
        (np.array([b"a"]), 13),
        (np.array(["a"]), 13),
    ],
)
def test_a_tensor_tells_its_array_type_and_shape(array: np.ndarray, number: int) -> None:
    tensor = Tensor("x", array)
    assert (tensor.name(), tensor.triton_dtype(), tensor.shape()) == ("x", number, list(array.shape))
    assert tensor.as_numpy() is array
    assert tensor.is_cpu()


def test_an_array_of_the_other_byte_order_is_turned() -> None:
    back = Tensor("x", np.array([1, 2], ">i4")).as_numpy()
    assert (back.dtype, back.tolist()) == (np.dtype("int32"), [1, 2])


@pytest.mark.parametrize("value", [[1], 5, None, np.float32(1)])
def test_a_tensor_of_no_array_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="tensor 'x': expected a numpy array"):
        Tensor("x", value)


def test_a_tensor_of_a_type_that_none_has_is_refused() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="complex64"):
        Tensor("x", np.zeros(1, np.complex64))


# --- DLPack --------------------------------------------------------------------------------------------------------------

TORCH = [
    torch.arange(6).reshape(2, 3),
    torch.tensor([1.5, -2], dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.zeros((1, 0, 2)),
    torch.tensor(3.0),
    torch.arange(6, dtype=torch.int16).reshape(2, 3).T,
]


@pytest.mark.parametrize("given", TORCH, ids=lambda tensor: str(tensor.dtype))
@pytest.mark.parametrize("as_capsule", [False, True])
def test_a_torch_tensor_goes_in_and_out_by_dlpack(given: torch.Tensor, as_capsule: bool) -> None:
    source = torch.utils.dlpack.to_dlpack(given) if as_capsule else given
    tensor = Tensor.from_dlpack("x", source)
    assert (tensor.shape(), tensor.is_cpu(), tensor.__dlpack_device__()) == (list(given.shape), True, (1, 0))
    for back in (torch.from_dlpack(tensor), torch.from_dlpack(tensor.to_dlpack())):
        assert back.dtype == given.dtype
        assert torch.equal(back, given)


def test_bf16_is_no_numpy_type() -> None:
    tensor = Tensor.from_dlpack("x", TORCH[1])
    assert tensor.triton_dtype() == 14
    with pytest.raises(pb_utils.TritonModelException, match="BF16"):
        tensor.as_numpy()


def test_numpy_takes_a_tensor_by_dlpack() -> None:
    assert np.from_dlpack(Tensor("x", np.arange(3))).tolist() == [0, 1, 2]


def test_a_tensor_over_memory_of_another_keeps_it_alive() -> None:
    tensor = Tensor.from_dlpack("x", torch.arange(100000) * 2)
    assert tensor.as_numpy()[-1] == 199998


def test_a_capsule_is_used_once() -> None:
    capsule = Tensor("x", np.arange(3)).to_dlpack()
    torch.from_dlpack(capsule)
    with pytest.raises(pb_utils.TritonModelException, match="nobody has used"):
        Tensor.from_dlpack("y", capsule)


@pytest.mark.parametrize("source", [5, None, np.zeros(1, np.complex64), torch.zeros(1, dtype=torch.complex64)])
def test_what_is_no_tensor_of_dlpack_is_refused(source: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="tensor 'x'"):
        Tensor.from_dlpack("x", source)


def test_strings_have_no_dlpack() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="no strings"):
        Tensor("x", np.array([b"a"], object)).to_dlpack()


def test_a_copy_by_dlpack_is_another_s_memory() -> None:
    array = np.arange(3)
    other = torch.from_dlpack(Tensor("x", array).__dlpack__(copy=True))
    other[0] = 9
    assert array[0] == 0


def test_a_tensor_is_not_on_another_device() -> None:
    with pytest.raises(BufferError):
        Tensor("x", np.arange(3)).__dlpack__(dl_device=(2, 0))


# --- responses and requests ----------------------------------------------------------------------------------------------


def test_a_response_has_tensors_or_an_error() -> None:
    tensor = Tensor("y", np.arange(3))
    good = InferenceResponse([tensor], parameters={"a": 1, "b": True, "c": "x", "d": 1.5})
    assert (good.output_tensors(), good.has_error(), good.error()) == ([tensor], False, None)
    assert json.loads(good.parameters()) == {"a": 1, "b": True, "c": "x", "d": 1.5}
    assert pb_utils.get_output_tensor_by_name(good, "y") is tensor
    assert pb_utils.get_output_tensor_by_name(good, "z") is None
    bad = InferenceResponse(error=TritonError("no", TritonError.NOT_FOUND))
    assert bad.has_error()
    assert (bad.error().message(), bad.error().code()) == ("no", 2)
    with pytest.raises(pb_utils.TritonModelException, match="no"):
        pb_utils.get_output_tensor_by_name(bad, "y")


@pytest.mark.parametrize(
    "arguments",
    [
        {"output_tensors": [1]},
        {"output_tensors": None},
        {"output_tensors": Tensor("x", np.arange(1))},
        {"error": "text"},
        {"parameters": [1]},
        {"parameters": {1: 2}},
        {"parameters": {"a": None}},
        {"parameters": {"a": 2**63}},
    ],
)
def test_a_response_of_something_else_is_a_type_error(arguments: Any) -> None:
    with pytest.raises(TypeError):
        InferenceResponse(**arguments)


@pytest.mark.parametrize(("message", "code"), [(5, 1), ("a", 99), ("a", "INTERNAL")])
def test_an_error_has_a_text_and_a_code(message: Any, code: Any) -> None:
    with pytest.raises(TypeError):
        TritonError(message, code)


def test_a_request_to_another_model_tells_what_it_was_made_of() -> None:
    tensor = Tensor("x", np.arange(3))
    request = InferenceRequest(
        request_id="r",
        correlation_id="c",
        inputs=[tensor],
        requested_output_names=["y"],
        model_name="m",
        flags=1,
        timeout=7,
        parameters={"a": 1},
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0),
        trace=pb_utils.InferenceTrace(),
    )
    assert (request.request_id(), request.correlation_id(), request.flags(), request.timeout()) == ("r", "c", 1, 7)
    assert (request.inputs(), request.requested_output_names()) == ([tensor], {"y"})
    assert json.loads(request.parameters()) == {"a": 1}
    assert pb_utils.get_input_tensor_by_name(request, "x") is tensor
    assert pb_utils.get_input_tensor_by_name(request, "y") is None
    request.set_flags(pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    assert request.flags() == 2
    assert not request.is_cancelled()
    assert request.trace().get_context() is None
    for method in (request.get_response_sender, lambda: request.set_release_flags(1)):
        with pytest.raises(pb_utils.TritonModelException, match="made by the model itself"):
            method()


GOOD: dict[str, Any] = {"inputs": [], "requested_output_names": [], "model_name": "m"}


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in GOOD),
        {"inputs": [1]},
        {"requested_output_names": [1]},
        {"model_name": 1},
        {"model_version": "1"},
        {"correlation_id": 1.5},
        {"flags": "1"},
        {"timeout": None},
        {"parameters": {"a": []}},
    ],
)
def test_a_request_of_something_else_is_a_type_error(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        InferenceRequest(**{**GOOD, **change})


def test_without_a_server_nothing_can_be_asked() -> None:
    for ask in (
        lambda: InferenceRequest(**GOOD).exec(),
        lambda: pb_utils.load_model("m"),
        lambda: pb_utils.unload_model("m"),
        lambda: pb_utils.is_model_ready("m"),
        lambda: pb_utils.MetricFamily("m", "d", pb_utils.MetricFamily.COUNTER),
    ):
        with pytest.raises(pb_utils.TritonModelException, match="no server"):
            ask()


@pytest.mark.parametrize("level", [7, "INFO"])
def test_a_line_has_a_level_of_the_logger(level: Any) -> None:
    with pytest.raises(TypeError, match="levels"):
        pb_utils.Logger.log("x", level)


# --- conversions ---------------------------------------------------------------------------------------------------------


def test_types_are_converted_between_names_numbers_and_numpy() -> None:
    assert pb_utils.triton_string_to_numpy("TYPE_FP32") is np.float32
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("TYPE_BF16")
    assert (pb_utils.triton_to_numpy_type(11), pb_utils.triton_to_numpy_type(14)) == (np.float32, None)
    assert (pb_utils.numpy_to_triton_type(np.int8), pb_utils.numpy_to_triton_type(np.bytes_)) == (6, 13)
    assert pb_utils.numpy_to_triton_type(np.complex64) is None


def test_strings_have_a_wire_form() -> None:
    encoded = pb_utils.serialize_byte_tensor(np.array([["a", b"\xff"], ["", 5]], object))
    assert encoded == b"\1\0\0\0a\1\0\0\0\xff\0\0\0\0\1\0\0\x005"
    assert pb_utils.deserialize_bytes_tensor(encoded).tolist() == [b"a", b"\xff", b"", b"5"]
    assert pb_utils.deserialize_bytes_tensor(b"").tolist() == []
    for cut in (encoded[:-1], b"\1", b"\xff\xff\xff\xff"):
        with pytest.raises(pb_utils.TritonModelException, match="past the end"):
            pb_utils.deserialize_bytes_tensor(cut)
    with pytest.raises(pb_utils.TritonModelException, match="int64"):
        pb_utils.serialize_byte_tensor(np.array([1]))


def test_tensors_of_a_configuration_are_found_by_name() -> None:
    values = {"input": [io("a", "TYPE_FP32", 1)], "output": [io("b", "TYPE_FP32", 1)]}
    assert pb_utils.get_input_config_by_name(values, "a") == io("a", "TYPE_FP32", 1)
    assert pb_utils.get_output_config_by_name(values, "b") == io("b", "TYPE_FP32", 1)
    assert pb_utils.get_input_config_by_name(values, "b") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(values)
    assert pb_utils.using_decoupled_model_transaction_policy({"model_transaction_policy": {"decoupled": True}})


# --- completing a configuration ------------------------------------------------------------------------------------------


def test_a_configuration_is_completed() -> None:
    made = config(input=[io("a", "TYPE_INVALID")])
    made.add_input(io("a", "TYPE_FP32", 4))
    made.add_input(io("b", "TYPE_INT8", -1, optional=True))
    made.add_output(io("c", "TYPE_FP32", 4))
    made.set_max_batch_size(8)
    made.set_dynamic_batching()
    made.set_model_transaction_policy({"decoupled": True})
    made.set_model_transaction_policy({})
    assert made.as_dict() == {
        "name": "m",
        "max_batch_size": 8,
        "input": [io("a", "TYPE_FP32", 4), io("b", "TYPE_INT8", -1, optional=True)],
        "output": [io("c", "TYPE_FP32", 4)],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": True},
    }


def test_what_was_written_already_may_be_said_again() -> None:
    written = {
        "max_batch_size": 4,
        "input": [io("a", "TYPE_FP32", 4)],
        "dynamic_batching": {"preferred_batch_size": [2]},
        "model_transaction_policy": {"decoupled": False},
    }
    made = config(**written)
    made.add_input(io("a", "TYPE_FP32", 4))
    made.set_max_batch_size(4)
    made.set_dynamic_batching()
    made.set_model_transaction_policy({"decoupled": False})
    assert made.as_dict() == {"name": "m", "output": [], **written}


@pytest.mark.parametrize(
    ("written", "complete", "text"),
    [
        ({"max_batch_size": 16}, lambda c: c.set_max_batch_size(8), "set to 8.* specifies 16"),
        ({}, lambda c: c.set_max_batch_size(-1), "integer >= 0, got -1"),
        ({"sequence_batching": {}}, lambda c: c.set_dynamic_batching(), "specifies 'sequence_batching'"),
        (
            {"model_transaction_policy": {"decoupled": False}},
            lambda c: c.set_model_transaction_policy({"decoupled": True}),
            "set to True.* specifies False",
        ),
        ({}, lambda c: c.set_model_transaction_policy({"x": 1}), "'decoupled' alone, got 'x'"),
        ({}, lambda c: c.set_model_transaction_policy({"decoupled": 1}), "a bool, got 1"),
        ({}, lambda c: c.add_input({"data_type": "TYPE_FP32", "dims": [1]}), "an input is missing the property 'name'"),
        ({}, lambda c: c.add_input({"name": "a", "dims": [1]}), "input 'a' is missing the property 'data_type'"),
        ({}, lambda c: c.add_output({"name": "a", "data_type": "TYPE_FP32"}), "output 'a' is missing .* 'dims'"),
        ({}, lambda c: c.add_output(io("a", "TYPE_FP32", 1, optional=True)), "has the property 'optional'"),
        ({}, lambda c: c.add_input(io("a", "FP32", 1)), "unknown data_type 'FP32'"),
        ({}, lambda c: c.add_input(io("a", "TYPE_FP32", 0)), r"dims \[0\], expected integers >= 1, or -1"),
        ({}, lambda c: c.add_input(["a"]), "an input as dict, got list"),
        (
            {"input": [io("a", "TYPE_INT8", 1)]},
            lambda c: c.add_input(io("a", "TYPE_FP32", 1)),
            "input 'a' is TYPE_FP32.* specifies TYPE_INT8",
        ),
        (
            {"output": [io("a", "TYPE_FP32", 16)]},
            lambda c: c.add_output(io("a", "TYPE_FP32", 4)),
            r"output 'a' has dims \[4\].* specifies \[16\]",
        ),
        (
            {"input": [io("a", "TYPE_FP32", 1, optional=True)]},
            lambda c: c.add_input(io("a", "TYPE_FP32", 1, optional=False)),
            "not optional",
        ),
    ],
)
def test_what_contradicts_the_configuration_is_refused(written: dict[str, Any], complete: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"auto_complete_config of model 'm': .*{text}"):
        complete(config(**written))


# --- GPU memory, by a stand-in for the CUDA runtime --------------------------------------------------------------------


class OnGpu:
    """A producer whose host memory is said to be a GPU's."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.streams: list[int | None] = []

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        self.streams.append(stream)
        capsule = self.array.__dlpack__()
        dlpack._head("x", capsule).device_type = dlpack.CUDA
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CUDA, 0)


class Runtime:
    def to_host(self, address: int, nbytes: int) -> bytearray:
        return bytearray(ctypes.string_at(address, nbytes))


def test_a_tensor_in_gpu_memory_is_copied_to_the_host_when_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlpack, "load_runtime", Runtime)
    producer = OnGpu(np.arange(6, dtype=np.float32).reshape(2, 3))
    tensor = Tensor.from_dlpack("x", producer)
    assert (tensor.is_cpu(), tensor.shape(), tensor.triton_dtype()) == (False, [2, 3], 11)
    assert tensor.__dlpack_device__() == (dlpack.CUDA, 0)
    with pytest.raises(pb_utils.TritonModelException, match="in GPU memory"):
        tensor.as_numpy()
    assert tensor._array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert producer.streams == [1, 1]
    assert tensor.__dlpack__(stream=7) is not None
    assert tensor.to_dlpack() is not None


def test_a_tensor_in_gpu_memory_is_contiguous() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="contiguous"):
        Tensor.from_dlpack("x", OnGpu(np.arange(6).reshape(2, 3).T))


def test_without_a_cuda_runtime_gpu_memory_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Runtime:
        raise invalid("this process has no CUDA runtime library")

    monkeypatch.setattr(dlpack, "load_runtime", none)
    tensor = Tensor.from_dlpack("x", OnGpu(np.arange(6)))
    with pytest.raises(pb_utils.TritonModelException, match="tensor 'x': .*no CUDA runtime library"):
        _ = tensor._array


@pytest.mark.gpu
def test_torch_tensors_of_a_gpu_come_to_the_host() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU that torch can use")
    given = torch.arange(6, device="cuda").reshape(2, 3)
    tensor = Tensor.from_dlpack("x", given)
    assert not tensor.is_cpu()
    assert tensor._array.tolist() == given.tolist()
    assert torch.equal(torch.from_dlpack(tensor), given)
