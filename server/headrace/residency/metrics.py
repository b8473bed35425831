"""What the metrics tell of residency."""

from __future__ import annotations

from headrace.observability.snapshot import Snapshot
from headrace.residency.keeper import Keeper


def add_residency(snapshot: Snapshot, keeper: Keeper) -> None:
    """Add what the metrics tell of it."""
    snapshot.gauge("headrace_model_memory_budget_bytes", "Memory for models, at most", {}, keeper.budget)
    for name, nbytes in keeper.policy.memory().items():
        help_text = "Memory that counts against the budget, measured or expected, by model"
        snapshot.gauge("headrace_model_memory_bytes", help_text, {"model": name}, nbytes)
    snapshot.counter("headrace_model_evictions_total", "Models unloaded to make room", {}, keeper.evictions)
    snapshot.counter("headrace_model_on_demand_loads_total", "Loads begun for requests or calls", {}, keeper.loads)
    help_text = "Requests that wait for their models to be loaded"
    snapshot.gauge("headrace_model_waiting_requests", help_text, {}, keeper.room.count)
