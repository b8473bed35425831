"""What a process asks, over a real channel: a ModelProcess and the far end of its socket, which the test plays."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from headrace.clock import SystemClock
from headrace.instances.model_process import ModelProcess
from headrace.instances.process import channel_pair
from headrace.instances.services import BackendServices, ModelServices
from headrace.types import InferenceRequest, InferenceResponse, OutputTensor
from headrace_protocol.datatype import UINT8
from headrace_protocol.errors import InferError, invalid
from headrace_protocol.framing import backend_framer
from headrace_protocol.messages import (
    MAX_CONTROLS,
    Call,
    CallRead,
    CallResponse,
    CancelCall,
    Control,
    ControlResult,
    DefineFamily,
    MetricSeries,
    MetricValue,
    MetricValues,
    Ready,
    TellMetrics,
)
from headrace_protocol.tensor import Tensor, TensorRef
from held_models import until

NBYTES = 100_000


class Planes:
    """Both planes: requests wait until they are answered, loads until `loading` is set."""

    def __init__(self) -> None:
        self.asked: list[Callable[[InferenceResponse | InferError], None]] = []
        self.loading = asyncio.Event()
        self.loaded: list[tuple[str, dict[str, Any]]] = []

    def submit(self, _: InferenceRequest, done: Callable[[InferenceResponse | InferError], None]) -> Any:
        self.asked.append(done)
        return self

    stream = submit

    def cancel(self) -> None:
        self.asked.clear()

    def model_ready(self, name: str, version: int) -> bool:
        if name == "odd":
            raise invalid("odd")
        return version == 1

    def instances_of(self, *_: object) -> tuple[()]:
        return ()

    async def load(self, name: str, parameters: dict[str, Any]) -> None:
        self.loaded.append((name, parameters))
        await self.loading.wait()
        if name == "broken":
            raise RuntimeError("a fault of ours")

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.loaded.append((name, {"dependents": unload_dependents}))


class Instances:
    def slots(self) -> int:
        return 1


class Far:
    """The process, as far as the server sees it."""

    pid = 0

    def __init__(self) -> None:
        self.socket, self.theirs = channel_pair()
        self.theirs.setblocking(False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        self.killed = False
        self.framer = backend_framer()

    def kill(self) -> None:
        self.killed = True

    async def wait(self) -> str:
        return "exit status 1"

    def say(self, *messages: msgspec.Struct) -> None:
        frame, _ = self.framer.encode(messages)
        self.theirs.send(frame)

    async def hear(self) -> list[Any]:
        """Return the messages of the next frame."""
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        loop.add_reader(self.theirs, lambda: ready.done() or ready.set_result(None))
        try:
            await asyncio.wait_for(ready, 5)
        finally:
            loop.remove_reader(self.theirs)
        data, descriptors, _, _ = socket.recv_fds(self.theirs, 1 << 17, 16)
        for descriptor in descriptors:
            socket.close(descriptor)
        return self.framer.decode(data, [])


class Setting:
    """A process that has loaded its model, and what is around it."""

    def __init__(self) -> None:
        self.services = BackendServices(SystemClock())
        self.planes = Planes()
        self.services.connect(self.planes, self.planes)
        self.far = Far()
        self.ended: list[str] = []
        self.model = ModelServices(self.services, Instances())
        self.process = ModelProcess(self.far, 1 << 16, lambda: None, self.ended.append, lambda *_: None, self.model)
        self.model.loaded = True

    async def asked(self, count: int) -> None:
        await until(lambda: len(self.planes.asked) >= count)

    async def end(self) -> str:
        await until(lambda: self.ended)
        assert self.far.killed
        return self.ended[0]


@pytest_asyncio.fixture
async def setting() -> AsyncIterator[Setting]:
    setting = Setting()
    yield setting
    setting.process.abort("the test is over")
    await setting.services.close()
    setting.far.theirs.close()


def large() -> InferenceResponse:
    return InferenceResponse("leaf", 1, [OutputTensor("OUT", UINT8, (NBYTES,), np.zeros(NBYTES, np.uint8).data)])


async def test_responses_wait_for_a_process_that_does_not_read_and_all_come_in_the_end(setting: Setting) -> None:
    count = 1000
    for number in range(count):
        setting.far.say(Call(number, "leaf", -1, ()))
        await asyncio.sleep(0)
    await setting.asked(count)
    for done in list(setting.planes.asked):
        done(large())
    assert not setting.process.reading
    setting.far.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)  # hundreds go at once now
    heard: list[int] = []
    while len(heard) < count:
        heard += [message.number for message in await setting.far.hear()]
    assert heard == list(range(count))


async def test_frames_wait_while_the_system_has_too_many_descriptors_on_their_way(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, refusals = socket.send_fds, iter(range(3))

    def sometimes(*arguments: Any) -> int:
        if next(refusals, None) is not None:
            raise OSError(errno.ETOOMANYREFS, "too many")
        return send(*arguments)

    monkeypatch.setattr(socket, "send_fds", sometimes)
    setting.far.say(*[Call(number, "leaf", -1, ()) for number in range(4)])
    await setting.asked(4)
    for done in list(setting.planes.asked):
        done(large())
    heard = [message.number for _ in range(4) for message in await setting.far.hear()]
    assert heard == [0, 1, 2, 3]
    assert not setting.ended


@pytest.mark.parametrize(
    "messages",
    [
        [Call(1, "leaf", -1, ()), Call(1, "leaf", -1, ())],
        [Call(1, "leaf", -1, (Tensor("IN", "FP32", (1,), TensorRef(0, 4, 0)),))],
        [Call(1, "leaf", -1, (), decoupled=True), CallRead(1, 1)],
        [Control(1, "load", "m", files=(("1/f", TensorRef(0, 4, 0)),))],
        [Control(1, "load", "m"), Control(1, "unload", "m")],
        [Control(1, "metric", series=7)],
        [DefineFamily(1, "mine", "", "counter"), DefineFamily(1, "other", "", "counter")],
        [MetricValues((MetricSeries(1, 1, ()),))],
        [MetricValues((), (MetricValue(1, 1),))],
        [Ready(), Ready()],
    ],
    ids=lambda messages: type(messages[-1]).__name__,
)
async def test_nonsense_is_the_end_of_the_process_that_sent_it(
    setting: Setting, messages: list[msgspec.Struct]
) -> None:
    setting.far.say(*messages)
    assert "nonsense" in await setting.end()
    assert not setting.planes.asked


@pytest.mark.parametrize(
    "frame",
    [
        [[20]],
        [[20, "1", "leaf", -1, []]],
        [[20, 1, "leaf", -1, [], 0, False, None, "", {"p": [1]}]],
        [[23, 1, "explode"]],
        [[24, 1, "n", "d", "gouge"]],
        [[25, [[1]]]],
        [[99, 1]],
    ],
    ids=str,
)
async def test_what_is_no_message_is_the_end_of_the_process_that_sent_it(setting: Setting, frame: list[Any]) -> None:
    setting.far.theirs.send(b"\0" + msgspec.msgpack.encode(frame))
    assert "cannot be read" in await setting.end()


async def test_what_comes_late_or_twice_and_harms_nobody_is_no_nonsense(setting: Setting) -> None:
    setting.far.say(CancelCall(5), CallRead(5, 1), MetricValues((), (), 99), Control(1, "ready", "m", 1))
    assert await setting.far.hear() == [ControlResult(1, None, 1.0)]
    assert not setting.ended


@pytest.mark.parametrize(("model", "version", "value"), [("m", 1, 1.0), ("m", 2, 0.0)])
async def test_readiness_is_told_as_a_number(setting: Setting, model: str, version: int, value: float) -> None:
    setting.far.say(Control(1, "ready", model, version))
    assert await setting.far.hear() == [ControlResult(1, None, value)]


async def test_an_error_that_says_more_than_not_ready_is_told(setting: Setting) -> None:
    setting.far.say(Control(1, "ready", "odd"))
    (result,) = await setting.far.hear()
    assert result.error.code == "INVALID_ARG"


async def test_a_load_answers_once_it_is_over_and_others_need_not_wait_for_it(setting: Setting) -> None:
    setting.far.say(Control(1, "load", "slow", config="{}"), Control(2, "unload", "m", unload_dependents=True))
    assert await setting.far.hear() == [ControlResult(2)]
    setting.planes.loading.set()
    assert await setting.far.hear() == [ControlResult(1)]
    assert setting.planes.loaded == [("slow", {"config": "{}"}), ("m", {"dependents": True})]


async def test_a_fault_in_a_load_is_told_and_ends_nothing(setting: Setting) -> None:
    setting.planes.loading.set()
    setting.far.say(Control(1, "load", "broken"))
    (result,) = await setting.far.hear()
    assert result.error.code == "INTERNAL"
    assert "a fault of ours" in result.error.message


async def test_a_load_goes_on_when_its_process_is_gone(setting: Setting) -> None:
    setting.far.say(Control(1, "load", "slow"))
    await until(lambda: setting.planes.loaded)
    setting.far.theirs.close()
    await setting.end()
    setting.planes.loading.set()
    await setting.services.close()
    assert setting.planes.loaded == [("slow", {})]


async def test_controls_have_a_bound(setting: Setting) -> None:
    setting.far.say(*[Control(number, "load", "slow") for number in range(MAX_CONTROLS + 1)])
    (result,) = await setting.far.hear()
    assert (result.number, result.error.code) == (MAX_CONTROLS, "UNAVAILABLE")


async def test_a_model_that_is_being_loaded_cannot_load_others_but_call_them(setting: Setting) -> None:
    setting.model.loaded = False
    setting.far.say(Control(1, "load", "m"))
    (result,) = await setting.far.hear()
    assert result.error.code == "UNAVAILABLE"
    setting.far.say(Call(1, "leaf", -1, ()))
    await setting.asked(1)


async def test_a_server_without_planes_says_that_there_are_no_others(setting: Setting) -> None:
    setting.services.plane = setting.services.control = None
    setting.far.say(Control(1, "ready", "m", 1), Control(2, "load", "m"), Call(3, "leaf", -1, ()))
    ready, load, call = [message for _ in range(3) for message in await setting.far.hear()]
    assert ready.value == 0
    assert load.error.code == "UNAVAILABLE"
    assert isinstance(call, CallResponse)
    assert call.error is not None
    assert call.error.code == "UNAVAILABLE"


async def test_a_scrape_asks_who_has_metrics_and_gets_what_has_changed(setting: Setting) -> None:
    setting.far.say(
        DefineFamily(1, "mine", "", "counter"), MetricValues((MetricSeries(4, 1, ()),), (MetricValue(4, 2.0),))
    )
    assert await setting.far.hear() == [ControlResult(1)]
    refresh = asyncio.ensure_future(setting.services.metrics.refresh())
    (ask,) = await setting.far.hear()
    assert isinstance(ask, TellMetrics)
    setting.far.say(MetricValues((), (MetricValue(4, 3.0),), ask.number), Control(9, "metric", series=4))
    await refresh
    assert await setting.far.hear() == [ControlResult(9, None, 5.0)]


async def test_a_scrape_does_not_ask_a_process_that_is_gone(setting: Setting) -> None:
    setting.far.say(DefineFamily(1, "mine", "", "counter"))
    await setting.far.hear()
    refresh = asyncio.ensure_future(setting.services.metrics.refresh())
    await setting.far.hear()
    setting.far.theirs.close()
    await setting.end()
    await refresh
    assert not setting.services.metrics.tellers


async def test_a_family_that_is_refused_is_told_and_its_number_free(setting: Setting) -> None:
    setting.far.say(DefineFamily(1, "nv_inference_count", "", "counter"))
    (refusal,) = await setting.far.hear()
    assert refusal.error.code == "INVALID_ARG"
    setting.far.say(DefineFamily(1, "mine", "", "counter"))
    assert await setting.far.hear() == [ControlResult(1)]
