"""Tensors in clients' shared memory through a real server, with the stock clients over both doors."""

from __future__ import annotations

import json
import mmap
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

import onnx_models
from clients import call
from figures import Figures, figures, metric, wait_until
from harness import RunningServer, running
from regions import CLIENTS, Client, Object, objects, threads
from repositories import add_decoupled, add_identity, add_onnx

PAGE = mmap.PAGESIZE
SIDE = 512
IMAGE = (1, 3, 64, 64)
ROW = np.arange(1000, dtype=np.float32).reshape(1, -1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "image", dims="3, 64, 64")
    add_identity(repository, "plain")
    add_identity(repository, "two", extra="instance_group { count: 2 kind: KIND_CPU }")
    add_identity(repository, "strings", datatype="STRING")
    add_decoupled(repository, "streaming")
    add_identity(
        repository,
        "batching",
        max_batch_size=4,
        extra="dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 5000000 }",
    )
    add_onnx(repository, "products", lambda path: onnx_models.products(path, SIDE, 40))
    with running(repository, "--allow-client-shm=true") as server:
        yield server


@pytest.fixture(params=sorted(CLIENTS))
def client(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[Client]:
    client = Client(server, request.param)
    yield client
    client.unregister("")
    client.calls.close()


def refusal(call, *arguments, **named) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **named)
    return f"{caught.value.status()} {caught.value.message()}"


def is_invalid(client: Client, text: str) -> bool:
    return ("INVALID_ARGUMENT" if client.door == "grpc" else "400") in text


def copied(server: RunningServer, model: str) -> tuple[int, int]:
    name = "headrace_tensor_bytes_copied_total"
    return metric(server, name, model, direction="in"), metric(server, name, model, direction="out")


def test_a_request_between_regions_moves_no_byte_in_the_server(server: RunningServer, client: Client) -> None:
    image = np.random.default_rng(1).random(IMAGE, np.float32)
    before = copied(server, "image")
    with objects(image.nbytes, image.nbytes) as (source, target):
        source.write(image)
        client.register(source)
        client.register(target)
        result = client.infer(
            "image", client.input(source, IMAGE, np.float32, image.nbytes), client.output(target, image.nbytes)
        )
        assert client.shape(result) == list(IMAGE)
        assert (target.read(np.float32, IMAGE) == image).all()
    assert copied(server, "image") == before


def test_a_region_may_hold_the_input_alone_or_the_output_alone(server: RunningServer, client: Client) -> None:
    with objects(2 * ROW.nbytes) as (memory,):
        memory.write(ROW)
        client.register(memory)
        before = copied(server, "plain")
        result = client.infer("plain", client.input(memory, ROW.shape, np.float32, ROW.nbytes))
        assert (result.as_numpy("OUTPUT0") == ROW).all()
        assert copied(server, "plain") == (before[0], before[1] + ROW.nbytes)
        client.infer("plain", client.wire_input(ROW + 1), client.output(memory, ROW.nbytes, ROW.nbytes))
        assert (memory.read(np.float32, ROW.shape, ROW.nbytes) == ROW + 1).all()
        assert copied(server, "plain") == (before[0] + ROW.nbytes, before[1] + ROW.nbytes)


def test_offsets_count_from_the_region_and_the_region_from_the_object(client: Client) -> None:
    with objects(4 * PAGE) as (memory,):
        memory.write(ROW[:, :10], PAGE + 100 + 8)
        client.register(memory, offset=PAGE + 100, nbytes=PAGE)
        client.infer("plain", client.input(memory, (1, 10), np.float32, 40, 8), client.output(memory, 40, PAGE - 40))
        assert (memory.read(np.float32, (1, 10), 2 * PAGE + 100 - 40) == ROW[:, :10]).all()
        assert not memory.read(np.uint8, (100,), 2 * PAGE + 100).any()


def test_strings_are_read_from_and_written_to_regions(client: Client) -> None:
    words = np.array([[b"", b"two words", "é".encode() * 500]], object)
    wire = serialize_byte_tensor(words).item()
    with objects(2 * PAGE) as (memory,):
        memory.write_bytes(wire)
        client.register(memory)
        result = client.infer(
            "strings", client.input(memory, (1, 3), np.object_, len(wire)), client.output(memory, PAGE, PAGE)
        )
        assert client.shape(result) == [1, 3]
        assert memory.path.read_bytes()[PAGE : PAGE + len(wire)] == wire


