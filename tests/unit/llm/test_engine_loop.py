"""The engine's thread: what is told of calls, in which order, whatever others do meanwhile."""

import random
import threading

import numpy as np
import pytest

from engine_loops import PARAMS, PROMPT, Anything, Loop
from headrace_backends.llm.engine import Told
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason, GenerationRequest, child_seed
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.errors import ErrorCode, ErrorDetail, InferError
from headrace_protocol.generation import StructuredOutput
from llm_fakes import VOCAB, expected, vector_of


@pytest.fixture
def loop():
    made: list[Loop] = []

    def make(**limits) -> Loop:
        made.append(Loop(**limits))
        return made[-1]

    yield make
    for each in made:
        each.runner.free.set()
        each.loop.close()
        each.nothing_is_left()


def joined(news: list[Told], index: int) -> GenerationOutput:
    outputs = [output for told in news for output in told.outputs if output.index == index]
    whole = outputs[0]
    for output in outputs[1:]:
        whole = whole.followed_by(output)
    return whole


def test_each_choice_is_told_to_its_end_as_if_it_were_alone(loop):
    one = loop()
    other = (3, 0, 1)
    one.submit(7, PROMPT, other, params=SamplingParams(n=2, max_tokens=5, ignore_eos=True), seed=3)
    news = one.heard.until(7)
    for index, prompt in enumerate([PROMPT, PROMPT, other, other]):
        seed = child_seed(child_seed(3, index - index % 2), index % 2)
        alone = GenerationRequest("x", prompt, SamplingParams(max_tokens=5, ignore_eos=True), seed)
        tokens, text, reason, _ = expected(alone, 40)
        told = joined(news, index)
        assert (list(told.token_ids), told.text, told.finish_reason.value) == (tokens, text, reason)
    assert not any(output.finished for told in news[:-1] for output in told.outputs if output.num_output_tokens < 5)


def test_a_calls_last_news_has_its_times(loop):
    one = loop()
    one.submit(1)
    news = one.heard.until(1)
    assert [told.scheduled_ns for told in news[:-1]] == [None] * (len(news) - 1)
    assert 0 < news[-1].scheduled_ns <= news[-1].first_token_ns


def test_a_step_is_told_in_one_piece(loop):
    one = loop()
    one.runner.hold()
    one.submit(1)
    assert one.runner.inside.wait(30)
    for number in (2, 3):
        one.submit(number)
    one.runner.free.set()
    for number in (1, 2, 3):
        one.heard.until(number)
    assert one.loop.stats().totals["steps"] <= 8
    assert len(one.heard.by_call[2]) == len(one.heard.by_call[3])


@pytest.mark.parametrize(
    ("prompts", "limits", "code", "detail"),
    [
        ([PROMPT, [0] * 40], {}, ErrorCode.INVALID_ARG, ErrorDetail.CONTEXT_LENGTH),
        ([PROMPT, [VOCAB]], {}, ErrorCode.INVALID_ARG, None),
        ([PROMPT, []], {}, ErrorCode.INVALID_ARG, None),
        ([PROMPT, PROMPT], {"max_num_queued_reqs": 1}, ErrorCode.INVALID_ARG, None),
    ],
)
def test_a_call_of_which_one_prompt_may_not_enter_is_refused_whole(loop, prompts, limits, code, detail):
    one = loop(**limits)
    one.submit(1, *prompts)
    (told,) = one.heard.until(1)
    assert (told.error.code, told.error.detail) == (code, detail)
    assert one.loop.stats().totals["steps"] == 0


def test_a_full_queue_is_told_as_one(loop):
    one = loop(max_num_seqs=1, max_num_queued_reqs=1)
    one.runner.hold()
    one.submit(1)
    assert one.runner.inside.wait(30)
    for number in (2, 3):
        one.submit(number)
    one.runner.free.set()
    told = one.heard.until(3)[-1]
    assert (told.error.code, told.error.detail) == (ErrorCode.UNAVAILABLE, ErrorDetail.QUEUE_FULL)
    assert joined(one.heard.until(2), 0).finish_reason is FinishReason.LENGTH


