"""What vLLM tells, as ours: new text, tokens and log probabilities of each choice. Pure; vLLM itself is not imported.

vLLM's objects are taken by their fields: RequestOutput (of the kind DELTA), CompletionOutput, Logprob, RequestStateStats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace_backends.llm.engine import EngineCall, Told
from headrace_backends.llm.logprobs import PromptLogprobs, TokenLogprob, TokenLogprobs
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason

_NS: Final = 1e9


class Telling:
    """What has been told of one call; each prompt is one request of vLLM's."""

    def __init__(self, call: EngineCall) -> None:
        self._call: Final = call
        self._num_tokens: Final = [0] * (len(call.prompts) * call.params.n)
        self._left = len(self._num_tokens)
        """Choices that have not ended."""
        self._prompt_told: Final = [False] * len(call.prompts)
        self._scheduled_ns: int | None = None
        self._first_token_ns: int | None = None
        self._preemptions = 0

    @property
    def done(self) -> bool:
        return not self._left

    def told(self, prompt: int, output: Any) -> Told:
        """Return what an output for one of the prompts has that is new."""
        self._note_times(output.metrics)
        outputs = [self._choice(prompt, output, choice) for choice in output.outputs]
        self._left -= sum(each.finished for each in outputs)
        if not self.done:
            return Told(self._call.number, outputs)
        return Told(
            self._call.number,
            outputs,
            scheduled_ns=self._scheduled_ns,
            first_token_ns=self._first_token_ns,
            num_preemptions=self._preemptions,
        )

    def _choice(self, prompt: int, output: Any, choice: Any) -> GenerationOutput:
        params = self._call.params
        index = prompt * params.n + choice.index
        nothing = params.max_tokens == 0
        tokens = () if nothing else tuple(choice.token_ids)
        self._num_tokens[index] += len(tokens)
        finished = choice.finish_reason is not None
        reason = None if not finished else FinishReason.LENGTH if nothing else FinishReason(choice.finish_reason)
        prompt_logprobs = None
        if params.prompt_logprobs is not None and output.prompt_logprobs and not self._prompt_told[prompt]:
            self._prompt_told[prompt] = True
            prompt_logprobs = prompt_logprobs_of(
                output.prompt_logprobs, self._call.prompts[prompt], params.prompt_logprobs
            )
        logprobs = None
        if params.logprobs is not None:
            logprobs = tuple(
                token_logprobs(entry, token, params.logprobs)
                for entry, token in zip(choice.logprobs or (), tokens, strict=False)
            )
        return GenerationOutput(
            request_id="",
            index=index,
            text="" if nothing else choice.text,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=None if nothing else choice.stop_reason,
            error="vLLM ended it with an error" if reason is FinishReason.ERROR else None,
            num_prompt_tokens=len(self._call.prompts[prompt]),
            num_cached_tokens=output.num_cached_tokens or 0,
            num_output_tokens=self._num_tokens[index],
            cumulative_logprob=choice.cumulative_logprob if params.logprobs is not None and not nothing else None,
        )

    def _note_times(self, metrics: Any) -> None:
        """Take note of when it first ran; vLLM's clock is the monotonic one, as ours is."""
        if metrics is None:
            return
        if self._scheduled_ns is None and metrics.scheduled_ts:
            self._scheduled_ns = int(metrics.scheduled_ts * _NS)
        if self._first_token_ns is None and metrics.first_token_ts:
            self._first_token_ns = int(metrics.first_token_ts * _NS)
        self._preemptions = max(self._preemptions, getattr(metrics, "num_preemptions", 0))


def token_logprobs(entry: Mapping[int, Any], chosen: int, count: int) -> TokenLogprobs:
    """Return vLLM's entry of one place: the chosen token, and the `count` likeliest (-1: all there are)."""
    own = entry[chosen]
    others = sorted((_one(token, each) for token, each in entry.items()), key=lambda each: each.rank)
    top = others if count < 0 else [each for each in others if each.rank <= count][:count]
    return TokenLogprobs(_one(chosen, own), tuple(top))


def prompt_logprobs_of(
    entries: Sequence[Mapping[int, Any] | None], prompt: Sequence[int], count: int
) -> tuple[PromptLogprobs, ...]:
    """Return what vLLM tells of a prompt's tokens; nothing of the first."""
    return tuple(
        None if entry is None else token_logprobs(entry, token, count)
        for entry, token in zip(entries, prompt, strict=False)
    )


def _one(token: int, entry: Any) -> TokenLogprob:
    return TokenLogprob(token, entry.logprob, entry.rank or 0)
