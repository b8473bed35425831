"""Whatever is put and asked for, the local store gives the newest block of a key or none, and keeps to its size."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.response_cache import ENTRY_OVERHEAD, LocalCache

CAPACITY = 4 * ENTRY_OVERHEAD + 400
KEYS = st.sampled_from([bytes([number]) for number in range(8)])


class Store(RuleBasedStateMachine):
    """Beside the store a list of the keys by last use, newest last, with their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = LocalCache(CAPACITY)
        self.expected: dict[bytes, bytes] = {}

    @rule(key=KEYS, size=st.integers(0, 2 * CAPACITY))
    def put(self, key: bytes, size: int) -> None:
        block = key * size
        self.cache.put(key, block)
        if size + ENTRY_OVERHEAD > CAPACITY:
            return
        self.expected.pop(key, None)
        self.expected[key] = block
        while sum(len(kept) + ENTRY_OVERHEAD for kept in self.expected.values()) > CAPACITY:
            del self.expected[next(iter(self.expected))]

    @rule(key=KEYS)
    def get(self, key: bytes) -> None:
        found = self.cache.get(key)
        assert found == self.expected.get(key)
        if found is not None:
            self.expected[key] = self.expected.pop(key)

    @invariant()
    def sound(self) -> None:
        self.cache.check_integrity()
        assert self.cache.entries == len(self.expected)


TestStore = Store.TestCase
