"""The supervisor and the zygote's launcher at the moments where a process ends just when it is not expected to."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import psutil
import pytest

from headrace.clock import SystemClock
from headrace.instances.process import channel_pair
from headrace.instances.supervisor import ProcessSettings, Supervisor
from headrace.instances.zygote import ZygoteLauncher
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.framing import backend_framer
from headrace_protocol.messages import PROTOCOL, Initialize, Ready

MESSAGE = Initialize(
    protocol=PROTOCOL,
    backend="identity",
    model_name="m",
    version=1,
    model_directory="/",
    version_directory="/",
    config={},
    backend_config={},
    instances=("m_0",),
    kind="KIND_CPU",
    device=0,
    auto_complete=True,
)
SETTINGS = ProcessSettings(arena_bytes=1 << 20, load_timeout_s=10)


class ShortLife:
    """A child that answers its first message with Ready and is gone before anybody has read that."""

    pid = 0

    def __init__(self) -> None:
        self.socket, self.theirs = channel_pair()
        self.killed = False
        asyncio.get_running_loop().add_reader(self.theirs.fileno(), self.answer)

    def answer(self) -> None:
        self.theirs.recv(1 << 16)
        self.theirs.send(backend_framer().encode([Ready(concurrency=1)])[0])
        self.end()

    def end(self) -> None:
        asyncio.get_running_loop().remove_reader(self.theirs.fileno())
        self.theirs.close()

    def kill(self) -> None:
        self.killed = True

    async def wait(self) -> str:
        return "exit status 1"


class Once:
    """Launches the child that it was given."""

    def __init__(self, child: ShortLife) -> None:
        self.child = child

    async def launch(self) -> ShortLife:
        return self.child


async def test_a_process_that_dies_with_its_ready_is_not_taken_for_a_living_one() -> None:
    child = ShortLife()
    supervisor = Supervisor(Once(child), MESSAGE, SETTINGS, SystemClock(), lambda: None, lambda _: None)
    try:
        await supervisor.start()
    except InferError as error:
        assert error.code is ErrorCode.UNAVAILABLE
        assert "as soon as the model was loaded" in error.message
    await until(lambda: supervisor.process is None)
    await supervisor.stop()


async def test_an_arena_that_cannot_be_had_is_a_failed_load_and_ends_the_process() -> None:
    child = ShortLife()
    settings = ProcessSettings(arena_bytes=1 << 62)
    supervisor = Supervisor(Once(child), MESSAGE, settings, SystemClock(), lambda: None, lambda _: None)
    with pytest.raises(InferError, match="cannot be started"):
        await supervisor.start()
    child.end()
    assert child.killed
    assert child.socket.fileno() == -1


def held() -> tuple[int, int]:
    """Return how many descendants and descriptors this process has."""
    process = psutil.Process()
    return len(process.children(recursive=True)), process.num_fds()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_launch_that_is_given_up_leaves_nothing_behind() -> None:
    launcher = ZygoteLauncher("identity")
    first = await launcher.launch()
    before = held()
    for turns in range(4):
        launch = asyncio.create_task(launcher.launch())
        for _ in range(turns):
            await asyncio.sleep(0)
        launch.cancel()
        await asyncio.gather(launch, return_exceptions=True)
    last = await launcher.launch()  # its answer comes after all others
    last.socket.close()
    await until(lambda: held() == before)
    first.socket.close()
    await first.wait()
    launcher.close()


async def test_a_launch_given_up_while_the_zygote_starts_ends_the_zygote() -> None:
    before = held()
    launch = asyncio.create_task(ZygoteLauncher("identity").launch())
    await until(lambda: held()[0] == before[0] + 1)
    launch.cancel()
    await asyncio.gather(launch, return_exceptions=True)
    await until(lambda: held() == before)


async def test_a_zygote_that_dies_as_it_starts_costs_the_launch_nothing_and_the_next_gets_another() -> None:
    launcher = ZygoteLauncher("identity")
    before, count = {process.pid for process in psutil.Process().children()}, held()[0]
    launch = asyncio.create_task(launcher.launch())
    await until(lambda: held()[0] == count + 1)
    (zygote,) = (process for process in psutil.Process().children() if process.pid not in before)
    zygote.kill()
    async with asyncio.timeout(10):
        first = await launch
        second = await launcher.launch()
    assert psutil.Process(first.pid).ppid() == os.getpid()
    assert psutil.Process(psutil.Process(second.pid).ppid()).cmdline()[3] == "zygote"
    for child in (first, second):
        child.kill()
        await child.wait()
        child.socket.close()
    launcher.close()


async def test_children_outlive_their_zygote_and_the_next_launch_gets_a_new_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    launcher = ZygoteLauncher("identity")
    before = {process.pid for process in psutil.Process().children()}
    first = await launcher.launch()
    (zygote,) = (process for process in psutil.Process().children() if process.pid not in before)
    zygote.kill()
    second = await launcher.launch()
    assert f"backend identity: the zygote process {zygote.pid} ended: killed by SIGKILL" in caplog.text
    assert psutil.Process(psutil.Process(second.pid).ppid()).cmdline()[3] == "zygote", (
        "at once, though it was just asked"
    )
    assert psutil.pid_exists(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    second.kill()
    async with asyncio.timeout(10):
        assert await first.wait() == "ended"
        await second.wait()
    first.socket.close()
    second.socket.close()
    launcher.close()


async def test_a_process_that_falls_silent_is_killed_and_replaced() -> None:
    launcher = ZygoteLauncher("identity")
    settings = ProcessSettings(arena_bytes=1 << 20, heartbeat_s=0.05, silent_s=0.5)
    back = asyncio.Event()
    supervisor = Supervisor(launcher, MESSAGE, settings, SystemClock(), back.set, lambda _: None)
    await supervisor.start()
    stopped = supervisor.process
    await asyncio.sleep(1.0)
    assert supervisor.process is stopped, "one that answers is left alone"
    os.kill(stopped.pid, signal.SIGSTOP)
    async with asyncio.timeout(10):
        while supervisor.process in (None, stopped):
            back.clear()
            await back.wait()
    assert supervisor.process.pid != stopped.pid
    await supervisor.stop()
    launcher.close()
