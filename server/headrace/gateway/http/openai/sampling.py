"""What completions and chats ask alike: how tokens are chosen, how many choices, where they end, and how it is told.

Ranges that OpenAI documents, and whatever makes work, are checked here, before anything waits in a queue. The rest of
the sampling parameters go by vLLM's names to the backend, which checks each.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.gateway.http.errors import HttpError
from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.errors import refusal, unsupported
from headrace.gateway.http.openai.fields import Fields

MAX_N: Final = 128
MAX_CHOICES: Final = 1024
"""Choices of all prompts of a request together."""
MAX_STOPS: Final = 4
MAX_STOP: Final = 1024
"""Characters of a stop string."""
MAX_BEST_OF: Final = 20
MAX_LIST: Final = 1024
"""Entries of a list of tokens or words."""
_INT64: Final = 1 << 63

_PASSED: Final = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "thinking_token_budget",
    "repetition_detection",
    "skip_reading_prefix_cache",
)
"""Checked by the backend alone."""
_PASSED_LISTS: Final = ("stop_token_ids", "bad_words")


def read_sampling(fields: Fields, model: LanguageModel) -> dict[str, Any]:
    """Return the sampling parameters but for max_tokens and logprobs, the model's defaults where the request has none."""
    sampling: dict[str, Any] = dict(model.card.sampling_defaults)
    for name in _PASSED:
        value = fields.any(name)
        if value is not None:
            sampling[name] = value
    for name in _PASSED_LISTS:
        items = fields.items(name, MAX_LIST)
        if items is not None:
            sampling[name] = items
    allowed = fields.items("allowed_token_ids", model.card.vocab_size, "tokens")
    if allowed is not None:
        sampling["allowed_token_ids"] = allowed
    bias = fields.mapping("logit_bias")
    if bias:
        if len(bias) > MAX_LIST:
            raise refusal(f"'logit_bias': {len(bias)} tokens, at most {MAX_LIST} are taken", "logit_bias")
        sampling["logit_bias"] = bias
    for name, low, high in (
        ("temperature", 0.0, 2.0),
        ("top_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
    ):
        number = fields.number(name, low, high)
        if number is not None:
            sampling[name] = number
    if sampling.get("top_p") == 0:  # nothing but the likeliest token is left
        sampling["temperature"] = 0.0
        del sampling["top_p"]
    stop = _read_stop(fields)
    if stop:
        sampling["stop"] = stop
    n = fields.integer("n", 1, MAX_N)
    if n is not None:
        sampling["n"] = n
    if fields.has("logprob_token_ids"):
        raise unsupported(
            "logprob_token_ids", "'logprob_token_ids' is not served; 'logprobs' tells the likeliest tokens"
        )
    return sampling


def _read_stop(fields: Fields) -> list[str]:
    if isinstance(fields.any("stop"), str):
        stops: list[Any] = [fields.any("stop")]
    else:
        stops = list(fields.items("stop", MAX_STOPS, "stop strings") or ())
    for number, stop in enumerate(stops):
        name = "stop" if isinstance(fields.any("stop"), str) else f"stop[{number}]"
        if not isinstance(stop, str):
            raise fields.wrong(name, "a string", stop)
        if not stop:
            raise refusal(f"'{name}' is empty, and would end every text", name)
        if len(stop) > MAX_STOP:
            raise refusal(f"'{name}': {len(stop)} characters, at most {MAX_STOP} are taken", name)
    return stops


def check_choices(prompts: int, n: int, best_of: int | None) -> None:
    """Raise HttpError 400 where a request makes too many choices of its prompts."""
    count = prompts * (best_of or n)
    if count > MAX_CHOICES:
        many = "best_of" if best_of else "n"
        raise refusal(
            f"{prompts} prompts with {many} = {best_of or n} make {count} choices, at most {MAX_CHOICES}", many
        )


def read_streaming(fields: Fields) -> tuple[bool, bool, bool]:
    """Return `stream`, and of stream_options `include_usage` and `continuous_usage_stats`."""
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is None:
        return stream, False, False
    if not stream:
        raise refusal("'stream_options' is for 'stream': true alone", "stream_options")
    continuous = options.flag("continuous_usage_stats")
    options.flag("include_obfuscation")
    return stream, options.flag("include_usage"), continuous


def read_prompt_logprobs(fields: Fields, model: LanguageModel, *, stream: bool) -> int | None:
    """Return how many likely tokens are wanted of each place of the prompt, -1 = all, None = no log probabilities."""
    wanted = fields.integer("prompt_logprobs", -1, None)
    if wanted is None:
        return None
    if stream:
        raise refusal("'prompt_logprobs' cannot be streamed", "prompt_logprobs")
    check_logprobs("prompt_logprobs", wanted, model)
    return wanted


def check_logprobs(name: str, wanted: int, model: LanguageModel) -> None:
    """Raise HttpError 400 for more likely tokens than the model tells; -1 is its whole vocabulary."""
    most = model.card.max_logprobs
    if most >= 0 and not 0 <= wanted <= most:
        raise refusal(f"'{name}': expected an integer from 0 to {most}, got {wanted}", name)


def read_beam_width(fields: Fields, n: int, *, stream: bool) -> int | None:
    """Return how many beams a beam search has, which is `n`; None = no beam search. Raises HttpError 400."""
    if not fields.flag("use_beam_search"):
        return None
    if stream:
        raise refusal("'use_beam_search' cannot be streamed: the best beams are known at the end", "use_beam_search")
    return n


def read_length_penalty(fields: Fields) -> float:
    """Return the power of its length by which a beam's score is divided. Raises HttpError 400."""
    penalty = fields.number("length_penalty", -10.0, 10.0)
    return 1.0 if penalty is None else penalty


def read_priority(fields: Fields) -> int:
    """Return the priority; lower runs first."""
    return fields.integer("priority", -_INT64, _INT64 - 1) or 0


def read_cache_salt(fields: Fields) -> str | None:
    """Return what keeps a request's prompt apart from others' in the prefix cache."""
    return fields.needed_text("cache_salt", 128) if fields.has("cache_salt") else None


def too_many_tokens(name: str, count: int, model: LanguageModel) -> HttpError:
    """Return the error of a prompt that is longer than the model."""
    length = model.card.max_model_len
    return refusal(
        f"'{name}' has {count} tokens; the model takes {length} of prompt and answer together",
        name,
        "context_length_exceeded",
    )


def read_timeout(fields: Fields) -> int:
    """Return the microseconds for which a request may wait in the queue; 0 = as its model is set."""
    return fields.integer("timeout", 0) or 0
