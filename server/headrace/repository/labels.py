"""Label files: the names of an output's classes, one a line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace.repository.model_config import ConfigError, ModelConfig, Problem
from headrace_protocol._generated import model_config_pb2 as pb

MAX_LABEL_BYTES: Final = 16 << 20
"""Largest label file that is read."""


def load_labels(path: Path) -> tuple[str, ...]:
    """Return the lines of `path` without their ends (LF or CRLF); empty lines stay, so that indexes stay right.

    Raises ConfigError where the file cannot be read as UTF-8 text.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_LABEL_BYTES + 1)
        if len(content) > MAX_LABEL_BYTES:
            raise ConfigError([Problem("", f"label file {path.name} has more than {MAX_LABEL_BYTES} bytes")])
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([Problem("", f"label file {path.name} cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([Problem("", f"label file {path.name} is not UTF-8 text: {error.reason}")]) from None
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return tuple(line.removesuffix("\r") for line in lines)


def label_path(model_directory: Path, filename: str) -> Path | None:
    """Return where `filename` lies, or None where that is outside the model's directory, links followed."""
    root = model_directory.resolve()
    try:
        path = (root / filename).resolve()
    except (OSError, ValueError, RuntimeError):
        return None
    return path if path != root and path.is_relative_to(root) else None


def labels_of(config: ModelConfig, model_directory: Path) -> Mapping[str, tuple[str, ...]]:
    """Return the class labels of a model by output, of those that have any. Raises ConfigError."""
    labels = {}
    for output in config.outputs:
        path = label_path(model_directory, output.label_filename) if output.label_filename else None
        if path is not None:
            labels[output.name] = load_labels(path)
    return labels


def check_label_files(proto: pb.ModelConfig, model_directory: Path) -> list[Problem]:
    """Return what is wrong with the label files that the outputs name: outside the model's directory, or missing."""
    problems = []
    for index, tensor in enumerate(proto.output):
        if not tensor.label_filename:
            continue
        where = f"output[{index}].label_filename"
        path = label_path(model_directory, tensor.label_filename)
        if path is None:
            problems.append(Problem(where, f"{tensor.label_filename!r} lies outside the model's directory"))
        elif not path.is_file():
            problems.append(Problem(where, f"there is no file {tensor.label_filename!r} in the model's directory"))
    return problems
