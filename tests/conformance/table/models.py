"""The repository of the conformance table: models of every datatype and rank, and some that are not well."""

from __future__ import annotations

from pathlib import Path

from repositories import add_identity, add_sample

DATATYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES", "BF16"),
)
LOADED = (
    *("simple", "identity", "digits", "plane", "rows", "scalar", "four", "echo", "text", "slow", "urgent"),
    *("repeat", "drip"),
    *("broken", "versions", "labelled"),
)
"""What is loaded at start; `parked` never is."""
LABELS = "a\r\nb b\r\n\r\n"
"""Four classes, of which two have a label."""


def write(repository: Path) -> None:
    """Write every model of the table."""
    for sample in ("simple", "identity", "digits", "repeat"):
        add_sample(repository, sample)
    _every_datatype(repository, "plane", "-1, -1")
    _every_datatype(repository, "rows", "-1", max_batch_size=8)
    _every_datatype(repository, "scalar", "1", reshape="reshape: { shape: [ ] }")
    add_identity(repository, "four", dims="4", max_batch_size=0)
    add_identity(repository, "echo", dims="-1", max_batch_size=0, echo_parameters="true", allow_misbehaviour="false")
    add_identity(repository, "text", datatype="STRING", dims="-1", max_batch_size=0)
    add_identity(repository, "slow", dims="1", max_batch_size=1)
    add_identity(repository, "urgent", dims="1", max_batch_size=4, extra=_URGENT)
    add_identity(repository, "drip", dims="1", max_batch_size=0, extra=_DECOUPLED)
    add_identity(repository, "broken", fail_load="the weights are stale")
    add_identity(repository, "parked")
    for version in (1, 3):
        (repository / "versions" / str(version)).mkdir(parents=True)
    text = (repository / "four" / "config.pbtxt").read_text().replace('"four"', '"versions"')
    (repository / "versions" / "config.pbtxt").write_text(text + "\nversion_policy { all { } }")
    _labelled(repository)


_DECOUPLED = "model_transaction_policy { decoupled: true }"
_URGENT = """dynamic_batching { priority_levels: 2 default_priority_level: 2
  default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 10000000 } }"""


def _every_datatype(repository: Path, name: str, dims: str, max_batch_size: int = 0, reshape: str = "") -> None:
    """Write an identity model with an optional input, and an output, for each datatype."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    text = f'name: "{name}" backend: "identity" max_batch_size: {max_batch_size}\n'
    for kind in DATATYPES:
        stored = f"data_type: TYPE_{'STRING' if kind == 'BYTES' else kind} dims: [ {dims} ] {reshape}"
        text += f'input [ {{ name: "INPUT_{kind}" {stored} optional: true }} ]\n'
        text += f'output [ {{ name: "OUTPUT_{kind}" {stored} }} ]\n'
    (folder / "config.pbtxt").write_text(text)


def _labelled(repository: Path) -> None:
    folder = add_identity(repository, "labelled", dims="4")
    (folder / "labels.txt").write_bytes(LABELS.encode())
    config = folder / "config.pbtxt"
    output = 'output [ { name: "OUTPUT0"'
    config.write_text(config.read_text().replace(output, f'{output} label_filename: "labels.txt"'))
