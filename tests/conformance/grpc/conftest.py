"""The gRPC gateway of a test, on each transport."""

import pytest

from grpc_doors import TRANSPORTS, Door, EchoData, RecordingControl
from headrace.gateway.grpc.settings import GrpcSettings
from headrace.gateway.grpc.transport import GrpcGateway


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.fixture
async def open_door(transport):
    doors = []

    async def open_one(**settings):
        data, control = EchoData(), RecordingControl()
        values = {"address": "127.0.0.1", "port": 0, "transport": transport} | settings
        gateway = GrpcGateway(data, control, GrpcSettings(**values))
        port = await gateway.start()
        doors.append(Door(gateway, data, control, port))
        return doors[-1]

    yield open_one
    for door in doors:
        await door.channel.close()
        await door.gateway.stop()


@pytest.fixture
async def door(open_door):
    return await open_door()
