"""Which versions of a model are to serve, and what identifies the content each is loaded from. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace
from typing import Final, NamedTuple

from headrace.repository.config_text import ParsedConfig
from headrace.repository.layout import ModelLayout
from headrace_protocol._generated import model_config_pb2 as pb

CHANGED_IN_PLACE: Final = ("instance_group", "version_policy")
"""Fields of a configuration in which a version that serves is changed without being loaded anew."""


TRAFFIC: Final = "traffic"
"""The parameter of a configuration that says how its requests go to the versions."""


class VersionChoice(NamedTuple):
    """Versions that a policy chooses, ascending, and those it names but the folder lacks."""

    versions: tuple[int, ...]
    missing: tuple[int, ...] = ()


def choose_versions(policy: pb.ModelVersionPolicy, available: Collection[int]) -> VersionChoice:
    """Apply a version policy; one that says nothing means the highest version."""
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return VersionChoice(tuple(sorted(available)))
    if choice == "specific":
        named = sorted(set(policy.specific.versions))
        return VersionChoice(
            tuple(version for version in named if version in available),
            tuple(version for version in named if version not in available),
        )
    count = max(policy.latest.num_versions, 1)
    return VersionChoice(tuple(sorted(available)[-count:]))


def without_traffic(config: ParsedConfig) -> tuple[ParsedConfig, str | None]:
    """Return a configuration without what it says about the traffic of versions, and that; None = it says nothing.

    Another share of the requests is no other content, and no business of a backend's.
    """
    if TRAFFIC not in config.proto.parameters:
        return config, None
    proto = pb.ModelConfig()
    proto.CopyFrom(config.proto)
    text = proto.parameters[TRAFFIC].string_value
    del proto.parameters[TRAFFIC]
    written = config.written if proto.parameters else config.written - {"parameters"}
    return replace(config, proto=proto, written=written), text


def identities(
    layout: ModelLayout,
    config: ParsedConfig,
    versions: Collection[int],
    *,
    from_call: bool = False,
    outside: bytes = b"",
    resizable: bool = False,
) -> dict[int, bytes]:
    """Return, for each version, a digest of all that loading it depends on: another digest means another content.

    The configuration counts by its meaning, not by its file: a touched file or another comment changes nothing. What
    a load call brought (`from_call`) never counts as what the repository holds, so that the next plain load reloads.
    `outside` stands for what the model needs that is not in its folder. `resizable`: how many instances there are and
    where, and which versions are chosen, is no content, for it can be changed of what serves.
    """
    written = set(config.written)
    proto = config.proto
    if resizable:
        proto = pb.ModelConfig()
        proto.CopyFrom(config.proto)
        for field in CHANGED_IN_PLACE:
            proto.ClearField(field)
        written -= set(CHANGED_IN_PLACE)
    common = hashlib.blake2b(digest_size=16, person=b"call" if from_call else b"repository")
    common.update(str(layout.directory).encode(errors="surrogateescape") + b"\0")
    common.update(layout.shared_fingerprint)
    common.update(proto.SerializeToString(deterministic=True))
    common.update(" ".join(sorted(written)).encode())
    common.update(outside)
    found: dict[int, bytes] = {}
    for version in versions:
        one = common.copy()
        one.update(layout.version_fingerprints[version])
        found[version] = one.digest()
    return found


def is_resizable(config: pb.ModelConfig) -> bool:
    """Return whether a model may be changed in place, as far as its author's configuration tells.

    Sequences are bound to instances, so models that take them are loaded anew; and an ensemble has no instances.
    """
    return not (config.HasField("sequence_batching") or config.HasField("ensemble_scheduling"))


def same_in_place(one: pb.ModelConfig, other: pb.ModelConfig) -> bool:
    """Return whether two configurations ask for the same instances and versions."""
    return list(one.instance_group) == list(other.instance_group) and one.version_policy == other.version_policy


def members_of(config: pb.ModelConfig) -> frozenset[str]:
    """Return the models that an ensemble is made of; empty for any other model."""
    return frozenset(step.model_name for step in config.ensemble_scheduling.step)
