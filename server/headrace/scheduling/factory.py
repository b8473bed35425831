"""Chooses the scheduler that a model's configuration asks for."""

from __future__ import annotations

from headrace.repository.model_config import ModelConfig
from headrace.scheduling.default import DefaultScheduler
from headrace.scheduling.dynamic import DynamicBatcher
from headrace.scheduling.scheduler import Scheduler


def make_scheduler(config: ModelConfig) -> Scheduler:
    """Return the empty scheduler of a model version."""
    if config.dynamic_batching is not None and config.max_batch_size > 0:
        return DynamicBatcher(config.max_batch_size, config.dynamic_batching)
    return DefaultScheduler(config.dynamic_batching)
