"""What a step holds, and who waits."""

from __future__ import annotations

import pytest

from headrace_backends.llm.admission import RefusalReason, SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.request import FinishReason, GenerationRequest, Status
from headrace_backends.llm.sampling_params import RepetitionDetection, SamplingParams
from headrace_backends.llm.scheduler import Scheduler
from headrace_backends.llm.step import SchedulerOutput, StepResult, verified
from headrace_backends.llm.waiting import Policy


def a_scheduler(num_blocks: int = 101, block_size: int = 1, *, caching: bool = False, **config: object) -> Scheduler:
    settings = {"max_model_len": 40, "max_num_seqs": 4, "max_num_batched_tokens": 16, "vocab_size": 100} | config
    return Scheduler(SchedulerConfig(**settings), BlockManager(num_blocks, block_size, prefix_caching=caching))


def a_request(name: str, length: int = 4, *, priority: int = 0, **params: object) -> GenerationRequest:
    return GenerationRequest(name, [5] * length, SamplingParams(**params), 0, frozenset({99}), priority=priority)


def counts(step: SchedulerOutput) -> dict[str, int]:
    return {entry.request.id: len(entry.token_ids) for entry in step.scheduled}


def answer(scheduler: Scheduler, step: SchedulerOutput, token: int = 1) -> None:
    results = [
        StepResult([*entry.draft_token_ids, token] if entry.num_sampled_rows else ()) for entry in step.scheduled
    ]
    scheduler.update(step, results, 0)
    scheduler.check_integrity()


def run(scheduler: Scheduler, token: int = 1) -> dict[str, int]:
    step = scheduler.schedule(0)
    answer(scheduler, step, token)
    return counts(step)


def test_prompts_are_cut_to_the_budget_and_decodes_go_first() -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request("a"), a_request("long", 30))
    assert run(scheduler) == {"a": 4, "long": 12}
    assert run(scheduler) == {"a": 1, "long": 15}
    assert run(scheduler) == {"a": 1, "long": 3}
    assert run(scheduler) == {"a": 1, "long": 1}


def test_only_the_chunk_that_reaches_the_end_is_sampled() -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request("long", 30))
    step = scheduler.schedule(0)
    assert [entry.num_sampled_rows for entry in step.scheduled] == [0]
    answer(scheduler, step)
    assert [entry.num_sampled_rows for entry in scheduler.schedule(0).scheduled] == [1]


def test_a_long_prompt_leaves_a_token_for_everybody_that_runs_after_it() -> None:
    scheduler = a_scheduler(long_prefill_token_threshold=13)
    x = a_request("x", 1)
    scheduler.add(x)
    run(scheduler)
    scheduler.add(a_request("long", 39), a_request("b", 1), a_request("c", 1))
    assert run(scheduler) == {"x": 1, "long": 13, "b": 1, "c": 1}
    scheduler.set_drafts(x, [1, 1, 1])
    assert run(scheduler) == {"x": 4, "long": 10, "b": 1, "c": 1}


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = a_scheduler(chunked_prefill=False, max_num_batched_tokens=40)
    scheduler.add(a_request("a", 30), a_request("b", 20), a_request("c", 1))
    assert run(scheduler) == {"a": 30}
    assert run(scheduler) == {"a": 1, "b": 20, "c": 1}


def test_nobody_overtakes_the_first_that_does_not_fit() -> None:
    scheduler = a_scheduler(num_blocks=41)
    scheduler.add(a_request("a", 15), a_request("b", 39, max_tokens=1), a_request("c", 1))
    assert run(scheduler) == {"a": 15}
    assert run(scheduler) == {"a": 1}
    assert scheduler.num_waiting == 2


def test_the_last_to_arrive_is_preempted_and_goes_first_among_those_that_wait() -> None:
    scheduler = a_scheduler(num_blocks=41, max_num_batched_tokens=64)
    scheduler.add(a_request("a", 19, max_tokens=9), a_request("b", 19, max_tokens=9), a_request("c", 5))
    assert run(scheduler) == {"a": 19, "b": 19}
    assert run(scheduler) == {"a": 1, "b": 1}
    step = scheduler.schedule(0)
    assert counts(step) == {"a": 1}
    assert step.preempted_ids == ("b",)
    b = scheduler.get("b")
    assert b is not None
    assert (b.status, b.num_preemptions, b.num_computed_tokens, b.block_table) == (Status.PREEMPTED, 1, 0, [])
    answer(scheduler, step)
    while scheduler.get("a"):
        assert set(run(scheduler)) <= {"a"}
    assert run(scheduler) == {"b": 21, "c": 5}


