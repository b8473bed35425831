"""Every rule that one configuration has to keep, by itself: Triton's, and a few of ours against silence.

Pure. All problems are reported, each with its field path. Rules of features that are not served yet come with those
features; until then unsupported.py refuses them as a whole.
"""

from __future__ import annotations

import itertools
import math
from typing import Final

from headrace.repository.batch_tensors import batch_tensor_problems
from headrace.repository.ensemble_config import validate_ensemble
from headrace.repository.model_config import Problem
from headrace.repository.padding import padding_problems
from headrace.repository.platforms import BY_PLATFORM, ENSEMBLE, TENSORRT
from headrace.repository.sequence_validation import validate_sequences
from headrace.repository.tensor_validation import validate_tensors
from headrace.repository.unsupported import unsupported
from headrace.repository.warm_up_validation import validate_warm_up
from headrace_protocol._generated import model_config_pb2 as pb

MAX_INSTANCES: Final = 1024
"""Most instances of one model."""
METRIC_FAMILIES: Final = frozenset({"nv_inference_first_response_histogram_ms"})
"""Metrics that a model may adjust."""


def validate(proto: pb.ModelConfig, *, model_name: str, gpu_count: int = 0, draft: bool = False) -> list[Problem]:
    """Return everything that is wrong with a normalised `proto`.

    A draft is a configuration that a backend may still complete: it may lack inputs, outputs and max_batch_size.
    """
    problems = _identity(proto, model_name)
    if proto.max_batch_size < 0:
        problems.append(Problem("max_batch_size", f"expected >= 0, got {proto.max_batch_size}"))
    problems += _version_policy(proto.version_policy)
    problems += validate_tensors(proto, draft=draft)
    problems += batch_tensor_problems(proto, draft=draft)
    problems += padding_problems(proto, draft=draft)
    if proto.HasField("dynamic_batching"):
        problems += _dynamic_batching(proto, draft=draft)
    if proto.HasField("sequence_batching"):
        problems += validate_sequences(proto, draft=draft)
    problems += _instance_groups(proto, gpu_count)
    problems += _model_metrics(proto.model_metrics)
    problems += validate_warm_up(proto, draft=draft)
    if proto.HasField("ensemble_scheduling"):
        problems += validate_ensemble(proto)
    if proto.response_cache.enable:
        problems += _response_cache(proto)
    problems += unsupported(proto)
    return problems


def _identity(proto: pb.ModelConfig, model_name: str) -> list[Problem]:
    problems = []
    if not proto.name:
        problems.append(Problem("name", "the model has no name"))
    elif proto.name != model_name:
        problems.append(
            Problem("name", f"expected the name of the model's directory, {model_name!r}, got {proto.name!r}")
        )
    platform, backend = proto.platform, proto.backend
    is_ensemble = platform == ENSEMBLE or proto.HasField("ensemble_scheduling")
    if is_ensemble and (platform != ENSEMBLE or backend):
        text = f"an ensemble has the platform {ENSEMBLE!r} and no backend, got {platform!r} and {backend!r}"
        problems.append(Problem("platform", text))
    elif is_ensemble and not proto.HasField("ensemble_scheduling"):
        problems.append(Problem("ensemble_scheduling", f"missing, though the platform is {ENSEMBLE!r}"))
    elif not is_ensemble and not platform and not backend:
        problems.append(Problem("backend", "neither backend nor platform says what runs the model"))
    elif not is_ensemble and not backend:
        known = ", ".join(BY_PLATFORM)
        problems.append(Problem("platform", f"expected one of {known}, or a backend beside it, got {platform!r}"))
    elif platform in BY_PLATFORM and BY_PLATFORM[platform].backend != backend:
        text = f"the platform {platform!r} belongs to the backend {BY_PLATFORM[platform].backend!r}, got {backend!r}"
        problems.append(Problem("backend", text))
    return problems


def _response_cache(proto: pb.ModelConfig) -> list[Problem]:
    """Return why answers cannot be kept: a stream, or a state, is not told by its request."""
    problems, path = [], "response_cache.enable"
    if proto.model_transaction_policy.decoupled:
        problems.append(Problem(path, "the answers of a decoupled model cannot be kept: switch one of the two off"))
    if proto.HasField("sequence_batching"):
        problems.append(Problem(path, "the answers of a model with sequence_batching depend on what came before"))
    return problems


def _version_policy(policy: pb.ModelVersionPolicy) -> list[Problem]:
    if policy.WhichOneof("policy_choice") != "specific":
        return []
    path = "version_policy.specific.versions"
    if not policy.specific.versions:
        return [Problem(path, "expected at least one version")]
    return [
        Problem(f"{path}[{index}]", f"expected a version >= 0, got {version}")
        for index, version in enumerate(policy.specific.versions)
        if version < 0
    ]


