"""Caller: who sends a request, what that one may do, and how much of it. Time is an argument."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from headrace.access.bucket import TokenBucket
from headrace_protocol.errors import ErrorCode, ErrorDetail, FailureReason, InferError

_MINUTE: Final = 60


class Role(enum.Enum):
    """What a caller may do. The values are the words of the file."""

    INFER = "infer"
    """Ask models, and what they are."""
    OBSERVE = "observe"
    """See what is loaded, its configuration, statistics and metrics."""
    ADMIN = "admin"
    """Everything: load and unload, shared memory, settings of traces and logs."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a caller may use; None is no limit. Of requests, those to models count, each once."""

    requests_per_second: float | None = None
    burst: int | None = None
    """Requests at once after a pause; None: those of one second, 1 at least."""
    concurrent: int | None = None
    """Requests under way."""
    tokens_per_minute: int | None = None
    """Of language models: prompt and answer together, counted when an answer ends."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What the file says of one caller."""

    name: str
    roles: frozenset[Role]
    models: tuple[str, ...] = ("*",)
    """Names, with * and ? as in file names, of the models that it may ask."""
    limits: Limits = Limits()


class Caller:
    """One caller and what it uses now. Lives as long as its name is in the file, over changes of it. For one thread."""

    __slots__ = ("_granted", "_grants_all", "_requests", "_tokens", "grant", "under_way")

    def __init__(self, grant: Grant, now_ns: int) -> None:
        self.under_way = 0
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.change(grant, now_ns)

    @property
    def name(self) -> str:
        return self.grant.name

    def change(self, grant: Grant, now_ns: int) -> None:
        """Take what the file says now; what was used stays used."""
        self.grant = grant
        self._grants_all = "*" in grant.models
        self._granted = lru_cache(maxsize=1024)(self._matches)
        limits = grant.limits
        rate = limits.requests_per_second
        burst = None if rate is None else float(limits.burst or max(1, math.ceil(rate)))
        self._requests = _bucket(self._requests, rate, burst, now_ns)
        tokens = limits.tokens_per_minute
        per_second = None if tokens is None else tokens / _MINUTE
        self._tokens = _bucket(self._tokens, per_second, None if tokens is None else float(tokens), now_ns)

    def has(self, roles: frozenset[Role]) -> bool:
        """Whether it has one of the roles. An admin has all."""
        return Role.ADMIN in self.grant.roles or not roles.isdisjoint(self.grant.roles)

    def may_ask(self, model: str) -> bool:
        """Whether the model is among those granted."""
        return self._grants_all or self._granted(model)

    @property
    def counts_tokens(self) -> bool:
        """Whether its answers have to be charged for."""
        return self._tokens is not None

    def begin(self, model: str, now_ns: int) -> None:
        """Take note of a request to a model that begins; `end` follows.

        Raises UNAVAILABLE: of detail FORBIDDEN for a model that is not granted, be it there or not; of RATE_LIMITED, with
        the time to wait, where a limit is reached. Nothing is noted then.
        """
        if not self.may_ask(model):
            raise forbidden(f"caller '{self.name}' may not ask model '{model}'")
        limits = self.grant.limits
        if limits.concurrent is not None and self.under_way >= limits.concurrent:
            raise limited(f"caller '{self.name}' has {self.under_way} requests under way, its limit", 1.0)
        if self._tokens is not None and (wait := self._tokens.wait(now_ns)) > 0:
            raise limited(f"caller '{self.name}' has used its {limits.tokens_per_minute} tokens a minute", wait)
        if self._requests is not None and (wait := self._requests.take(1, now_ns)) > 0:
            raise limited(f"caller '{self.name}' asks more than {limits.requests_per_second:g} times a second", wait)
        self.under_way += 1

    def end(self) -> None:
        """Take note that a request that began is over."""
        self.under_way -= 1

    def charge(self, tokens: int, now_ns: int) -> None:
        """Count the tokens of an answer of a language model; beyond the limit later requests wait."""
        if self._tokens is not None:
            self._tokens.charge(tokens, now_ns)

    def _matches(self, model: str) -> bool:
        return any(fnmatchcase(model, pattern) for pattern in self.grant.models)


def _bucket(old: TokenBucket | None, rate: float | None, burst: float | None, now_ns: int) -> TokenBucket | None:
    if rate is None or burst is None:
        return None
    if old is None:
        return TokenBucket(rate, burst, now_ns)
    old.resize(rate, burst, now_ns)
    return old


def forbidden(message: str) -> InferError:
    """Return the error of a caller who is known and may not do this."""
    return InferError(ErrorCode.UNAVAILABLE, message, FailureReason.REJECTED, detail=ErrorDetail.FORBIDDEN)


def unauthenticated(message: str) -> InferError:
    """Return the error of a caller whom nothing vouches for."""
    return InferError(ErrorCode.UNAVAILABLE, message, FailureReason.REJECTED, detail=ErrorDetail.UNAUTHENTICATED)


def limited(message: str, wait_s: float) -> InferError:
    """Return the error of a caller who has reached a limit; `wait_s` is when to try again."""
    error = InferError(ErrorCode.UNAVAILABLE, message, FailureReason.REJECTED, detail=ErrorDetail.RATE_LIMITED)
    error.retry_after_s = wait_s
    return error


def names(roles: Sequence[Role] | frozenset[Role]) -> str:
    """Return roles as a sentence has them."""
    return " or ".join(sorted(role.value for role in roles))
