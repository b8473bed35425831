"""Mixed load by count, then load/unload cycles, and what they leave in memory: run it by hand, read the drift.

    python tests/bench/soak.py [--requests 500000] [--cycles 50] [--processes 3]

Memory is read while the server is quiet, after 10, 50 and 100 percent of the requests and after 10 and all cycles.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import socket
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import onnx_models
from clients import call, infer
from harness import RunningServer, running
from headrace_protocol._generated import grpc_service_pb2 as pb
from repositories import add_identity, add_onnx, add_sample

IN_FLIGHT = 8
"""Requests that each client process has under way at once, each on a connection of its own."""
REQUESTS_A_CONNECTION = 500
PHASES = ((0.1, "10 %"), (0.5, "50 %"), (1.0, "100 %"))
QUIET_S = 11.0
"""Two heartbeats: by then the server has given idle memory back."""
INFER = "/inference.GRPCInferenceService/ModelInfer"


# --- What is sent -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shot:
    """One prepared request: the bytes for a door, and the status or code that must come back."""

    content: bytes
    expected: int


def http_shot(model: str, expected: int, header: dict | bytes, *binary: bytes) -> Shot:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "Host: x",
        f"Content-Length: {len(text) + sum(map(len, binary))}",
    ]
    if binary:
        lines.append(f"Inference-Header-Content-Length: {len(text)}")
    return Shot("\r\n".join([*lines, "", ""]).encode() + text + b"".join(binary), expected)


def grpc_shot(model: str, expected: grpc.StatusCode, *tensors: tuple[str, str, list[int], bytes], **parameters) -> Shot:
    inputs = [pb.ModelInferRequest.InferInputTensor(name=n, datatype=d, shape=s) for n, d, s, _ in tensors]
    request = pb.ModelInferRequest(model_name=model, inputs=inputs, raw_input_contents=[data for *_, data in tensors])
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return Shot(request.SerializeToString(), expected.value[0])


def json_tensor(name: str, datatype: str, array: np.ndarray) -> dict:
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist()}


def binary_tensor(name: str, datatype: str, shape: list[int], nbytes: int) -> dict:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": nbytes}}


def http_shots(chance: random.Random) -> list[tuple[int, Callable[[], Shot]]]:
    """Return the kinds of HTTP request with their weights."""
    values = np.random.default_rng(1)

    def simple_json() -> Shot:
        rows = values.integers(-99, 99, (chance.randint(1, 8), 16))
        return http_shot("simple", 200, {"inputs": [json_tensor(f"INPUT{i}", "INT32", rows) for i in (0, 1)]})

    def digits_binary() -> Shot:
        rows = chance.randint(1, 32)
        image = values.uniform(0, 16, (rows, 64)).astype(np.float32).tobytes()
        header = {"inputs": [binary_tensor("image", "FP32", [rows, 64], len(image))]}
        return http_shot("digits", 200, header | {"parameters": {"binary_data_output": True}}, image)

    def digits_classes() -> Shot:
        image = json_tensor("image", "FP32", values.integers(0, 16, (1, 64)))
        outputs = [{"name": "scores", "parameters": {"classification": 3}}]
        return http_shot("digits", 200, {"id": str(chance.random()), "inputs": [image], "outputs": outputs})

    def identity_binary() -> Shot:
        data = values.bytes(random_size(chance) // 4 * 4)
        header = {"inputs": [binary_tensor("INPUT_INT32", "INT32", [len(data) // 4], len(data))]}
        return http_shot("identity", 200, header | {"parameters": {"binary_data_output": True}}, data)

    def strings() -> Shot:
        texts = ["é" * chance.randint(0, 50) for _ in range(chance.randint(1, 50))]
        tensor = {"name": "INPUT_BYTES", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        return http_shot("identity", 200, {"inputs": [tensor]})

    def mistake() -> Shot:
        good = json_tensor("INPUT0", "INT32", np.zeros((1, 16), int))
        unknown = f"nobody{chance.random()}"
        return chance.choice(
            [
                http_shot("simple", 400, {"inputs": [good]}),
                http_shot("simple", 400, {"inputs": [good, good | {"name": "INPUT1", "shape": [1, 15]}]}),
                http_shot("simple", 400, b'{"inputs": [' * chance.randint(1, 50)),
                http_shot("simple", 400, {"inputs": [good | {"name": unknown}]}),
                http_shot(unknown, 404, {"inputs": [good]}),
                http_shot(
                    "faulty",
                    500,
                    {"inputs": [json_tensor("INPUT0", "FP32", np.zeros((1, 2)))], "parameters": {"fail": unknown}},
                ),
                http_shot(
                    "faulty",
                    500,
                    {"inputs": [json_tensor("INPUT0", "FP32", np.zeros((1, 2)))], "parameters": {"wrong_shape": True}},
                ),
            ]
        )

    return [
        (40, simple_json),
        (30, digits_binary),
        (12, digits_classes),
        (8, strings),
        (3, identity_binary),
        (7, mistake),
    ]


def grpc_shots(chance: random.Random) -> list[tuple[int, Callable[[], Shot]]]:
    """Return the kinds of gRPC request with their weights."""
    values = np.random.default_rng(2)
    ok, code = grpc.StatusCode.OK, grpc.StatusCode

    def simple() -> Shot:
        rows = chance.randint(1, 8)
        data = values.bytes(rows * 64)
        return grpc_shot("simple", ok, *(("INPUT" + i, "INT32", [rows, 16], data) for i in "01"))

    def identity() -> Shot:
        data = values.bytes(random_size(chance))
        return grpc_shot("identity", ok, ("INPUT_UINT8", "UINT8", [len(data)], data))

    def mistake() -> Shot:
        return chance.choice(
            [
                grpc_shot("simple", code.INVALID_ARGUMENT, ("INPUT0", "INT32", [1, 16], bytes(64))),
                grpc_shot(f"nobody{chance.random()}", code.NOT_FOUND, ("INPUT0", "INT32", [1, 16], bytes(64))),
                grpc_shot("faulty", code.INTERNAL, ("INPUT0", "FP32", [1, 2], bytes(8)), fail=str(chance.random())),
            ]
        )

    return [(90, simple), (3, identity), (7, mistake)]


def random_size(chance: random.Random) -> int:
    """Return from 1 kB to 1 MB, each order of magnitude as likely as the other."""
    return int(1000 * 1000 ** chance.random())


# --- Clients ------------------------------------------------------------------------------------------------------


def shots(kinds: list[tuple[int, Callable[[], Shot]]], chance: random.Random, count: int) -> Iterator[Shot]:
    """Make a pool of requests once, so that the clients' own work stays small, and draw from it."""
    weights = [weight for weight, _ in kinds]
    pool = [kind() for _, kind in chance.choices(kinds, weights, k=400)]
    pool += [kind() for _, kind in kinds for _ in range(5)]
    return (chance.choice(pool) for _ in range(count))


