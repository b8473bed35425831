"""Longest prefix match: who finds most of its prompt in the cache goes first, and nobody waits for ever."""

from headrace_backends.llm.admission import RefusalReason, SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.scheduler import Scheduler
from headrace_backends.llm.step import StepResult
from headrace_backends.llm.waiting import Policy


def a_scheduler(policy: Policy = Policy.LPM, **config) -> Scheduler:
    settings = {"max_model_len": 40, "max_num_seqs": 1, "max_num_batched_tokens": 40, "policy": policy} | config
    return Scheduler(SchedulerConfig(**settings), BlockManager(200, 4))


def a_request(name: str, first: int, **more) -> GenerationRequest:
    return GenerationRequest(name, [first] * 17, SamplingParams(max_tokens=1), 0, **more)


def run(scheduler: Scheduler) -> list[str]:
    step = scheduler.schedule(0)
    scheduler.update(step, [StepResult([1]) for _ in step.scheduled], 0)
    scheduler.check_integrity()
    return [entry.request.id for entry in step.scheduled]


def warm(scheduler: Scheduler, token: int) -> None:
    scheduler.add(a_request(f"warm {token}", token))
    run(scheduler)


def test_the_longest_match_goes_first() -> None:
    scheduler = a_scheduler()
    warm(scheduler, 7)
    scheduler.add(a_request("a", 1), a_request("b", 2), a_request("c", 7))
    assert [run(scheduler) for _ in range(3)] == [["c"], ["a"], ["b"]]


def test_in_order_of_arrival_it_would_not() -> None:
    scheduler = a_scheduler(Policy.FCFS)
    warm(scheduler, 7)
    scheduler.add(a_request("a", 1), a_request("c", 7))
    assert run(scheduler) == ["a"]


def test_equal_matches_go_by_arrival() -> None:
    scheduler = a_scheduler()
    warm(scheduler, 7)
    scheduler.add(a_request("a", 7), a_request("b", 7))
    assert [run(scheduler), run(scheduler)] == [["a"], ["b"]]


def test_who_matches_nothing_is_passed_over_so_often_and_no_more() -> None:
    scheduler = a_scheduler()
    warm(scheduler, 7)
    scheduler.add(a_request("unlucky", 1))
    ran = []
    for at in range(40):
        scheduler.add(a_request(f"r{at}", 7))
        ran += run(scheduler)
    assert ran.index("unlucky") == 16


def test_priorities_belong_to_their_own_policy() -> None:
    refused = a_scheduler().add(a_request("a", 1, priority=3))
    assert refused.reason is RefusalReason.INVALID
    assert "lpm" in refused.message
