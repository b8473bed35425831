"""POST /v1/chat/completions: conversations to calls of a language model."""

from __future__ import annotations

from typing import Any, Final

from headrace.gateway.http.openai.call import CallAnswer, CallStream, begin
from headrace.gateway.http.openai.chat_answer import ChatAnswer, ChatChunks, ChatForm
from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.endpoint import CallEndpoint
from headrace.gateway.http.openai.errors import refusal, unsupported
from headrace.gateway.http.openai.exchange import Exchange
from headrace.gateway.http.openai.fields import Fields, read_body
from headrace.gateway.http.openai.message import MessagePlan
from headrace.gateway.http.openai.messages import read_messages
from headrace.gateway.http.openai.sampling import (
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
from headrace.gateway.http.openai.tools.chat_plan import plan_chat
from headrace.gateway.http.request import Outlet, Streaming
from headrace_protocol.generation import ChatPrompt, GenerationCall

MAX_DOCUMENTS: Final = 1024
_NAMES: Final = {
    "chat": "messages",
    "prompts": "messages",
    "structured": "response_format",
    "beam_width": "use_beam_search",
    "adapter": "model",
    "logprobs": "top_logprobs",
}
"""What a backend names of a call, as the client named it."""


class Chat(CallEndpoint):
    """The endpoint."""

    def begin(self, exchange: Exchange, outlet: Outlet) -> Streaming:
        """Read the request and begin its call."""
        exchange.names = _NAMES
        fields = read_body(exchange.http)
        model = self._directory.find(fields.text("model"))
        model.check_task("generate", "chats")
        call, form = read_chat(fields, model)
        if form.plan.structured is not None:
            exchange.names = {**_NAMES, "structured": "tools"}
        timeout_us = read_timeout(fields)
        under_way: CallStream | CallAnswer
        if form.stream:
            under_way = CallStream(ChatChunks(form, exchange, model), exchange, outlet)
        else:
            under_way = CallAnswer(ChatAnswer(form, exchange, model), exchange, outlet.answer)
        under_way.under_way = begin(self._data, model, call, exchange, under_way.take, timeout_us)
        return under_way


def read_chat(fields: Fields, model: LanguageModel) -> tuple[GenerationCall, ChatForm]:
    """Return the call that a body asks for, and how it is to be told. Raises HttpError 400."""
    messages = read_messages(fields)
    plan = plan_chat(fields, model)
    sampling = read_sampling(fields, model)
    stream, include_usage, continuous = read_streaming(fields)
    max_tokens = _read_max_tokens(fields, model)
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    logprobs = _read_logprobs(fields, model)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    of_prompt = read_prompt_logprobs(fields, model, stream=stream)
    if of_prompt is not None:
        sampling["prompt_logprobs"] = of_prompt
    _refuse_modalities(fields)
    if not plan.skip_special_tokens:
        sampling["skip_special_tokens"] = False
    structured = read_structured(fields)
    beam_width = read_beam_width(fields, int(sampling.get("n", 1)), stream=stream)
    token_ids = fields.flag("return_token_ids")
    penalty = read_length_penalty(fields)
    call = GenerationCall(
        chat=_read_prompt(fields, messages, plan),
        sampling=sampling,
        structured=plan.structured or structured,
        add_special_tokens=fields.flag("add_special_tokens") if fields.has("add_special_tokens") else None,
        stream=stream or (plan.tells_steps and beam_width is None),
        return_token_ids=token_ids,
        priority=read_priority(fields),
        cache_salt=read_cache_salt(fields),
        adapter=model.adapter,
        beam_width=beam_width,
        length_penalty=penalty,
    )
    form = ChatForm(
        int(sampling.get("n", 1)),
        plan,
        stream=stream,
        logprobs=logprobs is not None,
        prompt_logprobs=of_prompt is not None,
        token_ids=token_ids,
        as_ids=fields.flag("return_tokens_as_token_ids"),
        prefix=messages[-1]["content"] if fields.flag("echo") and messages[-1]["role"] == "assistant" else "",
        include_usage=include_usage,
        continuous_usage=continuous,
    )
    return call, form


def _read_prompt(fields: Fields, messages: list[dict[str, Any]], plan: MessagePlan) -> ChatPrompt:
    continues = fields.flag("continue_final_message")
    generates = fields.flag("add_generation_prompt", not continues)
    if continues and generates:
        raise refusal(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true: a message is continued, or begun",
            "continue_final_message",
        )
    documents = fields.objects("documents", MAX_DOCUMENTS, "documents")
    arguments = {**(plan.template_arguments or {}), **(fields.mapping("chat_template_kwargs") or {})}
    return ChatPrompt(
        messages,
        tools=plan.tools,
        documents=None if documents is None else [dict(document.members) for document in documents],
        chat_template=fields.text("chat_template"),
        chat_template_kwargs=arguments or None,
        add_generation_prompt=generates,
        continue_final_message=continues,
    )


def _read_max_tokens(fields: Fields, model: LanguageModel) -> int | None:
    """Return how many tokens there may be; without a wish as many as fit, which the backend knows."""
    wanted = fields.integer("max_completion_tokens", 1)
    old = fields.integer("max_tokens", 1)
    if wanted is None:
        wanted = old
    return None if wanted is None else min(wanted, model.card.max_model_len)


def _read_logprobs(fields: Fields, model: LanguageModel) -> int | None:
    """Return how many likely tokens are told beside each chosen one, None where no log probabilities are."""
    top = fields.integer("top_logprobs", -1)
    if not fields.flag("logprobs"):
        if top:
            raise refusal("'top_logprobs' needs 'logprobs': true", "top_logprobs")
        return None
    if top is not None:
        check_logprobs("top_logprobs", top, model)
    return top or 0


def _refuse_modalities(fields: Fields) -> None:
    for kind in fields.items("modalities", 16) or ():
        if kind != "text":
            raise unsupported("modalities", f"'modalities': the model answers with text alone, got {str(kind)[:40]!r}")
    if fields.has("audio"):
        raise unsupported("audio", "'audio' is not served: the model answers with text alone")