def test_calls_beyond_what_one_step_can_bring_are_refused(loop, monkeypatch):
    monkeypatch.setattr("headrace_backends.llm.engine_loop._MOST_UNTAKEN", 2)
    one = loop()
    one.runner.hold()
    one.submit(1)
    assert one.runner.inside.wait(30)
    for number in (2, 3, 4):
        one.submit(number)
    one.runner.free.set()
    assert one.heard.until(4)[0].error.detail is ErrorDetail.QUEUE_FULL
    one.heard.until(3)


def test_a_number_that_is_under_way_is_refused(loop):
    one = loop()
    one.runner.hold()
    one.submit(1, params=SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert one.runner.inside.wait(30)
    one.submit(1)
    one.runner.free.set()
    while not any(told.error for told in one.heard.by_call.get(1, ())):
        one.heard.listen()
    assert joined([told for told in one.heard.until(1) if not told.error], 0).num_output_tokens > 0


def test_an_abort_ends_a_call_while_a_step_computes_it(loop):
    one = loop()
    one.runner.hold()
    one.submit(1, PROMPT, PROMPT)
    assert one.runner.inside.wait(30)
    one.loop.abort(1)
    one.submit(2)
    one.runner.free.set()
    one.heard.until(2)
    assert len(one.heard.by_call.get(1, ())) <= 1, "only the step under way may still be told"


def test_an_abort_before_the_call_was_taken_leaves_no_trace(loop):
    one = loop()
    one.runner.hold()
    one.submit(1)
    assert one.runner.inside.wait(30)
    one.submit(2)
    one.loop.abort(2)
    one.loop.abort(99)
    one.runner.free.set()
    one.heard.until(1)
    assert 2 not in one.heard.by_call


JSON = StructuredOutput("json_object")


def test_a_call_runs_when_its_grammar_is_compiled_and_holds_nobody_up(loop):
    one = loop()
    one.submit(1, PROMPT, structured=JSON)
    future = one.grammars.futures.get(timeout=30)
    one.submit(2)
    one.heard.until(2)
    assert 1 not in one.heard.by_call
    future.set_result(Anything())
    assert joined(one.heard.until(1), 0).finish_reason is FinishReason.LENGTH


def test_a_call_whose_grammar_is_wrong_is_refused_whole(loop):
    one = loop()
    one.submit(1, PROMPT, PROMPT, structured=JSON)
    wrong = InferError(ErrorCode.INVALID_ARG, "json_schema: no")
    for _ in range(2):
        one.grammars.futures.get(timeout=30).set_exception(wrong)
    (told,) = one.heard.until(1)
    assert told.error is wrong
    one.submit(2)
    one.heard.until(2)


def test_an_abort_does_not_wait_for_the_grammar(loop):
    one = loop()
    one.submit(1, structured=JSON)
    future = one.grammars.futures.get(timeout=30)
    one.loop.abort(1)
    one.submit(2)
    one.heard.until(2)
    assert one.loop.stats().waiting == 0
    future.set_result(Anything())
    one.submit(3)
    one.heard.until(3)
    assert 1 not in one.heard.by_call


def test_vectors_come_together_and_end_the_call(loop):
    one = loop()
    prompts = [PROMPT, (3,), tuple(range(VOCAB)) * 2]
    one.submit(1, *prompts, embed=True)
    (told,) = one.heard.until(1)
    wanted = [vector_of(GenerationRequest("x", prompt, PARAMS, 0, pooling="mean")) for prompt in prompts]
    np.testing.assert_allclose(told.vectors, wanted)
    assert told.scheduled_ns is not None


def test_one_prompt_that_cannot_be_embedded_fails_its_call_alone(loop):
    one = loop()
    one.runner.poisoned.add("1.1")
    one.submit(1, PROMPT, (3, 1), tuple(range(VOCAB)) * 2, embed=True)
    one.submit(2)
    (told,) = one.heard.until(1)
    assert told.error.code is ErrorCode.INTERNAL
    assert "the model broke" in told.error.message
    one.heard.until(2)


def test_a_request_that_no_step_can_compute_fails_alone(loop):
    one = loop()
    one.runner.poisoned.add("2.0")
    for number in (1, 2, 3):
        one.submit(number)
    broken = joined(one.heard.until(2), 0)
    assert (broken.finish_reason, broken.error) == (FinishReason.ERROR, "RuntimeError: the model broke")
    tokens = expected(GenerationRequest("x", PROMPT, PARAMS, 0), 40)[0]
    for number in (1, 3):
        assert list(joined(one.heard.until(number), 0).token_ids) == tokens
    assert one.loop.healthy()


def test_many_requests_at_fault_are_not_taken_for_a_model_at_fault(loop):
    one = loop()
    one.runner.poisoned.update(f"{number}.0" for number in range(20))
    for number in range(20):
        one.submit(number)
    for number in range(20):
        assert joined(one.heard.until(number), 0).finish_reason is FinishReason.ERROR
    one.submit(30)
    assert joined(one.heard.until(30), 0).finish_reason is FinishReason.LENGTH


def test_a_model_that_can_compute_nothing_breaks_the_engine(loop):
    one = loop()
    one.runner.fails = lambda _: True
    for number in range(12):
        one.submit(number)
    assert one.heard.gone.wait(30)
    assert "the device is gone" in one.heard.error.message
    assert not one.loop.healthy()
    for number in range(12):
        last = one.heard.until(number)[-1]
        assert last.error is not None or last.outputs[-1].finish_reason is FinishReason.ERROR


def test_a_fault_of_our_own_breaks_the_engine_and_not_in_silence(loop):
    one = loop()
    one.runner.execute = lambda _: 3  # not even a list of results
    one.submit(1)
    assert one.heard.gone.wait(30)
    assert one.heard.until(1)[-1].error.code is ErrorCode.INTERNAL


def test_a_call_whose_words_cannot_be_made_tokens_of_fails_alone(loop):
    one = loop()
    one.submit(1, params=SamplingParams(bad_words=("z",)))
    assert "ValueError" in one.heard.until(1)[-1].error.message
    one.submit(2)
    one.heard.until(2)


def test_the_end_tells_those_that_are_left(loop):
    one = loop()
    one.runner.hold()
    one.submit(1, params=SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert one.runner.inside.wait(30)
    one.submit(2)
    closing = threading.Thread(target=one.loop.close)
    closing.start()
    one.runner.free.set()
    closing.join(30)
    assert not closing.is_alive()
    for number in (1, 2):
        assert one.heard.until(number)[-1].error.code is ErrorCode.UNAVAILABLE
    assert not one.loop.healthy()
    one.submit(3)
    assert one.heard.until(3)[-1].error.code is ErrorCode.UNAVAILABLE, "also those that come too late"


def test_how_it_stands_can_be_asked_at_any_time(loop):
    one = loop()
    one.runner.hold()
    one.submit(1)
    assert one.runner.inside.wait(30)
    one.submit(2)
    stats = one.loop.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert 0 < stats.kv_usage < 1
    one.runner.free.set()
    one.heard.until(1)
    one.heard.until(2)
    totals = one.loop.stats().totals
    assert (totals["prompt_tokens"], totals["generation_tokens"]) == (8, 12)
    assert totals["prefix_cache_queries"] == 8


@pytest.mark.parametrize("seed", range(200))
def test_no_order_of_calls_aborts_and_failures_leaves_a_block(loop, seed):
    numbers = random.Random(seed)
    one = loop(max_num_queued_reqs=numbers.choice([4, None]), max_num_seqs=numbers.choice([1, 3, 6]))
    one.runner.fails = lambda step: len(step.scheduled) > 1 and numbers.random() < 0.2
    live = []
    for number in range(numbers.randint(1, 8)):
        prompts = [
            [numbers.randrange(VOCAB) for _ in range(numbers.randint(1, 12))] for _ in range(numbers.randint(1, 3))
        ]
        if numbers.random() < 0.1:
            one.runner.poisoned.add(f"{number}.0")
        params = SamplingParams(n=numbers.randint(1, 2), max_tokens=numbers.randint(1, 9), stop=("ab",))
        one.submit(number, *prompts, params=params, embed=numbers.random() < 0.2)
        live.append(number)
        if numbers.random() < 0.4:
            one.loop.abort(live.pop(numbers.randrange(len(live))))
    for number in live:
        one.heard.until(number)
