"""A normalised, validated message into the frozen ModelConfig that the server decides by."""

from __future__ import annotations

from types import MappingProxyType

from headrace.repository.batch_tensors import scattered_outputs
from headrace.repository.config_text import expanded_parameters
from headrace.repository.model_config import (
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    Need,
    QueuePolicy,
    TensorConfig,
    TimeoutAction,
    VersionPolicy,
)
from headrace.repository.padding import padding_of
from headrace.repository.sequence_settings import sequence_settings
from headrace_protocol import datatype
from headrace_protocol._generated import model_config_pb2 as pb


def freeze(proto: pb.ModelConfig, model_directory: str = "") -> ModelConfig:
    """Return the frozen form of `proto`, which must be normalised and valid; `proto` belongs to the result.

    In `parameters` the name of the model's directory is expanded, in the message it stays as written.
    """
    batching = _dynamic_batching(proto.dynamic_batching) if proto.HasField("dynamic_batching") else None
    return ModelConfig(
        name=proto.name,
        backend=proto.backend,
        platform=proto.platform,
        max_batch_size=proto.max_batch_size,
        inputs=tuple(_input(tensor) for tensor in proto.input),
        outputs=tuple(_output(tensor) for tensor in proto.output),
        instance_groups=tuple(_group(group) for group in proto.instance_group),
        version_policy=_version_policy(proto.version_policy),
        dynamic_batching=batching,
        decoupled=proto.model_transaction_policy.decoupled,
        default_model_filename=proto.default_model_filename,
        parameters=MappingProxyType(dict(expanded_parameters(proto, model_directory))),
        metric_tags=MappingProxyType(dict(sorted(proto.metric_tags.items()))),
        proto=proto,
        sequence_batching=sequence_settings(proto),
        scattered=scattered_outputs(proto),
        padding=padding_of(proto),
    )


def _input(tensor: pb.ModelInput) -> TensorConfig:
    return TensorConfig(
        name=tensor.name,
        datatype=datatype.BY_NUMBER[tensor.data_type],
        dims=tuple(tensor.dims),
        reshape=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        optional=tensor.optional,
        allow_ragged_batch=tensor.allow_ragged_batch,
        is_shape_tensor=tensor.is_shape_tensor,
    )


def _output(tensor: pb.ModelOutput) -> TensorConfig:
    return TensorConfig(
        name=tensor.name,
        datatype=datatype.BY_NUMBER[tensor.data_type],
        dims=tuple(tensor.dims),
        reshape=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        is_shape_tensor=tensor.is_shape_tensor,
        label_filename=tensor.label_filename,
    )


def _group(group: pb.ModelInstanceGroup) -> InstanceGroup:
    return InstanceGroup(
        name=group.name,
        kind=pb.ModelInstanceGroup.Kind.Name(group.kind),
        count=group.count,
        gpus=tuple(group.gpus),
        passive=group.passive,
        host_policy=group.host_policy,
        needs=tuple(
            Need(resource.name.lower(), resource.count, everywhere=getattr(resource, "global"))
            for resource in group.rate_limiter.resources
        ),
        priority=max(1, group.rate_limiter.priority),
    )


def _version_policy(policy: pb.ModelVersionPolicy) -> VersionPolicy:
    match policy.WhichOneof("policy_choice"):
        case "all":
            return VersionPolicy(latest=0)
        case "specific":
            return VersionPolicy(specific=tuple(policy.specific.versions))
        case _:
            return VersionPolicy(latest=policy.latest.num_versions)


def _dynamic_batching(batching: pb.ModelDynamicBatching) -> DynamicBatching:
    policies = {level: _queue_policy(policy) for level, policy in sorted(batching.priority_queue_policy.items())}
    return DynamicBatching(
        preferred_batch_sizes=tuple(sorted(set(batching.preferred_batch_size))),
        max_queue_delay_us=batching.max_queue_delay_microseconds,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        default_queue_policy=_queue_policy(batching.default_queue_policy),
        priority_queue_policies=MappingProxyType(policies),
    )


def _queue_policy(policy: pb.ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=TimeoutAction(pb.ModelQueuePolicy.TimeoutAction.Name(policy.timeout_action)),
        default_timeout_us=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )
