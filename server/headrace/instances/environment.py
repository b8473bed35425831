"""Environments of models: which Python runs a model's processes, and the archives that such Pythons come in.

An environment is a folder with `bin/python` (venv or conda), used where it lies, or a tar archive of one (conda-pack),
unpacked once for all models that name the same content, and removed when none does any more. Knows processes and
files; what is installed in an environment is its owner's matter, but for what a backend process itself needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import partial
from pathlib import Path
from typing import Any, Final

from headrace.archives import ArchiveError, open_regular, unpack
from headrace.instances.process import Child, ExecChild, channel_pair, start
from headrace.instances.variables import VariablePolicy
from headrace_protocol.errors import InferError, invalid, unavailable

OLDEST_PYTHON: Final = (3, 11)
NEEDED: Final = ("msgspec", "numpy")
"""What a backend process needs beside this project's own packages; lent to an environment with the same Python."""
_OWN: Final = ("headrace_backends", "headrace_protocol")
_PROBE_S: Final = 60
_UNPACK_S: Final = 600
_PREFIX: Final = "headrace-environments-"
_LOCK: Final = "lock"
_CHUNK: Final = 1 << 20
_MAX_PATHS: Final = 256
_NOT_INHERITED: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV")
"""Variables that speak of the server's own Python."""
_USUAL: Final = VariablePolicy()


