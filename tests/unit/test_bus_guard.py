"""A fault in memory that its owner cut off is repaired in whatever thread it happens; any other fault is what it was."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from headrace_backends.bus_guard import GUARD

SIZE = 256 * mmap.PAGESIZE


class Memory:
    """A guarded mapping of an object that can be cut off."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("client")
        os.ftruncate(self.fd, SIZE)
        self.map = mmap.mmap(self.fd, SIZE)
        self.array = np.frombuffer(self.map, np.uint8)
        self.array[:] = 1
        self.faults = 0
        self.address = self.array.ctypes.data
        GUARD.watch(self.address, SIZE, self._fault)

    def _fault(self) -> None:
        self.faults += 1

    def close(self) -> None:
        GUARD.unwatch(self.address)
        os.close(self.fd)


@pytest.fixture
def memory():
    memory = Memory()
    yield memory
    memory.close()


@pytest.mark.parametrize("left", [0, 3 * mmap.PAGESIZE, 3 * mmap.PAGESIZE + 1])
def test_reading_goes_on_with_zeros_behind_what_is_left(memory: Memory, left: int) -> None:
    os.ftruncate(memory.fd, left)
    assert int(memory.array.sum()) == left
    assert memory.faults == 1


def test_writing_goes_on_into_memory_that_nobody_sees(memory: Memory) -> None:
    os.ftruncate(memory.fd, mmap.PAGESIZE)
    memory.array[:] = 5
    assert int(memory.array.sum()) == 5 * SIZE
    assert os.fstat(memory.fd).st_size == mmap.PAGESIZE
    assert memory.faults == 1


def test_each_object_is_repaired_by_itself(memory: Memory) -> None:
    other = Memory()
    os.ftruncate(memory.fd, 0)
    assert int(other.array.sum()) == SIZE
    assert int(memory.array.sum()) == 0
    assert (memory.faults, other.faults) == (1, 0)
    other.close()


def test_the_kernel_that_meets_a_missing_page_says_so_and_sends_no_signal(memory: Memory) -> None:
    os.ftruncate(memory.fd, 0)
    with pytest.raises(OSError, match="Bad address"):
        os.write(memory.fd, memory.array)
    assert memory.faults == 0


def run(program: str) -> subprocess.CompletedProcess[str]:
    head = (
        "import mmap, os, sys, threading; sys.path[:0] = sys.argv[1].split(':'); import numpy as np\n"
        "from headrace_backends.bus_guard import GUARD\n"
        f"size = {16 * SIZE}\n"
        "def make():\n"
        "    fd = os.memfd_create('client'); os.ftruncate(fd, size); return fd, mmap.mmap(fd, size)\n"
        "fd, mapped = make(); array = np.frombuffer(mapped, np.float32)\n"
        "faults = []\n"
        "GUARD.watch(array.ctypes.data, size, lambda: faults.append(threading.get_native_id()))\n"
    )
    argv = [sys.executable, "-c", head + program, ":".join(sys.path)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def test_threads_without_an_interpreter_and_threads_that_hold_it_are_helped_alike() -> None:
    """A product of matrices in OpenBLAS's threads, while others keep the interpreter busy."""
    done = run(
        "matrix = array[: 2048 * 2048].reshape(2048, 2048)\n"
        "stop = threading.Event()\n"
        "def spin():\n"
        "    while not stop.is_set(): sum(range(1000))\n"
        "busy = [threading.Thread(target=spin) for _ in range(2)]\n"
        "for thread in busy: thread.start()\n"
        "threading.Timer(0.2, os.ftruncate, (fd, 0)).start()\n"
        "while not faults: np.dot(matrix, matrix)\n"
        "stop.set()\n"
        "print('survived')\n"
    )
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


@pytest.mark.parametrize("how", ["other = make(); os.ftruncate(other[0], 0); other[1][0]", "os.kill(os.getpid(), 7)"])
def test_a_fault_elsewhere_and_a_signal_that_was_sent_end_the_process(how: str) -> None:
    assert run(f"{how}\nthreading.Event().wait()\n").returncode == -7


def test_memory_that_is_guarded_no_more_is_like_any_other() -> None:
    assert run("GUARD.unwatch(array.ctypes.data); os.ftruncate(fd, 0); array.sum()\n").returncode == -7
