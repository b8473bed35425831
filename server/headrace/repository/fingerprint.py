"""What a model's answers depend on, in a few bytes: equal on all servers that serve equal files, and only there.

For caches that several servers share, or that outlast a server; times and inodes of files would not do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from headrace import __version__
from headrace.repository.model_config import ModelConfig
from headrace.repository.outside import environment_of, outside_state
from headrace.repository.sources import ModelSource
from headrace_protocol._generated import model_config_pb2 as pb

_CHUNK: Final = 1 << 20
_COMPILED: Final = "__pycache__"
_PASSED_OVER: Final = frozenset({"config.pbtxt", "configs", _COMPILED})
"""Not looked at: the configuration that counts is given."""


def content_identity(config: ModelConfig, source: ModelSource, version: int) -> bytes:
    """Return a digest of configuration and files. Blocking: it reads every file that the version may use.

    Left out are other versions, and instance groups, which change no answer. An environment that is a folder counts by
    its dates, so that no two servers are alike with one. Raises OSError where a file cannot be read.
    """
    proto = pb.ModelConfig()
    proto.CopyFrom(config.proto)
    proto.ClearField("instance_group")
    proto.ClearField("version_policy")
    digest = hashlib.blake2b(digest_size=32)
    for part in (__version__.encode(), str(version).encode(), proto.SerializeToString(deterministic=True)):
        _add(digest, part)
    environment = environment_of(config.proto, source.directory)
    if environment is not None:
        _add(digest, _content(environment) if environment.is_file() else outside_state(config.proto, source.directory))
    shared = [
        path
        for path in source.directory.iterdir()
        if path.name not in _PASSED_OVER and not (path.is_dir() and path.name.isdecimal())
    ]
    for top in (*sorted(shared), source.versions[version]):
        for path in _files(top):
            _add(digest, path.relative_to(top).as_posix().encode("utf-8", "surrogateescape"))
            _add(digest, _content(path))
        _add(digest, top.name.encode("utf-8", "surrogateescape"))
    return digest.digest()


def _files(path: Path) -> Iterator[Path]:
    """Yield the files at and below `path`, in order. The registry has bounded their number and depth."""
    if path.is_file():
        yield path
    elif path.is_dir() and path.name != _COMPILED:
        for below in sorted(path.iterdir()):
            yield from _files(below)


def _content(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.digest()


def _add(digest: hashlib.blake2b, value: bytes) -> None:
    digest.update(len(value).to_bytes(8, "little"))
    digest.update(value)
