"""A model's grammars: its tokens, how it sets reasoning apart, and the threads that compile. Puts parts together."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from threading import Lock
from typing import Any

from headrace_backends.llm.engine import TextCodec
from headrace_backends.llm.grammar import ReasoningMarks
from headrace_backends.llm.grammar_compiler import GrammarCompiler
from headrace_backends.llm.grammar_llguidance import LlgBuilder, LlgGrammar
from headrace_protocol.generation import StructuredOutput


def grammars_of(
    tokenizer: Any, eos_token_ids: Iterable[int], vocab_size: int, *, reasoning: ReasoningMarks | None = None
) -> GrammarCompiler:
    """Return what compiles for a model; `tokenizer` is as `LlgBuilder` takes it, and read when it is first needed."""
    lock = Lock()

    @cache
    def builder() -> LlgBuilder:
        return LlgBuilder(tokenizer, eos_token_ids, vocab_size)

    def build(structured: StructuredOutput) -> LlgGrammar:
        with lock:
            ready = builder()
        return ready(structured)

    return GrammarCompiler(build, reasoning=reasoning)


def marks_of(reasoning_format: str | None, text: TextCodec) -> ReasoningMarks | None:
    """Return the tokens around the reasoning of a model with that format; None where it does not set it apart."""
    if reasoning_format != "think_tags":
        return None
    start, end = (tuple(text.encode(mark, add_special_tokens=False)) for mark in ("<think>", "</think>"))
    return ReasoningMarks(start, end)
