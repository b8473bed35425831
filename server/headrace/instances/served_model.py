"""ServedModel: one loaded version of a model, ready to take requests: configuration, queue, processes, statistics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from headrace.clock import Clock
from headrace.instances.environment import Environment
from headrace.instances.model_process import ModelProcess
from headrace.instances.services import BackendServices, ModelServices
from headrace.instances.signature import ModelSignature
from headrace.instances.supervisor import Supervisor
from headrace.observability.statistics import ModelStatistics
from headrace.repository.model_config import ModelConfig
from headrace.response_cache import ResponseCache
from headrace.scheduling.cached_driver import CachedDriver
from headrace.scheduling.driver import Driver, SchedulerDriver
from headrace.scheduling.factory import make_scheduler
from headrace.scheduling.ordering import OrderedRelease
from headrace.scheduling.sequence import SequenceBatcher
from headrace.scheduling.sequence_driver import InstancePlace, SequenceDriver
from headrace_protocol.errors import unavailable

_log = logging.getLogger("headrace.instances")


class InstancePool:
    """The processes of a model version: a free instance is looked for where most are free."""

    def __init__(self, services: BackendServices | None = None) -> None:
        self.supervisors: list[Supervisor] = []
        self.services = None if services is None else ModelServices(services, self)
        """What its processes may ask of the server."""
        self._retiring: dict[Supervisor, asyncio.Task[None]] = {}
        self.environment: Environment | None = None
        """The Python that its processes run in, where it is not the server's."""

    def free_process(self) -> ModelProcess | None:
        """Return the process with the most free instances, or None where all are busy."""
        best: ModelProcess | None = None
        most = 0
        for supervisor in self.supervisors:
            process = supervisor.process
            if process is not None and len(process.free) > most and (process.gate is None or process.gate.open):
                best, most = process, len(process.free)
        return best

    def places(self) -> list[InstancePlace]:
        """Return every instance, of whichever process its supervisor has."""
        return [InstancePlace(supervisor, slot) for supervisor in self.supervisors for slot in range(supervisor.slots)]

    def busy(self) -> int:
        """Return how many batches run now."""
        return sum(s.process.busy for s in self.supervisors if s.process is not None)

    def slots(self) -> int:
        """Return how many instances there are; at least one where a process is being started."""
        return sum(s.process.slots if s.process is not None else 1 for s in self.supervisors)

    def replace(self, supervisors: list[Supervisor]) -> None:
        """Have these processes take the batches from now on; those of the others end once nothing runs in them."""
        for supervisor in self.supervisors:
            if supervisor not in supervisors:
                task = asyncio.get_running_loop().create_task(supervisor.retire(), name=f"retire {supervisor.label}")
                self._retiring[supervisor] = task
                task.add_done_callback(partial(self._retired, supervisor))
        self.supervisors[:] = supervisors

    def _retired(self, supervisor: Supervisor, task: asyncio.Task[None]) -> None:
        del self._retiring[supervisor]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("model %s: an instance did not end cleanly", supervisor.label, exc_info=error)

    def abort(self) -> None:
        """Kill every process and fail what runs in it. `stop` follows."""
        for supervisor in (*self.supervisors, *self._retiring):
            supervisor.abort()

    async def stop(self) -> None:
        """End every process, and what they showed of themselves."""
        tasks = list(self._retiring.values())
        await asyncio.gather(*(supervisor.stop() for supervisor in (*self.supervisors, *self._retiring)))
        await asyncio.gather(*tasks)
        if self.services is not None:
            self.services.close()
        if self.environment is not None:
            await self.environment.release()


