"""What a model depends on that lies outside of its folder: the environment that its configuration names.

A few looks at dates, sizes and inodes tell whether it has changed, as for what lies in the folder (layout.py).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from headrace.repository.config_text import expanded_parameters
from headrace_protocol._generated import model_config_pb2 as pb

ENVIRONMENT: Final = "EXECUTION_ENV_PATH"
"""Parameter of a model for the Python backend: the folder or archive of the Python that runs it."""
_TOLD_BY: Final = ("bin/python", "pyvenv.cfg", "conda-meta", "lib/python3*/site-packages")
"""In an environment that is a folder: what changes when packages come and go."""


def environment_of(proto: pb.ModelConfig, model_directory: Path) -> Path | None:
    """Return the environment that a configuration names, None where it names none."""
    text = expanded_parameters(proto, str(model_directory)).get(ENVIRONMENT, "")
    return Path(text) if text and "\0" not in text else None


def outside_state(proto: pb.ModelConfig, model_directory: Path) -> bytes:
    """Return what is there outside of the folder, as a digest; b"" for a model that needs nothing. Blocking."""
    path = environment_of(proto, model_directory)
    if path is None:
        return b""
    digest = hashlib.blake2b(digest_size=16)
    for pattern in _TOLD_BY:
        for found in sorted(path.glob(pattern)):
            _add(digest, found)
    _add(digest, path)
    return digest.digest()


def _add(digest: hashlib.blake2b, path: Path) -> None:
    try:
        status = path.stat()
    except OSError as error:
        digest.update(f"{path}: {error}".encode(errors="surrogateescape"))
        return
    told = (os.fspath(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    digest.update(repr(told).encode(errors="surrogateescape"))
