"""The engine without its model: requests in, steps out, results in, text out. Pure; one thread owns it.

    core.add(...); step = core.schedule(now); core.update(step, runner.execute(step), now) -> what to tell

Knows no tensors, no client and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from headrace_backends.llm.admission import Refusal, RefusalReason
from headrace_backends.llm.beam_searches import BeamSearches, problem_of
from headrace_backends.llm.detokenizer import Detokenizer, GenerationText, Tokenizer
from headrace_backends.llm.grammar import GrammarSource
from headrace_backends.llm.ngram import Drafter
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason, GenerationRequest, child_id, child_seed
from headrace_backends.llm.scheduler import Progress, Scheduler
from headrace_backends.llm.step import SchedulerOutput, StepResult
from headrace_backends.llm.stop import StopStrings
from headrace_protocol.errors import InferError, internal

_MOST_FORCED: Final = 8
"""Tokens that a grammar leaves no choice about that are computed at once."""


@dataclass(slots=True)
class _Telling:
    """What has been told of one generation."""

    cumulative_logprob: float | None
    prompt_logprobs_told: bool = False


class EngineCore:
    """A scheduler, and the text of its requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        drafter: Drafter | None = None,
        grammars: GrammarSource | None = None,
    ) -> None:
        """Without `grammars` no request may say what its text has to be."""
        self.scheduler = scheduler
        self._tokenizer = tokenizer
        self._drafter = drafter
        self._grammars = grammars
        self._tellings: dict[str, _Telling] = {}
        self._searches = BeamSearches()

    def __len__(self) -> int:
        """Return how many generations wait or run."""
        return len(self.scheduler)

    def add(self, *requests: GenerationRequest) -> Refusal | None:
        """Take requests and, for n > 1, their choices (`request.child_id` names them); all or none. Return why not."""
        for request in requests:
            if self._searches.get(request.id) is not None:
                return Refusal(RefusalReason.INVALID, f"a request with the id {request.id!r} is under way")
            if request.beam is not None and (problem := problem_of(request, request.beam)) is not None:
                return Refusal(RefusalReason.INVALID, problem)
        if self._grammars is None and any(request.structured is not None for request in requests):
            return Refusal(RefusalReason.INVALID, "this model's engine cannot keep its text to a schema or a grammar")
        choices = [choice for request in requests for choice in self._entering(request)]
        refused = self.scheduler.add(*choices)
        if refused is None:
            for choice in choices:
                if choice.structured is not None and self._grammars is not None:
                    choice.compilation = self._grammars.compile(choice.structured)
                self._begin_telling(choice)
        else:
            for request in requests:
                self._searches.end(request.id, FinishReason.ABORT)
        return refused

    def get(self, request_id: str) -> GenerationRequest | None:
        """Return a generation that was asked for and has not ended, by its id."""
        return self._searches.get(request_id) or self.scheduler.get(request_id)

    def abort(self, request_id: str, now_ns: int, reason: FinishReason = FinishReason.ABORT) -> GenerationOutput | None:
        """End one generation at any time; return its last output, or None if it is not there.

        A beam search ends with any of its texts, and tells nothing of the others.
        """
        if self._searches.get(request_id) is not None:
            return self._abort_search(request_id, now_ns, reason)
        request = self.scheduler.abort(request_id, now_ns, reason)
        return None if request is None else self._output(Progress(request))

    def settle(self, now_ns: int) -> list[tuple[str, InferError]]:
        """Let requests run whose grammar is compiled; return those that are refused because theirs cannot be, and why.

        To be called before `schedule`. Nothing was told of those requests.
        """
        if self._grammars is None:
            return []
        refused = []
        for request in self.scheduler.settle(self._grammars.reasoning, now_ns):
            error = None if request.compilation is None else request.compilation.exception()
            refused.append((request.id, error if isinstance(error, InferError) else internal(f"its grammar: {error}")))
            self._forget(request)
        return refused

    def schedule(self, now_ns: int) -> SchedulerOutput:
        """Return the next step: to be answered by `update` or `fail`. Empty while all that wait wait for their grammar."""
        return self.scheduler.schedule(now_ns)

    def update(self, step: SchedulerOutput, results: Sequence[StepResult], now_ns: int) -> list[GenerationOutput]:
        """Take a step's results; return what is new of each generation that has something new."""
        outputs = self._outputs(self.scheduler.update(step, results, now_ns), now_ns)
        self._draft()
        return outputs

    def fail(self, step: SchedulerOutput, message: str, now_ns: int) -> list[GenerationOutput]:
        """Take that a step could not be computed; return the last outputs of those that end by it."""
        return self._outputs(self.scheduler.fail(step, message, now_ns), now_ns)

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        self.scheduler.check_integrity()
        assert len(self._tellings) == len(self.scheduler)

    def _with_text(self, request: GenerationRequest) -> GenerationRequest:
        params = request.params
        if params.detokenize:
            detokenizer = Detokenizer(
                self._tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            request.text = GenerationText(
                detokenizer, StopStrings(params.stop, include=params.include_stop_str_in_output)
            )
        if params.bad_words and not request.bad_word_ids:
            request.bad_word_ids = bad_word_ids(params.bad_words, self._tokenizer)
        return request

    def _draft(self) -> None:
        """Let the next step check what the drafter guesses, and of constrained texts what the grammar makes certain."""
        running = [request for request in self.scheduler.running if request.output_token_ids]
        if self._drafter is not None:
            for request, guesses in zip(running, self._drafter.propose(running), strict=True):
                self.scheduler.set_drafts(request, guesses)
        for request in running:
            if request.grammar is not None and (forced := request.grammar.forced()):
                self.scheduler.set_drafts(request, forced[:_MOST_FORCED])

    def _forget(self, request: GenerationRequest) -> None:
        del self._tellings[request.id]
        if self._drafter is not None:
            self._drafter.forget(request.id)

    def _outputs(self, progress: list[Progress], now_ns: int) -> list[GenerationOutput]:
        outputs = [
            self._output(change)
            for change in progress
            if change.token_ids or change.request.finished or self._prompt_logprobs_due(change.request)
        ]
        if not self._searches:
            return outputs
        outputs, following, failed = self._searches.absorb(outputs)
        for request in failed:
            self._drop(request, now_ns)
        self.scheduler.add_in_place(*following)
        for request in following:
            self._begin_telling(request)
        return outputs

    def _entering(self, request: GenerationRequest) -> list[GenerationRequest]:
        """Return what is scheduled for a request: its choices, or the beginning of its beam search."""
        choices = [self._with_text(choice) for choice in choices_of(request)]
        if request.beam is None:
            return choices
        return [self._searches.begin(choices, request.beam, self.scheduler.config.max_model_len)]

    def _begin_telling(self, request: GenerationRequest) -> None:
        self._tellings[request.id] = _Telling(None if request.params.logprobs is None else 0.0)

    def _abort_search(self, request_id: str, now_ns: int, reason: FinishReason) -> GenerationOutput:
        for request in self._searches.steps_of(request_id):
            self._drop(request, now_ns)
        told = self._searches.end(request_id, reason)
        return next(output for output in told if output.request_id == request_id)

    def _drop(self, request: GenerationRequest, now_ns: int) -> None:
        """End a request of which nobody is told."""
        self.scheduler.abort(request.id, now_ns)
        self._forget(request)

    def _prompt_logprobs_due(self, request: GenerationRequest) -> bool:
        return (
            request.params.prompt_logprobs is not None
            and len(request.prompt_logprobs) == request.num_prompt_tokens
            and not self._tellings[request.id].prompt_logprobs_told
        )

    def _output(self, change: Progress) -> GenerationOutput:
        request = change.request
        telling = self._tellings[request.id]
        if telling.cumulative_logprob is not None:
            telling.cumulative_logprob += sum(entry.chosen.logprob for entry in change.logprobs or ())
        prompt_logprobs = None
        if self._prompt_logprobs_due(request):
            prompt_logprobs = tuple(request.prompt_logprobs)
            telling.prompt_logprobs_told = True
        if request.finished:
            self._forget(request)
        return GenerationOutput(
            request_id=request.id,
            index=request.index,
            text="" if request.text is None else request.text.take(final=request.finished),
            token_ids=change.token_ids,
            logprobs=change.logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            pooled=pooled_of(request),
            cumulative_logprob=telling.cumulative_logprob,
        )


def choices_of(request: GenerationRequest) -> list[GenerationRequest]:
    """Return the request's n choices: the same prompt, a seed of its own each. The first is the request itself."""
    others = [
        replace(request, id=child_id(request.id, at), seed=child_seed(request.seed, at), index=request.index + at)
        for at in range(1, request.params.n)
    ]
    return [request, *others]


def pooled_of(request: GenerationRequest) -> Any:
    """Return the vector of a request that pools and has ended well, else None."""
    if request.finish_reason is not FinishReason.LENGTH or request.pooled is None:
        return None
    return request.pooled / request.num_prompt_tokens if request.pooling == "mean" else request.pooled


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return each word as tokens, as it begins a text and as it follows a space."""
    spellings = (spelling for word in words for spelling in (word, f" {word.lstrip()}"))
    encoded = (tuple(tokenizer.encode(spelling)) for spelling in spellings)
    return tuple(dict.fromkeys(tokens for tokens in encoded if tokens))
