"""Calls as vLLM takes them, and what it tells as the backend takes it; vLLM's objects by their fields."""

from types import SimpleNamespace

import pytest

from headrace_backends.llm.adapters.vllm_outputs import Telling
from headrace_backends.llm.adapters.vllm_params import (
    repetition_arguments,
    sampling_arguments,
    structured_arguments,
)
from headrace_backends.llm.adapters.vllm_stats import StatsSum
from headrace_backends.llm.engine import EngineCall
from headrace_backends.llm.logprobs import TokenLogprob, TokenLogprobs
from headrace_backends.llm.request import FinishReason
from headrace_backends.llm.sampling_params import RepetitionDetection, SamplingParams
from headrace_protocol.errors import InferError
from headrace_protocol.generation import StructuredOutput


def logprob(value: float, rank: int) -> SimpleNamespace:
    return SimpleNamespace(logprob=value, rank=rank)


def choice(index=0, text="", tokens=(), finish=None, stop=None, logprobs=None, total=None) -> SimpleNamespace:
    return SimpleNamespace(
        index=index, text=text, token_ids=list(tokens), finish_reason=finish, stop_reason=stop, logprobs=logprobs, cumulative_logprob=total
    )  # fmt: skip


def output(*choices, prompt_logprobs=None, cached=0, metrics=None) -> SimpleNamespace:
    return SimpleNamespace(
        outputs=choices, prompt_logprobs=prompt_logprobs, num_cached_tokens=cached, metrics=metrics
    )  # fmt: skip


def telling(*prompts, **params) -> Telling:
    return Telling(EngineCall(7, prompts or ([1, 2, 3],), SamplingParams(**params), 0))


def test_most_parameters_keep_their_names():
    arguments = sampling_arguments(SamplingParams(temperature=0.5, stop=("x",), logit_bias={3: 1.5}, bad_words=("no",)))
    assert arguments["temperature"] == 0.5
    assert (arguments["stop"], arguments["bad_words"], arguments["logit_bias"]) == (["x"], ["no"], {3: 1.5})
    assert not {"truncate_prompt_tokens", "repetition_detection", "skip_reading_prefix_cache"} & set(arguments)


def test_no_tokens_are_one_that_is_not_told():
    arguments = sampling_arguments(SamplingParams(max_tokens=0, stop=("x",)))
    assert (arguments["max_tokens"], arguments["stop"]) == (1, [])
    told = telling(max_tokens=0).told(0, output(choice(text="a", tokens=[5], finish="stop", stop=5)))
    (last,) = told.outputs
    assert (last.text, last.token_ids, last.num_output_tokens) == ("", (), 0)
    assert (last.finish_reason, last.stop_reason) == (FinishReason.LENGTH, None)


def test_patterns_that_end_a_text_are_passed_on():
    params = SamplingParams(repetition_detection=RepetitionDetection(max_pattern_size=4, min_count=3))
    assert repetition_arguments(params) == {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}
    assert repetition_arguments(SamplingParams()) is None


@pytest.mark.parametrize(
    ("kind", "spec", "arguments"),
    [
        ("json_object", "", {"json_object": True}),
        ("json_schema", '{"type": "object"}', {"json": '{"type": "object"}'}),
        ("regex", "a+", {"regex": "a+"}),
        ("choice", '["a", "b"]', {"choice": ["a", "b"]}),
        ("grammar", "root ::= x", {"grammar": "root ::= x"}),
        ("structural_tag", "{}", {"structural_tag": "{}"}),
    ],
)
def test_what_a_text_has_to_be_is_named_as_vllm_does(kind, spec, arguments):
    assert structured_arguments(StructuredOutput(kind, spec)) == arguments


def test_choices_that_are_no_json_are_refused():
    with pytest.raises(InferError, match="choices"):
        structured_arguments(StructuredOutput("choice", "["))


def test_choices_are_numbered_through_all_prompts_and_counted():
    told = telling([1], [2, 3], n=2)
    first = told.told(1, output(choice(1, "ab", [4, 5]), cached=1))
    (entry,) = first.outputs
    assert (entry.index, entry.text, entry.num_prompt_tokens, entry.num_cached_tokens) == (3, "ab", 2, 1)
    second = told.told(1, output(choice(1, "c", [6], "length")))
    assert second.outputs[0].num_output_tokens == 3
    assert not told.done