def test_strings_that_do_not_add_up_are_refused(client: Client) -> None:
    with objects(PAGE) as (memory,):
        memory.write_bytes(b"\xff\xff\xff\xff")
        client.register(memory)
        text = refusal(client.infer, "strings", client.input(memory, (1, 1), np.object_, 8))
        assert is_invalid(client, text)
        assert "INPUT0" in text


def test_rows_of_several_requests_share_a_batch_and_go_back_to_their_regions(
    server: RunningServer, client: Client
) -> None:
    before, moved = figures(server, "batching"), copied(server, "batching")
    with objects(4 * 80, 4 * 80) as (source, target), threads() as pool:
        client.register(source)
        client.register(target)
        source.write(np.arange(80, dtype=np.float32))
        calls = [
            pool.submit(
                client.infer_alone,
                "batching",
                client.input(source, (1, 20), np.float32, 80, 80 * i),
                client.output(target, 80, 240 - 80 * i),
            )
            for i in range(3)
        ]
        calls.append(pool.submit(client.infer_alone, "batching", client.wire_input(np.full((1, 20), 7, np.float32))))
        *_, last = [made.result(30) for made in calls]
        assert (last.as_numpy("OUTPUT0") == 7).all()
        wanted = np.arange(60, dtype=np.float32).reshape(3, 20)[::-1]
        assert (target.read(np.float32, (3, 20), 80) == wanted).all()
    assert figures(server, "batching").since(before).executions == 1
    assert copied(server, "batching") == (moved[0] + 320, moved[1] + 320)


def test_an_input_that_is_cut_off_in_the_queue_fails_alone(server: RunningServer, client: Client) -> None:
    before = figures(server, "batching")
    with objects(80, 80) as (memory, victim), threads() as pool:
        client.register(memory)
        client.register(victim)
        memory.write(np.arange(20, dtype=np.float32))
        cut = pool.submit(client.infer_alone, "batching", client.input(victim, (1, 20), np.float32, 80))
        wait_until("it waits", lambda: metric(server, "headrace_queue_depth", "batching") == 1)
        victim.truncate(40)
        tensor = client.input(memory, (1, 20), np.float32, 80)
        fine = [pool.submit(client.infer_alone, "batching", tensor) for _ in range(3)]
        assert is_invalid(client, refusal(cut.result, 30))
        for call_ in fine:
            assert (call_.result(30).as_numpy("OUTPUT0") == np.arange(20)).all()
    assert figures(server, "batching").since(before) == Figures(3, 3, 1)


def test_an_output_that_does_not_fit_names_itself_and_both_sizes(client: Client) -> None:
    with objects(2 * ROW.nbytes) as (memory,):
        client.register(memory)
        tensor = client.input(memory, ROW.shape, np.float32, ROW.nbytes)
        text = refusal(client.infer, "plain", tensor, client.output(memory, ROW.nbytes - 4, ROW.nbytes))
        assert is_invalid(client, text)
        assert all(part in text for part in ("OUTPUT0", str(ROW.nbytes), str(ROW.nbytes - 4)))


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 3996), (0, 8), (96, 4000), (4096, 4000), (4000, 4000)])
def test_an_input_that_is_not_as_large_as_its_shape_or_leaves_the_region_is_refused(
    client: Client, offset: int, nbytes: int
) -> None:
    with objects(PAGE) as (memory,):
        client.register(memory, nbytes=4090)
        tensor = client.input(memory, ROW.shape, np.float32, nbytes, offset)
        assert is_invalid(client, refusal(client.infer, "plain", tensor))


def test_an_unknown_region_is_not_found(client: Client) -> None:
    with objects(PAGE) as (memory,):
        text = refusal(client.infer, "plain", client.input(memory, ROW.shape, np.float32, ROW.nbytes))
        assert ("NOT_FOUND" if client.door == "grpc" else "404") in text
        assert memory.name in text


def test_a_region_in_use_can_be_unregistered_and_its_request_ends_in_peace(
    server: RunningServer, client: Client
) -> None:
    with objects(2 * ROW.nbytes) as (memory,), threads(1) as pool:
        memory.write(ROW)
        client.register(memory)
        running_call = pool.submit(
            client.infer_alone,
            "plain",
            client.input(memory, ROW.shape, np.float32, ROW.nbytes),
            client.output(memory, ROW.nbytes, ROW.nbytes),
            delay_ms=500,
        )
        wait_until("the request runs in the region", lambda: busy(server, memory))
        client.unregister(memory.name)
        assert memory.name not in client.names()
        client.register(memory)
        running_call.result(30)
        assert (memory.read(np.float32, ROW.shape, ROW.nbytes) == ROW).all()
        client.unregister(memory.name)
        wait_until("the region is unmapped", lambda: not busy(server, memory))


