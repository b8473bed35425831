"""A call as vLLM takes it: the arguments of its SamplingParams, made of ours. Pure; vLLM itself is not imported.

Most of our names are vLLM's. `max_tokens` of 0 is not: one token is generated there, and not told (`vllm_outputs`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.errors import invalid
from headrace_protocol.generation import StructuredOutput

_OURS: Final = frozenset({"truncate_prompt_tokens", "truncation_side", "repetition_detection"})
"""Not passed on by name."""


def sampling_arguments(params: SamplingParams) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams, without structured outputs and the kind of output."""
    arguments = {name: value for name, value in msgspec.structs.asdict(params).items() if name not in _OURS}
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        if arguments[name] is not None:
            arguments[name] = list(arguments[name])
    if params.max_tokens == 0:
        arguments |= {"max_tokens": 1, "min_tokens": 0, "stop": [], "detokenize": False}
    if not params.skip_reading_prefix_cache:
        del arguments["skip_reading_prefix_cache"]  # vLLM's own default depends on prompt_logprobs
    return arguments


def repetition_arguments(params: SamplingParams) -> dict[str, int] | None:
    """Return the arguments of vLLM's RepetitionDetectionParams, if they are wanted."""
    rule = params.repetition_detection
    return None if rule is None else dict(msgspec.structs.asdict(rule))


_STRUCTURED: Final[Mapping[str, Callable[[str], dict[str, Any]]]] = {
    "json_object": lambda _: {"json_object": True},
    "json_schema": lambda spec: {"json": spec},
    "regex": lambda spec: {"regex": spec},
    "choice": lambda spec: {"choice": json.loads(spec)},
    "grammar": lambda spec: {"grammar": spec},
    "structural_tag": lambda spec: {"structural_tag": spec},
}


def structured_arguments(structured: StructuredOutput) -> dict[str, Any]:
    """Return the arguments of vLLM's StructuredOutputsParams. Raises INVALID_ARG for choices that are no JSON list."""
    try:
        return _STRUCTURED[structured.kind](structured.spec)
    except ValueError as error:
        raise invalid(f"structured: the choices are no JSON: {error}") from error
