"""What clients leave behind in shared memory: nothing of ours, whatever they do and however often."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from figures import wait_until
from harness import RunningServer, running
from regions import FOLDER, Client, Object, objects, threads
from repositories import add_identity

CYCLES = 500
ROW = np.arange(256, dtype=np.float32).reshape(1, -1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "plain", extra="dynamic_batching {} instance_group { count: 2 kind: KIND_CPU }")
    before = names()
    with running(repository, "--allow-client-shm=true") as server:
        yield server
    assert names() <= before


def names() -> set[str]:
    """Return what is there of this test's and of the server's; the rest may be anybody's."""
    found = {path.name for path in FOLDER.iterdir()}
    return {name for name in found if name.startswith(f"test_{os.getpid()}_") or "headrace" in name}


def holdings(server: RunningServer) -> dict[int, tuple[int, int, int]]:
    """Return descriptors, mappings, and mappings of clients' memory of the server and of each of its backends."""
    return {
        process.pid: (
            process.num_fds(),
            len(Path(f"/proc/{process.pid}/maps").read_text().splitlines()),
            len([area for area in process.memory_maps() if area.path.startswith(str(FOLDER))]),
        )
        for process in [psutil.Process(server.process.pid), *server.backends()]
    }


def cycle(client: Client, memory: Object, number: int) -> None:
    """Register, infer, unregister; each cycle with a name of its own."""
    memory.name = f"cycle {number}"
    client.register(memory)
    memory.write(ROW + number)
    arguments = client.input(memory, ROW.shape, np.float32, ROW.nbytes), client.output(memory, ROW.nbytes, ROW.nbytes)
    client.infer("plain", *arguments)
    assert (memory.read(np.float32, ROW.shape, ROW.nbytes) == ROW + number).all()
    client.unregister(memory.name)


def test_500_cycles_of_register_infer_unregister_leave_nothing(server: RunningServer) -> None:
    client = Client(server, "grpc")
    with objects(2 * ROW.nbytes) as (memory,):
        for number in range(20):
            cycle(client, memory, number)
        settled = holdings(server)
        for number in range(20, 20 + CYCLES):
            cycle(client, memory, number)
        wait_until("the last region is unmapped", lambda: not any(held[2] for held in holdings(server).values()))
        after = holdings(server)
    client.calls.close()
    assert after.keys() == settled.keys()
    for pid, (files, areas, _) in after.items():
        assert files <= settled[pid][0] + 1, (pid, settled, after)
        assert areas <= settled[pid][1] + 8, (pid, settled, after)  # allocators' arenas come and go, regions do not


def test_clients_that_cut_their_memory_at_any_time_get_answers_or_errors_and_harm_nobody(server: RunningServer) -> None:
    """Ten clients infer while their objects are shortened and grow again; one with memory of its own never notices."""
    pids = {process.pid for process in server.backends()}
    chance = random.Random(5)

    def careless(seed: int) -> int:
        own, failed = random.Random(seed), 0
        client = Client(server, "grpc")
        with objects(2 * ROW.nbytes) as (memory,):
            for _ in range(30):
                client.register(memory)
                tensor = client.input(memory, ROW.shape, np.float32, ROW.nbytes)
                memory.truncate(own.choice([0, 100, ROW.nbytes, 2 * ROW.nbytes]))
                try:
                    client.infer(
                        "plain", tensor, client.output(memory, ROW.nbytes, ROW.nbytes), delay_ms=own.choice([0, 5])
                    )
                except InferenceServerException as error:
                    assert error.status() == "StatusCode.INVALID_ARGUMENT"
                    failed += 1
                memory.truncate(2 * ROW.nbytes)
                client.unregister(memory.name)
        client.calls.close()
        return failed

    with threads(10) as pool, objects(2 * ROW.nbytes) as (memory,):
        others = [pool.submit(careless, chance.random()) for _ in range(9)]
        client = Client(server, "grpc")
        client.register(memory)
        memory.write(ROW)
        while not all(other.done() for other in others):
            tensor = client.input(memory, ROW.shape, np.float32, ROW.nbytes)
            client.infer("plain", tensor, client.output(memory, ROW.nbytes, ROW.nbytes))
            assert (memory.read(np.float32, ROW.shape, ROW.nbytes) == ROW).all()
        assert sum(other.result() for other in others) > 50
        client.unregister("")
        client.calls.close()
    assert {process.pid for process in server.backends()} == pids


def test_a_server_that_is_killed_leaves_the_clients_memory_to_the_client(tmp_path: Path) -> None:
    add_identity(tmp_path, "plain")
    server = RunningServer(tmp_path, "--allow-client-shm=true")
    server.wait_ready()
    client = Client(server, "http")
    with objects(2 * ROW.nbytes) as (memory,):
        cycle(client, memory, 1)
        client.register(memory)
        before = names()
        backends = server.backends()
        server.kill()
        psutil.wait_procs(backends, timeout=10)
        assert not any(process.is_running() for process in backends)
        assert names() == before
        assert (memory.read(np.float32, ROW.shape, ROW.nbytes) == ROW + 1).all()
    client.calls.close()
