"""What a chat request says of tools and reasoning, for its model: the plan that the chat endpoint goes by."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.fields import Fields
from headrace.gateway.http.openai.reasoning import FORMATS, ReasoningSplitter, template_arguments
from headrace.gateway.http.openai.tools.formats import call_ids
from headrace.gateway.http.openai.tools.plan import ToolPlan, plan_tools
from headrace.gateway.http.openai.tools.reader import ChatReader
from headrace_protocol.generation import StructuredOutput

_source: Final = random.SystemRandom()


class ChatPlan:
    """Implements MessagePlan."""

    def __init__(
        self,
        tools: ToolPlan,
        make_id: Callable[[], str],
        template_arguments: dict[str, Any] | None,
        *,
        splits: bool,
        tells_reasoning: bool,
    ) -> None:
        self._tools = tools
        self._make_id = make_id
        self._splits = splits
        self._tells_reasoning = tells_reasoning
        self.template_arguments = template_arguments

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        return self._tools.told

    @property
    def structured(self) -> StructuredOutput | None:
        return self._tools.structured

    @property
    def tells_steps(self) -> bool:
        return self._splits

    @property
    def skip_special_tokens(self) -> bool:
        return not self._tools.keeps_special_tokens

    @property
    def legacy(self) -> bool:
        """Whether the answer has `function_call` in place of `tool_calls`, since the request has `functions`."""
        return self._tools.legacy

    def reader(self, *, in_reasoning: bool) -> ChatReader | None:
        parser = self._tools.parser(self._make_id)
        splitter = ReasoningSplitter(inside=in_reasoning) if self._splits else None
        if parser is None and splitter is None:
            return None
        return ChatReader(parser, splitter, self._tools.finish_reason, tells_reasoning=self._tells_reasoning)


def plan_chat(fields: Fields, model: LanguageModel, source: random.Random = _source) -> ChatPlan:
    """Return what the request says. Raises HttpError 400, naming the member at fault."""
    tools = plan_tools(fields, model.id, model.card.tool_format)
    return ChatPlan(
        tools,
        call_ids(model.card.tool_format, source),
        template_arguments(fields),
        splits=model.card.reasoning_format in FORMATS,
        tells_reasoning=fields.flag("include_reasoning", True),
    )
