"""LlmMetrics: a language model's figures at /metrics, under vLLM's names behind `headrace_llm_` and with its buckets.

A step costs a few additions, however many calls it tells of: latencies that are equal are counted together. What an engine can
be asked for is looked up when somebody scrapes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from headrace_backends.calls import ServerCalls
from headrace_backends.llm.engine import Engine, EngineStats, Told
from headrace_backends.llm.open_calls import OpenCall
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason
from headrace_backends.metrics import Metric, MetricKind
from headrace_protocol.errors import ErrorCode, ErrorDetail, InferError

PREFIX: Final = "headrace_llm_"
_LOG: Final = logging.getLogger(__name__)
_TTFT: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_ITL: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_STEP: Final = tuple(float(size) for size in (1, 8, *(1 << power for power in range(4, 15))))
_CHOICES: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
_TOKENS: Final = ()
"""Stands for decades of 1, 2, 5 up to the model's length."""

_COUNTED: Final = {
    "prompt_tokens_total": "Prompt tokens that were computed or found in the prefix cache",
    "prompt_tokens_cached_total": "Prompt tokens that were found in the prefix cache",
    "generation_tokens_total": "Tokens that were generated",
}
_READ: Final = {
    "prefix_cache_queries": ("prefix_cache_queries_total", "Prompt tokens that were looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits_total", "Prompt tokens that the prefix cache had"),
    "preemptions": ("num_preemptions_total", "Requests that lost their blocks to others and were computed again"),
    "drafts": ("spec_decode_num_drafts_total", "Guesses of next tokens that were checked"),
    "draft_tokens": ("spec_decode_num_draft_tokens_total", "Tokens of these guesses"),
    "accepted_tokens": ("spec_decode_num_accepted_tokens_total", "Tokens of these guesses that were right"),
}
"""Totals of the engine: by its name for them, ours and what they count."""
_GAUGES: Final = {
    "num_requests_running": "Requests that are computed in steps now",
    "num_requests_waiting": "Requests that wait for room in the engine",
    "kv_cache_usage_perc": "Part of the KV cache that is in use, 0 to 1",
}
_HISTOGRAMS: Final = {
    "time_to_first_token_seconds": (_TTFT, "From the arrival of a request to its first token"),
    "inter_token_latency_seconds": (_ITL, "Between two tellings of one generation"),
    "request_time_per_output_token_seconds": (_ITL, "Mean time of a generation's tokens after its first"),
    "e2e_request_latency_seconds": (_LATENCY, "From the arrival of a request to its end"),
    "request_queue_time_seconds": (_LATENCY, "From the arrival of a request until it first ran"),
    "request_inference_time_seconds": (_LATENCY, "From when a request first ran to its end"),
    "request_prefill_time_seconds": (_LATENCY, "From when a request first ran to its first token"),
    "request_decode_time_seconds": (_LATENCY, "From a request's first token to its end"),
    "request_prompt_tokens": (_TOKENS, "Tokens of a prompt"),
    "request_prefill_kv_computed_tokens": (_TOKENS, "Tokens of a prompt that were not in the prefix cache"),
    "request_generation_tokens": (_TOKENS, "Tokens of a generation"),
    "request_max_num_generation_tokens": (_TOKENS, "Tokens of the longest generation of a request"),
    "request_params_max_tokens": (_TOKENS, "max_tokens of a request"),
    "request_params_n": (_CHOICES, "n of a request"),
    "request_num_preemptions": (_PREEMPTIONS, "Preemptions of a request that had some"),
    "iteration_tokens_total": (_STEP, "Tokens of a step: prompts that it completed, and those that it generated"),
}
_SECOND: Final = 1e9
_LONGEST_LABEL: Final = 1024
_MOST_ADAPTER_STATES: Final = 256
"""Combinations of adapters in use that are shown; each stays at /metrics as long as the model does."""


