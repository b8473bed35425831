"""What a configuration may say and this server does not do: an error where results would differ, a note for mere hints.

Whoever makes a feature work deletes its row. Paths are field names from the top; `[]` stands for every item.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import Message

from headrace.repository.model_config import Problem
from headrace.repository.platforms import TENSORRT
from headrace_protocol._generated import model_config_pb2 as pb

UNSUPPORTED: Final = {
    "model_repository_agents": "repository agents are not supported yet",
    "model_operations.op_library_filename": "only the backend 'onnxruntime' loads custom operators",
    "instance_group[].secondary_devices": "only the backend 'tensorrt' uses a second device, a DLA core",
}
"""A field that is set -> why the model cannot be served as its author means it."""

IGNORED: Final = {
    "runtime": "names a file of another server's backend and is not used",
    "cc_model_filenames": "is not used: every device gets default_model_filename",
    "optimization.priority": "is not used",
    "optimization.cuda": "is not used",
    "optimization.gather_kernel_buffer_threshold": "is not used",
    "optimization.eager_batching": "is not used",
}
"""A field that is set -> what happens to this hint. Answers are the same without it."""

USED_BY: Final = {
    "cc_model_filenames": frozenset({TENSORRT}),
    "instance_group[].secondary_devices": frozenset({TENSORRT}),
    "model_operations.op_library_filename": frozenset({"onnxruntime"}),
    "optimization.cuda": frozenset({TENSORRT}),
    "optimization.priority": frozenset({TENSORRT}),
    "runtime": frozenset({"pytorch"}),
}
"""A field of the two above -> the backends that do use it."""


def unsupported(proto: pb.ModelConfig) -> list[Problem]:
    """Return a problem for every field of UNSUPPORTED that `proto` sets."""
    return [Problem(where, text) for path, text in _rows(UNSUPPORTED, proto) for where in set_fields(proto, path)]


def ignored(proto: pb.ModelConfig) -> list[str]:
    """Return a sentence for every hint of IGNORED that `proto` sets."""
    return [f"{where} {text}" for path, text in _rows(IGNORED, proto) for where in set_fields(proto, path)]


def _rows(table: dict[str, str], proto: pb.ModelConfig) -> list[tuple[str, str]]:
    """Return the rows that apply to the backend of `proto`."""
    return [(path, text) for path, text in table.items() if proto.backend not in USED_BY.get(path, ())]


def set_fields(message: Message, path: str) -> list[str]:
    """Return the concrete paths that match `path` and are set: not a default, not an empty list."""
    head, _, rest = path.partition(".")
    name = head.removesuffix("[]")
    value: Any = next((value for field, value in message.ListFields() if field.name == name), None)
    if value is None:
        return []
    if not rest:
        return [name]
    members = [(f"{name}[{index}]", item) for index, item in enumerate(value)] if head != name else [(name, value)]
    return [f"{where}.{found}" for where, member in members for found in set_fields(member, rest)]
