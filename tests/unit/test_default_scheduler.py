"""DefaultScheduler: one request a batch in order of arrival; and which scheduler a configuration gets."""

import pytest

from headrace.repository.model_config import DynamicBatching, ModelConfig, QueuePolicy, VersionPolicy
from headrace.scheduling.default import DefaultScheduler
from headrace.scheduling.dynamic import DynamicBatcher
from headrace.scheduling.factory import make_scheduler
from headrace.scheduling.scheduler import QueuedRequest
from headrace_protocol._generated import model_config_pb2
from headrace_protocol.errors import InferError


def enqueue(scheduler, *names, now=0):
    items = [QueuedRequest(name, 4, "a", 5, 1) for name in names]
    for item in items:
        scheduler.enqueue(item, now)
    return items


def served(scheduler, now=0):
    batches = []
    while batch := scheduler.next_batch(now):
        batches.append([item.owner for item in batch])
    return batches


def config(max_batch_size, dynamic_batching):
    return ModelConfig(
        name="m",
        backend="identity",
        platform="",
        max_batch_size=max_batch_size,
        inputs=(),
        outputs=(),
        instance_groups=(),
        version_policy=VersionPolicy(),
        dynamic_batching=dynamic_batching,
        decoupled=False,
        default_model_filename="",
        parameters={},
        metric_tags={},
        proto=model_config_pb2.ModelConfig(),
    )


def test_each_request_runs_alone_in_order_of_arrival():
    scheduler = DefaultScheduler()
    enqueue(scheduler, "x", "y", "z")
    assert served(scheduler) == [["x"], ["y"], ["z"]]


def test_what_waits_is_ripe_at_once():
    scheduler = DefaultScheduler()
    assert scheduler.ripe_at_ns() is None
    enqueue(scheduler, "x", now=7)
    assert scheduler.ripe_at_ns() == scheduler.wake_at_ns() == 7
    assert scheduler.next_expiry_ns() is None


def test_without_settings_priority_and_timeout_of_a_request_are_ignored():
    scheduler = DefaultScheduler()
    enqueue(scheduler, "x")
    assert scheduler.expire(10**18) == []
    assert served(scheduler, 10**18) == [["x"]]


def test_a_cancelled_request_is_not_served():
    scheduler = DefaultScheduler()
    x, _ = enqueue(scheduler, "x", "y")
    assert scheduler.cancel(x)
    assert not scheduler.cancel(x)
    assert served(scheduler) == [["y"]]


def test_drain_gives_back_all_that_waits():
    scheduler = DefaultScheduler()
    enqueue(scheduler, "x", "y")
    assert [item.owner for item in scheduler.drain()] == ["x", "y"]
    assert scheduler.waiting == 0


def test_a_queue_policy_bounds_length_and_time():
    policy = QueuePolicy(default_timeout_us=1, max_queue_size=1)
    scheduler = DefaultScheduler(DynamicBatching(default_queue_policy=policy, max_queue_delay_us=10**6))
    (item,) = enqueue(scheduler, "x")
    with pytest.raises(InferError, match="full"):
        enqueue(scheduler, "y")
    assert scheduler.next_batch(1000) is None
    assert scheduler.expire(1000) == [item]


@pytest.mark.parametrize(
    ("max_batch_size", "batching", "kind"),
    [
        (0, None, DefaultScheduler),
        (8, None, DefaultScheduler),
        (0, DynamicBatching(), DefaultScheduler),
        (8, DynamicBatching(), DynamicBatcher),
    ],
)
def test_a_model_batches_only_if_it_can_and_asks_for_it(max_batch_size, batching, kind):
    assert type(make_scheduler(config(max_batch_size, batching))) is kind


def test_a_model_that_cannot_batch_keeps_its_queue_policy():
    policy = QueuePolicy(max_queue_size=1)
    scheduler = make_scheduler(config(0, DynamicBatching(default_queue_policy=policy)))
    enqueue(scheduler, "x")
    with pytest.raises(InferError, match="full"):
        enqueue(scheduler, "y")
