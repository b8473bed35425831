"""Whether a chat template takes a message's content as one text or as a list of parts, and messages as it takes them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes

from headrace_protocol.errors import invalid


class _Generation(jinja2.ext.Extension):
    """Reads `{% generation %}`, which transformers' templates may have."""

    tags = {"generation"}  # noqa: RUF012 - the interface is jinja's

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=32)
def takes_parts(template: str) -> bool:
    """Say whether a template walks over the parts of a message's content; one that cannot be parsed does not."""
    try:
        tree = jinja2.Environment(  # noqa: S701 - nothing is rendered
            extensions=[_Generation, "jinja2.ext.loopcontrols"]
        ).parse(template)
    except jinja2.TemplateError:
        return False
    names = {"content"}
    for node in tree.find_all(jinja2.nodes.Assign):
        if isinstance(node.target, jinja2.nodes.Name) and _is_content(node.node, names):
            names.add(node.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(jinja2.nodes.For))


def _is_content(node: Any, names: set[str]) -> bool:
    while isinstance(node, jinja2.nodes.Filter):
        node = node.node
    if isinstance(node, jinja2.nodes.Getattr):
        return bool(node.attr == "content")
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return isinstance(node, jinja2.nodes.Name) and node.name in names


def as_template_takes(messages: Sequence[dict[str, Any]], *, parts: bool) -> list[dict[str, Any]]:
    """Return the messages with contents as texts, or as lists of `{"type": "text", "text": ...}` where `parts` is set.

    Raises INVALID_ARG for a part that is no text.
    """
    return [
        message if message.get("content") is None else _converted(message, at, parts=parts)
        for at, message in enumerate(messages)
    ]


def _converted(message: dict[str, Any], at: int, *, parts: bool) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]} if parts else message
    texts = list(_texts(content, f"messages[{at}].content"))
    converted = [{"type": "text", "text": text} for text in texts] if parts else "\n".join(texts)
    return {**message, "content": converted}


def _texts(content: Any, where: str) -> Iterator[str]:
    if not isinstance(content, list):
        raise invalid(f"{where}: expected a text or a list of parts, got {type(content).__name__}")
    for at, part in enumerate(content):
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict) and isinstance(text := part.get("text", part.get("refusal")), str):
            yield text
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise invalid(f"{where}[{at}]: this model reads text; a part of the type {kind} is none")
