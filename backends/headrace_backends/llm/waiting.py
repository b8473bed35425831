"""Requests that wait to be run, in order. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from headrace_backends.llm.request import GenerationRequest, Status


class Policy(Enum):
    """Who goes first; ties go to the earlier arrival. A preempted request keeps its place."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    LPM = "lpm"
    """Longest prefix match: who finds most of its tokens in the prefix cache is admitted first (SGLang, Zheng et al. 2024)."""


Key = tuple[int, int]


def order_of(policy: Policy) -> Callable[[GenerationRequest], Key]:
    """Return the key by which requests are served; the greatest is the first to be preempted."""
    if policy is Policy.PRIORITY:
        return lambda request: (request.priority, request.order)
    return lambda request: (0, request.order)


class WaitingQueue:
    """Sorted; each request once. Keeps count of the tokens that wait.

    Those whose grammar is not compiled yet are counted, and come to their place in the order when they are released.
    """

    def __init__(self, policy: Policy) -> None:
        self._key = order_of(policy)
        self._entries: list[tuple[Key, GenerationRequest]] = []
        self._held: dict[str, GenerationRequest] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries) + len(self._held)

    def __iter__(self) -> Iterator[GenerationRequest]:
        """Go through those that may run, in order."""
        return (request for _, request in self._entries)

    @property
    def held(self) -> Sequence[GenerationRequest]:
        """Those that may not run yet, by arrival."""
        return tuple(self._held.values())

    def push(self, request: GenerationRequest) -> None:
        if request.status is Status.WAITING_FOR_GRAMMAR:
            self._held[request.id] = request
        else:
            insort(self._entries, (self._key(request), request))
        self.num_tokens += request.num_tokens

    def release(self, request: GenerationRequest) -> None:
        """Let a held request run when it is its turn."""
        del self._held[request.id]
        request.status = Status.WAITING
        insort(self._entries, (self._key(request), request))

    def first(self) -> GenerationRequest | None:
        return self._entries[0][1] if self._entries else None

    def remove(self, request: GenerationRequest) -> None:
        if self._held.pop(request.id, None) is None:
            at = bisect_left(self._entries, (self._key(request),))
            assert self._entries[at][1] is request, f"{request.id} does not wait"
            del self._entries[at]
        self.num_tokens -= request.num_tokens