def test_the_more_urgent_run_first_and_the_least_urgent_is_preempted() -> None:
    scheduler = a_scheduler(num_blocks=41, max_num_seqs=2, policy=Policy.PRIORITY, max_num_batched_tokens=64)
    scheduler.add(a_request("late", 18, priority=5), a_request("soon", 18, priority=-1), a_request("then", 18))
    assert run(scheduler) == {"soon": 18, "then": 18}
    scheduler.abort("then", 0)
    assert run(scheduler) == {"soon": 1, "late": 18}
    preempted = 0
    while not preempted:
        step = scheduler.schedule(0)
        preempted = len(step.preempted_ids)
        answer(scheduler, step)
    assert step.preempted_ids == ("late",)


def test_a_waiting_request_keeps_a_part_of_the_blocks_free() -> None:
    scheduler = a_scheduler(num_blocks=41, watermark=0.5)
    scheduler.add(a_request("a", 4), a_request("b", 15))
    run(scheduler)
    scheduler.add(a_request("c", 4))
    assert scheduler.get("c") is not None
    assert scheduler.num_running == 2
    assert "c" not in run(scheduler)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (a_request("x", 0), RefusalReason.INVALID),
        (a_request("x", 40), RefusalReason.TOO_LONG),
        (a_request("x", 41, max_tokens=0), RefusalReason.TOO_LONG),
        (a_request("x", priority=1), RefusalReason.INVALID),
        (GenerationRequest("x", [100], SamplingParams(), 0), RefusalReason.INVALID),
        (GenerationRequest("x", [-1], SamplingParams(), 0), RefusalReason.INVALID),
        (a_request("there"), RefusalReason.INVALID),
    ],
)
def test_what_can_never_run_is_refused_and_changes_nothing(request_: GenerationRequest, reason: RefusalReason) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request("there"))
    refused = scheduler.add(a_request("fine"), request_)
    assert refused is not None
    assert refused.reason is reason
    assert len(scheduler) == 1


def test_a_full_queue_is_said_to_be_full() -> None:
    scheduler = a_scheduler(max_num_queued_reqs=2, max_num_queued_tokens=30)
    assert scheduler.add(a_request("a"), a_request("b")) is None
    full = scheduler.add(a_request("c"))
    assert full is not None
    assert full == (RefusalReason.BUSY, "2 requests wait; the limit is 2")
    run(scheduler)
    assert scheduler.add(a_request("c", 25)) is None
    full = scheduler.add(a_request("d", 6))
    assert full == (RefusalReason.BUSY, "25 tokens wait; the limit is 30")


def test_what_could_not_even_wait_in_an_empty_queue_is_not_told_to_try_again() -> None:
    scheduler = a_scheduler(max_num_queued_reqs=2, max_num_queued_tokens=30)
    for requests in ([a_request("a"), a_request("b"), a_request("c")], [a_request("a", 31)]):
        refused = scheduler.add(*requests)
        assert refused is not None
        assert refused.reason is RefusalReason.INVALID


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"max_model_len": 101}, "max_model_len: 101 tokens do not fit in the KV cache's 100"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 3}, "less than max_num_seqs"),
        ({"chunked_prefill": False}, "without chunked prefill"),
        ({"watermark": 1.0}, "watermark"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
    ],
)
def test_limits_with_which_a_request_could_never_end_are_refused(config: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        a_scheduler(**config)


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        ({}, [1, 99], FinishReason.STOP, None),
        ({"ignore_eos": True, "max_tokens": 2}, [99, 99], FinishReason.LENGTH, None),
        ({"stop_token_ids": (7,)}, [1, 7], FinishReason.STOP, 7),
        ({"min_tokens": 1}, [99, 99], FinishReason.STOP, None),
        ({"max_tokens": 3}, [1, 2, 3], FinishReason.LENGTH, None),
        ({"max_tokens": None}, [1] * 36, FinishReason.LENGTH, None),
        (
            {"repetition_detection": RepetitionDetection(max_pattern_size=2, min_count=3)},
            [1, 2, 1, 2, 1, 2],
            FinishReason.REPETITION,
            None,
        ),
    ],
)
def test_why_a_generation_ends(
    params: dict[str, object], tokens: list[int], reason: FinishReason, stop_reason: int | None
) -> None:
    scheduler = a_scheduler()
    request = a_request("a", **params)
    scheduler.add(request)
    for token in tokens:
        assert not request.finished
        run(scheduler, token)
    assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
    assert request.output_token_ids == tokens
    assert scheduler.blocks.num_free == scheduler.blocks.num_usable


def test_no_tokens_asked_is_the_prompt_computed_and_nothing_sampled() -> None:
    scheduler = a_scheduler()
    request = a_request("a", 40, max_tokens=0)
    scheduler.add(request)
    run(scheduler)
    run(scheduler)
    assert not request.finished
    run(scheduler)
    assert (request.finish_reason, request.output_token_ids) == (FinishReason.LENGTH, [])


