"""A gRPC gateway of a test: the planes behind it, a client in front of it, and what that sends."""

import asyncio

import grpc
import grpc.aio
import pytest

from echo_planes import NotingControlPlane, ScriptedStreams, SubmitsByInfer
from headrace.types import IndexEntry, InferenceResponse, ModelMetadata, OutputTensor, ServerMetadata, TensorMetadata
from headrace_protocol._generated import grpc_service_pb2 as pb
from headrace_protocol._generated import model_config_pb2
from headrace_protocol.errors import ErrorCode, InferError, invalid, not_found

INFERENCE = "/inference.GRPCInferenceService/"
TRANSPORTS = ("grpcio", "pygrpc-native")


class EchoData(SubmitsByInfer, ScriptedStreams):
    """OUTPUTi = INPUTi. Model `hang` waits until it is cancelled, `held` until `let_go`; others fail as named.

    A stream of model `stream...` or `held...` is driven by the test.
    """

    def __init__(self):
        super().__init__()
        self.is_live = True
        self.is_exiting = False
        self.is_ready = True
        self.requests = []
        self.released = 0
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.let_go = asyncio.Event()

    def live(self):
        return self.is_live

    def exiting(self):
        return self.is_exiting

    def ready(self):
        return self.is_ready

    def model_ready(self, name, version):
        self._known(name, version)
        return name != "loading"

    def server_metadata(self):
        return ServerMetadata("headrace", "0.1", ("parameters", "statistics"))

    def model_metadata(self, name, version):
        self._known(name, version)
        return ModelMetadata(
            name,
            ("1", "2"),
            "echo",
            (TensorMetadata("INPUT0", "FP32", (-1, 4)),),
            (TensorMetadata("OUTPUT0", "BYTES", (-1,)),),
        )

    def model_config(self, name, version):
        self._known(name, version)
        return model_config_pb2.ModelConfig(name=name, max_batch_size=8)

    def statistics(self, name, version):
        return pb.ModelStatisticsResponse(
            model_stats=[pb.ModelStatistics(name=name or "all", version=str(version), inference_count=5)]
        )

    async def infer(self, request):
        self.requests.append(request)
        self.entered.set()
        match request.model_name:
            case "hang":
                await self._hang()
            case "held":
                await self.let_go.wait()
            case "boom":
                raise RuntimeError("a secret of ours")
            case "long":
                raise invalid("é" * 100_000)
            case name if name in ErrorCode.__members__:
                raise InferError(ErrorCode[name], f"planned {name} é\n\0 😀")
        times = 2 if request.model_name == "double" else 1
        outputs = [
            OutputTensor(one.name.replace("INPUT", "OUTPUT"), one.datatype, one.shape, bytes(one.data) * times)
            for one in request.inputs
        ]
        response = InferenceResponse(request.model_name, 1, outputs, request.parameters, self._count_release)
        response.id = request.id
        if request.model_name == "huge":
            response.parameters = {"too big": 2**64}
        return response

    async def _hang(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def _count_release(self):
        self.released += 1

    def _known(self, name, version):
        if name == "missing":
            raise not_found(f"model '{name}' does not exist")
        if version not in (-1, 1, 2):
            raise not_found(f"model '{name}' has no version {version}")


class RecordingControl(NotingControlPlane):
    def index(self, *, ready_only):
        entries = [IndexEntry("a", "1", "READY"), IndexEntry("b", "1", "UNAVAILABLE", "unloaded"), IndexEntry("c")]
        return [entry for entry in entries if entry.state == "READY" or not ready_only]

    async def load(self, name, parameters):
        self.calls.append(("load", name, parameters))
        if name == "broken":
            raise invalid("model 'broken': version 1 cannot be loaded")


class Door:
    """A running gateway, its planes, and a raw channel to it."""

    def __init__(self, gateway, data, control, port):
        self.gateway, self.data, self.control, self.port = gateway, data, control, port
        self.address = f"127.0.0.1:{port}"
        self.channel = grpc.aio.insecure_channel(
            self.address,
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )

    def call(self, rpc, request=b"", **options):
        path = rpc if rpc.startswith("/") else INFERENCE + rpc
        data = request if isinstance(request, bytes) else request.SerializeToString()
        return self.channel.unary_unary(path)(data, **options)

    async def status(self, rpc, request=b"", **options):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(rpc, request, **options)
        return caught.value.code(), caught.value.details()


def infer_request(model="echo", data=b"abcd", **fields):
    values = {
        "model_name": model,
        "inputs": [pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="UINT8", shape=[len(data)])],
        "raw_input_contents": [data],
    }
    return pb.ModelInferRequest(**(values | fields))


class StreamClient:
    """One stream of a client."""

    def __init__(self, door, **options):
        self.call = door.channel.stream_stream(INFERENCE + "ModelStreamInfer")(**options)

    async def send(self, *requests):
        for request in requests:
            await self.call.write(request if isinstance(request, bytes) else request.SerializeToString())

    async def receive(self, count=None):
        """Return so many answers, or all until the stream ends."""
        answers = []
        async with asyncio.timeout(10):
            while count is None or len(answers) < count:
                try:
                    data = await self.call.read()
                except grpc.aio.AioRpcError:
                    break
                if data is grpc.aio.EOF:
                    break
                answers.append(pb.ModelStreamInferResponse.FromString(data))
        return answers

    async def end(self):
        """Half-close; return what still comes, and the status."""
        await self.call.done_writing()
        return await self.receive(), await self.status()

    async def status(self):
        async with asyncio.timeout(10):
            return await self.call.code()


def stream_ids(answers):
    return [answer.infer_response.id for answer in answers]


def is_final(answer):
    return answer.infer_response.parameters["triton_final_response"].bool_param


def stream_data(answers):
    return [b"".join(answer.infer_response.raw_output_contents) for answer in answers]