class ServedModel:
    """Owned by the registry, which leases it to requests and stops it once no lease is left."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        pool: InstancePool,
        labels: Mapping[str, Sequence[str]],
        statistics: ModelStatistics,
        load_seconds: float,
        clock: Clock,
        cache: ResponseCache | None = None,
        identity: bytes = b"",
    ) -> None:
        """`cache`: where answers are kept, if they are; `identity` tells what is loaded from all else in it."""
        self.name: Final = config.name
        self.version: Final = version
        self.config = config
        """Its instance groups change with the instances; all else stays."""
        self.labels: Final = labels
        """Class labels by output name."""
        self.load_seconds: Final = load_seconds
        self.signature: Final = ModelSignature(config, version)
        self.statistics: Final = statistics
        self.pool: Final = pool
        self.accepting = True
        """Whether a request may join the queue: also while a process is being started again, until all are given up."""
        self.cached: Final = cache is not None
        self.sequences: Final = self._sequence_driver(clock) if config.sequence_batching is not None else None
        """The driver, where the model takes sequences."""
        self._batches: Final = self.sequences or self._request_driver(clock, kept=cache is not None)
        """The driver that hands batches to instances."""
        self.driver: Final[Driver] = (
            self._batches if cache is None else self._cached_driver(self._batches, clock, cache, identity)
        )

    def _sequence_driver(self, clock: Clock) -> SequenceDriver:
        config, settings = self.config, self.config.sequence_batching
        assert settings is not None
        places = self.pool.places()
        ordering = OrderedRelease() if settings.preserve_ordering and not config.decoupled else None
        return SequenceDriver(
            SequenceBatcher(settings, config.max_batch_size, len(places), config.name, ordering),
            places,
            self.pool,
            self.signature,
            self.statistics,
            clock,
            ordering,
            decoupled=config.decoupled,
            iterative=settings.iterative,
        )

    def _request_driver(self, clock: Clock, *, kept: bool) -> SchedulerDriver:
        return SchedulerDriver(
            make_scheduler(self.config),
            self.pool,
            self.signature,
            self.statistics,
            clock,
            None if kept else self._ordering(),
            decoupled=self.config.decoupled,
        )

    def _cached_driver(self, driver: Driver, clock: Clock, cache: ResponseCache, identity: bytes) -> CachedDriver:
        return CachedDriver(driver, cache, lambda: identity, self.signature, self.statistics, clock, self._ordering())

    def _ordering(self) -> OrderedRelease | None:
        batching = self.config.dynamic_batching
        ordered = batching is not None and batching.preserve_ordering and not self.config.decoupled
        return OrderedRelease() if ordered else None

    def admit(self) -> None:
        """Let batches into the processes. Raises INVALID_ARG where an instance could never run, for lack of resources."""
        for supervisor in self.pool.supervisors:
            supervisor.admit(self._batches.ripe)
        self._note_gates()

    def resize(self, config: ModelConfig, supervisors: list[Supervisor], new: list[Supervisor]) -> None:
        """Go on with these instances, the `new` ones among them, and the configuration that asks for them.

        Raises INVALID_ARG where a new instance could never run, for lack of resources; nothing has changed then.
        """
        for supervisor in new:
            supervisor.admit(self._batches.ripe)
        self.config = config
        self.pool.replace(supervisors)
        self._note_gates()
        self.driver.kick()

    def _note_gates(self) -> None:
        self._batches.limited = any(supervisor.gate is not None for supervisor in self.pool.supervisors)

    @property
    def ready(self) -> bool:
        """Whether every process is there, and its model says that it can serve: what readiness tells."""
        return all(s.process is not None and s.process.model_ready for s in self.pool.supervisors)

    @property
    def not_ready_reason(self) -> str:
        """Why it is not ready; "" when it is."""
        gone = next((s.reason for s in self.pool.supervisors if s.process is None), "")
        return gone or ("" if self.ready else "the model says that it is not ready")

    @property
    def restarts(self) -> int:
        """How often its processes were started again."""
        return sum(supervisor.policy.restarts for supervisor in self.pool.supervisors)

    def pools(self, _outputs: Sequence[str] | None) -> tuple[InstancePool]:
        """Return its instances, which any request needs."""
        return (self.pool,)

    def pids(self) -> list[int]:
        """Return the process numbers of its backends that run now."""
        return [s.process.pid for s in self.pool.supervisors if s.process is not None]

    def given_up(self, reason: str) -> None:
        """Refuse what waits, once no process is left to serve it."""
        self.accepting = not all(supervisor.given_up for supervisor in self.pool.supervisors)
        if not self.accepting:
            self.driver.fail_waiting(unavailable(f"model '{self.name}' is not available: {reason}"))

    def abort(self) -> None:
        """Fail what runs and what waits, at once: the server stops. `stop` follows."""
        self.driver.fail_waiting(unavailable("the server is stopping"))
        self.pool.abort()

    async def stop(self) -> None:
        """End the processes. The registry calls it when the last lease is gone; what still waits is refused."""
        self.driver.fail_waiting(unavailable(f"model '{self.name}' version {self.version} is being unloaded"))
        await self.pool.stop()