def test_tokens_after_the_end_fall_though_they_were_accepted() -> None:
    scheduler = a_scheduler()
    request = a_request("a")
    scheduler.add(request)
    run(scheduler)
    scheduler.set_drafts(request, [2, 99, 3])
    run(scheduler)
    assert request.output_token_ids == [1, 2, 99]
    assert request.finish_reason is FinishReason.STOP


def test_wrong_drafts_are_computed_over() -> None:
    scheduler = a_scheduler()
    request = a_request("a")
    scheduler.add(request)
    run(scheduler)
    scheduler.set_drafts(request, [2, 3, 4])
    step = scheduler.schedule(0)
    assert (step.scheduled[0].num_drafts, step.scheduled[0].num_sampled_rows) == (3, 4)
    scheduler.update(step, [StepResult(verified([2, 3, 4], [2, 8, 9, 9]))], 0)
    assert request.output_token_ids == [1, 2, 8]
    assert request.num_computed_tokens == request.num_tokens - 1
    assert (scheduler.stats.num_draft_tokens, scheduler.stats.num_accepted_tokens) == (3, 1)
    assert scheduler.stats.accepted_at == [1]
    (entry,) = scheduler.schedule(0).scheduled
    assert (entry.start, list(entry.token_ids)) == (6, [8])


def test_guesses_take_no_blocks_from_requests_that_run() -> None:
    scheduler = a_scheduler(num_blocks=41, max_num_batched_tokens=64)
    a, b = a_request("a", 19), a_request("b", 19)
    scheduler.add(a, b)
    run(scheduler)
    scheduler.set_drafts(a, [1, 1, 1])
    assert run(scheduler) == {"a": 1, "b": 1}


def test_guesses_go_no_further_than_the_output_can() -> None:
    scheduler = a_scheduler()
    request = a_request("a", max_tokens=3)
    scheduler.add(request)
    run(scheduler)
    scheduler.set_drafts(request, [1, 1, 1])
    assert request.draft_token_ids == [1]


def test_choices_of_one_prompt_share_its_blocks_in_the_first_step() -> None:
    scheduler = a_scheduler(caching=True, block_size=4)
    scheduler.add(a_request("a", 10), a_request("b", 10))
    assert run(scheduler) == {"a": 10, "b": 2}
    a, b = scheduler.get("a"), scheduler.get("b")
    assert a is not None
    assert b is not None
    assert a.block_table[:2] == b.block_table[:2]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 8)
    assert scheduler.stats.prefix_cache_hits == 8


def test_a_failed_step_is_tried_one_request_at_a_time() -> None:
    scheduler = a_scheduler()
    a, b = a_request("a"), a_request("b")
    scheduler.add(a, b)
    assert scheduler.fail(scheduler.schedule(0), "broke", 0) == []
    scheduler.check_integrity()
    step = scheduler.schedule(0)
    assert counts(step) == {"a": 4}
    (ended,) = scheduler.fail(step, "broke again", 0)
    assert (ended.request, a.finish_reason, a.error) == (a, FinishReason.ERROR, "broke again")
    assert run(scheduler) == {"b": 4}
    scheduler.add(a_request("c"))
    assert run(scheduler) == {"b": 1, "c": 4}
    assert not b.suspect
    assert b.output_token_ids == [1, 1]


def test_what_a_failed_step_should_have_written_is_found_by_nobody() -> None:
    scheduler = a_scheduler(caching=True)
    scheduler.add(a_request("a", 8))
    step = scheduler.schedule(0)
    scheduler.abort("a", 0)
    scheduler.fail(step, "broke", 0)
    assert scheduler.blocks.lookup(a_request("b", 8)) == []


@pytest.mark.parametrize(
    "result",
    [StepResult([]), StepResult([1, 2]), StepResult([1], error="no"), StepResult([9, 9, 9])],
    ids=["none", "many", "error", "other than drafts"],
)
def test_a_result_that_cannot_be_ends_its_own_request_alone(result: StepResult) -> None:
    scheduler = a_scheduler()
    a, b = a_request("a"), a_request("b")
    scheduler.add(a, b)
    scheduler.update(scheduler.schedule(0), [result, StepResult([1])], 0)
    scheduler.check_integrity()
    assert a.finish_reason is FinishReason.ERROR
    assert a.error
    assert b.output_token_ids == [1]


def test_the_runner_is_told_of_ends_with_the_next_step() -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request("a", max_tokens=1))
    run(scheduler)
    assert not scheduler.schedule(0)
    scheduler.add(a_request("a"))
    step = scheduler.schedule(0)
    assert step.finished_ids == ("a",)
    assert counts(step) == {"a": 4}


def test_slots_follow_the_block_table() -> None:
    scheduler = a_scheduler(block_size=4)
    scheduler.add(a_request("x", 3), a_request("a", 6))
    entry = scheduler.schedule(0).scheduled[1]
    first, second = entry.block_table
    assert entry.slots(4) == [*range(first * 4, first * 4 + 4), second * 4, second * 4 + 1]
