"""What a program of torch.export writes to: its inputs, or tensors that it keeps from one run to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node


def written_inputs(program: ExportedProgram) -> set[str]:
    """Return the names, in the graph, of the user's inputs that a run writes to."""
    users = {found.arg.name for found in program.graph_signature.input_specs if found.kind is InputKind.USER_INPUT}
    return (users & _written(program)) | set(program.graph_signature.user_inputs_to_mutate.values())


def keeps_state(program: ExportedProgram) -> bool:
    """Return whether a run writes to parameters, buffers or constants of the program."""
    users = {found.arg.name for found in program.graph_signature.input_specs if found.kind is InputKind.USER_INPUT}
    return bool(program.graph_signature.buffers_to_mutate) or bool(_written(program) - users)


def _written(program: ExportedProgram) -> set[str]:
    """Return the names of placeholders to whose memory some operator writes, by itself or through a view."""
    written: set[str] = set()
    for node in program.graph.nodes:
        schema = _schema(node)
        if schema is not None and schema.is_mutable:
            for argument, value in _arguments(node, schema):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for target in _nodes(value):
                        written |= _sources(target)
    return written


def _sources(node: Node) -> set[str]:
    """Return the placeholders whose memory `node` may be part of."""
    found: set[str] = set()
    seen: set[Node] = set()
    open_nodes = [node]
    while open_nodes:
        current = open_nodes.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "placeholder":
            found.add(current.name)
            continue
        schema = _schema(current)
        if schema is None:  # taking an element out of a result, say: nothing tells, so it may be part of any argument
            open_nodes.extend(current.all_input_nodes)
            continue
        for argument, value in _arguments(current, schema):
            if argument.alias_info is not None:
                open_nodes.extend(_nodes(value))
    return found


def _schema(node: Node) -> Any:
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def _arguments(node: Node, schema: Any) -> list[tuple[Any, Any]]:
    by_name = {argument.name: argument for argument in schema.arguments}
    positional = list(zip(schema.arguments, node.args, strict=False))
    return positional + [(by_name[name], value) for name, value in node.kwargs.items() if name in by_name]


def _nodes(value: Any) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    return [node for part in value for node in _nodes(part)] if isinstance(value, (list, tuple)) else []