def busy(server: RunningServer, memory: Object) -> bool:
    """Whether a backend process maps the object."""
    return is_mapped(server, memory.key)


def is_mapped(server: RunningServer, key: str) -> bool:
    return any(key in area.path for process in server.backends() for area in process.memory_maps())


def test_memory_that_is_cut_off_under_a_request_harms_neither_the_process_nor_another_client(
    server: RunningServer, client: Client
) -> None:
    before = {process.pid for process in server.backends()}
    with objects(64 * PAGE, 2 * ROW.nbytes) as (victim, other), threads(2) as pool:
        client.register(victim)
        client.register(other)
        other.write(ROW)
        cut = pool.submit(
            client.infer_alone,
            "two",
            client.input(victim, (1, 8 * PAGE), np.float32, 32 * PAGE),
            client.output(victim, 32 * PAGE, 32 * PAGE),
            delay_ms=600,
        )
        wait_until("the request runs in the region", lambda: busy(server, victim))
        fine = pool.submit(
            client.infer_alone,
            "two",
            client.input(other, ROW.shape, np.float32, ROW.nbytes),
            client.output(other, ROW.nbytes, ROW.nbytes),
            delay_ms=600,
        )
        victim.truncate(PAGE)
        text = refusal(cut.result, 30)
        assert is_invalid(client, text)
        fine.result(30)
        assert (other.read(np.float32, ROW.shape, ROW.nbytes) == ROW).all()
        assert is_invalid(
            client, refusal(client.infer, "two", client.input(victim, (1, 8 * PAGE), np.float32, 32 * PAGE))
        )
    assert {process.pid for process in server.backends()} == before


def test_a_framework_that_computes_in_memory_which_goes_survives(server: RunningServer, client: Client) -> None:
    """ONNX Runtime reads it in threads of its own, which have no interpreter."""
    before = {process.pid for process in server.backends()}
    with objects(SIDE * SIDE * 4) as (memory,), threads(1) as pool:
        memory.write(np.eye(SIDE, dtype=np.float32))
        client.register(memory)
        tensor = client.input(memory, (SIDE, SIDE), np.float32, SIDE * SIDE * 4)
        client.infer("products", tensor)
        started = time.monotonic()
        client.infer("products", tensor)
        lasts = time.monotonic() - started
        cut = pool.submit(client.infer_alone, "products", tensor)
        time.sleep(lasts / 3)
        memory.truncate(PAGE)
        assert is_invalid(client, refusal(cut.result, 30))
    assert {process.pid for process in server.backends()} == before


def test_a_new_process_gets_the_region_again_when_the_last_one_was_killed(
    server: RunningServer, client: Client
) -> None:
    with objects(2 * ROW.nbytes) as (memory,), threads(1) as pool:
        memory.write(ROW)
        client.register(memory)
        arguments = (
            client.input(memory, ROW.shape, np.float32, ROW.nbytes),
            client.output(memory, ROW.nbytes, ROW.nbytes),
        )
        cut = pool.submit(client.infer_alone, "plain", *arguments, delay_ms=30_000)
        wait_until("the request runs in the region", lambda: busy(server, memory))
        (process,) = (p for p in server.backends() if any(memory.key in area.path for area in p.memory_maps()))
        process.kill()
        assert ("UNAVAILABLE" if client.door == "grpc" else "503") in refusal(cut.result, 30)
        client.infer("plain", *arguments)
        assert (memory.read(np.float32, ROW.shape, ROW.nbytes) == ROW).all()