def http_client(address: str, seed: int, count: int, wrong: multiprocessing.SimpleQueue) -> None:
    """Send requests over several connections; now and then go away before the answer."""
    chance = random.Random(seed)
    waiting: deque[tuple[HttpConnection, Shot]] = deque()
    idle = [HttpConnection(address) for _ in range(IN_FLIGHT)]
    found: Counter[str] = Counter()
    for shot in shots(http_shots(chance), chance, count):
        connection = idle.pop() if idle else finish(waiting, found)
        if connection.sent >= REQUESTS_A_CONNECTION:
            connection.close()
            connection = HttpConnection(address)
        connection.send(shot.content)
        if chance.random() < 0.003:
            connection.close()
            idle.append(HttpConnection(address))
        else:
            waiting.append((connection, shot))
    while waiting:
        finish(waiting, found)
    wrong.put(found)


def finish(waiting: deque[tuple[HttpConnection, Shot]], found: Counter[str]) -> HttpConnection:
    """Take the oldest answer and check its status."""
    connection, shot = waiting.popleft()
    status, body = connection.receive()
    if status != shot.expected:
        found[f"HTTP {status}, not {shot.expected}: {body[:200]!r}"] += 1
    return connection


class HttpConnection:
    """A bare keep-alive connection."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb", 65536)
        self.sent = 0

    def send(self, content: bytes) -> None:
        self.sent += 1
        self._socket.sendall(content)

    def receive(self) -> tuple[int, bytes]:
        status = int(self._file.readline().split()[1])
        length = 0
        while line := self._file.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return status, self._file.read(length)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def grpc_client(address: str, seed: int, count: int, wrong: multiprocessing.SimpleQueue) -> None:
    """Send requests over one channel at a time; now and then cancel one."""
    chance = random.Random(seed)
    found: Counter[str] = Counter()
    left = shots(grpc_shots(chance), chance, count)
    for start in range(0, count, REQUESTS_A_CONNECTION * IN_FLIGHT):
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, options) as channel:
            method = channel.unary_unary(INFER)
            waiting: deque[tuple[grpc.Future, Shot]] = deque()
            for _ in range(min(REQUESTS_A_CONNECTION * IN_FLIGHT, count - start)):
                shot = next(left)
                future = method.future(shot.content)
                if chance.random() < 0.003:
                    future.cancel()
                else:
                    waiting.append((future, shot))
                while len(waiting) >= IN_FLIGHT:
                    check_code(*waiting.popleft(), found)
            while waiting:
                check_code(*waiting.popleft(), found)
    wrong.put(found)


def check_code(future: grpc.Future, shot: Shot, found: Counter[str]) -> None:
    code = future.code().value[0]
    if code != shot.expected:
        found[f"gRPC {code}, not {shot.expected}: {future.details()[:200]}"] += 1


# --- What is measured ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """One process at one moment; sizes in MB."""

    rss: float
    pss: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, process: psutil.Process) -> Memory:
        found = process.memory_full_info()
        return cls(found.rss / 1e6, found.pss / 1e6, process.num_fds(), process.num_threads())

    def __str__(self) -> str:
        return f"RSS {self.rss:7.1f} MB  PSS {self.pss:7.1f} MB  {self.descriptors:3} fds  {self.threads:2} threads"


def memory(server: RunningServer) -> dict[str, Memory]:
    """Return the server and what runs below it, by a name that stays the same while the process lives."""
    names = {int(pid): model for model, pid in served(server)}
    found = {"server": Memory.of(psutil.Process(server.process.pid))}
    for process in server.descendants():
        found[f"{names.get(process.pid, 'zygote')} {process.pid}"] = Memory.of(process)
    return found


def served(server: RunningServer) -> Iterator[tuple[str, str]]:
    """Yield (model, pid) from the lines that tell of a load."""
    for line in server.log().splitlines():
        _, loaded, rest = line.partition("loaded model ")
        if loaded and ", process " in rest:
            yield rest.split(" ")[0], rest.split(", process ")[1].split(",")[0].strip()


def soak(requests: int, processes: int) -> None:
    """Run the mixed load and print what it leaves."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        for name in ("simple", "digits", "identity"):
            add_sample(repository, name)
        add_identity(repository, "faulty")
        with running(repository) as server:
            print(f"before: {memory(server)['server']}")
            taken = []
            done = 0.0
            for share, title in PHASES:
                started = time.monotonic()
                count = int(requests * share) - int(requests * done)
                wrong = fire(server, count, processes, seed=int(share * 1000))
                seconds = time.monotonic() - started
                time.sleep(QUIET_S)
                taken.append(memory(server))
                print(f"\nafter {title}: {count} requests more in {seconds:.0f} s, {sum(wrong.values())} wrong")
                for name, found in taken[-1].items():
                    print(f"  {name:18} {found}")
                for text, times in wrong.most_common(5):
                    print(f"  {times} times {text}")
                done = share
            print("\ndrift from 10 % to 100 %")
            for name, found in taken[-1].items():
                if name in taken[0]:
                    before = taken[0][name]
                    print(f"  {name:18} RSS {found.rss - before.rss:+.1f} MB  PSS {found.pss - before.pss:+.1f} MB")
                else:
                    print(f"  {name:18} was not there before")


