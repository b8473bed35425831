"""A load client in Python, for where perf_analyzer is not installed. Run as a program; prints one JSON object.

Requests are encoded once, and each of `concurrency` connections (HTTP) or calls (gRPC) sends its next request when the
answer to the last has come. It costs more CPU than a native client, on the same cores as the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time

import grpc
import models
import numpy as np
import uvloop

from headrace_protocol._generated import grpc_service_pb2 as pb

CASES = {
    "add_sub": models.ADD_SUB,
    "mlp_onnx": models.MLP,
    "identity_img": models.IDENTITY,
    "identity_onnx": models.IDENTITY,
}
_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_LARGEST = 64 << 20
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Recorder:
    """When requests began and how long they took; those that end after `seconds` do not count."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.started = time.perf_counter()
        self.deadline = self.started + seconds
        self.latencies: list[float] = []

    def done(self, began: float) -> bool:
        """Count an answer; return whether to go on."""
        now = time.perf_counter()
        if now > self.deadline:
            return False
        self.latencies.append(now - began)
        return True

    def result(self) -> dict[str, float]:
        if not self.latencies:
            raise RuntimeError("no request was answered in time")
        p50, p99 = np.percentile(self.latencies, [50, 99]) * 1e6
        return {"throughput": len(self.latencies) / self.seconds, "p50_us": float(p50), "p99_us": float(p99)}


def http_request(name: str, model: models.Model, *, as_json: bool) -> bytes:
    """Return a whole HTTP request, tensors binary or as JSON."""
    arrays = [tensor.array() for tensor in model.inputs]
    inputs: list[dict[str, object]] = []
    for tensor, array in zip(model.inputs, arrays, strict=True):
        data = {"data": array.reshape(-1).tolist()} if as_json else {"parameters": {"binary_data_size": array.nbytes}}
        inputs.append({"name": tensor.name, "datatype": tensor.datatype, "shape": array.shape, **data})
    outputs = [{"name": t.name, **({} if as_json else {"parameters": {"binary_data": True}})} for t in model.outputs]
    head = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    body = head if as_json else head + b"".join(array.tobytes() for array in arrays)
    headers = {"Host": "bench", "Content-Type": "application/json", "Content-Length": len(body)}
    if not as_json:
        headers["Inference-Header-Content-Length"] = len(head)
    lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
    return f"POST /v2/models/{name}/infer HTTP/1.1\r\n{lines}\r\n".encode() + body


class HttpConnection(asyncio.Protocol):
    """Sends one request over and over; `finished` gets the result once the time is over, or what went wrong."""

    def __init__(self, request: bytes, recorder: Recorder, finished: asyncio.Future[None]) -> None:
        self._request = request
        self._recorder = recorder
        self._finished = finished
        self._head = b""
        self._missing = -1
        self._began = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._head = b""
        self._missing = -1
        self._began = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._missing < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            if b" 200 " not in self._head[:16]:
                self._fail(RuntimeError(f"the server answered {self._head[:300]!r}"))
                return
            length = _CONTENT_LENGTH.search(self._head, 0, end + 2)
            if length is None:
                self._fail(RuntimeError("the server sent an answer without Content-Length"))
                return
            self._missing = int(length[1]) - (len(self._head) - end - 4)
        else:
            self._missing -= len(data)
        if not self._missing:
            if self._recorder.done(self._began):
                self._send()
            else:
                self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or ConnectionError("the server closed the connection"))

    def _fail(self, error: Exception) -> None:
        if not self._finished.done():
            self._finished.set_exception(error)
            self._transport.close()

    def _finish(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)
            self._transport.close()


async def load_http(port: int, request: bytes, concurrency: int, recorder: Recorder) -> None:
    loop = asyncio.get_running_loop()
    finished = [loop.create_future() for _ in range(concurrency)]
    for future in finished:
        await loop.create_connection(lambda f=future: HttpConnection(request, recorder, f), "127.0.0.1", port)
    await asyncio.gather(*finished)


def grpc_request(name: str, model: models.Model) -> bytes:
    """Return an encoded ModelInferRequest."""
    message = pb.ModelInferRequest(model_name=name)
    for tensor in model.inputs:
        array = tensor.array()
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    for tensor in model.outputs:
        message.outputs.add(name=tensor.name)
    return message.SerializeToString()


async def load_grpc(port: int, request: bytes, concurrency: int, recorder: Recorder) -> None:
    options = [("grpc.max_receive_message_length", _LARGEST), ("grpc.max_send_message_length", _LARGEST)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = channel.unary_unary(_METHOD)

        async def caller() -> None:
            going = True
            while going:
                began = time.perf_counter()
                await call(request)
                going = recorder.done(began)

        await asyncio.gather(*(caller() for _ in range(concurrency)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--door", choices=["http", "grpc"], required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", choices=list(CASES), required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--json", action="store_true", help="tensors as JSON over HTTP")
    options = parser.parse_args()
    model = CASES[options.model]
    recorder = Recorder(options.seconds)
    if options.door == "http":
        request = http_request(options.model, model, as_json=options.json)
        uvloop.run(load_http(options.port, request, options.concurrency, recorder))
    else:
        request = grpc_request(options.model, model)
        asyncio.run(load_grpc(options.port, request, options.concurrency, recorder))
    print(json.dumps(recorder.result()))


if __name__ == "__main__":
    main()
