"""What a model of ours says of itself: most of it out of its chat template and its generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace_backends.llm.chat_formats import chosen_format, reasoning_format_of, tool_format_of
from headrace_backends.llm.loading import LoadedModel
from headrace_backends.llm.settings import Settings
from headrace_backends.llm.text_codec import HfTextCodec
from headrace_protocol.errors import invalid
from headrace_protocol.generation import AdapterCard, ModelCard, Task

_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def card_of(
    settings: Settings, loaded: LoadedModel, text: HfTextCodec, max_model_len: int, adapter_ranks: Mapping[str, int]
) -> ModelCard:
    template = text.template_with_tools or ""
    tasks: tuple[Task, ...] = ("generate", "embed") if settings.task == "auto" else ()
    if settings.task != "auto":
        tasks = ("embed",) if settings.task == "embed" else ("generate",)
    return ModelCard(
        max_model_len=max_model_len,
        vocab_size=loaded.vocab_size,
        tasks=(*tasks, "tokenize", "detokenize"),
        dtype=str(loaded.dtype).removeprefix("torch."),
        has_chat_template=bool(template),
        tool_format=chosen_format(settings.tool_call_parser, tool_format_of(template)),
        reasoning_format=chosen_format(settings.reasoning_parser, reasoning_format_of(template)),
        adapters=tuple(AdapterCard(name, rank) for name, rank in adapter_ranks.items()),
        aliases=settings.served_model_name,
        sampling_defaults=sampling_defaults(settings, loaded.sampling_defaults),
        max_logprobs=loaded.vocab_size if settings.max_logprobs < 0 else settings.max_logprobs,
        embedding_width=int(loaded.model.config.get_text_config().hidden_size),
    )


def sampling_defaults(settings: Settings, makers: Mapping[str, float]) -> dict[str, float]:
    """Return the sampling of requests that do not say theirs, by vLLM's rule: the makers' unless the settings say otherwise."""
    found: dict[str, float] = {}
    if settings.generation_config == "auto":
        found = dict(makers)
    elif settings.generation_config != "vllm":
        path = Path(settings.generation_config)
        path = path / "generation_config.json" if path.is_dir() else path
        try:
            given = json.loads(path.read_bytes())
            found = {name: given[name] for name in _DEFAULTS if given.get(name) is not None}
        except (OSError, ValueError, AttributeError) as error:
            raise invalid(f"generation_config: cannot read {path}: {error}") from error
    found |= settings.override_generation_config
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found
