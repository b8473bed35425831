"""The rpcs by which clients register memory that they share with the server, as functions from bytes to bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.gateway.grpc.request_parsing import parse
from headrace.planes import ControlPlane
from headrace_protocol._generated import grpc_service_pb2 as pb


class MemoryService:
    """The handlers, by rpc. What may be registered is decided behind `ControlPlane.memory`."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self.handlers: Final[dict[str, Callable[[bytes], bytes]]] = {
            "SystemSharedMemoryStatus": self.system_status,
            "SystemSharedMemoryRegister": self.register_system,
            "SystemSharedMemoryUnregister": self.unregister_system,
            "CudaSharedMemoryStatus": self.cuda_status,
            "CudaSharedMemoryRegister": self.register_cuda,
            "CudaSharedMemoryUnregister": self.unregister_cuda,
        }

    def system_status(self, data: bytes) -> bytes:
        request = parse(pb.SystemSharedMemoryStatusRequest, data)
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._control.memory.system_status(request.name):
            told = response.regions[region.name]
            told.name, told.key, told.offset, told.byte_size = region.name, region.key, region.offset, region.byte_size
        return response.SerializeToString()

    def register_system(self, data: bytes) -> bytes:
        request = parse(pb.SystemSharedMemoryRegisterRequest, data)
        self._control.memory.register_system(request.name, request.key, request.offset, request.byte_size)
        return b""

    def unregister_system(self, data: bytes) -> bytes:
        self._control.memory.unregister_system(parse(pb.SystemSharedMemoryUnregisterRequest, data).name)
        return b""

    def cuda_status(self, data: bytes) -> bytes:
        request = parse(pb.CudaSharedMemoryStatusRequest, data)
        response = pb.CudaSharedMemoryStatusResponse()
        for region in self._control.memory.cuda_status(request.name):
            told = response.regions[region.name]
            told.name, told.device_id, told.byte_size = region.name, region.device_id, region.byte_size
        return response.SerializeToString()

    def register_cuda(self, data: bytes) -> bytes:
        request = parse(pb.CudaSharedMemoryRegisterRequest, data)
        self._control.memory.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return b""

    def unregister_cuda(self, data: bytes) -> bytes:
        self._control.memory.unregister_cuda(parse(pb.CudaSharedMemoryUnregisterRequest, data).name)
        return b""
