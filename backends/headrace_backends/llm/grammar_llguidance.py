"""Grammars by llguidance: from a description to a matcher over a model's tokens.

The library follows Earley parsers and derivatives of regular expressions lazily, so that compiling is quick and what a
grammar costs shows while a text is made; its limits bound both. Knows no engine and no thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from headrace_backends.llm.grammar import GrammarError, Matcher
from headrace_backends.llm.grammar_numbers import BoundedNumbers
from headrace_backends.llm.grammar_specs import (
    StructuralTag,
    check_grammar,
    check_regex,
    check_schema,
    check_size,
    read_choices,
    read_json,
    read_structural_tag,
)
from headrace_protocol.errors import InferError, invalid, unsupported
from headrace_protocol.generation import StructuredOutput

_WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the parts of JSON: of bounded length, or a model that is fond of blanks would write them for ever."""
_JSON: Final = {"whitespace_pattern": _WHITESPACE}
_OBJECT: Final = '{"type": "object"}'
_LIMITS: Final = llguidance.LLParserLimits(
    max_items_in_row=8000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""A mask then takes some 20 ms at most, and a grammar some tens of MB."""
_DIGIT_FIRST: Final = r"start: /[0-9](.|\n)*/"
_ASCII: Final = "d"
"""Of regular expressions: digits are 0 to 9, not those of all scripts."""
_OF_THE_TEXT: Final = ("NoExtension", "doesn't satisfy the grammar")
"""In the library's errors: nothing can follow, or not this token."""
_TRIED: Final = 3
"""Tokens with which it is tried whether a grammar can be followed."""
_MOST_OF_A_REASON: Final = 300


class LlgMatcher:
    """A `Matcher`."""

    __slots__ = ("_grammar", "_matcher")

    def __init__(self, grammar: LlgGrammar, matcher: Any) -> None:
        self._grammar = grammar
        self._matcher = matcher

    def accept(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise self._failure(f"token {token_id} is not one that the grammar allows here")

    def validate(self, token_ids: Sequence[int]) -> int:
        count: int = self._matcher.validate_tokens(list(token_ids))
        return count

    def rollback(self, count: int) -> None:
        if not self._matcher.rollback(count):
            raise self._failure("the text cannot be taken back in its grammar")

    def fill(self, row: Any) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise self._failure("the grammar allows no token any more")

    def forced(self) -> Sequence[int]:
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _failure(self, otherwise: str) -> GrammarError:
        if _too_costly(self._matcher):
            self._grammar.spoiled = True
            return GrammarError("the grammar became too costly to follow at this place of the text")
        return GrammarError(otherwise)


class LlgGrammar:
    """A `Grammar`: texts that follow it share what of its automata has been built."""

    def __init__(self, matcher: Any, around: Callable[[Matcher], Matcher] | None = None) -> None:
        """`around` may put something around the matcher of each text."""
        self._beginning = matcher
        self._around = around
        self.spoiled = False

    def matcher(self) -> Matcher:
        inner = LlgMatcher(self, self._beginning.deep_copy())
        return inner if self._around is None else self._around(inner)


class LlgBuilder:
    """Builds grammars over one model's tokens. Thread-safe."""

    def __init__(self, tokenizer: Any, eos_token_ids: Iterable[int], vocab_size: int) -> None:
        """Read a tokenizer of transformers, or one that makes llguidance's itself (`llg_tokenizer`).

        `vocab_size` is the width of the logits, which may be more than it knows.
        Raises UNSUPPORTED where llguidance cannot read the tokenizer.
        """
        self._tokens: Final = _tokens_of(tokenizer, sorted(eos_token_ids), vocab_size)
        self._added: Final = {
            token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._words: Final = -(-vocab_size // 32)
        self._digits: Final = self._first_tokens(llguidance.LLMatcher(self._tokens, _DIGIT_FIRST, log_level=0))

    def __call__(self, structured: StructuredOutput) -> LlgGrammar:
        """Compile. Raises INVALID_ARG naming what is wrong, also where no text at all would do."""
        check_size(structured)
        kind = structured.kind
        try:
            grammar = self._grammar(structured)
        except InferError:
            raise
        except Exception as error:
            raise invalid(f"{kind}: cannot be compiled: {_line(error)}") from error
        matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise invalid(f"{kind}: cannot be compiled: {_line(matcher.get_error())}")
        self._try(kind, matcher.deep_copy())
        return LlgGrammar(matcher, self._bounded if kind in ("json_schema", "json_object") else None)

    def _bounded(self, inner: Matcher) -> Matcher:
        return BoundedNumbers(inner, lambda token: bytes(self._tokens.decode_bytes([token])), self._digits)

    def _first_tokens(self, matcher: Any) -> NDArray[np.uint32]:
        row = np.zeros(self._words, np.uint32)
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return row

    def _try(self, kind: str, matcher: Any) -> None:
        """Go a few tokens, which builds much of what the next texts need."""
        for at in range(_TRIED):
            row = self._first_tokens(matcher)
            if _too_costly(matcher):
                raise invalid(f"{kind}: too large or too ambiguous to be followed")
            allowed = np.flatnonzero(row)
            if not at and (
                matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()) or not row.any()
            ):
                raise invalid(f"{kind}: no text fits it")
            if matcher.is_stopped() or not len(allowed):
                return
            word = int(row[allowed[0]])
            matcher.consume_token(int(allowed[0]) * 32 + (word & -word).bit_length() - 1)

    def _grammar(self, structured: StructuredOutput) -> str:
        kind, spec = structured.kind, structured.spec
        if kind == "regex":
            check_regex(spec)
            return f"start: /{llguidance.regex_to_lark(spec, _ASCII)}/"
        if kind == "grammar":
            check_grammar(spec)
            return str(llguidance.LLMatcher.grammar_from_lark(any_to_lark(spec)))
        if kind == "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in read_choices(spec))
            return f"start: {choices}"
        if kind == "structural_tag":
            return self._tagged(read_structural_tag(spec))
        if kind == "json_object":
            spec = _OBJECT
        schema = read_json(kind, spec)
        check_schema(kind, schema)
        if schema is False:
            raise invalid(f"{kind}: no text fits it")
        return str(llguidance.LLMatcher.grammar_from_json_schema("{}" if schema is True else spec, overrides=_JSON))

    def _tagged(self, tag: StructuralTag) -> str:
        """Return free text in which each trigger begins one of its structures.

        A trigger that is one special token cannot be spelled out, so it is named.
        """
        rules = []
        for at, each in enumerate(tag.structures):
            trigger = max((t for t in tag.triggers if t and each.begin.startswith(t)), key=len)
            rest, end = _quoted(each.begin[len(trigger) :]), _quoted(each.end)
            schema = json.dumps({**(each.schema if isinstance(each.schema, dict) else {}), "x-guidance": _JSON})
            if trigger in self._added:
                rules.append(f"tag_{at}: TEXT <[{self._added[trigger]}]> {rest} %json {schema} {end}")
            else:
                rules.append(f"begin_{at}[lazy]: TEXT {_quoted(trigger)}")
                rules.append(f"tag_{at}: begin_{at} {rest} %json {schema} {end}")
        tags = " | ".join(f"tag_{at}" for at in range(len(tag.structures)))
        return "\n".join([f"start: ({tags})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules])


def _too_costly(matcher: Any) -> bool:
    """Say whether a matcher failed for its limits, and not for what the text is."""
    return matcher.is_error() and not any(sign in matcher.get_error() for sign in _OF_THE_TEXT)


def _tokens_of(tokenizer: Any, ends: Sequence[int], vocab_size: int) -> Any:
    """Return a tokenizer as llguidance has it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    make = getattr(tokenizer, "llg_tokenizer", None)
    try:
        if make is not None:
            return make(vocab_size, ends)
        if backend is None:
            raise unsupported("structured output: the model's tokenizer has no fast form")
        return llguidance.LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=list(ends) or None)
    except InferError:
        raise
    except Exception as error:
        raise unsupported(f"structured output: the model's tokenizer cannot be read: {_line(error)}") from error


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _line(reason: Any) -> str:
    """Return a library's reason as one line that is not too long."""
    text = " ".join(str(reason).split())
    return text if len(text) <= _MOST_OF_A_REASON else f"{text[: _MOST_OF_A_REASON - 3]}..."
