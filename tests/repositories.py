"""Model repositories written for a test: folders with a config.pbtxt, a version and a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

SAMPLES = Path(__file__).resolve().parent.parent / "model_repository"


def identity_config(
    name: str, datatype: str = "FP32", dims: str = "-1", max_batch_size: int = 8, extra: str = "", **parameters: str
) -> str:
    """Return the config.pbtxt of an identity model with one pair of tensors that may be told to misbehave."""
    settings = {"allow_misbehaviour": "true", **parameters}
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in settings.items()]
    return "\n".join(
        [
            f'name: "{name}" backend: "identity" max_batch_size: {max_batch_size}',
            f'input [ {{ name: "INPUT0" data_type: TYPE_{datatype} dims: [ {dims} ] }} ]',
            f'output [ {{ name: "OUTPUT0" data_type: TYPE_{datatype} dims: [ {dims} ] }} ]',
            *lines,
            extra,
        ]
    )


def add_identity(repository: Path, name: str, version: int = 1, **config: object) -> Path:
    """Write an identity model; keywords as for identity_config. Returns its folder."""
    folder = repository / name
    (folder / str(version)).mkdir(parents=True)
    (folder / "config.pbtxt").write_text(identity_config(name, **config))  # type: ignore[arg-type]
    return folder


def add_decoupled(repository: Path, name: str, **config: object) -> Path:
    """Write an identity model that gives its input back `responses` times; keywords as for identity_config.

    A request may say for itself `responses`, `response_delay_ms`, `empty_final` and what goes wrong after them.
    """
    return add_identity(repository, name, extra="model_transaction_policy { decoupled: true }", **config)


def add_onnx(
    repository: Path, name: str, write: Callable[[Path], object], version: int = 1, config: str | None = None
) -> Path:
    """Write an ONNX model with `write(path)`; without `config` the folder has none. Returns its folder."""
    folder = repository / name
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    write(folder / str(version) / "model.onnx")
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder


def add_sample(repository: Path, name: str) -> Path:
    """Copy a model of the sample repository. Returns its folder."""
    return Path(shutil.copytree(SAMPLES / name, repository / name))
