"""What a scheduler counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start."""

    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    """Tokens that were looked for in the prefix cache."""
    prefix_cache_hits: int = 0
    """Of these, tokens that were found."""
    prompt_tokens: int = 0
    """Of requests that began to run."""
    generation_tokens: int = 0
    num_drafts: int = 0
    """Rows that carried guesses."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """How often the first guess of a row was right, the second, and so on."""

    def count_drafts(self, proposed: int, accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        self.accepted_at.extend([0] * (accepted - len(self.accepted_at)))
        for at in range(accepted):
            self.accepted_at[at] += 1
