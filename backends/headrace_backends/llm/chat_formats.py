"""How a model writes calls of tools and its reasoning, by what its chat template says. Pure."""

from __future__ import annotations

from typing import Final

_TOOL_MARKS: Final = (
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(", "[func1(", "func_name(")),
    ("llama3_json", ("<|python_tag|>", '"parameters"', "ipython")),
)
"""What templates of models say that write calls of tools in each way; the first that is there counts."""


def tool_format_of(template: str) -> str | None:
    """Return how a model with that chat template writes calls of tools; None if the template has no tools."""
    if "tools" not in template:
        return None
    return next((name for name, marks in _TOOL_MARKS if any(mark in template for mark in marks)), None)


def reasoning_format_of(template: str) -> str | None:
    """Return how a model with that chat template sets its reasoning apart."""
    return "think_tags" if "<think>" in template or "</think>" in template else None


def chosen_format(given: str | None, detected: str | None) -> str | None:
    """Return what the settings say, where they say something; `none` is that there is no format."""
    return detected if given is None else None if given == "none" else given
