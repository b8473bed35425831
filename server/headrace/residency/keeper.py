"""Keeper: obeys the policy of residency. Loads, unloads, measures, and lets requests in to their models.

The shell around policy.py and waiting.py; used from one event loop. It decides nothing about who comes and who goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final

from headrace.clock import Clock
from headrace.instances.loaded_model import LoadedModel
from headrace.repository.layout import RepositorySnapshot
from headrace.repository.overlay import Overlay
from headrace.repository.registry import ModelRegistry
from headrace.residency.catalogue import Entry, Known
from headrace.residency.decisions import (
    Close,
    Decision,
    Evict,
    Load,
    Refuse,
    Reload,
    Reopen,
    Settings,
    Stage,
)
from headrace.residency.failures import Failures
from headrace.residency.options import ResidencyOptions
from headrace.residency.policy import ResidencyPolicy
from headrace.residency.readings import Readings
from headrace.residency.shelf import Shelf
from headrace.residency.waiting import Waiter, WaitingRoom, no_room
from headrace.types import LATEST, ModelMetadata
from headrace_protocol.errors import InferError, not_found, unavailable

_log = logging.getLogger("headrace.residency")

TICK_S: Final = 0.02
"""Seconds between two looks while somebody waits: models become idle and deadlines pass without telling."""
MEASURE_S: Final = 1.0
"""Seconds between two measurements of what models take."""
How = Callable[[], Awaitable[None]]


class Keeper:
    """One a server that has a memory budget; borrows the registry, whose loads and unloads are its business."""

    def __init__(
        self,
        options: ResidencyOptions,
        registry: ModelRegistry[LoadedModel],
        clock: Clock,
        *,
        config_name: str | None = None,
        overlay: Overlay | None = None,
        explicit: bool = False,
    ) -> None:
        """`explicit`: models are loaded from what their folders hold then, not from what a scan has seen."""
        self._options = options
        self._registry = registry
        self._now_ns = clock.now_ns
        self.shelf: Final = Shelf(registry.repositories, config_name, overlay, options)
        self._explicit = explicit
        self.policy: Final = ResidencyPolicy(
            Settings(options.budget, min_residence_ns=int(options.min_residence_s * 1e9))
        )
        self.room: Final = WaitingRoom()
        self.entries: Final = self.shelf.entries
        self.known: Final = self.shelf.known
        self.absent: Final[set[str]] = set()
        """Models to which requests have to wait."""
        self.used: Final[dict[str, int]] = {}
        """Of the models in memory, when the last request came."""
        self._barred: set[str] = set()
        """Models that a call unloaded: they stay away until a call loads them."""
        self._failures = Failures()
        self._readings = Readings(registry)
        self._how: dict[str, How] = {}
        self._outcomes: dict[str, asyncio.Future[None]] = {}
        """Of loads that are not made for requests."""
        self._asked_for: set[str] = set()
        """Models that are to serve from the start."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False
        self._closing = False
        self.describe: Callable[[str, int], ModelMetadata] | None = None
        """Tells what a model that serves is like, for the time when it is away."""
        self.started = False
        self.budget: Final = options.budget
        self.wait_ns: Final = int(options.wait_s * 1e9)
        self.loads = self.evictions = 0
        registry.takes_over = self.applied
        registry.on_change = self._changed

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self, named: Iterable[str] = ()) -> dict[str, str]:
        """Learn what there is, and load what is pinned or named; return those that failed, with the reasons."""
        if self._explicit:
            await self._learn(await self.shelf.scan())
        elif self._registry.snapshot is not None:
            await self._learn(self._registry.snapshot)
        pinned = [name for name, entry in self.entries.items() if entry.pinned]
        self._asked_for = {*pinned, *named} - {"*"}
        names = sorted(self._asked_for)
        outcomes = await asyncio.gather(*map(self.load, names), return_exceptions=True)
        failed = {name: str(error) for name, error in zip(names, outcomes, strict=True) if error is not None}
        self.started = True
        self._spawn(self._measure_always(), "measure models")
        self.poke()
        return failed

    def close(self) -> None:
        """Refuse all who wait; nothing is loaded any more."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for name in self.room.models():
            self.room.fail(name, unavailable("the server is shutting down"))
        for task in self._tasks:
            task.cancel()

    def ready(self) -> bool:
        """Return whether what is to serve from the start does."""
        return self.started and all(map(self._registry.stands, self._asked_for))

    # --- for requests -------------------------------------------------------------------------------------------------

    def join(self, waiter: Waiter) -> None:
        """Let a request wait for its model, and have that loaded. Raises UNAVAILABLE where that is known to be in vain."""
        reason = self.why_not(waiter.model)
        if reason:
            raise unavailable(reason)
        self.room.join(waiter)
        self.policy.want(waiter.model, self._now_ns())
        self.poke()

    def leave(self, waiter: Waiter) -> None:
        """Let one go whose client is gone."""
        if self.room.leave(waiter):
            self._unwant(waiter.model)

    def why_not(self, name: str) -> str:
        """Return why a model cannot be loaded now; "" where it may be."""
        if self._closing:
            return "the server is shutting down"
        now = self._now_ns()
        for one in self.policy.closure(name):
            entry = self.entries.get(one)
            member = f"model {name!r} needs model {one!r}: " if one != name else ""
            if entry is not None and entry.problem:
                return f"{member}model {one!r} failed to load: {entry.problem}"
            failure = self._failures.reason(one, now)
            if failure:
                return member + failure
            if one in self._barred:
                return f"{member}model {one!r} was unloaded"
        return ""

    # --- for operators ------------------------------------------------------------------------------------------------

    async def load(self, name: str, how: How | None = None, *, special: bool = False) -> None:
        """Load or reload a model by a call, by `how`, once there is room. `special`: not as it would be on demand.

        Raises as the load does, and UNAVAILABLE where there is no room.
        """
        news = await self._learn_one(name)
        self._barred -= self.policy.closure(name)
        self._failures.forget(name)
        while (other := self._outcomes.get(name)) is not None or self._moving(name):
            await asyncio.wait([other], timeout=TICK_S) if other is not None else await asyncio.sleep(TICK_S)
        if how is not None and not (news or special or self.policy.held(name)) and self.policy.open(name):
            await how()  # which finds nothing to do
            return
        outcome = self._outcomes[name] = asyncio.get_running_loop().create_future()
        if how is not None:
            self._how[name] = how
        if self.policy.stage(name) is Stage.RESIDENT:
            self.policy.outdate(name)
        else:
            self.policy.want(name, self._now_ns())
        self.poke()
        try:
            await asyncio.wait([outcome], timeout=self._options.wait_s)
            if not outcome.done() and self.policy.stage(name) not in (Stage.LOADING, Stage.RELOADING):
                raise unavailable(no_room(name, self.budget))
            await outcome
            if name in self.policy:
                self.policy.hold(name, held=special)
        finally:
            self._outcomes.pop(name, None)
            self._how.pop(name, None)
            self._unwant(name)
            if name in self.policy and not outcome.done():
                self.policy.outdate(name, stale=False)
            self._tidy(name)

    async def unload(self, name: str, how: How) -> None:
        """Unload a model by a call: it stays away until a call loads it."""
        if name in self.policy:
            self._barred.add(name)
            self.policy.hold(name, held=False)
            self.room.fail(name, unavailable(f"model {name!r} was unloaded"))
            self.policy.unwant(name)
        try:
            await how()
        finally:
            self._follow()

    # --- what the repositories hold -----------------------------------------------------------------------------------

    def applied(self, snapshot: RepositorySnapshot) -> None:
        """Take note of what the repositories hold; the registry calls it in place of loading what is new."""
        if self.started:
            self._spawn(self._learn(snapshot), "look at models")

    async def _learn(self, snapshot: RepositorySnapshot) -> None:
        for entry in await self.shelf.news(snapshot):
            self._put(entry)
        for name in self.entries.keys() - snapshot.models.keys():
            self._forget(name)
        self.poke()

    async def _learn_one(self, name: str) -> bool:
        """Look at one model again before a call loads it; return whether it is another than before."""
        entry = await self.shelf.news_of(name)
        if entry is not None:
            self._put(entry, renew=False)
        elif name not in self.policy:
            self.policy.put(name, self.shelf.stranger())
        return entry is not None

    def _put(self, entry: Entry, *, renew: bool = True) -> None:
        name = entry.layout.name
        changed = name in self.entries
        self.entries[name] = entry
        self._failures.forget(name)
        self.policy.put(name, self.shelf.traits(entry), changed=changed)
        if changed:
            self.known.pop(name, None)
            if renew:
                self.policy.outdate(name)
        if entry.pinned and self.started and self.policy.stage(name) is Stage.ABSENT:
            self._asked_for.add(name)
            self.policy.want(name, self._now_ns())
        self._refresh(name)

    def _forget(self, name: str) -> None:
        del self.entries[name]
        self.known.pop(name, None)
        self._failures.forget(name)
        self._barred.discard(name)
        self._asked_for.discard(name)
        self.room.fail(name, not_found(f"model {name!r} is not in any model repository of this server any more"))
        if self.policy.stage(name) is Stage.RESIDENT:
            self.policy.leaving(name)
        self.policy.drop(name)
        self._changed(name)
        self._refresh(name)

    # --- deciding and obeying -----------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Decide in the next turn of the loop."""
        if not self._soon and not self._closing:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._tick)

    def _tick(self) -> None:
        self._soon = False
        if self._closing:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._now_ns()
        for name in self.room.expire(now, self._late):
            self._unwant(name)
        for decision in self.policy.decide(now, self._readings.activity(self.policy.names(Stage.RESIDENT), self.used)):
            self._obey(decision)
        for name in self.room.models():
            if name in self.policy and self.policy.open(name):
                self.room.let_in(name)
                self._unwant(name)
        if self.policy.wanting or self.room.count:
            pause_s = TICK_S if self.room.count or self._outcomes else MEASURE_S
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._tick)

    def _obey(self, decision: Decision) -> None:
        name = decision.name
        match decision:
            case Load() | Reload():
                self._spawn(self._load(name, again=isinstance(decision, Reload)), f"load {name!r} on demand")
            case Evict():
                self.evictions += 1
                _log.info("model %s: evicted, it took %d bytes", name, self.policy.memory().get(name, 0))
                self._spawn(self._registry.unload(name), f"evict {name!r}")
            case Close():
                _log.info("model %s: closed until it is idle, to make room", name)
            case Reopen():
                pass
            case Refuse(_, reason):
                error = unavailable(reason)
                self.room.fail(name, error)
                self._conclude(name, error)
        self._refresh(name)

    async def _load(self, name: str, *, again: bool) -> None:
        """Do a load that was decided, and report it."""
        how = self._how.get(name) or partial(self._load_plainly, name)
        self.loads += not again
        try:
            await how()
        except InferError as error:
            self._load_failed(name, error, by_call=name in self._how)
        except BaseException:
            self._load_failed(name, unavailable(f"model {name!r}: the load was given up"))
            raise
        else:
            nbytes = await self._measure(name)
            self._failures.forget(name)
            self.policy.loaded(name, nbytes, self._now_ns())
            self._remember(name)
            self._conclude(name, None)
            if not self._registry.versions(name):  # a call unloaded it meanwhile
                self._follow()
        finally:
            self._tidy(name)
            self._refresh(name)
            self._tick()

    async def _load_plainly(self, name: str) -> None:
        entry = self.entries.get(name)
        if self._explicit or entry is None:
            await self._registry.load(name)
        else:
            await self._registry.load_seen(entry.layout)

    def _load_failed(self, name: str, error: InferError, *, by_call: bool = False) -> None:
        if not by_call:  # whose parameters may be what is wrong
            self._failures.note(name, error.message, self._now_ns())
        hopeless = self.policy.load_failed(name)
        for other in {name, *hopeless}:
            needs = "" if other == name else f"model {other!r} needs model {name!r}: "
            self.room.fail(other, unavailable(needs + error.message))
            self._conclude(other, error)

    def _remember(self, name: str) -> None:
        """Keep what a model told of itself for the time when it is away."""
        self.used[name] = self._now_ns()
        try:
            model = self._registry.get(name, LATEST)
        except InferError:
            return
        if self.describe is not None:
            metadata = self.describe(name, LATEST)
            self.known[name] = Known(metadata, model.config.proto, decoupled=model.config.decoupled)

    def _changed(self, name: str) -> None:
        """Note that a model's copies may be others than before; see ModelRegistry.on_change."""
        if self.policy.stage(name) is Stage.LEAVING and not self._registry.copies_left(name):
            self.policy.freed(name)
            self.used.pop(name, None)
            self._tidy(name)
            self.poke()

    def _tidy(self, name: str) -> None:
        """Forget a model that is gone and that no repository holds."""
        alone = name not in self.entries and name not in self._outcomes
        if alone and name in self.policy and self.policy.stage(name) is Stage.ABSENT:
            self.policy.drop(name)

    def _follow(self) -> None:
        """Take note of models that a call has unloaded, members of ensembles among them."""
        for name in self.policy.names(Stage.RESIDENT):
            if not self._registry.versions(name):
                self._barred.add(name)
                self.policy.leaving(name)
                self._refresh(name)
                self._changed(name)
        self.poke()

    def _refresh(self, name: str) -> None:
        """Have requests to a model wait, or not."""
        if name in self.entries and name not in self._barred and not self.policy.open(name):
            self.absent.add(name)
        else:
            self.absent.discard(name)

    def _moving(self, name: str) -> bool:
        return self.policy.stage(name) in (Stage.LOADING, Stage.RELOADING, Stage.LEAVING)

    def _conclude(self, name: str, error: InferError | None) -> None:
        outcome = self._outcomes.get(name)
        if outcome is None or outcome.done():
            return
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)

    # --- those who wait -----------------------------------------------------------------------------------------------

    def _unwant(self, name: str) -> None:
        if not self.room.waits(name) and name not in self._outcomes and not self._wanted_pinned(name):
            self.policy.unwant(name)

    def _wanted_pinned(self, name: str) -> bool:
        entry = self.entries.get(name)
        return entry is not None and entry.pinned and self.policy.stage(name) is Stage.ABSENT

    def _late(self, name: str) -> str:
        if any(self.policy.stage(one) is Stage.LOADING for one in self.policy.closure(name)):
            return f"model {name!r} is being loaded, which takes longer than the request may wait"
        return no_room(name, self.budget)

    # --- measuring ----------------------------------------------------------------------------------------------------

    async def _measure_always(self) -> None:
        while True:
            await asyncio.sleep(MEASURE_S)
            for name, nbytes in (await self._readings.memory(self.policy.names(Stage.RESIDENT))).items():
                self.policy.measured(name, nbytes)
            if self.policy.used > self.budget:
                self.poke()

    async def _measure(self, name: str) -> int:
        """Return the bytes that a model takes now, and learn from that."""
        nbytes = (await self._readings.memory([name])).get(name, self.policy.memory().get(name, 0))
        for entry in self.shelf.measured(name, nbytes):
            self.policy.put(entry.layout.name, self.shelf.traits(entry))
        return nbytes

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed: %s", task.get_name(), error, exc_info=error)
