"""Whether a generation ends with its newest token, and why. Pure."""

from __future__ import annotations

from typing import NamedTuple

from headrace_backends.llm.request import FinishReason, GenerationRequest
from headrace_backends.llm.stop import repeats


class Ending(NamedTuple):
    """Why a generation ends; `stop_reason` is the stop token or string, None for the end of the text."""

    reason: FinishReason
    stop_reason: int | str | None = None


def ending_after(request: GenerationRequest, max_model_len: int) -> Ending | None:
    """Show the newest token to the request's text; return the ending that it brings.

    The end of the text goes before stop tokens, a stop string before the limit of length. Until there are more than
    min_tokens of output neither token nor string ends it; the sampler keeps the tokens away until then. A text that is
    all that its grammar allows has ended. Raises GrammarError for a token that the grammar does not allow.
    """
    token, params, text = request.token_ids[-1], request.params, request.text
    may_stop = request.num_output_tokens > params.min_tokens
    ending = _by_token(request, token, may_stop=may_stop)
    stopped_by_token = ending is not None
    if ending is None:
        ending = _by_course(request, token, max_model_len, may_stop=may_stop)
    if text is None:
        return ending
    matched = None
    if not stopped_by_token or params.include_stop_str_in_output:
        matched = text.append(token, check_stop=may_stop)
    if matched is None and ending is not None:
        matched = text.finish(check_stop=may_stop)
    return ending if matched is None else Ending(FinishReason.STOP, matched)


def _by_token(request: GenerationRequest, token: int, *, may_stop: bool) -> Ending | None:
    """Return the ending that is the token's only meaning."""
    params = request.params
    if may_stop:
        if token in request.eos_token_ids and not params.ignore_eos:
            return Ending(FinishReason.STOP)
        if token in params.stop_token_ids:
            return Ending(FinishReason.STOP, token)
    return None


def _by_course(request: GenerationRequest, token: int, max_model_len: int, *, may_stop: bool) -> Ending | None:
    """Return the ending of a text that is whole, long enough, or goes round in circles."""
    params = request.params
    if request.grammar is not None:
        request.grammar.accept(token)
        if request.grammar.complete:
            return Ending(FinishReason.STOP)
    if request.num_output_tokens >= request.max_tokens or request.num_tokens >= max_model_len:
        return Ending(FinishReason.LENGTH)
    rule = params.repetition_detection
    if rule is not None and may_stop and repeats(request.output_token_ids, rule):
        return Ending(FinishReason.REPETITION)
    return None
