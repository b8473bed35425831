"""Defaults written out: what every configuration gets before it is checked and shown, Triton's rules.

Changes the message in place. Values that make no sense stay as they are: saying so is validation's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.repository.platforms import ENSEMBLE
from headrace.types import LATEST
from headrace_protocol._generated import model_config_pb2 as pb

DEFAULT_SEQUENCE_IDLE_US: Final = 1_000_000
TWO_ON_CPU: Final = frozenset({"onnxruntime", "tensorflow"})
"""Backends of which a CPU group gets two instances where the configuration gives no count."""


@dataclass(frozen=True, slots=True)
class NormaliseSettings:
    """What the defaults depend on besides the configuration."""

    gpu_count: int = 0
    """GPUs that the server may use, numbered from 0."""


def normalise(proto: pb.ModelConfig, *, model_name: str, server: NormaliseSettings) -> None:
    """Write the defaults into `proto`. Idempotent."""
    if not proto.name:
        proto.name = model_name
    _normalise_version_policy(proto)
    _normalise_batching(proto)
    if proto.platform == ENSEMBLE or proto.HasField("ensemble_scheduling"):
        for step in proto.ensemble_scheduling.step:
            step.model_version = step.model_version or LATEST
        return
    if not proto.optimization.HasField("input_pinned_memory"):
        proto.optimization.input_pinned_memory.enable = True
    if not proto.optimization.HasField("output_pinned_memory"):
        proto.optimization.output_pinned_memory.enable = True
    if not proto.instance_group:
        proto.instance_group.add(name=proto.name)
    for index, group in enumerate(proto.instance_group):
        _normalise_group(group, f"{proto.name}_{index}", proto.backend, server.gpu_count)


def _normalise_version_policy(proto: pb.ModelConfig) -> None:
    policy = proto.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice is None or (choice == "latest" and policy.latest.num_versions == 0):
        policy.latest.num_versions = 1


def _normalise_batching(proto: pb.ModelConfig) -> None:
    batches = proto.max_batch_size > 0
    if proto.HasField("dynamic_batching"):
        if batches and not proto.dynamic_batching.preferred_batch_size:
            proto.dynamic_batching.preferred_batch_size.append(proto.max_batch_size)
    elif proto.HasField("sequence_batching"):
        sequences = proto.sequence_batching
        if sequences.max_sequence_idle_microseconds == 0:
            sequences.max_sequence_idle_microseconds = DEFAULT_SEQUENCE_IDLE_US
        if batches and sequences.HasField("oldest") and not sequences.oldest.preferred_batch_size:
            sequences.oldest.preferred_batch_size.append(proto.max_batch_size)


def _normalise_group(group: pb.ModelInstanceGroup, name: str, backend: str, gpu_count: int) -> None:
    if not group.name:
        group.name = name
    if group.kind == pb.ModelInstanceGroup.KIND_AUTO:
        usable = gpu_count > 0 and all(0 <= gpu < gpu_count for gpu in group.gpus)
        group.kind = pb.ModelInstanceGroup.KIND_GPU if usable else pb.ModelInstanceGroup.KIND_CPU
    on_cpu = group.kind == pb.ModelInstanceGroup.KIND_CPU
    if group.count == 0:
        group.count = 2 if on_cpu and backend in TWO_ON_CPU else 1
    if group.kind == pb.ModelInstanceGroup.KIND_GPU and not group.gpus:
        group.gpus.extend(range(gpu_count))
