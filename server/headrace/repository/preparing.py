"""What a model is to be loaded from: its configuration, the versions that are to serve, and what identifies their content."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from typing import Final

from headrace.repository.config_loading import read_config
from headrace.repository.config_text import ParsedConfig
from headrace.repository.layout import ModelLayout
from headrace.repository.outside import ENVIRONMENT, outside_state
from headrace.repository.overlay import Overlay
from headrace.repository.planning import VersionChoice, choose_versions, identities, is_resizable, without_traffic
from headrace.repository.sources import LoadOverride
from headrace.repository.standing import shown_versions
from headrace_protocol.errors import invalid

_log = logging.getLogger(__name__)


class Preparer:
    """Reads configurations, in threads, and applies the rules of planning.py. Raises InferError and ConfigError."""

    def __init__(self, config_name: str | None, overlay: Overlay | None) -> None:
        self._config_name: Final = config_name
        self._overlay: Final = overlay

    async def config_of(self, found: ModelLayout, override: LoadOverride | None) -> tuple[ParsedConfig, str | None]:
        """Return a model's configuration, and apart from it what it says about traffic."""
        if found.problem:
            raise invalid(found.problem)
        if override is not None:
            return without_traffic(override.config)
        config = await asyncio.to_thread(read_config, found.directory, self._config_name, self._overlay)
        return without_traffic(config)

    async def contents(
        self, found: ModelLayout, config: ParsedConfig, only: int | None, *, from_call: bool, resizable: bool
    ) -> dict[int, bytes]:
        """Return the versions that are to serve, each with what identifies its content; `only` this one, where it is given."""
        versions = _versions(found, config, only)
        named = ENVIRONMENT in config.proto.parameters
        outside = await asyncio.to_thread(outside_state, config.proto, found.directory) if named else b""
        changeable = resizable and is_resizable(config.proto)
        return identities(found, config, versions, from_call=from_call, outside=outside, resizable=changeable)


def _versions(found: ModelLayout, config: ParsedConfig, only: int | None) -> Collection[int]:
    choice = choose_versions(config.proto.version_policy, found.versions) if only is None else VersionChoice((only,))
    for version in choice.missing:
        _log.error("%r version %d: chosen by the version policy, but the folder is missing", found.name, version)
    if choice.versions:
        return choice.versions
    if found.versions:
        shown = shown_versions(found.versions)
        raise invalid(f"no version to serve: the version policy chooses none of the versions {shown}")
    raise invalid("no version to serve: the model's folder holds no version, which is a folder named by a number")


def log_warnings(subject: str, warnings: Iterable[str]) -> None:
    """Tell what a scan has found odd."""
    for warning in warnings:
        _log.warning("%s: %s", subject, warning)
