"""Text from tokens, one at a time: never half a character, and in sum what decoding all of them at once gives. Pure.

Knows a tokenizer by one method. The method is that of prefix offsets (Hugging Face TGI): a few tokens are decoded with and
without the new one, so that the tokenizer's own rules about spaces between tokens hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace_backends.llm.stop import StopStrings

_CONTEXT = 5
"""Tokens of the prompt that are decoded with the first new ones."""
_LONGEST_WAIT = 16
"""Tokens that may wait for the end of a character, or that may have no text, before they are settled."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """What the engine's core asks of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, no special tokens around it."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of tokens; incomplete characters are U+FFFD."""


class Detokenizer:
    """Decodes one generation. Its window of tokens is bounded, so that each token costs the same."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        """Without `spaces_between_special_tokens` one that follows another has no space before it."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._joins = not skip_special_tokens and not spaces_between_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT:])
        self._read = len(self._window)
        """Tokens of the window whose text has been told."""

    def append(self, token_id: int) -> str:
        """Return the text that the token completes, often none."""
        self._window.append(token_id)
        told, text = self._decode(self._read), self._decode(len(self._window))
        if len(text) > len(told) and not text.endswith(_REPLACEMENT):
            new = text[len(told) :]
            joined = self._joins and len(self._window) > 1 and all(map(self._special, self._window[-2:]))
            return self._tell(len(self._window), new.lstrip(" ") if joined else new)
        if len(self._window) - self._read > _LONGEST_WAIT:
            return self._settle(told, text)
        return ""

    def finish(self) -> str:
        """Return the text of tokens that still wait."""
        told, text = self._decode(self._read), self._decode(len(self._window))
        return self._tell(len(self._window), text[len(told) :])

    def _special(self, token_id: int) -> bool:
        decode = self._tokenizer.decode
        return bool(decode([token_id], skip_special_tokens=False)) and not decode([token_id], skip_special_tokens=True)

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._window[:end], skip_special_tokens=self._skip) if end else ""

    def _tell(self, end: int, text: str) -> str:
        """Make the tokens up to `end` the told ones; those told before are no longer needed."""
        del self._window[: self._read]
        self._read = end - self._read
        return text

    def _settle(self, told: str, text: str) -> str:
        """Bound the window: tell what no later token changes, or drop tokens that have no text."""
        if len(text) <= len(told):
            del self._window[self._read :]
            return ""
        for end in range(len(self._window) - 1, self._read, -1):
            before = self._decode(end)
            if len(told) < len(before) < len(text) and text.startswith(before):
                return self._tell(end, before[len(told) :])
        return self._tell(len(self._window), text[len(told) :])


class GenerationText:
    """The text of one generation: detokenised, cut at a stop string, held back where it may become one."""

    def __init__(self, detokenizer: Detokenizer, stop: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stop = stop

    def append(self, token_id: int, *, check_stop: bool) -> str | None:
        """Take the next token; return the stop string that it completed."""
        return self._stop.append(self._detokenizer.append(token_id), check=check_stop)

    def finish(self, *, check_stop: bool) -> str | None:
        """Take the end of the tokens: characters that will never be complete are text now."""
        return self._stop.append(self._detokenizer.finish(), check=check_stop)

    def take(self, *, final: bool = False) -> str:
        """Return the new text that is certain; with `final`, all that is left."""
        return self._stop.take(final=final)
