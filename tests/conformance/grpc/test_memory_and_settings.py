"""Shared memory, trace settings and log settings over gRPC, on both transports."""

import grpc
import pytest
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from headrace_protocol._generated import grpc_service_pb2 as pb


async def test_tritonclient_manages_system_shared_memory(door):
    async with tritonclient.grpc.aio.InferenceServerClient(door.address) as client:
        await client.register_system_shared_memory("r", "/key", 4096, offset=16)
        status = await client.get_system_shared_memory_status(as_json=True)
        one = await client.get_system_shared_memory_status("a", as_json=True)
        await client.unregister_system_shared_memory("r")
        await client.unregister_system_shared_memory()
    assert door.control.calls == [
        ("register_system", "r", "/key", 16, 4096),
        ("unregister_system", "r"),
        ("unregister_system", ""),
    ]
    assert sorted(status["regions"]) == ["a", "b"]
    assert one["regions"] == {"a": {"name": "a", "key": "/a", "offset": "4096", "byte_size": str(2**40)}}


async def test_tritonclient_manages_cuda_shared_memory(door):
    handle = bytes(range(64))
    async with tritonclient.grpc.aio.InferenceServerClient(door.address) as client:
        import base64

        await client.register_cuda_shared_memory("r", base64.b64encode(handle), 1, 4096)
        status = await client.get_cuda_shared_memory_status("b", as_json=True)
        await client.unregister_cuda_shared_memory("r")
        await client.unregister_cuda_shared_memory()
    assert door.control.calls == [
        ("register_cuda", "r", handle, 1, 4096),
        ("unregister_cuda", "r"),
        ("unregister_cuda", ""),
    ]
    assert status["regions"] == {"b": {"name": "b", "device_id": "3", "byte_size": str(2**40)}}


async def test_numbers_of_a_region_arrive_as_they_are(door):
    request = pb.SystemSharedMemoryRegisterRequest(name="r", key="k", offset=2**64 - 1, byte_size=2**63)
    await door.call("SystemSharedMemoryRegister", request)
    await door.call("CudaSharedMemoryRegister", pb.CudaSharedMemoryRegisterRequest(name="r", device_id=-5))
    assert door.control.calls == [
        ("register_system", "r", "k", 2**64 - 1, 2**63),
        ("register_cuda", "r", b"", -5, 0),
    ]


@pytest.mark.parametrize("kind", ["System", "Cuda"])
async def test_failures_of_shared_memory_have_their_codes(door, kind):
    register = getattr(pb, f"{kind}SharedMemoryRegisterRequest")
    status = getattr(pb, f"{kind}SharedMemoryStatusRequest")
    assert await door.status(f"{kind}SharedMemoryRegister", register(name="taken")) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "region 'taken' is registered already",
    )
    assert (await door.status(f"{kind}SharedMemoryStatus", status(name="missing")))[0] is grpc.StatusCode.NOT_FOUND


async def test_tritonclient_reads_and_changes_trace_settings(door):
    async with tritonclient.grpc.aio.InferenceServerClient(door.address) as client:
        read = await client.get_trace_settings(as_json=True)
        await client.get_trace_settings("m")
        await client.update_trace_settings(
            "m", {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "5", "trace_count": None}
        )
        with pytest.raises(InferenceServerException) as caught:
            await client.get_trace_settings("missing")
    assert read["settings"] == {
        "trace_level": {"value": ["TIMESTAMPS", "TENSORS"]},
        "trace_rate": {"value": ["1000"]},
        "trace_mode": {"value": ["triton"]},
    }
    assert door.control.calls == [
        ("trace", "m", {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": ["5"], "trace_count": None})
    ]
    assert caught.value.status() == "StatusCode.NOT_FOUND"


def trace(**settings):
    values = {key: pb.TraceSettingRequest.SettingValue(value=value) for key, value in settings.items()}
    return pb.TraceSettingRequest(settings=values)


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        (trace(trace_rate=["1", "2"]), grpc.StatusCode.INVALID_ARGUMENT, "'trace_rate' takes one value, got 2"),
        (trace(trace_rate=["-1"]), grpc.StatusCode.INVALID_ARGUMENT, "4294967295"),
        (trace(trace_file=["/etc/x"]), grpc.StatusCode.UNIMPLEMENTED, "trace_file"),
    ],
)
async def test_bad_trace_settings_are_refused(door, request_, code, said):
    status, text = await door.status("TraceSetting", request_)
    assert status is code
    assert said in text
    assert door.control.calls == []


async def test_tritonclient_reads_and_changes_log_settings(door):
    async with tritonclient.grpc.aio.InferenceServerClient(door.address) as client:
        read = await client.get_log_settings(as_json=True)
        changed = await client.update_log_settings(
            {"log_info": False, "log_verbose_level": 3, "log_format": "ISO8601"}, as_json=True
        )
    assert read["settings"]["log_error"] == {"bool_param": False}
    assert read["settings"]["log_verbose_level"] == {"uint32_param": 2}
    assert read["settings"]["log_format"] == {"string_param": "default"}
    assert door.control.calls == [("log", {"log_info": False, "log_verbose_level": 3, "log_format": "ISO8601"})]
    assert changed["settings"]["log_verbose_level"] == {"uint32_param": 3}


def log(key, **value):
    return pb.LogSettingsRequest(settings={key: pb.LogSettingsRequest.SettingValue(**value)})


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        (log("log_info", uint32_param=1), grpc.StatusCode.INVALID_ARGUMENT, "'log_info' takes a bool_param"),
        (log("log_error", string_param="true"), grpc.StatusCode.INVALID_ARGUMENT, "got a string_param"),
        (log("log_verbose_level", bool_param=True), grpc.StatusCode.INVALID_ARGUMENT, "takes a uint32_param"),
        (log("log_format", uint32_param=1), grpc.StatusCode.INVALID_ARGUMENT, "takes a string_param"),
        (log("log_format", string_param="xml"), grpc.StatusCode.INVALID_ARGUMENT, "'xml'"),
        (log("log_info"), grpc.StatusCode.INVALID_ARGUMENT, "got no value"),
        (log("log_nothing", bool_param=True), grpc.StatusCode.INVALID_ARGUMENT, "'log_nothing'"),
        (log("log_file", string_param="/etc/x"), grpc.StatusCode.UNIMPLEMENTED, "log_file"),
    ],
)
async def test_bad_log_settings_are_refused(door, request_, code, said):
    status, text = await door.status("LogSettings", request_)
    assert status is code
    assert said in text
    assert door.control.calls == []


@pytest.mark.parametrize("rpc", ["TraceSetting", "LogSettings", "SystemSharedMemoryRegister", "CudaSharedMemoryStatus"])
async def test_what_is_no_message_is_refused(door, rpc):
    status, text = await door.status(rpc, b"\xff\xff")
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc in text
