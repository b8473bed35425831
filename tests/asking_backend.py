"""A backend that asks the server what a request tells it to, and answers with what came of it: for tests of calls.

`installed(folder)` writes the distribution that makes it known as the backend "asking", and returns the environment of a
server that finds it. `add_asker` writes a model of it, `ask` has it do something.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace_backends.api import (
    Batch,
    BatchRequest,
    Call,
    CallRequest,
    CallResult,
    CallTensor,
    ModelContext,
    ModelDescription,
)
from headrace_protocol.datatype import BF16
from headrace_protocol.errors import InferError

CONFIG = """
max_batch_size: 0
input [ { name: "ASK" data_type: TYPE_STRING dims: [ 1 ] }, { name: "DATA" data_type: TYPE_FP32 dims: [ -1 ] optional: true } ]
output [ { name: "ANSWER" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


OURS = {"asking": "asking_backend:AskingBackend", "apart": "asking_backend:ApartBackend"}


def installed(folder: Path, backends: Mapping[str, str] = OURS) -> dict[str, str]:
    """Install this module below `folder`, and what names backends; return the environment that finds them there."""
    information = folder / "asking_backend-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: asking-backend\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in backends.items()]
    (information / "entry_points.txt").write_text("\n".join(["[headrace.backends]", *lines, ""]))
    shutil.copy(__file__, folder)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def add_asker(repository: Path, name: str, extra: str = "", backend: str = "asking", first: str = "") -> None:
    """Write a model that asks, `first` of all in `initialize`. Of the backend "apart" each instance has a process."""
    if first:
        escaped = first.replace('"', '\\"')
        extra += f'parameters {{ key: "first" value {{ string_value: "{escaped}" }} }}'
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(f'name: "{name}" backend: "{backend}" {CONFIG}{extra}')


class AskingBackend:
    """Does what `ASK`, a JSON object, says: `do` names a method, the rest are its arguments."""

    fork_safe: ClassVar[bool] = True
    threads: ClassVar[bool] = True

    def initialize(self, model: ModelContext) -> ModelDescription:
        self.server = model.server
        self.kept: list[Call] = []
        self.jobs: queue.Queue[tuple[Callable[[], Any], queue.Queue[Any]] | None] = queue.Queue()
        self.worker = threading.Thread(target=self.work)
        self.worker.start()
        first = model.parameter("first")
        self.first = self.attempt(**json.loads(first)) if first else None
        return ModelDescription()

    def execute(self, batch: Batch) -> None:
        for request in batch.requests:
            command = json.loads(bytes(request.input("ASK").reshape(-1)[0]))
            answer = json.dumps(self.attempt(**command, request=request)).encode()
            request.respond({"ANSWER": np.array([answer], np.object_)})

    def finalize(self) -> None:
        self.jobs.put(None)
        self.worker.join()

    def work(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                job[1].put(job[0]())
            except BaseException as error:
                job[1].put(error)

    def attempt(self, do: str, request: BatchRequest | None = None, **arguments: Any) -> Any:
        method = getattr(self, f"do_{do}")
        if "request" in inspect.signature(method).parameters:
            arguments["request"] = request
        try:
            return method(**arguments)
        except InferError as error:
            return {"error": error.code.value, "message": error.message}

    def do_infer(self, model: str, values: list[float] | None = None, version: int = -1, **more: Any) -> Any:
        """Call a model with a row of values; more are fields of the CallRequest."""
        result = self.server.infer(_request(model, values or [1.0], version, **more))
        return _told(result)

    def do_first(self) -> Any:
        """Tell what came of the configuration parameter `first`, asked in `initialize`."""
        return self.first

    def do_thread(self, **command: Any) -> Any:
        """Have a thread that was started in `initialize` do it."""
        command["do"] = command.pop("what")
        answer: queue.Queue[Any] = queue.Queue()
        self.jobs.put((lambda: self.attempt(**command), answer))
        return answer.get(timeout=30)

    def do_leave(self, **command: Any) -> Any:
        """As `thread`, without waiting for it."""
        command["do"] = command.pop("what")
        self.jobs.put((lambda: self.attempt(**command), queue.Queue()))
        return "left"

    def do_gather(self, model: str, count: int, **more: Any) -> Any:
        """Make many calls at once from a loop, and wait for all."""

        async def gather() -> list[Any]:
            return await asyncio.gather(*[self._await(model, [float(n)], more) for n in range(count)])

        return asyncio.run(gather())

    async def _await(self, model: str, values: list[float], more: dict[str, Any]) -> Any:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        call = self.server.begin(
            _request(model, values, **more), on_arrival=lambda: loop.call_soon_threadsafe(arrived.set)
        )
        while (result := call.poll()) is None:
            await arrived.wait()
            arrived.clear()
        return _told(result)

    def do_streams(self, model: str, count: int, length: int) -> Any:
        """Make many streamed calls at once from a loop; return how many responses each had, and what they add up to."""

        async def one(number: int) -> list[float]:
            loop, arrived = asyncio.get_running_loop(), asyncio.Event()
            call = self.server.begin(
                CallRequest(model, [CallTensor("IN", np.arange(number, number + length, dtype=np.int32))]),
                decoupled=True,
                on_arrival=lambda: loop.call_soon_threadsafe(arrived.set),
            )
            seen: list[float] = []
            while not call.over:
                if (result := call.poll()) is None:
                    await arrived.wait()
                    arrived.clear()
                elif result.error is not None:
                    raise result.error
                elif not result.empty:
                    seen.append(int(result.outputs[0].array.item()))
            return seen

        async def gather() -> list[Any]:
            return await asyncio.gather(*[one(number) for number in range(count)])

        return asyncio.run(gather())

    def do_stream(self, model: str, length: int, pause_ms: float = 0, most: int = 0) -> Any:
        """Iterate over one streamed call, at leisure; stop after `most` responses where that is not 0."""
        call = self.server.stream(CallRequest(model, [CallTensor("IN", np.arange(length, dtype=np.int32))]))
        seen = []
        for result in call:
            time.sleep(pause_ms / 1000)
            seen.append(int(result.outputs[0].array.item()))
            if len(seen) == most:
                call.cancel()
                break
        return seen

    def do_told(self, model: str, **more: Any) -> Any:
        """Tell every response to a streamed call, and the error that ends it."""
        told: list[Any] = []
        call = self.server.stream(_request(model, [1.0], **more))
        while (result := call.next()) is not None:
            if not result.empty:
                told.append(_told(result) if result.error is not None else _told(result)["outputs"])
        return told

    def do_large(self, model: str, nbytes: int, responses: int) -> Any:
        """Count the responses to a streamed call, each of so many bytes."""
        tensor = CallTensor("INPUT0", np.ones((1, nbytes // 4), np.float32))
        call = self.server.stream(CallRequest(model, [tensor], parameters={"responses": responses}))
        return sum(bool(result.outputs[0].array.all()) for result in call)

    def do_ask(self, model: str, what: dict[str, Any]) -> Any:
        """Have another model of this backend do something."""
        tensor = CallTensor("ASK", np.array([json.dumps(what)], np.object_))
        return json.loads(self.server.infer(CallRequest(model, [tensor])).outputs[0].array[0])

    def do_drop(self, model: str, length: int) -> Any:
        """Begin a stream and forget it."""
        self.server.stream(CallRequest(model, [CallTensor("IN", np.arange(length, dtype=np.int32))]))
        return "dropped"

    def do_drop_stream(self, model: str) -> Any:
        """Read one of three responses and forget the rest."""
        call = self.server.stream(_request(model, [1.0], parameters={"responses": 3}))
        return _told(next(iter(call)))

    def do_keep(self, model: str, count: int = 1, **more: Any) -> Any:
        """Begin calls and return before they are answered."""
        self.kept += [self.server.begin(_request(model, [1.0], **more)) for _ in range(count)]
        return len(self.kept)

    def do_collect(self) -> Any:
        """Return what became of the calls that were kept."""
        kept, self.kept = self.kept, []
        return [None if result is None else _told(result) for result in (call.next() for call in kept)]

    def do_data(self, model: str, request: BatchRequest) -> Any:
        """Pass DATA on to a model, and tell whether the same comes back, in memory of our own."""
        data = request.input("DATA")
        (output,) = self.server.infer(CallRequest(model, [CallTensor("INPUT0", data.reshape(1, -1))])).outputs
        same = bool(np.array_equal(output.array.reshape(-1), data))
        output.array[...] = 0
        return same

    def do_half(self, model: str, bits: list[int]) -> Any:
        """Pass BF16 on, as raw bits."""
        tensor = CallTensor("INPUT0", np.array([bits], np.uint16), BF16)
        (output,) = self.server.infer(CallRequest(model, [tensor])).outputs
        assert output.datatype is not None
        return [output.datatype.name, output.array.reshape(-1).tolist()]

    def do_many(self, model: str, count: int) -> Any:
        """Make calls in turn, as fast as they go; return how many a second."""
        started = time.monotonic()
        for _ in range(count):
            self.server.infer(_request(model, [1.0]))
        return count / (time.monotonic() - started)

    def do_crowd(self, model: str, threads: int, count: int) -> Any:
        """Make calls from many threads at once."""
        with ThreadPoolExecutor(threads) as pool:
            done = pool.map(lambda n: _told(self.server.infer(_request(model, [float(n)]))), range(count))
            return [told["outputs"]["OUTPUT0"] for told in done]

    def do_load(self, model: str, config: str = "", files: dict[str, str] | None = None) -> Any:
        self.server.load(model, config, {path: text.encode() for path, text in (files or {}).items()})
        return "loaded"

    def do_unload(self, model: str) -> Any:
        self.server.unload(model)
        return "unloaded"

    def do_ready(self, model: str, version: int = -1) -> Any:
        return self.server.ready(model, version)

    def do_count(
        self, name: str, kind: str = "counter", by: list[float] | None = None, labels: dict[str, str] | None = None
    ) -> Any:
        """Add to a counter or gauge, or have a histogram observe."""
        family = self.server.metric_family(name, f"what {name} counts", kind)  # type: ignore[arg-type]
        metric = family.metric(labels or {}, [1.0, 10.0] if kind == "histogram" else None)
        for value in by or []:
            (metric.observe if kind == "histogram" else metric.increment)(value)
        return None if kind == "histogram" else metric.value()

    def do_set(self, name: str, value: float) -> Any:
        """Set a gauge."""
        metric = self.server.metric_family(name, f"what {name} shows", "gauge").metric()
        metric.set(value)
        return metric.value()

    def do_descriptors(self) -> Any:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    def do_again(self, model: str, delays_ms: list[float]) -> Any:
        """Make calls in turn that take so long."""
        for delay_ms in delays_ms:
            self.server.infer(_request(model, [1.0], parameters={"delay_ms": delay_ms}))
        return len(delays_ms)

    def do_sleep(self, seconds: float) -> Any:
        time.sleep(seconds)
        return os.getpid()

    def do_pid(self) -> Any:
        return os.getpid()

    def do_crash(self, model: str, **more: Any) -> Any:
        """Begin a call and die."""
        self.server.begin(_request(model, [1.0], **more))
        os._exit(7)


class ApartBackend(AskingBackend):
    """The same with a process for each instance."""

    threads: ClassVar[bool] = False


def _request(model: str, values: list[float], version: int = -1, **more: Any) -> CallRequest:
    return CallRequest(model, [CallTensor("INPUT0", np.array([values], np.float32))], version, **more)


def _told(result: CallResult) -> Any:
    if result.error is not None:
        return {"error": result.error.code.value, "message": result.error.message}
    outputs = {tensor.name: tensor.array.reshape(-1).tolist() for tensor in result.outputs}
    return {"outputs": outputs, "parameters": dict(result.parameters or {})}
