"""The rules of `model_warmup`: what can be told of a sample by the configuration alone, and whether its files are there.

Whether a sample fits the model is told by what checks requests, when it is made into one (instances/warm_up.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from headrace.repository.model_config import Problem
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.datatype import element_count

FOLDER: Final = "warmup"
MAX_ELEMENTS: Final = 1 << 40
MAX_SAMPLES: Final = 1024


def validate_warm_up(proto: pb.ModelConfig, *, draft: bool) -> list[Problem]:
    """Return what is wrong with the samples. A draft may not know yet whether the model batches."""
    problems = []
    if len(proto.model_warmup) > MAX_SAMPLES:
        problems.append(Problem("model_warmup", f"expected at most {MAX_SAMPLES}, got {len(proto.model_warmup)}"))
    limit = max(1, proto.max_batch_size)
    for index, sample in enumerate(proto.model_warmup):
        path = f"model_warmup[{index}]"
        if not sample.name:
            problems.append(Problem(f"{path}.name", "the sample has no name"))
        if sample.batch_size > limit and not (draft and proto.max_batch_size == 0):
            problems.append(Problem(f"{path}.batch_size", f"expected at most {limit}, got {sample.batch_size}"))
        if not sample.inputs:
            problems.append(Problem(f"{path}.inputs", "the sample has no inputs"))
        for name, given in sorted(sample.inputs.items()):
            problems += _input(given, f"{path}.inputs.{name}")
    return problems


def _input(given: pb.ModelWarmup.Input, path: str) -> list[Problem]:
    problems = []
    if given.data_type == pb.TYPE_INVALID:
        problems.append(Problem(f"{path}.data_type", "missing"))
    problems += [
        Problem(f"{path}.dims[{place}]", f"expected a size, for a sample leaves nothing open, got {dim}")
        for place, dim in enumerate(given.dims)
        if dim < 0
    ]
    if not problems and element_count(given.dims) > MAX_ELEMENTS:
        problems.append(Problem(f"{path}.dims", f"expected at most {MAX_ELEMENTS} elements, got {list(given.dims)}"))
    if given.WhichOneof("input_data_type") is None:
        text = "the input has no data: give zero_data, random_data or input_data_file"
        problems.append(Problem(path, text))
    return problems


def warm_up_file(model_directory: Path, filename: str) -> Path | None:
    """Return where a sample's file lies, or None where that is outside the folder for them, links followed."""
    root = (model_directory / FOLDER).resolve()
    try:
        path = (root / filename).resolve()
    except (OSError, ValueError, RuntimeError):
        return None
    return path if path != root and path.is_relative_to(root) else None


def check_warm_up_files(proto: pb.ModelConfig, model_directory: Path) -> list[Problem]:
    """Return what is wrong with the files that the samples name: outside their folder, or missing."""
    problems = []
    for index, sample in enumerate(proto.model_warmup):
        for name, given in sorted(sample.inputs.items()):
            if given.WhichOneof("input_data_type") != "input_data_file":
                continue
            where = f"model_warmup[{index}].inputs.{name}.input_data_file"
            path = warm_up_file(model_directory, given.input_data_file)
            if path is None:
                text = f"{given.input_data_file!r} lies outside the model's folder {FOLDER!r}"
                problems.append(Problem(where, text))
            elif not path.is_file():
                text = f"there is no file {given.input_data_file!r} in the model's folder {FOLDER!r}"
                problems.append(Problem(where, text))
    return problems
