"""How vLLM stands, summed over what it tells of each step. Pure; vLLM itself is not imported.

vLLM's objects are taken by their fields: SchedulerStats and IterationStats, which it gives to a logger of statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from headrace_backends.llm.engine import EngineStats


class StatsSum:
    """Totals since the start, and the newest state."""

    def __init__(self, cache_config: Mapping[str, str]) -> None:
        """`cache_config` is told with the rest: see `EngineStats`."""
        self._cache_config: Final = cache_config
        self._totals: Counter[str] = Counter()
        self._accepted: list[int] = []
        self._now = EngineStats(cache_config=cache_config)

    def stats(self) -> EngineStats:
        return self._now

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Take what one step tells; either may be None."""
        if iteration is not None:
            self._totals["prompt_tokens"] += iteration.num_prompt_tokens
            self._totals["generation_tokens"] += iteration.num_generation_tokens
            self._totals["preemptions"] += iteration.num_preempted_reqs
            self._totals["steps"] += 1
            self._totals["step_tokens"] += iteration.num_prompt_tokens + iteration.num_generation_tokens
        running, waiting, usage = self._now.running, self._now.waiting, self._now.kv_usage
        if scheduler is not None:
            running, usage = scheduler.num_running_reqs, scheduler.kv_cache_usage
            waiting = scheduler.num_waiting_reqs + getattr(scheduler, "num_skipped_waiting_reqs", 0)
            self._totals["prefix_cache_queries"] += scheduler.prefix_cache_stats.queries
            self._totals["prefix_cache_hits"] += scheduler.prefix_cache_stats.hits
            if scheduler.spec_decoding_stats is not None:
                self._count_drafts(scheduler.spec_decoding_stats)
        self._now = EngineStats(
            running=running,
            waiting=waiting,
            kv_usage=usage,
            totals=dict(self._totals),
            accepted_per_position=tuple(self._accepted),
            cache_config=self._cache_config,
        )

    def _count_drafts(self, told: Any) -> None:
        self._totals["drafts"] += told.num_drafts
        self._totals["draft_tokens"] += told.num_draft_tokens
        self._totals["accepted_tokens"] += told.num_accepted_tokens
        counts = told.num_accepted_tokens_per_pos
        self._accepted.extend([0] * (len(counts) - len(self._accepted)))
        for at, count in enumerate(counts):
            self._accepted[at] += count
