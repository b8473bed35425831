"""POST /v1/completions: prompts to calls of a language model."""

from __future__ import annotations

from typing import Final

from headrace.gateway.http.openai.call import CallAnswer, CallStream, begin
from headrace.gateway.http.openai.completion_answer import CompletionAnswer, CompletionChunks, CompletionForm
from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.endpoint import CallEndpoint
from headrace.gateway.http.openai.errors import refusal, unsupported
from headrace.gateway.http.openai.exchange import Exchange
from headrace.gateway.http.openai.fields import Fields, read_body
from headrace.gateway.http.openai.prompts import read_prompts
from headrace.gateway.http.openai.sampling import (
    MAX_BEST_OF,
    check_choices,
    check_logprobs,
    read_beam_width,
    read_cache_salt,
    read_length_penalty,
    read_priority,
    read_prompt_logprobs,
    read_sampling,
    read_streaming,
    read_timeout,
)
from headrace.gateway.http.openai.structured import read_structured
from headrace.gateway.http.request import Outlet, Streaming
from headrace_protocol.generation import GenerationCall

_DEFAULT_MAX_TOKENS: Final = 16
_NAMES: Final = {
    "prompts": "prompt",
    "structured": "response_format",
    "beam_width": "use_beam_search",
    "adapter": "model",
}
"""What a backend names of a call, as the client named it."""


class Completions(CallEndpoint):
    """The endpoint."""

    def begin(self, exchange: Exchange, outlet: Outlet) -> Streaming:
        """Read the request and begin its call."""
        exchange.names = _NAMES
        fields = read_body(exchange.http)
        model = self._directory.find(fields.text("model"))
        model.check_task("generate", "completions")
        call, form = read_completion(fields, model)
        timeout_us = read_timeout(fields)
        under_way: CallStream | CallAnswer
        if call.stream:
            under_way = CallStream(CompletionChunks(form, exchange, model), exchange, outlet)
        else:
            under_way = CallAnswer(CompletionAnswer(form, exchange, model), exchange, outlet.answer)
        under_way.under_way = begin(self._data, model, call, exchange, under_way.take, timeout_us)
        return under_way


def read_completion(fields: Fields, model: LanguageModel) -> tuple[GenerationCall, CompletionForm]:
    """Return the call that a body asks for, and how it is to be told. Raises HttpError 400."""
    prompts = read_prompts(fields, model)
    sampling = read_sampling(fields, model)
    n = int(sampling.get("n", 1))
    stream, include_usage, continuous = read_streaming(fields)
    best_of = _read_best_of(fields, n, stream=stream)
    beam_width = read_beam_width(fields, n, stream=stream)
    check_choices(len(prompts), n, best_of)
    if fields.text("suffix"):
        raise unsupported("suffix", "'suffix' is not served: text is continued, not inserted")
    max_tokens = fields.integer("max_tokens", 0)
    sampling["max_tokens"] = min(_DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens, model.card.max_model_len)
    echo = fields.flag("echo")
    logprobs = fields.integer("logprobs", -1)
    if logprobs is not None:
        check_logprobs("logprobs", logprobs, model)
        sampling["logprobs"] = logprobs
    of_prompt = read_prompt_logprobs(fields, model, stream=stream)
    if of_prompt is not None or (echo and logprobs is not None):
        sampling["prompt_logprobs"] = logprobs if of_prompt is None else of_prompt
    token_ids = fields.flag("return_token_ids")
    penalty = read_length_penalty(fields)
    call = GenerationCall(
        prompts=prompts,
        sampling=sampling,
        structured=read_structured(fields),
        add_special_tokens=fields.flag("add_special_tokens", True) if fields.has("add_special_tokens") else None,
        stream=stream,
        echo=echo,
        return_token_ids=token_ids,
        priority=read_priority(fields),
        cache_salt=read_cache_salt(fields),
        adapter=model.adapter,
        best_of=best_of,
        beam_width=beam_width,
        length_penalty=penalty,
    )
    form = CompletionForm(
        len(prompts),
        n,
        echo=echo,
        logprobs=logprobs is not None,
        prompt_logprobs=of_prompt is not None,
        token_ids=token_ids,
        as_ids=fields.flag("return_tokens_as_token_ids"),
        special=not fields.flag("skip_special_tokens", True),
        include_usage=include_usage,
        continuous_usage=continuous,
    )
    return call, form


def _read_best_of(fields: Fields, n: int, *, stream: bool) -> int | None:
    best_of = fields.integer("best_of", 0, MAX_BEST_OF)
    if not best_of:
        return None
    if best_of < n:
        raise refusal(f"'best_of' is {best_of}, and less than 'n', {n}", "best_of")
    if best_of == n:
        return None
    if stream:
        raise refusal("'best_of' above 'n' cannot be streamed: the best are known at the end", "best_of")
    return best_of
