"""Supervisor: keeps one ModelProcess alive for as long as its model is loaded.

A process that dies, stops answering pings or sends nonsense is replaced after a back-off; after too many crashes in a
window the supervisor gives up and says why. Requests that wait in the queue survive a restart, those inside the dead
process have failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from headrace.clock import Clock
from headrace.instances.arenas import ArenaTable
from headrace.instances.gate import Gate
from headrace.instances.model_process import ModelProcess
from headrace.instances.placement import ANYWHERE, Placement, bind
from headrace.instances.process import Launcher
from headrace.instances.restart import RestartPolicy
from headrace.instances.services import ModelServices
from headrace.instances.variables import VariablePolicy
from headrace.instances.warm_up import WarmUp
from headrace.scheduling.rate_limiter import RateLimiter
from headrace_protocol.errors import InferError, unavailable
from headrace_protocol.messages import Initialize, Ready

_log = logging.getLogger("headrace.instances")

HEARTBEAT_S: Final = 5.0
SILENT_S: Final = 60.0
"""Seconds without an answer to a ping after which a process counts as hung."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How backend processes are run."""

    arena_bytes: int = 8 << 30
    load_timeout_s: float = 600.0
    restart_limit: int = 5
    restart_window_s: float = 60.0
    heartbeat_s: float = HEARTBEAT_S
    silent_s: float = SILENT_S
    host_policies: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Processors by the name of the policy."""
    variables: VariablePolicy = field(default_factory=VariablePolicy)
    """Which environment variables they get."""
    memory_limit: int = 0
    """Bytes of private memory that each may take; 0 = as much as there is."""
    limiter: RateLimiter | None = None
    """Who says which instances may run; None = all that are free."""
    arenas: ArenaTable | None = None
    """Where their arenas are made known to each other."""


class Supervisor:
    """Owns the current process. `process` is None between a death and the next start."""

    def __init__(
        self,
        launcher: Launcher,
        initialize: Initialize,
        settings: ProcessSettings,
        clock: Clock,
        on_capacity: Callable[[], None],
        on_given_up: Callable[[str], None],
        services: ModelServices | None = None,
        placement: Placement = ANYWHERE,
    ) -> None:
        self.process: ModelProcess | None = None
        self.placement = placement
        self.slots = 1
        """Instances that each of its processes has."""
        self.label = f"{initialize.model_name}:{initialize.version}"
        self.reason = "loading"
        """Why there is no process now."""
        self.given_up = False
        self.policy = RestartPolicy(settings.restart_limit, int(settings.restart_window_s * 1e9))
        self._launcher = launcher
        self._initialize = initialize
        self._settings = settings
        self._clock = clock
        self._on_capacity = on_capacity
        self._on_given_up = on_given_up
        self._services = services
        self._warm_up: WarmUp | None = None
        self.gate: Gate | None = None
        """What batches have to pass, where they need resources that there are only so many of."""
        self._admitted = False
        self._retired = False
        self._freed: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._death: asyncio.Future[str] | None = None

    async def start(self) -> Ready:
        """Start the first process and load the model; then watch over it. Raises InferError where it cannot load."""
        ready = await self._start_process()
        self._task = asyncio.get_running_loop().create_task(self._watch(), name=f"supervisor {self.label}")
        return ready

    async def warm_up(self, warm_up: WarmUp, timeout_s: float) -> None:
        """Have each instance of the process run what warms it up, and later those of any that takes its place.

        Raises InferError where that fails, or takes longer.
        """
        self._warm_up = warm_up
        if self.process is None:
            raise unavailable(f"the backend process ended as soon as the model was loaded: {self.reason}")
        await warm_up.run(self.process, self._initialize.instances, timeout_s)

    def admit(self, ripe: Callable[[ModelProcess], bool]) -> None:
        """Let batches in, now that the model is complete; `ripe` tells whether there is one for a process.

        Raises INVALID_ARG where an instance could never run, for lack of resources.
        """
        placement, limiter = self.placement, self._settings.limiter
        if placement.needs and not placement.passive and limiter is not None:

            def wants() -> bool:
                return self.process is not None and bool(self.process.free) and ripe(self.process)

            self.gate = Gate(limiter, placement.needs, placement.device, placement.priority, wants, self._on_capacity)
        self._admitted = True
        if self.process is not None:
            self._admit(self.process)

    def _admit(self, process: ModelProcess) -> None:
        process.gate = self.gate
        if self.placement.passive:
            process.free, process.slots = [], 0

    async def retire(self) -> None:
        """End the process once nothing runs in it any more; nobody gives it anything. One that dies stays so."""
        self._retired = True
        while self.process is not None and self.process.busy:
            self._freed = asyncio.get_running_loop().create_future()
            await self._freed
        await self.stop()

    def _slot_free(self) -> None:
        if self._freed is not None and not self._freed.done():
            self._freed.set_result(None)
        self._on_capacity()

    async def stop(self) -> None:
        """End the process and the watch. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        process, self.process = self.process, None
        self.reason = "unloaded"
        if process is not None:
            await process.stop()
        if self.gate is not None:
            self.gate.close()

    def abort(self) -> None:
        """Kill the process and fail the requests in it. `stop` follows."""
        if self.process is not None:
            self.process.abort("the server is stopping")

    async def _start_process(self) -> Ready:
        death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def ended(reason: str) -> None:
            death.set_result(reason)
            if self.process is process:
                self.process = None
                self.reason = reason
                self._slot_free()  # whoever bound something to the process takes note
                if self.gate is not None:
                    self.gate.changed()

        try:
            child = await self._launcher.launch()
            cores = self._settings.host_policies.get(self.placement.policy_name)
            if cores is not None:
                bind(child.pid, cores)
            process = ModelProcess(
                child,
                self._settings.arena_bytes,
                self._slot_free,
                ended,
                self._backend_log,
                self._services,
                self._settings.arenas,
            )
        except OSError as error:
            raise unavailable(f"a backend process cannot be started: {error}") from error
        ready = await process.initialize(self._initialize, self._settings.load_timeout_s)
        if death.done():
            raise unavailable(f"the backend process ended as soon as the model was loaded: {death.result()}")
        if self._warm_up is not None:
            try:
                await self._warm_up.run(process, self._initialize.instances, self._settings.load_timeout_s)
            except BaseException:
                process.kill()
                raise
        if self._admitted:
            self._admit(process)
        self.process = process
        self.slots = 0 if self.placement.passive else process.slots
        self._death = death
        self.reason = ""
        return ready

    async def _watch(self) -> None:
        while True:
            reason = await self._outlive()
            if self._retired:
                return
            delay_ns = self.policy.crashed(self._clock.now_ns())
            if delay_ns is None:
                self._give_up(reason)
                return
            _log.warning("model %s: %s; starting it again in %.1f s", self.label, reason, delay_ns / 1e9)
            await asyncio.sleep(delay_ns / 1e9)
            while self.process is None:
                try:
                    await self._start_process()
                except InferError as error:
                    delay_ns = self.policy.crashed(self._clock.now_ns())
                    if delay_ns is None:
                        self._give_up(error.message)
                        return
                    self.reason = error.message
                    _log.warning("model %s does not come back: %s", self.label, error.message)
                    await asyncio.sleep(delay_ns / 1e9)
            _log.info("model %s serves again, process %d", self.label, self.process.pid)
            self._on_capacity()

    def _give_up(self, reason: str) -> None:
        self.given_up = True
        self.reason = f"its backend process failed {self.policy.limit + 1} times in a short time, at last: {reason}"
        _log.error("model %s: %s", self.label, self.reason)
        self._on_given_up(self.reason)

    async def _outlive(self) -> str:
        """Return why the current process ended, pinging it meanwhile and killing it where it falls silent."""
        assert self._death is not None
        process = self.process
        nonce = 0
        answered_ns = self._clock.now_ns()
        while True:
            done, _ = await asyncio.wait([self._death], timeout=self._settings.heartbeat_s)
            if done or process is None:
                reason = await self._death
                status = await process.ended() if process is not None else ""
                return f"{reason} ({status})" if status else reason
            now = self._clock.now_ns()
            if process.last_pong == nonce:
                answered_ns = now
                nonce += 1
                process.ping(nonce)
                process.trim()
            elif now - answered_ns > self._settings.silent_s * 1e9:
                _log.error(
                    "model %s: the backend process has not answered for %d s", self.label, self._settings.silent_s
                )
                process.kill()

    def _backend_log(self, level: str, text: str) -> None:
        _log.log(logging.getLevelNamesMapping().get(level, logging.INFO), "model %s: %s", self.label, text)