def test_times_come_with_the_last_choice_of_all():
    told = telling([1], [2])
    metrics = SimpleNamespace(scheduled_ts=1.5, first_token_ts=2.0, num_preemptions=1)
    later = SimpleNamespace(scheduled_ts=1.75, first_token_ts=2.5, num_preemptions=0)
    assert told.told(0, output(choice(tokens=[1], finish="stop"), metrics=metrics)).scheduled_ns is None
    last = told.told(1, output(choice(tokens=[1], finish="length"), metrics=later))
    assert (last.scheduled_ns, last.first_token_ns, last.num_preemptions) == (1_500_000_000, 2_000_000_000, 1)
    assert told.done


def test_log_probabilities_are_the_chosen_ones_and_the_likeliest():
    entries = [{9: logprob(-3.0, 4), 1: logprob(-0.5, 1), 2: logprob(-1.0, 2)}]
    told = telling(logprobs=2).told(0, output(choice(tokens=[9], logprobs=entries, total=-3.0)))
    assert told.outputs[0].logprobs == (
        TokenLogprobs(TokenLogprob(9, -3.0, 4), (TokenLogprob(1, -0.5, 1), TokenLogprob(2, -1.0, 2))),
    )
    assert told.outputs[0].cumulative_logprob == -3.0


def test_a_chosen_token_is_among_the_likeliest_where_it_is_one_of_them():
    entries = [{1: logprob(-0.5, 1), 2: logprob(-1.0, 2)}]
    told = telling(logprobs=2).told(0, output(choice(tokens=[1], logprobs=entries)))
    assert [each.token_id for each in told.outputs[0].logprobs[0].top] == [1, 2]
    none = telling(logprobs=0).told(0, output(choice(tokens=[1], logprobs=[{1: logprob(-0.5, 1)}])))
    assert none.outputs[0].logprobs[0].top == ()


def test_a_prompts_log_probabilities_are_told_once():
    entries = [None, {2: logprob(-1.0, 3), 5: logprob(-0.1, 1)}, {3: logprob(-2.0, 1)}]
    told = telling([1, 2, 3], n=2, prompt_logprobs=1)
    first = told.told(0, output(choice(0, tokens=[1]), prompt_logprobs=entries))
    second = told.told(0, output(choice(1, tokens=[1]), prompt_logprobs=entries))
    assert first.outputs[0].prompt_logprobs == (
        None,
        TokenLogprobs(TokenLogprob(2, -1.0, 3), (TokenLogprob(5, -0.1, 1),)),
        TokenLogprobs(TokenLogprob(3, -2.0, 1), (TokenLogprob(3, -2.0, 1),)),
    )
    assert second.outputs[0].prompt_logprobs is None


def test_totals_are_summed_over_steps():
    total = StatsSum({"block_size": "32"})
    prefixes = SimpleNamespace(queries=10, hits=4)
    drafts = SimpleNamespace(
        num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3, num_accepted_tokens_per_pos=[2, 1]
    )
    scheduler = SimpleNamespace(
        num_running_reqs=3, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.25, prefix_cache_stats=prefixes, spec_decoding_stats=drafts
    )  # fmt: skip
    step = SimpleNamespace(num_prompt_tokens=7, num_generation_tokens=3, num_preempted_reqs=1)
    total.record(scheduler, step)
    total.record(scheduler, None)
    total.record(None, step)
    stats = total.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (3, 3, 0.25)
    assert stats.totals == {
        "prompt_tokens": 14, "generation_tokens": 6, "preemptions": 2, "steps": 2, "step_tokens": 20, "prefix_cache_queries": 20,
        "prefix_cache_hits": 8, "drafts": 4, "draft_tokens": 12, "accepted_tokens": 6,
    }  # fmt: skip
    assert stats.accepted_per_position == (4, 2)
    assert stats.cache_config == {"block_size": "32"}
