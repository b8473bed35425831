"""A language model's figures: what a step, the end of a call and a scrape add to them."""

from __future__ import annotations

from typing import Any

import pytest

import scripted_engine
from headrace_backends.llm.asked_call import AskedCall, AskedPrompt
from headrace_backends.llm.engine import EngineStats, Told
from headrace_backends.llm.metrics import _TTFT, LlmMetrics, _decades
from headrace_backends.llm.open_calls import OpenCall
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.metrics import MetricRegistry
from headrace_protocol.errors import ErrorCode, ErrorDetail, InferError, internal, invalid

S = 1_000_000_000
LABELS = {"model": "m", "version": "1", "engine": "0"}


class Server:
    """The part of ServerCalls that metrics need; keeps what was told."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.series: dict[int, str] = {}
        self.values: dict[str, float] = {}
        self.counts: dict[str, list[int]] = {}
        self.bounds: dict[str, tuple[float, ...]] = {}
        self.told = 0
        self.registry = MetricRegistry(self.define, lambda _: 0.0, self.send)
        self.metric_family = self.registry.family
        self.before_metrics = self.registry.before_telling

    def define(self, name: str, *_: Any) -> int:
        self.names[len(self.names) + 1] = name.removeprefix("headrace_llm_")
        return len(self.names)

    def send(self, messages: Any, _: Any) -> None:
        (message,) = messages
        for new in message.series:
            own = {k: v for k, v in new.labels if k not in LABELS}
            self.series[new.number] = name = ":".join([self.names[new.family], *own.values()])
            self.bounds[name] = new.buckets
        for value in message.values:
            self.told += 1
            name = self.series[value.series]
            self.values[name] = value.change + (self.values.get(name, 0) if value.base is None else value.base)
            if value.counts:
                before = self.counts.get(name, [0] * len(value.counts))
                self.counts[name] = [a + b for a, b in zip(before, value.counts, strict=True)]

    def scrape(self) -> dict[str, float]:
        self.registry.tell(1)
        return self.values


class Engine(scripted_engine.ScriptedEngine):
    stands = EngineStats()

    def stats(self) -> EngineStats:
        return self.stands


@pytest.fixture
def server() -> Server:
    server = Server()
    yield server
    server.registry.close()


@pytest.fixture
def engine() -> Engine:
    return Engine({"max_model_len": 100})


@pytest.fixture
def metrics(server: Server, engine: Engine) -> LlmMetrics:
    return LlmMetrics(server, LABELS, engine)


def call(number: int = 1, *, prompts: int = 1, **more: Any) -> OpenCall:
    params = more.pop("params", SamplingParams(max_tokens=16))
    asked = AskedCall((AskedPrompt((1, 2, 3)),) * prompts, params, told_n=params.n, **more)
    return OpenCall(number, None, asked, None, 1 * S)


def out(
    tokens: int = 1, total: int = 1, *, index: int = 0, end: FinishReason | None = None, cached: int = 0
) -> GenerationOutput:
    return GenerationOutput(
        request_id="", index=index, token_ids=(5,) * tokens, finish_reason=end,
        num_prompt_tokens=3, num_cached_tokens=cached, num_output_tokens=total,
    )  # fmt: skip


def tell(metrics: LlmMetrics, now_s: float, *news: tuple[OpenCall, Told]) -> None:
    now_ns = int(now_s * S)
    for each, told in news:
        each.take(told, now_ns)
    metrics.told(news, now_ns)


def test_a_generation_is_counted_from_its_arrival_to_its_end(metrics: LlmMetrics, server: Server) -> None:
    one = call()
    tell(metrics, 3, (one, Told(1, [out(cached=2)])))
    tell(metrics, 4, (one, Told(1, [out(total=2)])))
    tell(metrics, 6, (one, Told(1, [out(2, 4, end=FinishReason.STOP)], scheduled_ns=2 * S, first_token_ns=3 * S)))
    seen = server.scrape()
    assert seen["time_to_first_token_seconds"] == 2
    assert seen["inter_token_latency_seconds"] == 3
    assert sum(server.counts["inter_token_latency_seconds"]) == 2
    assert seen["e2e_request_latency_seconds"] == 5
    assert (seen["request_queue_time_seconds"], seen["request_inference_time_seconds"]) == (1, 4)
    assert (seen["request_prefill_time_seconds"], seen["request_decode_time_seconds"]) == (1, 3)
    assert seen["request_time_per_output_token_seconds"] == 1
    assert (seen["prompt_tokens_total"], seen["prompt_tokens_cached_total"], seen["generation_tokens_total"]) == (
        3,
        2,
        4,
    )
    assert (seen["request_prompt_tokens"], seen["request_prefill_kv_computed_tokens"]) == (3, 1)
    assert (seen["request_generation_tokens"], seen["request_max_num_generation_tokens"]) == (4, 4)
    assert (seen["request_params_max_tokens"], seen["request_params_n"]) == (16, 1)
    assert seen["request_success_total:stop"] == 1
    assert "request_num_preemptions" not in seen


def test_a_step_counts_its_tokens_and_those_of_the_prompts_it_completed(metrics: LlmMetrics, server: Server) -> None:
    one, two = call(1), call(2)
    tell(metrics, 2, (one, Told(1, [out()])))
    tell(metrics, 3, (one, Told(1, [out(2, 3)])), (two, Told(2, [out()])))
    assert server.scrape()["iteration_tokens_total"] == (1 + 3) + (2 + 1 + 3)
    assert sum(server.counts["iteration_tokens_total"]) == 2


def test_the_choices_of_a_prompt_are_generations_and_the_prompt_counts_once(
    metrics: LlmMetrics, server: Server
) -> None:
    one = call(prompts=2, params=SamplingParams(n=2))
    tell(
        metrics, 2, (one, Told(1, [out(index=index, end=FinishReason.LENGTH) for index in range(4)], num_preemptions=3))
    )
    seen = server.scrape()
    assert seen["request_success_total:length"] == 4
    assert seen["prompt_tokens_total"] == 6
    assert sum(server.counts["time_to_first_token_seconds"]) == 4
    assert sum(server.counts["e2e_request_latency_seconds"]) == 1
    assert (seen["request_params_n"], seen["request_num_preemptions"]) == (2, 3)


def test_a_prompt_that_was_only_computed_and_one_that_became_a_vector_are_counted(
    metrics: LlmMetrics, server: Server
) -> None:
    tell(metrics, 2, (one := call(), Told(1, [out(0, 0, end=FinishReason.LENGTH)])))
    assert one.finished
    assert server.scrape()["prompt_tokens_total"] == 3
    tell(metrics, 2, (call(embed=True), Told(1, vectors=__import__("numpy").zeros((1, 2)))))
    assert server.scrape()["prompt_tokens_total"] == 6
    assert server.values["request_success_total:stop"] == 1


def test_what_was_refused_left_or_failed_is_told_apart(metrics: LlmMetrics, server: Server) -> None:
    for error in (
        InferError(ErrorCode.UNAVAILABLE, "7 requests wait; the limit is 7", detail=ErrorDetail.QUEUE_FULL),
        InferError(ErrorCode.UNAVAILABLE, "99 tokens wait; the limit is 99", detail=ErrorDetail.QUEUE_FULL),
        internal("it failed"),
        invalid("not this model"),
    ):
        tell(metrics, 2, (call(), Told(1, error=error)))
    metrics.left(call(params=SamplingParams(n=3)))
    seen = server.scrape()
    assert seen["admission_rejections_total:max_num_queued_reqs"] == 1
    assert seen["admission_rejections_total:max_num_queued_tokens"] == 1
    assert seen["request_success_total:error"] == 1
    assert seen["request_success_total:abort"] == 3
    assert "request_success_total:stop" not in seen


def test_how_the_engine_stands_is_looked_up_when_somebody_asks(
    metrics: LlmMetrics, server: Server, engine: Engine
) -> None:
    totals = {"prefix_cache_queries": 10, "prefix_cache_hits": 4, "preemptions": 1, "drafts": 3, "accepted_tokens": 5}
    engine.stands = EngineStats(2, 7, 0.25, totals=totals, accepted_per_position=(3, 2))
    seen = server.scrape()
    assert (seen["num_requests_running"], seen["num_requests_waiting"], seen["kv_cache_usage_perc"]) == (2, 7, 0.25)
    assert (seen["prefix_cache_queries_total"], seen["prefix_cache_hits_total"]) == (10, 4)
    assert (seen["num_preemptions_total"], seen["spec_decode_num_accepted_tokens_total"]) == (1, 5)
    assert seen["spec_decode_num_accepted_tokens_per_pos_total:1"] == 2
    engine.stands = EngineStats(0, 0, 0.0, totals=totals | {"prefix_cache_queries": 15}, accepted_per_position=(3, 2))
    seen = server.scrape()
    assert (seen["num_requests_running"], seen["prefix_cache_queries_total"]) == (0, 15)
    told = server.told
    server.scrape()
    assert server.told == told, "nothing has changed"


def test_an_engine_that_fails_to_say_how_it_stands_keeps_no_scrape(
    metrics: LlmMetrics, server: Server, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "stats", lambda _: 1 / 0)
    server.scrape()


def test_all_is_there_from_the_start_and_the_cache_is_described(server: Server, engine: Engine) -> None:
    engine.stands = EngineStats(cache_config={"block_size": "16", "cache_dtype": "bf16"})
    LlmMetrics(server, LABELS, engine)
    assert server.scrape()["cache_config_info:16:bf16"] == 1
    assert {"request_success_total:repetition", "admission_rejections_total:max_num_queued_tokens"} <= set(
        server.bounds
    )
    assert server.bounds["time_to_first_token_seconds"] == _TTFT


def test_buckets_of_tokens_go_up_to_the_models_length() -> None:
    assert _decades(100) == (1, 2, 5, 10, 20, 50, 100)
    assert _decades(99) == (1, 2, 5, 10, 20, 50)
    assert _decades(1) == (1,)


def test_equal_latencies_of_a_step_are_counted_together(
    metrics: LlmMetrics, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [call(number) for number in range(50)]
    tell(metrics, 2, *((each, Told(each.number, [out()])) for each in calls))
    observed: list[tuple[float, int]] = []
    histogram = metrics._histograms["inter_token_latency_seconds"]
    monkeypatch.setattr(type(histogram), "observe", lambda _self, value, times=1: observed.append((value, times)))
    tell(metrics, 3, *((each, Told(each.number, [out(total=2)])) for each in calls))
    assert (1.0, 50) in observed
    assert len(observed) == 2


def test_the_adapters_in_use_are_named_and_the_newest_have_the_latest_time(server: Server) -> None:
    engine = Engine({"max_model_len": 100, "adapters": [{"name": "french"}, {"name": "german"}]})
    calls: list[OpenCall] = []
    now = 1.0
    LlmMetrics(server, LABELS, engine, lambda: calls, lambda: now)
    calls += [call(1, adapter="german"), call(2, adapter="french"), call(3)]
    calls[0].first_token_ns = 5
    now = 2.0
    seen = server.scrape()
    assert seen["lora_requests_info:2:german:french"] == 2
    assert seen["lora_requests_info:2::"] == 1
    calls.clear()
    now = 3.0
    assert server.scrape()["lora_requests_info:2::"] == 3
