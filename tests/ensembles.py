"""Ensembles written for a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """A step: its model, and tensors of the ensemble by the model's inputs and outputs."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    version: int = -1


def ident(model: str, source: str, target: str, version: int = -1) -> Step:
    """Return a step by a model with INPUT0 and OUTPUT0."""
    return Step(model, {"INPUT0": source}, {"OUTPUT0": target}, version)


def ensemble_config(
    steps: Sequence[Step],
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    extra: str = "",
    max_inflight: int = 0,
) -> str:
    """Return a config.pbtxt. Tensors are given as "FP32 -1 4"; without them there are INPUT0 and OUTPUT0, FP32 [ -1 ]."""
    lines = ['platform: "ensemble"', extra]
    for kind, tensors in (("input", inputs or {"INPUT0": "FP32 -1"}), ("output", outputs or {"OUTPUT0": "FP32 -1"})):
        for name, text in tensors.items():
            datatype, *dims = text.split()
            optional = "optional: true" if "?" in dims else ""
            shape = ", ".join(dim for dim in dims if dim != "?")
            lines.append(f'{kind} [ {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {shape} ] {optional} }} ]')
    lines.append("ensemble_scheduling {")
    for step in steps:
        maps = [
            f'{kind} {{ key: "{key}" value: "{value}" }}'
            for kind, mapping in (("input_map", step.inputs), ("output_map", step.outputs))
            for key, value in mapping.items()
        ]
        lines.append(f'step [ {{ model_name: "{step.model}" model_version: {step.version} {" ".join(maps)} }} ]')
    lines.append(f"max_inflight_requests: {max_inflight} }}" if max_inflight else "}")
    return "\n".join(lines)


def add_ensemble(
    repository: Path,
    name: str,
    steps: Sequence[Step],
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    extra: str = "",
    max_inflight: int = 0,
) -> Path:
    """Write an ensemble; see ensemble_config. Returns its folder."""
    folder = repository / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(ensemble_config(steps, inputs, outputs, extra, max_inflight))
    return folder
