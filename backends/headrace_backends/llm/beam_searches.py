"""The beam searches of an engine: each step of one is a request of one token for each of its texts. Pure.

A text of the last step is found in the prefix cache, but for its last block, which is computed again; so beams share what they
have in common, and limits, preemption, adapters and failures are those of any request. The requests of later steps keep the
place in the order that the first one got. A search that asks is told at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_backends.llm.beam import MAX_WIDTH, Beam, BeamRules, BeamSearch
from headrace_backends.llm.logprobs import TokenLogprob, TokenLogprobs
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason, GenerationRequest, Status
from headrace_backends.llm.sampling_params import SamplingParams

_NOT_SEARCHED = (
    "stop", "bad_words", "logit_bias", "allowed_token_ids", "repetition_detection", "prompt_logprobs",
    "thinking_token_budget", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_PLAIN = SamplingParams()


@dataclass(slots=True, eq=False)
class _Search:
    """One search, and what was asked for."""

    rules: BeamRules
    choices: list[GenerationRequest]
    """What was asked for, one of each result; none of them is ever scheduled."""
    search: BeamSearch
    order: int = 0
    """The first of its places in the order."""
    round: int = 0
    step: list[GenerationRequest] = field(default_factory=list)
    """One of each text that is alive."""
    tops: dict[str, Sequence[TokenLogprob]] = field(default_factory=dict)
    """What those of the step found that have ended."""
    num_cached_tokens: int = 0

    @property
    def asked(self) -> GenerationRequest:
        return self.choices[0]

    def next_step(self) -> list[GenerationRequest]:
        """Return the requests that find the next tokens of the texts that are alive."""
        asked, self.tops = self.asked, {}
        params = SamplingParams(
            temperature=0, max_tokens=1, logprobs=self.search.num_candidates, ignore_eos=True, detokenize=False
        )
        self.step = [
            GenerationRequest(
                id=f"{asked.id}@{self.round}.{at}",
                prompt_token_ids=(*asked.prompt_token_ids, *beam.token_ids),
                params=params,
                seed=0,
                arrival_ns=asked.arrival_ns,
                priority=asked.priority,
                cache_salt=asked.cache_salt,
                lora=asked.lora,
            )
            for at, beam in enumerate(self.search.alive)
        ]
        for at, request in enumerate(self.step):
            request.order = self.order + at
        self.round += 1
        return self.step

    def note(self, request: GenerationRequest) -> None:
        """Take over when a request of the step first ran, and how often it was preempted."""
        for choice in self.choices:
            choice.num_preemptions += request.num_preemptions if choice is self.asked else 0
            choice.scheduled_ns = choice.scheduled_ns or request.scheduled_ns
            choice.first_token_ns = choice.first_token_ns or request.first_token_ns


class BeamSearches:
    """All searches under way, by the requests that asked for them and those of their steps."""

    def __init__(self) -> None:
        self._by_choice: dict[str, _Search] = {}
        self._by_step: dict[str, _Search] = {}

    def __len__(self) -> int:
        return len({id(search) for search in self._by_choice.values()})

    def get(self, choice_id: str) -> GenerationRequest | None:
        """Return what was asked for, by its id."""
        search = self._by_choice.get(choice_id)
        return None if search is None else next(choice for choice in search.choices if choice.id == choice_id)

    def begin(self, choices: Sequence[GenerationRequest], rules: BeamRules, max_model_len: int) -> GenerationRequest:
        """Take what was asked for; return the request that begins it. `end` it if that may not enter."""
        asked, params = choices[0], choices[0].params
        room = max_model_len - asked.num_prompt_tokens
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else asked.eos_token_ids)
        most = max(1, room if params.max_tokens is None else min(params.max_tokens, room))
        search = _Search(rules, list(choices), BeamSearch(rules, ends, most, params.min_tokens))
        self._by_choice |= dict.fromkeys((choice.id for choice in choices), search)
        (first,) = search.next_step()
        first.places = rules.width
        self._by_step[first.id] = search
        return first

    def steps_of(self, choice_id: str) -> list[GenerationRequest]:
        """Return the requests of the step that is under way for what was asked for."""
        search = self._by_choice.get(choice_id)
        return [] if search is None else [request for request in search.step if not request.finished]

    def absorb(
        self, outputs: Sequence[GenerationOutput]
    ) -> tuple[list[GenerationOutput], list[GenerationRequest], list[GenerationRequest]]:
        """Take what came of a step.

        Returns what is to be told, the requests of the searches' next steps, and those to be ended as their search failed.
        """
        told: list[GenerationOutput] = []
        following: list[GenerationRequest] = []
        failed: list[GenerationRequest] = []
        for output in outputs:
            search = self._by_step.pop(output.request_id, None)
            if search is None:
                told.append(output)
                continue
            request = next(each for each in search.step if each.id == output.request_id)
            search.note(request)
            if search.round == 1:
                search.num_cached_tokens, search.order = output.num_cached_tokens, request.order
            if output.error is not None or not output.logprobs:
                failed.extend(self.steps_of(search.asked.id))
                told.extend(self.end(search.asked.id, FinishReason.ERROR, output.error or "the model told no tokens"))
                continue
            search.tops[request.id] = output.logprobs[0].top
            if len(search.tops) < len(search.step):
                continue
            search.search.take([search.tops[each.id] for each in search.step])
            if search.search.alive:
                following.extend(search.next_step())
                self._by_step |= dict.fromkeys((each.id for each in search.step), search)
            else:
                told.extend(self._results(search))
        return told, following, failed

    def end(self, choice_id: str, reason: FinishReason, error: str | None = None) -> list[GenerationOutput]:
        """End a search without results; return what is told of it. Its step's requests are the caller's to abort."""
        search = self._by_choice.get(choice_id)
        if search is None:
            return []
        self._forget(search)
        return [_output(search, at, Beam(), reason, error) for at in range(len(search.choices))]

    def _forget(self, search: _Search) -> None:
        for choice in search.choices:
            del self._by_choice[choice.id]
        for request in search.step:
            self._by_step.pop(request.id, None)

    def _results(self, search: _Search) -> list[GenerationOutput]:
        self._forget(search)
        found = search.search.best(len(search.choices))
        outputs = []
        for at, beam in enumerate(found):
            reason = FinishReason.LENGTH if beam.ended_by is None else FinishReason.STOP
            outputs.append(_output(search, at, beam, reason))
        missing = "the search ended with fewer texts than were asked for"
        outputs.extend(
            _output(search, at, Beam(), FinishReason.ERROR, missing) for at in range(len(found), len(search.choices))
        )
        return outputs


def problem_of(request: GenerationRequest, rules: BeamRules) -> str | None:
    """Return why a request cannot be searched for."""
    params = request.params
    if not 1 <= rules.width <= MAX_WIDTH:
        return f"beam_width: expected 1 to {MAX_WIDTH}, got {rules.width}"
    if params.n > rules.width:
        return f"n: {params.n} texts of a beam search of width {rules.width}"
    if params.max_tokens == 0 or request.pooling is not None:
        return "beam_width: a search wants tokens"
    named = [name for name in _NOT_SEARCHED if getattr(params, name) != getattr(_PLAIN, name)]
    if request.structured is not None:
        named.append("structured")
    return f"beam_width: beam search does not take {', '.join(named)}" if named else None


def _output(search: _Search, at: int, beam: Beam, reason: FinishReason, error: str | None = None) -> GenerationOutput:
    choice, params = search.choices[at], search.asked.params
    choice.status, choice.finish_reason, choice.error = Status.FINISHED, reason, error
    for token in beam.token_ids:
        choice.append(token)
    if beam.ended_by is not None and beam.ended_by not in choice.eos_token_ids:
        choice.stop_reason = beam.ended_by
    return GenerationOutput(
        request_id=choice.id,
        index=choice.index,
        text=_text(choice, beam),
        token_ids=beam.token_ids,
        logprobs=_told_logprobs(beam, params.logprobs),
        finish_reason=reason,
        stop_reason=choice.stop_reason,
        error=error,
        num_prompt_tokens=choice.num_prompt_tokens,
        num_cached_tokens=search.num_cached_tokens,
        num_output_tokens=len(beam.token_ids),
        cumulative_logprob=None if params.logprobs is None else beam.cumulative_logprob,
    )


def _text(choice: GenerationRequest, beam: Beam) -> str:
    """Return a result's text; the token that ended it is in it as it would be without a search."""
    if choice.text is None:
        return ""
    shown = beam.token_ids
    if beam.ended_by is not None and not choice.params.include_stop_str_in_output:
        shown = shown[:-1]
    for token in shown:
        choice.text.append(token, check_stop=False)
    choice.text.finish(check_stop=False)
    return choice.text.take(final=True)


def _told_logprobs(beam: Beam, count: int | None) -> tuple[TokenLogprobs, ...] | None:
    if count is None:
        return None
    return tuple(TokenLogprobs(each.chosen, each.top[:count]) for each in beam.logprobs)
