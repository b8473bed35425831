"""Log probabilities in the two shapes that OpenAI has for them. JSON has no minus infinity: it is told as -9999."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from headrace_protocol.generation import PromptTold, TokenChance, TokenLogprob

LOWEST: Final = -9999.0


def finite(logprob: float | None) -> float:
    """Return a log probability that JSON has a number for."""
    return LOWEST if logprob is None or logprob < LOWEST else logprob


def shown(chance: TokenChance, *, as_ids: bool) -> str:
    """Return the text of a token, or `token_id:<id>`, which no two share."""
    return f"token_id:{chance.id}" if as_ids else chance.token


def chat_logprobs(told: Iterable[TokenLogprob], *, as_ids: bool) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a chat: an entry a token, with its exact bytes."""
    content = [
        {**_of_chat(one.chosen, as_ids), "top_logprobs": [_of_chat(chance, as_ids) for chance in one.top]}
        for one in told
    ]
    return {"content": content, "refusal": None}


def _of_chat(chance: TokenChance, as_ids: bool) -> dict[str, Any]:
    return {"token": shown(chance, as_ids=as_ids), "logprob": finite(chance.logprob), "bytes": chance.bytes}


class CompletionLogprobs:
    """Makes the `logprobs` of one choice of a completion, as parallel lists; goes on where it was with each piece."""

    __slots__ = ("_as_ids", "_offset", "_special")

    def __init__(self, *, as_ids: bool, special: bool) -> None:
        """Begin at the start of a text; `special` says whether special tokens are part of it."""
        self._as_ids = as_ids
        self._special = special
        self._offset = 0
        """Characters of the whole text before the next token; with echo the prompt is a part of it."""

    def prompt(self, told: PromptTold) -> dict[str, list[Any]]:
        """Return those of a prompt that is echoed, whose first token has none."""
        return self._lists(told.logprobs or (), self._first_text(told))

    def output(self, told: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """Return those of more of the output."""
        return self._lists(told, "")

    def _lists(self, told: Sequence[TokenLogprob | None], first: str) -> dict[str, list[Any]]:
        lists = nothing()
        for one in told:
            lists["text_offset"].append(self._offset)
            if one is None:
                lists["tokens"].append(first)
                lists["token_logprobs"].append(None)
                lists["top_logprobs"].append(None)
                self._offset += len(first)
                continue
            name = shown(one.chosen, as_ids=self._as_ids)
            lists["tokens"].append(name)
            lists["token_logprobs"].append(finite(one.chosen.logprob))
            likely = {shown(chance, as_ids=self._as_ids): finite(chance.logprob) for chance in one.top}
            likely.setdefault(name, finite(one.chosen.logprob))
            lists["top_logprobs"].append(likely)
            self._offset += self._width(one.chosen)
        return lists

    def _first_text(self, told: PromptTold) -> str:
        """Return what the tokens with log probabilities leave of the prompt's text."""
        if told.token_strings:
            return told.token_strings[0]
        rest = sum(self._width(one.chosen) for one in told.logprobs or () if one is not None)
        text = told.text or ""
        return text[: max(0, len(text) - rest)]

    def _width(self, chance: TokenChance) -> int:
        """Return how many characters of the text begin in a token."""
        if chance.bytes is None:
            return len(chance.token) if self._special else 0
        if "\ufffd" not in chance.token:
            return len(chance.token)
        return sum(byte & 0xC0 != 0x80 for byte in chance.bytes)


def nothing() -> dict[str, list[Any]]:
    """Return the `logprobs` of no token."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return two pieces as one."""
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(told: PromptTold) -> list[dict[str, Any] | None] | None:
    """Return the log probabilities of a prompt as vLLM tells them: by token id."""
    if told.logprobs is None:
        return None
    return [
        None if one is None else {str(c.id): _of_prompt(c) for c in (*one.top, one.chosen)} for one in told.logprobs
    ]


def _of_prompt(chance: TokenChance) -> dict[str, Any]:
    return {"logprob": finite(chance.logprob), "rank": chance.rank, "decoded_token": chance.token}