def _dynamic_batching(proto: pb.ModelConfig, *, draft: bool) -> list[Problem]:
    path, batching, problems = "dynamic_batching", proto.dynamic_batching, []
    limit_known = proto.max_batch_size > 0 or not draft
    for index, size in enumerate(batching.preferred_batch_size):
        where = f"{path}.preferred_batch_size[{index}]"
        if size <= 0:
            problems.append(Problem(where, f"expected a size > 0, got {size}"))
        elif limit_known and size > proto.max_batch_size:
            problems.append(Problem(where, f"expected at most max_batch_size = {proto.max_batch_size}, got {size}"))
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels and not 1 <= default <= levels:
        text = f"expected a level from 1 to priority_levels = {levels}, got {default}"
        problems.append(Problem(f"{path}.default_priority_level", text))
    elif default and not levels:
        problems.append(Problem(f"{path}.default_priority_level", "there are no levels: priority_levels is 0"))
    for level in sorted(batching.priority_queue_policy):
        if not 1 <= level <= levels:
            where = f"{path}.priority_queue_policy.{level}"
            problems.append(Problem(where, f"expected a level from 1 to priority_levels = {levels}"))
    if batching.preserve_ordering:
        problems += _preserved_order(batching)
    return problems


def _preserved_order(batching: pb.ModelDynamicBatching) -> list[Problem]:
    """Return what contradicts `preserve_ordering`: anything by which a request may overtake another."""
    path, problems = "dynamic_batching", []
    if batching.priority_levels > 1:
        text = f"with preserve_ordering there is one level, got {batching.priority_levels}"
        problems.append(Problem(f"{path}.priority_levels", text))
    policies = [(f"{path}.default_queue_policy", batching.default_queue_policy)]
    for level, policy in sorted(batching.priority_queue_policy.items()):
        policies.append((f"{path}.priority_queue_policy.{level}", policy))
    for where, policy in policies:
        if policy.timeout_action == pb.ModelQueuePolicy.DELAY and policy.default_timeout_microseconds:
            text = "DELAY lets others pass a request that timed out; preserve_ordering forbids that: use REJECT"
            problems.append(Problem(f"{where}.timeout_action", text))
    return problems


def _instance_groups(proto: pb.ModelConfig, gpu_count: int) -> list[Problem]:
    problems, seen, total = [], dict[str, int](), 0
    for index, group in enumerate(proto.instance_group):
        path = f"instance_group[{index}]"
        problems += _instance_group(group, path, proto.backend, gpu_count)
        if group.name in seen:
            text = f"{group.name!r} is the name of instance_group[{seen[group.name]}] too"
            problems.append(Problem(f"{path}.name", text))
        seen.setdefault(group.name, index)
        problems += _rate_limiter(group.rate_limiter, f"{path}.rate_limiter")
        total += max(0, group.count) * max(1, len(group.gpus))
    if proto.instance_group and all(group.passive for group in proto.instance_group):
        problems.append(Problem("instance_group", "every group is passive, so that no instance would take a request"))
    if total > MAX_INSTANCES:
        problems.append(Problem("instance_group", f"expected at most {MAX_INSTANCES} instances, got {total}"))
    return problems


def _instance_group(group: pb.ModelInstanceGroup, path: str, backend: str, gpu_count: int) -> list[Problem]:
    problems = []
    if group.count < 1:
        problems.append(Problem(f"{path}.count", f"expected >= 1, got {group.count}"))
    if group.kind != pb.ModelInstanceGroup.KIND_GPU:
        if group.gpus:
            kind = pb.ModelInstanceGroup.Kind.Name(group.kind)
            text = f"GPUs go with KIND_GPU alone, this group is {kind} and names {list(group.gpus)}"
            problems.append(Problem(f"{path}.gpus", text))
    elif gpu_count == 0:
        text = f"KIND_GPU needs a GPU, and this server has none that the backend {backend!r} can use"
        problems.append(Problem(f"{path}.kind", text))
    else:
        problems += [
            Problem(f"{path}.gpus[{place}]", f"expected a GPU from 0 to {gpu_count - 1}, got {gpu}")
            for place, gpu in enumerate(group.gpus)
            if not 0 <= gpu < gpu_count
        ]
    if group.profile and backend != TENSORRT:
        problems.append(Problem(f"{path}.profile", f"profiles belong to the backend {TENSORRT!r}, got {backend!r}"))
    return problems


def _rate_limiter(limiter: pb.ModelRateLimiter, path: str) -> list[Problem]:
    problems, seen = [], set[str]()
    for index, resource in enumerate(limiter.resources):
        where = f"{path}.resources[{index}]"
        if not resource.name.strip():
            problems.append(Problem(f"{where}.name", "the resource has no name"))
        elif resource.name.lower() in seen:
            problems.append(Problem(f"{where}.name", f"{resource.name!r} is given twice; capitals make no difference"))
        seen.add(resource.name.lower())
        if resource.count < 1:
            problems.append(Problem(f"{where}.count", f"expected >= 1, got {resource.count}"))
    return problems


def _model_metrics(metrics: pb.ModelMetrics) -> list[Problem]:
    problems = []
    for index, control in enumerate(metrics.metric_control):
        path = f"model_metrics.metric_control[{index}]"
        family = control.metric_identifier.family
        if family not in METRIC_FAMILIES:
            text = f"expected a metric that can be adjusted ({', '.join(sorted(METRIC_FAMILIES))}), got {family!r}"
            problems.append(Problem(f"{path}.metric_identifier.family", text))
        buckets = list(control.histogram_options.buckets)
        ordered = all(low < high for low, high in itertools.pairwise(buckets))
        if not buckets or not ordered or not all(map(math.isfinite, buckets)):
            text = f"expected bounds that rise from one to the next, got {buckets}"
            problems.append(Problem(f"{path}.histogram_options.buckets", text))
    return problems
