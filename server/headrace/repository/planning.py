"""Which versions of a model are to serve, and what identifies the content each is loaded from. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import NamedTuple

from headrace.repository.config_text import ParsedConfig
from headrace.repository.layout import ModelLayout
from headrace_protocol._generated import model_config_pb2 as pb


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


def identities(
    layout: ModelLayout,
    config: ParsedConfig,
    versions: Collection[int],
    *,
    from_call: bool = False,
    outside: bytes = b"",
) -> dict[int, bytes]:
    """Return, for each version, a digest of all that loading it depends on: another digest means another content.

    The configuration counts by its meaning, not by its file: a touched file or another comment changes nothing. What
    a load call brought (`from_call`) never counts as what the repository holds, so that the next plain load reloads.
    `outside` stands for what the model needs that is not in its folder.
    """
    common = hashlib.blake2b(digest_size=16, person=b"call" if from_call else b"repository")
    common.update(str(layout.directory).encode(errors="surrogateescape") + b"\0")
    common.update(layout.shared_fingerprint)
    common.update(config.proto.SerializeToString(deterministic=True))
    common.update(" ".join(sorted(config.written)).encode())
    common.update(outside)
    found: dict[int, bytes] = {}
    for version in versions:
        one = common.copy()
        one.update(layout.version_fingerprints[version])
        found[version] = one.digest()
    return found


def members_of(config: pb.ModelConfig) -> frozenset[str]:
    """Return the models that an ensemble is made of; empty for any other model."""
    return frozenset(step.model_name for step in config.ensemble_scheduling.step)
