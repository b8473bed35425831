"""The end of a model's reasoning, where a request wants only so many tokens of it. Pure.

Which token is forced is a function of the output alone, so that a guess may be checked and a step computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_backends.llm.grammar import ReasoningMarks, last_index
from headrace_backends.llm.request import GenerationRequest


def forced_token(request: GenerationRequest, output: Sequence[int]) -> int | None:
    """Return the token that has to follow `output`, since the reasoning has had its budget; None where any may.

    Reasoning begins in the prompt, if that leaves it open, or where the output opens it. Tokens between the marks count.
    """
    budget, marks = request.params.thinking_token_budget, request.reasoning
    if budget is None or marks is None:
        return None
    if request.structured is not None and not request.structured.after_reasoning:
        return None
    began = _began(request.prompt_token_ids, output, marks)
    if began is None or len(output) - began < budget or last_index(output[began:], marks.end) >= 0:
        return None
    return marks.end[(len(output) - began - budget) % len(marks.end)]


def _began(prompt: Sequence[int], output: Sequence[int], marks: ReasoningMarks) -> int | None:
    """Return the place in the output where reasoning begins."""
    if last_index(prompt, marks.start) > last_index(prompt, marks.end):
        return 0
    opened = last_index(output, marks.start)
    return None if opened < 0 else opened + len(marks.start)
