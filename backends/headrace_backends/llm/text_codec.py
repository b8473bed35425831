"""A model's tokenizer and chat template, as transformers reads them, for any number of threads.

Knows no engine. Templates run in transformers' sandbox.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from headrace_backends.llm.chat_content import as_template_takes, takes_parts
from headrace_backends.llm.vocabulary import Vocabulary
from headrace_protocol.errors import InferError, invalid
from headrace_protocol.generation import ChatPrompt

_RESERVED: Final = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {
    "messages",
    "conversations",
    "raise_exception",
    "strftime_now",
    "kwargs",
}
"""What `chat_template_kwargs` may not name: it would reach transformers and not the template."""


class HfTextCodec:
    """Implements `engine.TextCodec` over a tokenizer of transformers. Thread-safe."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, *, chat_template: str | None = None, trust_request_template: bool = False
    ) -> None:
        """`vocab_size` is the width of the logits; tokens beyond the tokenizer's own have no text."""
        self._tokenizer = tokenizer
        self._template = chat_template
        self._trusts = trust_request_template
        self._lock = Lock()
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self.vocab_size: Final = max(vocab_size, len(tokenizer))
        self.vocabulary: Final = Vocabulary(tokenizer, self._backend)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        try:
            if self._backend is not None:
                ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
                return ids
            with self._lock:
                return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        except Exception as error:  # half of a surrogate pair, and whatever else a tokenizer does not take
            raise invalid(f"the text cannot be made tokens of: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise invalid(f"token {token} is not of the vocabulary of {self.vocab_size}")
        if self._backend is not None:
            text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            return text
        with self._lock:
            return str(
                self._tokenizer.decode(
                    [token for token in token_ids if token < len(self._tokenizer)],
                    skip_special_tokens=skip_special_tokens,
                    clean_up_tokenization_spaces=False,
                )
            )

    def token_bytes(self, token_id: int) -> bytes | None:
        return self.vocabulary.token_bytes(token_id)

    @property
    def template_with_tools(self) -> str | None:
        """The template that conversations with tools are made a prompt of."""
        return self._template or self._own_template(tools=())

    def render(self, chat: ChatPrompt) -> str:
        template = self._chosen(chat)
        kwargs = dict(chat.chat_template_kwargs or {})
        if reserved := sorted(_RESERVED & set(kwargs)):
            raise invalid(f"chat_template_kwargs: {', '.join(reserved)} cannot be set by it")
        if not chat.messages:
            raise invalid("messages: expected one at least, got none")
        if chat.add_generation_prompt and chat.continue_final_message:
            raise invalid("add_generation_prompt and continue_final_message exclude each other")
        messages = as_template_takes(chat.messages, parts=takes_parts(template))
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=chat.tools,
                documents=chat.documents,
                chat_template=template,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tokenize=False,
                **kwargs,
            )
        except InferError:
            raise
        except Exception as error:  # the template's own refusals, and its mistakes over what it was given
            raise invalid(f"the chat template does not take this conversation: {error}") from error
        return str(text)

    def _chosen(self, chat: ChatPrompt) -> str:
        if chat.chat_template is not None:
            if not self._trusts:
                raise invalid(
                    "chat_template: this model takes no templates of clients; trust_request_chat_template in its "
                    "model.json would allow it"
                )
            return chat.chat_template
        template = self._template or self._own_template(chat.tools)
        if template is None:
            raise invalid(
                "the model has no chat template: ask it by a prompt, or name a template in its model.json (chat_template)"
            )
        return template

    def _own_template(self, tools: Any) -> str | None:
        templates = self._tokenizer.chat_template
        if isinstance(templates, Mapping):
            name = "tool_use" if tools is not None and "tool_use" in templates else "default"
            found = templates.get(name)
            return None if found is None else str(found)
        return None if templates is None else str(templates)
