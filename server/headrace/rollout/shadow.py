"""ShadowSender: sends some requests to another version as well, and drops what it answers.

It begins after the request itself was handed over, in a later turn of the loop; it never raises, and never waits. What it sends
holds the request's bytes, no lease and no region of the client's. Shadows are no requests of a caller: nobody is charged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

from headrace.instances.loaded_model import LoadedModel
from headrace.rollout.policy import HUNDRED, ShadowPolicy
from headrace.rollout.rollouts import Rollouts, ShadowCounts
from headrace.scheduling.batch_driver import Outcome
from headrace.types import LATEST, InferenceRequest, InferenceResponse, RequestedOutput
from headrace_protocol.errors import InferError, unsupported

_log = logging.getLogger("headrace.rollout")

MOST_BYTES: Final = 256 << 20
"""Of inputs that all shadows under way hold."""


class Registry(Protocol):
    """The models, leased."""

    def acquire(self, name: str, version: int) -> LoadedModel: ...

    def release(self, model: LoadedModel) -> None: ...


class ShadowSender:
    """One a server. Owns what is under way until `close`."""

    def __init__(self, rollouts: Rollouts, registry: Registry, now_ns: Callable[[], int]) -> None:
        self._rollouts = rollouts
        self._registry = registry
        self._now_ns = now_ns
        self._under_way: dict[str, set[_Shadow]] = {}
        """By model; those that are about to be sent included."""
        self._bytes = 0

    def consider(self, request: InferenceRequest, served: LoadedModel) -> None:
        """Send a shadow of a request that `served` has got, if it is its turn."""
        rollout = self._rollouts.get(request.model_name)
        if rollout is None or (policy := rollout.policy.shadow) is None or not _may(request, served, policy):
            return
        if rollout.shadow_turns.next() * HUNDRED >= policy.percent:
            return
        counts = rollout.shadow_counts[policy.version]
        under_way = self._under_way.setdefault(request.model_name, set())
        nbytes = sum(len(tensor.data) for tensor in request.inputs)
        if len(under_way) >= policy.max_in_flight or self._bytes + nbytes > MOST_BYTES:
            counts.full += 1
            return
        self._bytes += nbytes
        under_way.add(_Shadow(self, request, policy, counts, nbytes))

    def in_flight(self, name: str) -> int:
        """Return how many shadows of a model's requests are under way."""
        return len(self._under_way.get(name, ()))

    def close(self) -> None:
        """Give up everything that is under way."""
        for shadow in [shadow for shadows in self._under_way.values() for shadow in shadows]:
            shadow.give_up()

    def begin(self, shadow: _Shadow) -> None:
        """Hand a shadow over to its version. Raises InferError where it cannot be."""
        request = shadow.request
        model = self._registry.acquire(request.model_name, request.model_version)
        shadow.model = model
        if model.sequences is not None or (model.config.decoupled and not shadow.policy.streams):
            raise unsupported(f"version {model.version} takes sequences, or gives any number of responses")
        request.received_ns = self._now_ns()
        shadow.pending = model.driver.submit(model.signature.prepare(request), shadow.take)

    def ended(self, shadow: _Shadow) -> None:
        """Note that a shadow is over."""
        name = shadow.request.model_name
        under_way = self._under_way[name]
        under_way.discard(shadow)
        if not under_way:
            del self._under_way[name]
        self._bytes -= shadow.nbytes
        if shadow.model is not None:
            self._registry.release(shadow.model)


class _Shadow:
    """One request that nobody waits for."""

    __slots__ = ("_counts", "_sender", "_timer", "model", "nbytes", "pending", "policy", "request")

    def __init__(
        self, sender: ShadowSender, request: InferenceRequest, policy: ShadowPolicy, counts: ShadowCounts, nbytes: int
    ) -> None:
        self._sender = sender
        self._counts = counts
        self.request = _copy(request, policy.version)
        self.policy = policy
        self.nbytes = nbytes
        self.model: LoadedModel | None = None
        self.pending: Any = None
        self._timer: asyncio.Handle | None = asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.policy.timeout_secs, self._expired)
        try:
            self._sender.begin(self)
        except InferError as error:
            _log.debug("shadow of model %s: not sent: %s", self.request.model_name, error)
            self._counts.refused += 1
            self._end()
        except Exception:  # a fault of our own, which must not reach the loop's handler for each request
            _log.exception("shadow of model %s: not sent", self.request.model_name)
            self._counts.refused += 1
            self._end()

    def take(self, outcome: Outcome) -> None:
        """Drop an outcome."""
        if self._timer is None:
            if isinstance(outcome, InferenceResponse):
                outcome.release()
            return
        if isinstance(outcome, InferenceResponse):
            final = outcome.final
            outcome.release()
            if not final:
                return
            self._counts.ok += 1
        else:
            self._counts.error += 1
        self.pending = None
        self._end()

    def give_up(self) -> None:
        """Wait for it no longer."""
        pending, self.pending = self.pending, None
        if pending is not None and self.model is not None:
            self.model.driver.cancel(pending)
        self._end()

    def _expired(self) -> None:
        self._counts.timeout += 1
        self.give_up()

    def _end(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            self._sender.ended(self)


def _may(request: InferenceRequest, served: LoadedModel, policy: ShadowPolicy) -> bool:
    """Return whether a request can be sent a second time without anybody's noticing.

    Not what a model asks, which may be a part of another shadow; not a part of a sequence; nothing in clients' memory.
    """
    if request.model_version != LATEST or request.nested or request.correlation_id or served.version == policy.version:
        return False
    if served.config.decoupled and not policy.streams:
        return False
    return not (
        any(tensor.region is not None for tensor in request.inputs)
        or any(output.region is not None for output in request.outputs or ())
    )


def _copy(request: InferenceRequest, version: int) -> InferenceRequest:
    """Return the same request to another version, which shares nothing with it but the bytes of its inputs."""
    copy = InferenceRequest(request.model_name, version, request.received_ns)
    copy.id = request.id
    copy.inputs = list(request.inputs)
    if request.outputs:
        copy.outputs = [RequestedOutput(output.name) for output in request.outputs]
    copy.parameters = None if request.parameters is None else dict(request.parameters)
    copy.priority = request.priority
    copy.timeout_us = request.timeout_us
    return copy