class Environment:
    """One environment in use. Its folder stays until `release`."""

    def __init__(
        self,
        folder: Path,
        lent: Mapping[str, str],
        release: Callable[[], Awaitable[None]] | None = None,
        policy: VariablePolicy = _USUAL,
    ) -> None:
        self.folder: Final = folder
        self.interpreter: Final = interpreter_of(folder)
        self._lent: Final = lent
        self._release = release
        self._policy: Final = policy

    async def launch(self) -> Child:
        """Start a backend process. Implements process.Launcher."""
        ours, theirs = channel_pair()
        with theirs:
            descriptor = theirs.fileno()
            told = {
                "packages": {name: _folder_of(name) for name in _OWN},
                "lent": self._lent,
                "arguments": ["run", "--fd", str(descriptor)],
            }
            argv = [str(self.interpreter), _bootstrap(), json.dumps(told)]
            return ExecChild(start(argv, [descriptor], variables(self.folder, self._policy)), ours)

    async def release(self) -> None:
        """Say that no process of the model is left. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            await release()


class Environments:
    """Owns the folder that archives are unpacked into; it comes with the first of them, and goes at `close`.

    A locked file in it says that its process lives; what a killed one left is removed by the next that needs a folder.
    """

    def __init__(self, parent: Path | None = None, policy: VariablePolicy = _USUAL) -> None:
        self._policy: Final = policy
        self._parent: Final = Path(tempfile.gettempdir()) if parent is None else parent
        self._root: Path | None = None
        self._lock = -1
        self._opening: Final = asyncio.Lock()
        self._users: dict[str, int] = {}
        """How many models use an unpacked archive, by the digest of its content."""
        self._busy: dict[str, asyncio.Lock] = {}
        self._there: set[str] = set()
        """Digests of what is unpacked."""
        self._digests: dict[Path, tuple[tuple[int, ...], str]] = {}

    async def open(self, path: Path) -> Environment:
        """Return the environment at `path`. Raises INVALID_ARG where there is none that a model can run in."""
        if not path.is_absolute():
            raise _unusable(path, "expected an absolute path, or one that begins with $$TRITON_MODEL_DIRECTORY")
        if await asyncio.to_thread(path.is_dir):
            return Environment(path, await _lendings(path, None, self._policy), None, self._policy)
        digest = await asyncio.to_thread(self._digest, path)
        self._users[digest] = self._users.get(digest, 0) + 1
        try:
            async with self._busy.setdefault(digest, asyncio.Lock()):
                folder = await self._unpacked(path, digest)
            lent = await _lendings(folder, path, self._policy)
            return Environment(folder, lent, partial(self._drop, digest), self._policy)
        except BaseException:
            await self._drop(digest)
            raise

    def close(self) -> None:
        """Remove everything. Blocking, idempotent; the models must be gone."""
        root, self._root = self._root, None
        if root is not None:
            _remove(root)
            os.close(self._lock)

    async def _unpacked(self, path: Path, digest: str) -> Path:
        """Return the folder of an archive's content. With the lock of `digest` held."""
        async with self._opening:
            if self._root is None:
                self._root = await asyncio.to_thread(self._open_root)
        root = self._root
        folder = root / digest
        if digest in self._there:
            return folder
        try:
            await asyncio.to_thread(_unpack, path, folder, self._policy)
            if await asyncio.to_thread(self._digest, path) != digest:
                raise ArchiveError("it was replaced while it was unpacked")
        except ArchiveError as error:
            await asyncio.to_thread(_remove, folder)
            raise _unusable(path, str(error)) from None
        except OSError as error:
            await asyncio.to_thread(_remove, folder)
            raise unavailable(f"environment {path} cannot be unpacked into {root}: {error.strerror}") from None
        self._there.add(digest)
        return folder

    async def _drop(self, digest: str) -> None:
        """Count one user less; remove what none is left of."""
        self._users[digest] -= 1
        async with self._busy[digest]:
            if self._users[digest] or digest not in self._there:
                return
            self._there.discard(digest)
            if self._root is not None:
                await asyncio.to_thread(_remove, self._root / digest)

    def _open_root(self) -> Path:
        remove_leftovers(self._parent)
        root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent))
        self._lock = os.open(root / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        flock(self._lock, LOCK_EX | LOCK_NB)
        return root

    def _digest(self, path: Path) -> str:
        """Return the digest of a file's content, remembered for as long as nothing about the file changes."""
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                known = self._digests.get(path)
                if known is not None and known[0] == stamp:
                    return known[1]
                digest = hashlib.blake2b(digest_size=16)
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        except ArchiveError as error:
            raise _unusable(path, str(error)) from None
        if len(self._digests) > _MAX_PATHS:  # they were named by models once
            self._digests.clear()
        self._digests[path] = (stamp, digest.hexdigest())
        return digest.hexdigest()


def interpreter_of(folder: Path) -> Path:
    """Return where the Python of an environment is."""
    return folder / "bin" / "python"


def variables(folder: Path, policy: VariablePolicy = _USUAL) -> dict[str, str]:
    """Return the variables of a process in an environment: as of others, without what speaks of the server's own Python."""
    kept = {name: value for name, value in policy.select(os.environ).items() if name not in _NOT_INHERITED}
    kind = "CONDA_PREFIX" if (folder / "conda-meta").is_dir() else "VIRTUAL_ENV"
    path = f"{folder / 'bin'}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, kind: str(folder), "PYTHONNOUSERSITE": "1"}


def remove_leftovers(parent: Path) -> None:
    """Remove what servers of this user that were killed had unpacked. Blocking."""
    for root in parent.glob(f"{_PREFIX}*"):
        try:
            if root.is_symlink() or root.stat().st_uid != os.getuid():
                continue
            lock = os.open(root / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        with os.fdopen(lock, "rb") as held, contextlib.suppress(BlockingIOError):
            flock(held, LOCK_EX | LOCK_NB)
            _remove(root)


def _unpack(path: Path, folder: Path, policy: VariablePolicy) -> None:
    """Unpack an archive to `folder`, and put right what in it names the place where it was made. Raises ArchiveError."""
    _remove(folder)
    folder.mkdir()
    unpack(path, folder, links=True)
    fixer = folder / "bin" / "conda-unpack"
    if not fixer.is_file():
        return
    try:
        command = [str(interpreter_of(folder)), str(fixer)]
        subprocess.run(command, env=variables(folder, policy), check=True, capture_output=True, timeout=_UNPACK_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise ArchiveError(f"its own bin/conda-unpack fails: {error}") from None


async def _lendings(folder: Path, archive: Path | None, policy: VariablePolicy) -> dict[str, str]:
    """Return what an environment is lent, folder by package. Raises INVALID_ARG where it cannot run a model."""
    named = archive or folder
    found = await asyncio.to_thread(_probe, folder, named, policy)
    version = tuple(found["version"])
    shown = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise _unusable(named, f"its Python is {shown}, and models run on {oldest} or later")
    missing = found["missing"]
    if missing and found["abi"] != sysconfig.get_config_var("SOABI"):
        ours = ".".join(map(str, sys.version_info[:2]))
        raise _unusable(
            named,
            f"its Python {shown} lacks {' and '.join(missing)}, which only an environment with the server's Python {ours} "
            f"is lent: install them in it",
        )
    return {name: _folder_of(name) for name in missing}


def _probe(folder: Path, named: Path, policy: VariablePolicy) -> dict[str, Any]:
    command = [str(interpreter_of(folder)), _bootstrap(), json.dumps({"probe": NEEDED})]
    try:
        done = subprocess.run(
            command,
            env=variables(folder, policy),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
        )
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout)
            return found
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise _unusable(named, f"its bin/python ends with status {done.returncode}: {said[:500]}")
    except FileNotFoundError:
        raise _unusable(named, "it has no bin/python") from None
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise _unusable(named, f"its bin/python cannot be asked what it has: {error}") from None


def _unusable(path: Path, why: str) -> InferError:
    return invalid(f"parameters.EXECUTION_ENV_PATH: environment {path} cannot be used: {why}")


def _folder_of(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is a dependency"
    assert spec.origin is not None
    return str(Path(spec.origin).parent)


def _bootstrap() -> str:
    return str(Path(_folder_of("headrace_backends")) / "foreign.py")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