class LlmMetrics:
    """Implements `telling.Observer`. Used by the teller's thread, but for what a scrape looks up."""

    def __init__(
        self,
        server: ServerCalls,
        labels: Mapping[str, str],
        engine: Engine,
        calls: Callable[[], Iterable[OpenCall]] = tuple,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """`labels` are the model's own; `calls` returns those under way. The engine is open."""
        self._server: Final = server
        self._calls: Final = calls
        self._clock_s: Final = clock_s
        self._adapters: Final = len(engine.card.adapters)
        self._adapter_states: Final[dict[tuple[str, str], Metric]] = {}
        self._adapter_state: tuple[str, str] | None = None
        self._labels: Final = dict(labels)
        self._engine: Final = engine
        self._counters: Final = {name: self._new(name, text, "counter") for name, text in _COUNTED.items()}
        self._success: Final = {
            reason.value: self._new(
                "request_success_total", "Generations that ended, by why", "counter", None, finished_reason=reason.value
            )
            for reason in FinishReason
        }
        self._rejections: Final = {
            reason: self._new(
                "admission_rejections_total", "Requests refused, for too much waits", "counter", reason=reason
            )
            for reason in ("max_num_queued_reqs", "max_num_queued_tokens")
        }
        tokens = _decades(engine.card.max_model_len)
        self._histograms: Final = {
            name: self._new(name, text, "histogram", buckets or tokens) for name, (buckets, text) in _HISTOGRAMS.items()
        }
        self._gauges: Final = {name: self._new(name, text, "gauge") for name, text in _GAUGES.items()}
        self._totals: Final = {key: self._new(name, text, "counter") for key, (name, text) in _READ.items()}
        self._accepted: Final[list[Metric]] = []
        self._shown: dict[str, float] = {}
        self._added: Final[Counter[str]] = Counter()
        stats = engine.stats()
        if stats.cache_config:
            self._new("cache_config_info", "How the KV cache is set up", "gauge", None, **stats.cache_config).set(1)
        self._read()
        server.before_metrics(self._read)

    def _new(
        self, name: str, text: str, kind: MetricKind, buckets: Sequence[float] | None = None, **labels: str
    ) -> Metric:
        return self._server.metric_family(PREFIX + name, text, kind).metric({**self._labels, **labels}, buckets)

    # --- what a scrape looks up -----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Look up how the engine stands, and set what has changed."""
        try:
            stats = self._engine.stats()
        except Exception:
            _LOG.exception("the engine does not say how it stands")
            return
        self._set("num_requests_running", stats.running)
        self._set("num_requests_waiting", stats.waiting)
        self._set("kv_cache_usage_perc", stats.kv_usage)
        for key, metric in self._totals.items():
            self._add(key, metric, stats.totals.get(key, 0))
        self._read_positions(stats)
        if self._adapters:
            self._read_adapters()

    def _read_adapters(self) -> None:
        """Look up whose adapters run and wait; the newest combination is the one with the latest time as its value."""
        running: set[str] = set()
        waiting: set[str] = set()
        for call in self._calls():
            if call.asked.adapter is not None:
                (waiting if call.first_token_ns is None else running).add(call.asked.adapter)
        state = ",".join(sorted(running)), ",".join(sorted(waiting))
        if state == self._adapter_state:
            return
        metric = self._adapter_states.get(state)
        if metric is None:
            if len(self._adapter_states) >= _MOST_ADAPTER_STATES or max(map(len, state)) > _LONGEST_LABEL:
                return
            text = "Adapters in use, by name; the value is the time at which it was so"
            names = {"running_lora_adapters": state[0], "waiting_lora_adapters": state[1]}
            metric = self._new("lora_requests_info", text, "gauge", None, max_lora=str(self._adapters), **names)
            self._adapter_states[state] = metric
        self._adapter_state = state
        metric.set(self._clock_s())

    def _read_positions(self, stats: EngineStats) -> None:
        for at, total in enumerate(stats.accepted_per_position):
            if at == len(self._accepted):
                text = "Guessed tokens that were right, by their place in the guess"
                name = "spec_decode_num_accepted_tokens_per_pos_total"
                self._accepted.append(self._new(name, text, "counter", position=str(at)))
            self._add(f"accepted {at}", self._accepted[at], total)

    def _set(self, name: str, value: float) -> None:
        if self._shown.get(name) != value:
            self._shown[name] = value
            self._gauges[name].set(value)

    def _add(self, key: str, metric: Metric, total: int) -> None:
        if total > self._added[key]:
            metric.increment(total - self._added[key])
            self._added[key] = total

    # --- what is told ---------------------------------------------------------------------------------------------

    def told(self, news: Sequence[tuple[OpenCall, Told]], now_ns: int) -> None:
        """Count what a step told."""
        generated = prompted = 0
        since: Counter[int] = Counter()
        for call, told in news:
            for output in told.outputs:
                count = len(output.token_ids)
                if count:
                    generated += count
                    spoken = call.spoken.get(output.index)
                    if spoken is None:
                        call.spoken[output.index] = [now_ns, now_ns]
                        prompted += self._begun(call, output, now_ns)
                    else:
                        since[spoken[1]] += 1
                        spoken[1] = now_ns
                if output.finish_reason is not None:
                    self._finished(call, output)
            if call.finished:
                prompted += self._ended(call, told, now_ns)
        for last_ns, times in since.items():
            self._histograms["inter_token_latency_seconds"].observe((now_ns - last_ns) / _SECOND, times)
        if generated:
            self._counters["generation_tokens_total"].increment(generated)
        if prompted:
            self._counters["prompt_tokens_total"].increment(prompted)
        if generated or prompted:
            self._histograms["iteration_tokens_total"].observe(generated + prompted)

    def left(self, call: OpenCall) -> None:
        """Count the generations of a call that nobody waits for any more."""
        self._success["abort"].increment(call.left)

    def _begun(self, call: OpenCall, output: GenerationOutput, now_ns: int) -> int:
        """Count a first token; return the tokens of a prompt that was computed for it."""
        self._histograms["time_to_first_token_seconds"].observe((now_ns - call.arrival_ns) / _SECOND)
        return 0 if output.index % call.asked.params.n else self._prompted(output)

    def _prompted(self, output: GenerationOutput) -> int:
        self._counters["prompt_tokens_cached_total"].increment(output.num_cached_tokens)
        self._histograms["request_prompt_tokens"].observe(output.num_prompt_tokens)
        computed = output.num_prompt_tokens - output.num_cached_tokens
        self._histograms["request_prefill_kv_computed_tokens"].observe(computed)
        return output.num_prompt_tokens

    def _finished(self, call: OpenCall, output: GenerationOutput) -> None:
        """Count the end of one generation."""
        assert output.finish_reason is not None
        self._success[output.finish_reason.value].increment()
        tokens = output.num_output_tokens
        self._histograms["request_generation_tokens"].observe(tokens)
        call.longest = max(call.longest, tokens)
        spoken = call.spoken.get(output.index)
        if spoken is not None and tokens > 1:
            mean = (spoken[1] - spoken[0]) / (tokens - 1) / _SECOND
            self._histograms["request_time_per_output_token_seconds"].observe(mean)

    def _ended(self, call: OpenCall, told: Told, now_ns: int) -> int:
        """Count the end of a call; return the tokens of its prompts, where no token told of them."""
        if told.error is not None:
            self._failed(call, told.error)
            return 0
        params, histograms = call.asked.params, self._histograms
        scheduled = call.scheduled_ns or now_ns
        first = call.first_token_ns or now_ns
        for name, begin, end in (
            ("e2e_request_latency_seconds", call.arrival_ns, now_ns),
            ("request_queue_time_seconds", call.arrival_ns, scheduled),
            ("request_inference_time_seconds", scheduled, now_ns),
            ("request_prefill_time_seconds", scheduled, first),
            ("request_decode_time_seconds", first, now_ns),
        ):
            histograms[name].observe(max(0, end - begin) / _SECOND)
        histograms["request_params_n"].observe(call.asked.told_n)
        if call.preemptions:
            histograms["request_num_preemptions"].observe(call.preemptions)
        if call.asked.embed:
            self._success["stop"].increment()
            return sum(len(prompt.token_ids) for prompt in call.asked.prompts)
        histograms["request_max_num_generation_tokens"].observe(call.longest)
        if params.max_tokens is not None:
            histograms["request_params_max_tokens"].observe(params.max_tokens)
        if not call.spoken:
            return sum(self._prompted(output) for output in told.outputs if not output.index % params.n)
        return 0

    def _failed(self, call: OpenCall, error: InferError) -> None:
        if error.detail is ErrorDetail.QUEUE_FULL:
            by_tokens = "tokens" in error.message and "requests" not in error.message
            self._rejections["max_num_queued_tokens" if by_tokens else "max_num_queued_reqs"].increment()
        elif error.code in (ErrorCode.INTERNAL, ErrorCode.UNAVAILABLE, ErrorCode.UNKNOWN):
            self._success["error"].increment(call.left)


def _decades(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on up to `most`."""
    bounds: list[float] = []
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power > most:
                return tuple(bounds) or (1.0,)
            bounds.append(float(factor * power))
        power *= 10
