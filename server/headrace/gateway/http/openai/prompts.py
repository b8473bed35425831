"""The prompts of a completion: text or tokens, one or many."""

from __future__ import annotations

from typing import Any, Final

from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.errors import missing, refusal
from headrace.gateway.http.openai.fields import Fields
from headrace.gateway.http.openai.sampling import too_many_tokens

MAX_PROMPTS: Final = 1024


def read_prompts(fields: Fields, model: LanguageModel, name: str = "prompt") -> list[str | list[int]]:
    """Return the prompts, none of them empty. Raises HttpError 400, which names the one at fault."""
    value = fields.any(name)
    if value is None:
        raise missing(name)
    if isinstance(value, str):
        return [_checked(fields, name, value, model)]
    if not isinstance(value, list):
        raise fields.wrong(name, "a string, tokens, or an array of those", value)
    if not value:
        raise refusal(f"'{name}' is empty", name)
    if type(value[0]) is int:
        return [_checked(fields, name, value, model)]
    if len(value) > MAX_PROMPTS:
        raise refusal(f"'{name}': {len(value)} prompts, at most {MAX_PROMPTS} are taken", name)
    return [_checked(fields, f"{name}[{number}]", prompt, model) for number, prompt in enumerate(value)]


def _checked(fields: Fields, name: str, prompt: Any, model: LanguageModel) -> str | list[int]:
    if not isinstance(prompt, str | list):
        raise fields.wrong(name, "a string or an array of tokens", prompt)
    if not prompt:
        raise refusal(f"'{name}' is empty", name)
    if isinstance(prompt, list):
        size = model.card.vocab_size
        for token in prompt:
            if type(token) is not int or not 0 <= token < size:
                raise fields.wrong(name, f"tokens, which are integers from 0 to {size - 1}", token)
        if len(prompt) > model.card.max_model_len and not fields.has("truncate_prompt_tokens"):
            raise too_many_tokens(name, len(prompt), model)
    return prompt