def test_a_client_that_is_killed_leaves_a_server_that_serves(server: RunningServer, client: Client) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import numpy, regions; from types import SimpleNamespace\n"
        "memory = regions.Object(4000)\n"
        "client = regions.Client(SimpleNamespace(grpc=sys.argv[3], http=sys.argv[4]), sys.argv[2])\n"
        "client.register(memory); print(memory.key, flush=True)\n"
        "client.infer('plain', client.input(memory, (1, 1000), numpy.float32, 4000), client.output(memory, 4000), "
        "delay_ms=60000)\n"
    )
    argv = [sys.executable, "-c", program, str(Path(__file__).parent.parent), client.door, server.grpc, server.http]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as other:
        assert other.stdout is not None
        key = other.stdout.readline().strip()
        wait_until("its request runs in the region", lambda: is_mapped(server, key))
        other.kill()
    Path("/dev/shm", key).unlink(missing_ok=True)
    assert (client.infer("plain", client.wire_input(ROW)).as_numpy("OUTPUT0") == ROW).all()
    client.unregister("")
    wait_until("the region is unmapped", lambda: not is_mapped(server, key))


def test_the_server_itself_maps_nothing_of_a_client(server: RunningServer, client: Client) -> None:
    with objects(ROW.nbytes) as (memory,):
        client.register(memory)
        client.infer(
            "plain", client.input(memory, ROW.shape, np.float32, ROW.nbytes), client.output(memory, ROW.nbytes)
        )
        assert busy(server, memory)
        own = psutil.Process(server.process.pid).memory_maps()
        assert not [area.path for area in own if area.path.startswith("/dev/shm")]


def streamed(client: Client, tensor: Any, output: Any, **parameters: Any) -> list[Any]:
    """Return what a request to `streaming` gets, to its end: results, or an error."""
    answers: queue.Queue[Any] = queue.Queue()
    client.calls.start_stream(lambda result, error: answers.put(error or result))
    client.calls.async_stream_infer(
        "streaming", [tensor], outputs=[output], parameters=parameters, enable_empty_final_response=True
    )
    got = [answers.get(timeout=30)]
    while not isinstance(got[-1], InferenceServerException):
        if got[-1].get_response().parameters["triton_final_response"].bool_param:
            break
        got.append(answers.get(timeout=30))
    client.calls.stop_stream()
    return got


def test_every_response_of_a_stream_goes_into_the_region(server: RunningServer) -> None:
    client = Client(server, "grpc")
    with objects(2 * ROW.nbytes) as (memory,):
        memory.write(ROW)
        client.register(memory)
        tensor = client.input(memory, ROW.shape, np.float32, ROW.nbytes)
        *answers, end = streamed(
            client, tensor, client.output(memory, ROW.nbytes, ROW.nbytes), responses=3, empty_final=True
        )
        assert [client.shape(answer) for answer in answers] == [list(ROW.shape)] * 3
        assert not end.get_response().outputs
        assert (memory.read(np.float32, ROW.shape, ROW.nbytes) == ROW).all()
        client.unregister("")
    client.calls.close()


def test_a_stream_whose_response_does_not_fit_ends_with_an_error_and_costs_nobody_else(server: RunningServer) -> None:
    client = Client(server, "grpc")
    before = {process.pid for process in server.backends()}
    with objects(2 * ROW.nbytes) as (memory,):
        client.register(memory)
        tensor = client.input(memory, ROW.shape, np.float32, ROW.nbytes)
        (error,) = streamed(client, tensor, client.output(memory, 4, ROW.nbytes), responses=50, response_delay_ms=5)
        assert "OUTPUT0" in error.message()
        client.unregister("")
        wait_until("the stream's region is unmapped", lambda: not busy(server, memory))
    assert {process.pid for process in server.backends()} == before
    client.calls.close()


def test_gpu_memory_is_refused_in_words_where_there_is_no_gpu(server: RunningServer) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a GPU")
    body = {"raw_handle": {"b64": "A" * 86 + "=="}, "device_id": 0, "byte_size": 8}
    status, answer = call(server, "/v2/cudasharedmemory/region/r/register", body)
    assert (status, "GPU" in json.dumps(answer)) == (400, True)


def test_nothing_can_be_registered_unless_the_operator_allows_it(tmp_path: Path) -> None:
    add_identity(tmp_path, "plain")
    with running(tmp_path) as server, objects(ROW.nbytes) as (memory,):
        for door, code in (("http", "501"), ("grpc", "UNIMPLEMENTED")):
            client = Client(server, door)
            assert code in refusal(client.register, memory)
            assert code in refusal(client.unregister, "")
            assert client.names() == set()
            text = refusal(client.infer, "plain", client.input(memory, ROW.shape, np.float32, ROW.nbytes))
            assert "--allow-client-shm" in text
            client.calls.close()
