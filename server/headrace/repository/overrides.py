"""What a load call may bring with it: a configuration, and the files of a whole model folder.

Everything is checked before the first byte is written, and files go to a folder that this process alone owns.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headrace.planes import LoadParameters
from headrace.repository.config_text import ParsedConfig, parse_json
from headrace.repository.layout import MAX_VERSION
from headrace.repository.model_config import ConfigError
from headrace.repository.sources import LoadOverride
from headrace_protocol.errors import invalid, unsupported

FILE_PREFIX: Final = "file:"
MAX_FILES: Final = 1000
MAX_PATH_BYTES: Final = 1024
MAX_PATH_PARTS: Final = 16
MAX_NAME_BYTES: Final = 255

_VERSION: Final = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
_STORE_PREFIX: Final = "headrace-uploads-"
_LOCK_NAME: Final = "lock"


@dataclass(frozen=True, slots=True)
class OverrideRequest:
    """The parameters of a load call, checked. `files` are paths below the model's folder, `<version>/<relative>`."""

    config: ParsedConfig
    files: Mapping[str, bytes] = field(default_factory=dict)


def parse_override(parameters: LoadParameters, *, allow_files: bool) -> OverrideRequest | None:
    """Check the parameters of a load call; None if it brings nothing. Raises INVALID_ARG or UNSUPPORTED."""
    config_text: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == "config":
            if not isinstance(value, str):
                raise invalid(f"load parameter 'config': expected JSON text, got {_kind(value)}")
            config_text = value
        elif key.startswith(FILE_PREFIX):
            if not allow_files:
                raise unsupported(f"load parameter {_shown(key)}: this server does not accept uploaded model files")
            if not isinstance(value, bytes):
                raise invalid(f"load parameter {_shown(key)}: expected the file's bytes, got {_kind(value)}")
            files[_checked_path(key)] = value
        else:
            raise invalid(f"load parameter {_shown(key)} is unknown; expected 'config' or 'file:<version>/<path>'")
    if len(files) > MAX_FILES:
        raise invalid(f"{len(files)} files are uploaded, at most {MAX_FILES} go")
    _check_no_file_is_a_folder(files)
    if config_text is None:
        if files:
            raise invalid(
                "uploaded files replace the whole model folder, so load parameter 'config' is needed with them"
            )
        return None
    try:
        return OverrideRequest(parse_json(config_text, "load parameter 'config'"), files)
    except ConfigError as error:
        raise invalid(f"load parameter 'config': {error}") from None


def _checked_path(key: str) -> str:
    path = key.removeprefix(FILE_PREFIX)
    expected = f"load parameter {_shown(key)}: expected 'file:<version>/<path>'"
    if not path.isprintable() or "\\" in path:
        raise invalid(f"{expected} without control characters or backslashes")
    if len(path.encode()) > MAX_PATH_BYTES:
        raise invalid(f"{expected} of at most {MAX_PATH_BYTES} bytes")
    version, *parts = path.split("/")
    if not parts or not _VERSION.fullmatch(version) or int(version) > MAX_VERSION:
        raise invalid(f"{expected}, where the version is a number without leading zeros")
    if len(parts) > MAX_PATH_PARTS:
        raise invalid(f"{expected} of at most {MAX_PATH_PARTS} path parts")
    for part in parts:
        if part in {"", ".", ".."} or len(part.encode()) > MAX_NAME_BYTES:
            raise invalid(f"{expected} that stays in the model's folder: no empty part, no '.', no '..'")
    return path


def _check_no_file_is_a_folder(files: Mapping[str, bytes]) -> None:
    for path in files:
        parts = path.split("/")
        for length in range(1, len(parts)):
            above = "/".join(parts[:length])
            if above in files:
                raise invalid(f"file {_shown(above)} is uploaded, and as a folder too: {_shown(path)}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:100] + "...")


def _kind(value: object) -> str:
    return {str: "text", bytes: "bytes", bool: "a boolean", int: "an integer"}.get(type(value), type(value).__name__)


class UploadStore:
    """Owns the folder that uploaded files are written under; it comes with the first upload and goes at `close`.

    A locked file in it says that its process lives; what a killed process left is removed by the next one that starts.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent if parent is not None else Path(tempfile.gettempdir())
        self._root: Path | None = None
        self._lock = -1
        self._opening = threading.Lock()
        """Held while the folder is made or removed: uploads are written by several threads."""

    def write(self, name: str, request: OverrideRequest) -> LoadOverride:
        """Write the request's files, all or none, into a model folder of their own. Blocking."""
        temporary = Path(tempfile.mkdtemp(dir=self._open()))
        try:
            directory = temporary / name
            directory.mkdir(mode=0o700)
            for path, content in request.files.items():
                target = directory / path
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with target.open("xb") as file:
                    file.write(content)
        except BaseException:
            remove_tree(temporary)
            raise
        return LoadOverride(request.config, directory, temporary)

    def discard(self, override: LoadOverride) -> None:
        """Remove the files of an override that will not be loaded after all. Blocking."""
        if override.temporary is not None:
            remove_tree(override.temporary)

    def remove_leftovers(self) -> None:
        """Remove what processes of this user left that were killed. Blocking; called at start."""
        for root in self._parent.glob(f"{_STORE_PREFIX}*"):
            try:
                if root.is_symlink() or root.stat().st_uid != os.getuid():
                    continue
                lock = os.open(root / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            with contextlib.closing(os.fdopen(lock, "rb")), contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(root)

    def close(self) -> None:
        """Remove everything. Idempotent."""
        with self._opening:
            root, self._root = self._root, None
            if root is not None:
                remove_tree(root)
                os.close(self._lock)

    def _open(self) -> Path:
        with self._opening:
            if self._root is None:
                root = Path(tempfile.mkdtemp(prefix=_STORE_PREFIX, dir=self._parent))
                self._lock = os.open(root / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                self._root = root
            return self._root


def remove_tree(directory: Path) -> None:
    """Remove a folder and all in it, as far as that goes; links are removed, not followed. Blocking."""
    shutil.rmtree(directory, ignore_errors=True)
