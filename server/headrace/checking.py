"""`headrace check`: loads every model of a repository once, alone, and says what is wrong or what was completed.

Nothing is served and no port is opened. Loading is the only honest check of a model file, so it is done in the same
backend processes that would serve.
"""

# ruff: noqa: T201 - printing is what a command does
from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace

import uvloop

from headrace.clock import SystemClock
from headrace.config import ServerConfig
from headrace.ensembles.checking import FoundModels, members_first
from headrace.ensembles.loader import is_ensemble
from headrace.observability import logging as log_setup
from headrace.parts import StartError, completion_of, make_limiter, make_loader, mirrored
from headrace.repository import layout
from headrace.repository.config_loading import read_config
from headrace.repository.config_text import to_text
from headrace.repository.layout import ModelLayout
from headrace.repository.model_config import ConfigError
from headrace.repository.planning import TRAFFIC, choose_versions, members_of, without_traffic
from headrace.repository.remote import RemoteError
from headrace.repository.sources import ModelSource
from headrace.rollout.policy import parse_policy_text
from headrace_protocol.errors import InferError


def check_repositories(config: ServerConfig, print_config: bool) -> int:
    """Check every model; return 0 if all could serve, else 1."""
    log_setup.configure(replace(config.log, info=False))  # what info would say is in the report
    status: int = uvloop.run(_check(config, print_config))
    return status


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return True


async def _check(config: ServerConfig, print_config: bool) -> int:
    try:
        mirrors, repositories = mirrored(config)
        await asyncio.to_thread(mirrors.first, None, _wait)
    except (StartError, RemoteError) as error:
        print(error, file=sys.stderr)
        return 1
    missing = [str(path) for path in repositories if not path.is_dir()]
    if missing:
        print(f"not a folder: {', '.join(missing)}", file=sys.stderr)
        return 1
    snapshot = await asyncio.to_thread(layout.scan, repositories)
    for warning in snapshot.warnings:
        print(f"warning: {warning}")
    checker = _Checker(config, print_config)
    bad = 0
    try:
        for name in members_first({name: checker.members_of(found) for name, found in snapshot.models.items()}):
            lines = await checker.check(snapshot.models[name])
            bad += lines[0].startswith("BAD")
            print("\n".join(lines))
    finally:
        checker.loader.close()
    print(f"{len(snapshot.models) - bad} of {len(snapshot.models)} models can serve")
    return 1 if bad else 0


class _Checker:
    """Loads one model after the other, members before the ensembles that are made of them."""

    def __init__(self, config: ServerConfig, print_config: bool) -> None:
        self.loader = make_loader(config, SystemClock(), limiter=make_limiter(config))
        self._completion = completion_of(config)
        self._config_name = config.model_config_name or None
        self._overlay = config.model_overlay
        self._print_config = print_config
        self._found = FoundModels()

    def members_of(self, found: ModelLayout) -> frozenset[str]:
        """Return the members of an ensemble; none of what is none, or cannot be read."""
        try:
            return members_of(read_config(found.directory, self._config_name).proto)
        except ConfigError:
            return frozenset()

    async def check(self, found: ModelLayout) -> list[str]:
        """Return lines about one model; the first starts with OK or BAD."""
        warnings = [f"     warning: {warning}" for warning in found.warnings]
        if found.problem:
            return [f"BAD  {found.name}", f"     {found.problem}", *warnings]
        try:
            written = read_config(found.directory, self._config_name, self._overlay)
            parsed, traffic = without_traffic(written)
            if traffic is not None:
                parse_policy_text(traffic, f"parameters.{TRAFFIC}")
            chosen = choose_versions(parsed.proto.version_policy, found.versions)
        except ConfigError as error:
            return [f"BAD  {found.name}", *_problems(error), *warnings]
        if not chosen.versions:
            why = "its version policy chooses none of its versions" if found.versions else "it has no version folder"
            return [f"BAD  {found.name}", f"     {why}", *warnings]
        source = ModelSource(found.name, found.directory, found.versions, parsed)
        lines: list[str] = []
        good = True
        for version in chosen.versions:
            try:
                lines += await self._check_version(source, version)
            except ConfigError as error:
                good = False
                lines += [f"     version {version}:", *_problems(error)]
            except InferError as error:
                good = False
                lines.append(f"     version {version}: {error.message}")
        return [f"{'OK ' if good else 'BAD'}  {found.name}", *lines, *warnings]

    async def _check_version(self, source: ModelSource, version: int) -> list[str]:
        """Return lines about a version that can serve. Raises ConfigError, InferError for one that cannot."""
        if is_ensemble(source.config.proto):
            config, notes = self._found.check(source, version, self._completion)
            lines = [f"     version {version} fits its members"]
        else:
            model, notes = await self.loader.load_with_notes(source, version)
            await self.loader.unload(model)
            config = model.config
            self._found.add(config, version)
            lines = [f"     version {version} loads in {model.load_seconds:.2f} s"]
        lines += [f"       {note}" for note in notes]
        if self._print_config:
            lines += [f"       {line}" for line in to_text(config.proto).splitlines()]
        return lines


def _problems(error: ConfigError) -> list[str]:
    return [f"     {problem}" for problem in error.problems]
