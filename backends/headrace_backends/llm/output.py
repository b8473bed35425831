"""What one step tells those who wait: new text, tokens, log probabilities, and how a generation ended. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_backends.llm.logprobs import PromptLogprobs, TokenLogprobs
from headrace_backends.llm.request import FinishReason


class GenerationOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one generation since its last output. The last one has a finish reason."""

    request_id: str
    """Of the generation: see `request.child_id`."""
    index: int
    text: str = ""
    """Empty while characters are incomplete or may become a stop string."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One of each token of `token_ids`, whether its text is held back or not."""
    prompt_logprobs: tuple[PromptLogprobs, ...] | None = None
    """Of the whole prompt, once: when it has been computed."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache."""
    num_output_tokens: int
    """So far."""
    pooled: Any = None
    """The vector of a request that pools, fp32 [width], not normalised; with its last output."""
    cumulative_logprob: float | None = None
    """Of all tokens so far, where log probabilities were asked for."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def followed_by(self, later: GenerationOutput) -> GenerationOutput:
        """Return both as one output, for who could not send the first."""
        return msgspec.structs.replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=_joined(self.logprobs, later.logprobs),
            prompt_logprobs=self.prompt_logprobs if later.prompt_logprobs is None else later.prompt_logprobs,
        )


def _joined(
    first: tuple[TokenLogprobs, ...] | None, second: tuple[TokenLogprobs, ...] | None
) -> tuple[TokenLogprobs, ...] | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
