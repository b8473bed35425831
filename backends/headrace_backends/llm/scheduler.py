"""Who computes which tokens in the next step, and what comes of the step. Pure; now is an argument.

There are no phases: a request has computed tokens and known tokens, and each step brings the first nearer to the second
within a budget of tokens, running requests first. What does not fit is preempted and computed again later (the scheduler
of vLLM's V1; chunked prefill after Sarathi-Serve). Knows no tensors, no tokenizer and no client.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from headrace_backends.llm.admission import Refusal, RefusalReason, SchedulerConfig, refusal
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.ending import Ending, ending_after
from headrace_backends.llm.grammar import GrammarError, GrammarState, ReasoningMarks
from headrace_backends.llm.logprobs import TokenLogprobs
from headrace_backends.llm.request import FinishReason, GenerationRequest, Status
from headrace_backends.llm.scheduler_stats import SchedulerStats
from headrace_backends.llm.step import ScheduledRequest, SchedulerOutput, StepResult, contradiction
from headrace_backends.llm.waiting import Policy, WaitingQueue, order_of

_COMPARED: Final = 32
"""Waiting requests that are compared for the longest match."""
_MOST_PASSED_OVER: Final = 16


class Progress(NamedTuple):
    """What a step did to one request, which may have ended by it."""

    request: GenerationRequest
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Scheduler:
    """All requests of one model, and its blocks. One step is under way at most: `schedule`, then `update` or `fail`.

    A step has a token at least of every running request, unless it tries one alone of which a step failed; the first in
    order is never preempted for others. So each request ends.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        """Raise ValueError for limits with which a request could never end."""
        if problems := config.problems(blocks.num_usable, blocks.block_size):
            raise ValueError("; ".join(problems))
        self.config = config
        self.blocks = blocks
        self.stats = SchedulerStats()
        self._key = order_of(config.policy)
        self._waiting = WaitingQueue(config.policy)
        self._running: list[GenerationRequest] = []
        self._requests: dict[str, GenerationRequest] = {}
        self._arrivals = 0
        self._step: SchedulerOutput | None = None
        self._preempted_now = False
        self._preempted_ids: list[str] = []
        self._finished_ids: list[str] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return self._waiting.num_tokens

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> Sequence[GenerationRequest]:
        """Borrowed: until the next call."""
        return self._running

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> GenerationRequest | None:
        return self._requests.get(request_id)

    def add(self, *requests: GenerationRequest) -> Refusal | None:
        """Take requests, all or none; return why not."""
        seen = set(self._requests)
        for request in requests:
            if request.id in seen:
                return Refusal(RefusalReason.INVALID, f"a request with the id {request.id!r} is under way")
            seen.add(request.id)
        refused = refusal(
            requests, self.config, num_waiting=len(self._waiting), num_waiting_tokens=self._waiting.num_tokens
        )
        if refused is not None:
            return refused
        for request in requests:
            request.order = self._arrivals
            self._arrivals += request.places
        self.add_in_place(*requests)
        return None

    def add_in_place(self, *requests: GenerationRequest) -> None:
        """Take requests that go on with one that was taken: they come with an `order`, and no limit of the queue holds."""
        for request in requests:
            room = self.config.max_model_len - request.num_prompt_tokens
            wanted = request.params.max_tokens
            request.max_tokens = room if wanted is None else min(wanted, room)
            self._requests[request.id] = request
            if request.structured is not None:
                request.status = Status.WAITING_FOR_GRAMMAR
            self._waiting.push(request)

    def settle(self, marks: ReasoningMarks | None, now_ns: int) -> list[GenerationRequest]:
        """Let requests run whose grammar is compiled; return those that end because theirs cannot be.

        `marks` are those of the model's reasoning, if it has any.
        """
        failed = []
        for request in self._waiting.held:
            compilation, structured = request.compilation, request.structured
            if compilation is None or structured is None or not compilation.done():
                continue
            if compilation.exception() is not None:
                failed.append(request)
                self._finish(request, FinishReason.ERROR, now_ns)
                continue
            params = request.params
            ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else request.eos_token_ids)
            request.grammar = GrammarState(
                compilation.result().matcher(),
                ends,
                marks if structured.after_reasoning else None,
                request.prompt_token_ids,
            )
            self._waiting.release(request)
        return failed

    def abort(
        self, request_id: str, now_ns: int, reason: FinishReason = FinishReason.ABORT
    ) -> GenerationRequest | None:
        """End a request wherever it is, also while a step computes it; return it, or None where there is none."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason, now_ns)
        return request

    def set_drafts(self, request: GenerationRequest, token_ids: Sequence[int]) -> None:
        """Let the next step check guesses of the request's next tokens, as many of them as can matter."""
        most = min(
            self.config.max_model_len - request.num_tokens - 1, request.max_tokens - request.num_output_tokens - 1
        )
        caught_up = request.num_computed_tokens == request.num_tokens - 1
        guesses = list(token_ids[: max(0, most)]) if request.status is Status.RUNNING and caught_up else []
        if guesses and request.grammar is not None:
            guesses = guesses[: request.grammar.validate(guesses)]
        request.draft_token_ids = guesses

    def schedule(self, now_ns: int) -> SchedulerOutput:
        """Choose the next step's tokens and give them their blocks. Empty: nothing waits or runs, and no step is under way."""
        assert self._step is None, "a step is under way"
        step = self._suspect_alone(now_ns)
        if not step:
            counts = self._continue_running()
            step = [self._commit(request, count) for request, count in counts.items()]
            if not self._preempted_now:
                self._admit(step, now_ns)
        self._preempted_now = False
        if not step:
            return SchedulerOutput()
        self._step = SchedulerOutput(
            tuple(step),
            sum(len(entry.token_ids) for entry in step),
            tuple(self._preempted_ids),
            tuple(self._finished_ids),
        )
        self._preempted_ids.clear()
        self._finished_ids.clear()
        return self._step

    def update(self, step: SchedulerOutput, results: Sequence[StepResult], now_ns: int) -> list[Progress]:
        """Take what the runner found; return what became of the step's requests, less those that ended meanwhile."""
        if len(results) != len(step.scheduled):
            message = f"the model gave {len(results)} results for {len(step.scheduled)} requests"
            return self.fail(step, message, now_ns)
        self._end_step(step)
        progress = []
        for entry, result in zip(step.scheduled, results, strict=True):
            if entry.request.finished:
                continue
            problem = result.error or contradiction(entry, result)
            if problem is None:
                try:
                    progress.append(self._advance(entry, result, now_ns))
                    continue
                except GrammarError as error:
                    problem = str(error)
                except Exception as error:  # a tokenizer that fails on one request's text
                    problem = f"{type(error).__name__}: {error}"
            self._fail_one(entry, problem, now_ns)
            progress.append(Progress(entry.request))
        return progress

    def fail(self, step: SchedulerOutput, message: str, now_ns: int) -> list[Progress]:
        """Take that the runner could not compute the step; return the requests that ended by it.

        A request that was alone in its step ends. One of several is computed again alone, so that the one at fault is
        found and the others lose nothing but time.
        """
        self._end_step(step)
        entries = [entry for entry in step.scheduled if not entry.request.finished]
        for entry in step.scheduled:
            self.blocks.forget(entry.block_table[entry.start // self.blocks.block_size :])
        if len(step.scheduled) == 1:
            for entry in entries:
                self._fail_one(entry, message, now_ns)
            return [Progress(entry.request) for entry in entries]
        for entry in entries:
            self._preempt(entry.request)
            entry.request.suspect = True
        return []

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        waiting = [*self._waiting, *self._waiting.held]
        assert sorted(map(id, [*waiting, *self._running])) == sorted(map(id, self._requests.values()))
        assert len(self._running) <= self.config.max_num_seqs
        assert list(map(self._key, self._waiting)) == sorted(map(self._key, self._waiting))
        assert self._waiting.num_tokens == sum(request.num_tokens for request in waiting)
        for request in waiting:
            assert request.status not in {Status.RUNNING, Status.FINISHED}, (
                f"{request.id} waits and is {request.status}"
            )
            assert request.grammar is not None or request.structured is None or request in self._waiting.held
            assert (request.num_computed_tokens, request.block_table, request.draft_token_ids) == (0, [], [])
        for request in self._running:
            assert request.status is Status.RUNNING, f"{request.id} runs and is {request.status}"
            assert len(request.block_table) >= self.blocks.blocks_of(request.num_computed_tokens)
            if self._step is None:
                assert request.num_computed_tokens < request.num_tokens or request.max_tokens == 0
        for request in self._requests.values():
            assert request.token_ids == [*request.prompt_token_ids, *request.output_token_ids]
            assert request.num_tokens_with_drafts <= self.config.max_model_len
            assert request.num_output_tokens <= request.max_tokens
        self.blocks.check_integrity(self._requests.values())

    def _continue_running(self) -> dict[GenerationRequest, int]:
        """Return how many tokens of each running request come next; give them blocks, of the last in order if need be."""
        counts: dict[GenerationRequest, int] = {}
        budget = self.config.max_num_batched_tokens
        while len(counts) < len(self._running):
            request = self._running[len(counts)]
            later = len(self._running) - len(counts) - 1
            missing = request.num_tokens_with_drafts - request.num_computed_tokens
            count = self._limited(missing, budget - later, alone=len(self._running) == 1)
            if request.draft_token_ids and not self._has_room(request, count):
                count = min(count, request.num_tokens - request.num_computed_tokens)
            while request.status is Status.RUNNING and not self._has_room(request, count):
                budget += counts.pop(self._preempt_last(), 0)
            if request.status is not Status.RUNNING:
                continue
            self.blocks.append(request, request.num_computed_tokens + count)
            counts[request] = count
            budget -= count
        return counts

    def _preempt_last(self) -> GenerationRequest:
        victim = max(self._running, key=self._key)
        self._preempt(victim)
        self._preempted_now = True
        return victim

    def _admit(self, step: list[ScheduledRequest], now_ns: int) -> None:
        budget = self.config.max_num_batched_tokens - sum(len(entry.token_ids) for entry in step)
        while budget and (request := self._next()) is not None and not request.suspect:
            entry = self._try_admit(request, budget, now_ns)
            if entry is None:
                return
            step.append(entry)
            budget -= len(entry.token_ids)

    def _next(self) -> GenerationRequest | None:
        """Return who is to be admitted next: the first in order, or by lpm who matches most of the cache, within limits.

        Only so many are compared, and only so often is the first passed over, so that it is admitted at last.
        """
        first = self._waiting.first()
        if first is None or self.config.policy is not Policy.LPM or len(self._running) >= self.config.max_num_seqs:
            return first
        if first.status is Status.PREEMPTED or first.passed_over >= _MOST_PASSED_OVER:
            return first
        return max(islice(self._waiting, _COMPARED), key=lambda request: len(self._lookup(request)))

    def _suspect_alone(self, now_ns: int) -> list[ScheduledRequest]:
        """Give a step to the first that waits, if a step with it failed. Empty: it is none, or there is no room yet."""
        request = self._next()
        if request is None or not request.suspect:
            return []
        entry = self._try_admit(request, self.config.max_num_batched_tokens, now_ns)
        return [] if entry is None else [entry]

    def _try_admit(self, request: GenerationRequest, budget: int, now_ns: int) -> ScheduledRequest | None:
        if len(self._running) >= self.config.max_num_seqs or self._too_many_adapters(request):
            return None
        cached = self._lookup(request)
        hit = len(cached) * self.blocks.block_size
        missing = request.num_tokens - hit
        count = self._limited(missing, budget, alone=not self._running)
        if count < missing and not self.config.chunked_prefill:
            return None
        reserved = request.num_tokens if self.config.reserve_full_prompt else hit + count
        spare = int(self.config.watermark * self.blocks.num_usable) if self._running else 0
        if not self.blocks.can_allocate(cached, reserved, spare=spare):
            return None
        if (first := self._waiting.first()) is not None and first is not request:
            first.passed_over += 1
        self._waiting.remove(request)
        self.blocks.allocate(request, cached, hit + count)
        request.num_computed_tokens = hit
        if request.scheduled_ns is None:
            request.scheduled_ns = now_ns
            request.num_cached_tokens = hit
            self.stats.prompt_tokens += request.num_prompt_tokens
            self.stats.prefix_cache_queries += request.num_tokens
            self.stats.prefix_cache_hits += hit
        request.status = Status.RUNNING
        self._running.append(request)
        return self._commit(request, count)

    def _too_many_adapters(self, request: GenerationRequest) -> bool:
        most = self.config.max_loras
        if most is None or request.lora is None:
            return False
        there = {running.lora for running in self._running} - {None, request.lora}
        return len(there) >= most

    def _lookup(self, request: GenerationRequest) -> list[int]:
        params = request.params
        if params.skip_reading_prefix_cache or params.prompt_logprobs is not None or request.pooling == "mean":
            return []
        return self.blocks.lookup(request)

    def _limited(self, missing: int, budget: int, *, alone: bool) -> int:
        threshold = self.config.long_prefill_token_threshold
        count = min(missing, budget)
        return min(count, threshold) if threshold and not alone and self.config.chunked_prefill else count

    def _has_room(self, request: GenerationRequest, count: int) -> bool:
        return self.blocks.can_append(request, request.num_computed_tokens + count)

    def _commit(self, request: GenerationRequest, count: int) -> ScheduledRequest:
        """Count the tokens as computed, which the step will do, and let others find the blocks that they fill."""
        start = request.num_computed_tokens
        end = start + count
        drafts = request.draft_token_ids[: max(0, end - request.num_tokens)]
        request.draft_token_ids = drafts
        request.num_computed_tokens = end
        self.blocks.register(request, start)
        reached = end == request.num_tokens_with_drafts and request.max_tokens > 0
        return ScheduledRequest(
            request=request,
            start=start,
            token_ids=(*request.token_ids[start:end], *drafts),
            num_drafts=len(drafts),
            num_sampled_rows=1 + len(drafts) if reached else 0,
            block_table=tuple(request.block_table),
        )

    def _advance(self, entry: ScheduledRequest, result: StepResult, now_ns: int) -> Progress:
        request = entry.request
        request.suspect = False
        request.draft_token_ids = []
        if entry.num_drafts:
            accepted = len(result.token_ids) - 1
            request.num_computed_tokens -= entry.num_drafts - accepted
            self.stats.count_drafts(entry.num_drafts, accepted)
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs.extend(result.prompt_logprobs[len(request.prompt_logprobs) - entry.start - 1 :])
        if result.pooled is not None:
            request.pooled = result.pooled if request.pooled is None else request.pooled + result.pooled
        before = request.num_output_tokens
        ending = None
        for token in result.token_ids:
            request.append(token)
            ending = ending_after(request, self.config.max_model_len)
            if ending is not None:
                break
        if request.max_tokens == 0 and request.num_computed_tokens == request.num_tokens:
            ending = Ending(FinishReason.LENGTH)
        self.blocks.register(request, entry.start)
        taken = request.num_output_tokens - before
        self.stats.generation_tokens += taken
        if taken and request.first_token_ns is None:
            request.first_token_ns = now_ns
        if ending is not None:
            request.stop_reason = ending.stop_reason
            self._finish(request, ending.reason, now_ns)
        return Progress(
            request,
            tuple(result.token_ids[:taken]),
            None if result.logprobs is None else tuple(result.logprobs[:taken]),
        )

    def _preempt(self, request: GenerationRequest) -> None:
        self.blocks.free(request)
        self._running.remove(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.draft_token_ids = []
        request.pooled = None
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._preempted_ids.append(request.id)
        self._waiting.push(request)

    def _fail_one(self, entry: ScheduledRequest, message: str, now_ns: int) -> None:
        self.blocks.forget(entry.block_table[entry.start // self.blocks.block_size :])
        entry.request.error = message
        self._finish(entry.request, FinishReason.ERROR, now_ns)

    def _finish(self, request: GenerationRequest, reason: FinishReason, now_ns: int) -> None:
        if request.status is Status.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self.blocks.free(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.finished_ns = now_ns
        request.draft_token_ids = []
        del self._requests[request.id]
        self._finished_ids.append(request.id)

    def _end_step(self, step: SchedulerOutput) -> None:
        assert step is self._step, "not the step that is under way"
        self._step = None