def fire(server: RunningServer, count: int, processes: int, seed: int) -> Counter[str]:
    """Send `count` requests from `processes` processes, every third over gRPC; return what came back wrong."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    clients = []
    for number in range(processes):
        share = count * (number + 1) // processes - count * number // processes
        target, address = (grpc_client, server.grpc) if number % 3 == 2 else (http_client, server.http)
        clients.append(spawn.Process(target=target, args=(address, seed + number, share, results)))
    for client in clients:
        client.start()
    wrong: Counter[str] = Counter()
    for client in clients:
        client.join()
        if client.exitcode:
            wrong[f"a client ended with status {client.exitcode}"] += 1
        else:
            wrong += results.get()
    return wrong


# --- Load and unload ----------------------------------------------------------------------------------------------


def cycle(cycles: int) -> None:
    """Load, ask and unload a model of 50 MB again and again, then reload it; print what that leaves."""
    with tempfile.TemporaryDirectory() as folder:
        file = add_onnx(Path(folder), "m", lambda path: onnx_models.mlp(path, 2048, 6100, 4)) / "1" / "model.onnx"
        with running(folder, "--model-control-mode=explicit") as server:
            print(f"\nload, ask, unload: {file.stat().st_size / 1e6:.0f} MB of weights")
            for number in range(1, cycles + 1):
                load_and_ask(server)
                assert call(server, "/v2/repository/models/m/unload", {}) == (200, None)
                wait_for_backends(server, 0)
                if number in (1, 10, cycles):
                    time.sleep(QUIET_S)
                    print(f"  after {number:3}: {totals(server)}")
            print("reload what serves")
            for number in range(1, cycles + 1):
                file.touch()
                load_and_ask(server)
                wait_for_backends(server, 1)
                if number in (1, 10, cycles):
                    time.sleep(QUIET_S)
                    print(f"  after {number:3}: {totals(server)}")


def load_and_ask(server: RunningServer) -> None:
    assert call(server, "/v2/repository/models/m/load", {}) == (200, None)
    status, answer = infer(server, "m", ("x", "FP32", [1, 2048], [0.5] * 2048))
    assert status == 200, answer


def wait_for_backends(server: RunningServer, count: int) -> None:
    """Wait until there are so many, beside the zygote, and what ended has been reaped."""
    while len(server.descendants()) != 1 + count:
        time.sleep(0.01)


def totals(server: RunningServer) -> str:
    """Return what all processes of the server together hold."""
    everyone = [psutil.Process(server.process.pid), *server.descendants()]
    rss = sum(process.memory_info().rss for process in everyone)
    return (
        f"server {Memory.of(everyone[0])}; all together RSS {rss / 1e6:.1f} MB, {len(everyone)} processes, "
        f"{sum(process.num_fds() for process in everyone)} fds; "
        f"{len(list(Path('/dev/shm').iterdir()))} in /dev/shm, "
        f"{len(list(Path(tempfile.gettempdir()).glob('headrace*')))} temporary folders"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500_000, help="requests of the mixed load; 0 = skip it")
    parser.add_argument("--cycles", type=int, default=50, help="load/unload cycles; 0 = skip them")
    parser.add_argument("--processes", type=int, default=3, help="client processes; every third speaks gRPC")
    arguments = parser.parse_args()
    if arguments.requests:
        soak(arguments.requests, arguments.processes)
    if arguments.cycles:
        cycle(arguments.cycles)


if __name__ == "__main__":
    main()
