"""AccessTable: callers by their keys, as a file names them. Reads the file again as it changes; else pure.

Keys are long and random, so their SHA-256 is enough to keep: nothing can be found out from it, and a look-up by it takes
no time that would tell how much of a key is right.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from headrace.access.caller import Caller, Grant, Limits, Role

_log: Final = logging.getLogger(__name__)

ANONYMOUS: Final = "anonymous"
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_MOST_CALLERS: Final = 100_000
_Signature = tuple[int, int, int]


class AccessError(Exception):
    """A file that cannot be used; the message lists everything that is wrong, with its place."""


def key_hash(key: str) -> str:
    """Return what the file keeps of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class AccessTable:
    """Who may call. `caller_of` and `anonymous` are what doors ask; `refresh` is called every second."""

    def __init__(self, path: str, now_ns: Callable[[], int], today: Callable[[], datetime] | None = None) -> None:
        """Read the file. Raises AccessError."""
        self._path: Final = path
        self._now_ns: Final = now_ns
        self._today: Final = today or (lambda: datetime.now(UTC))
        self._callers: dict[str, Caller] = {}
        self._by_hash: Mapping[str, tuple[Caller, datetime | None]] = {}
        self._signature: _Signature | None = None
        self._refused: _Signature | None = None
        self._candidate: _Signature | None = None
        """Of what was read last."""
        self.anonymous: Caller
        """Who shows no key; may be without any role."""
        self._take(self._read())

    def caller_of(self, key: str) -> Caller | None:
        """Return who has this key; None where nobody has, or it has expired."""
        found = self._by_hash.get(key_hash(key))
        if found is None:
            return None
        caller, expires = found
        return caller if expires is None or self._today() < expires else None

    def refresh(self) -> bool:
        """Read the file again if it has changed; return whether it was taken. One that is wrong leaves all as it was."""
        signature = _signature(self._path)
        if signature in (self._signature, self._refused):
            return False
        try:
            document = self._read()
            self._take(document)
        except AccessError as error:
            self._refused = signature
            _log.error("the access file stays as it was: %s", error)
            return False
        _log.info("access file taken anew: %d callers", len(self._callers))
        return True

    def _read(self) -> Any:
        signature = _signature(self._path)
        try:
            document = yaml.safe_load(Path(self._path).read_text(encoding="utf-8"))
        except OSError as error:
            raise AccessError(f"{self._path}: {error.strerror or error}") from error
        except (yaml.YAMLError, ValueError) as error:
            raise AccessError(f"{self._path} is no YAML: {' '.join(str(error).split())[:200]}") from error
        self._candidate = signature
        return document

    def _take(self, document: Any) -> None:
        parsed = _Parser(self._path, document)
        now = self._now_ns()
        callers: dict[str, Caller] = {}
        for grant in parsed.grants:
            known = self._callers.get(grant.name)
            if known is None:
                known = Caller(grant, now)
            else:
                known.change(grant, now)
            callers[grant.name] = known
        for name in self._callers.keys() - callers.keys():
            self._callers[name].change(Grant(name, frozenset(), ()), now)  # what is open still may begin nothing more
        self._callers = callers
        self._by_hash = {digest: (callers[name], expires) for digest, (name, expires) in parsed.hashes.items()}
        self.anonymous = callers[ANONYMOUS]
        self._signature, self._refused = self._candidate, None


class _Parser:
    """Reads one document; `problems` collects everything that is wrong."""

    def __init__(self, path: str, document: Any) -> None:
        self.grants: list[Grant] = []
        self.hashes: dict[str, tuple[str, datetime | None]] = {}
        self._problems: list[str] = []
        if not isinstance(document, dict):
            raise AccessError(f"{path}: expected a mapping with the entry 'callers'")
        for unknown in sorted(set(map(str, document)) - {"callers", ANONYMOUS}):
            self._problems.append(f"{unknown}: no such entry; there are callers and {ANONYMOUS}")
        self._anonymous({} if document.get(ANONYMOUS) is None else document[ANONYMOUS])
        callers = [] if document.get("callers") is None else document["callers"]
        if not isinstance(callers, list) or len(callers) > _MOST_CALLERS:
            self._problems.append(f"callers: expected a list of up to {_MOST_CALLERS}")
            callers = []
        for at, entry in enumerate(callers):
            self._caller(f"callers[{at}]", entry)
        if self._problems:
            raise AccessError(f"{path}: " + "; ".join(self._problems[:20]))

    def _anonymous(self, entry: Any) -> None:
        if not isinstance(entry, dict):
            self._problems.append(f"{ANONYMOUS}: expected a mapping")
            entry = {}
        self._unknown(ANONYMOUS, entry, {"roles", "models", "limits"})
        self.grants.append(self._grant(ANONYMOUS, ANONYMOUS, entry))

    def _caller(self, where: str, entry: Any) -> None:
        if not isinstance(entry, dict):
            self._problems.append(f"{where}: expected a mapping")
            return
        self._unknown(where, entry, {"name", "roles", "models", "limits", "keys"})
        name = entry.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == ANONYMOUS:
            self._problems.append(f"{where}.name: expected 1 to 64 letters, digits, '_', '.', '@' or '-', got {name!r}")
            return
        if any(grant.name == name for grant in self.grants):
            self._problems.append(f"{where}.name: {name!r} is there twice")
            return
        self.grants.append(self._grant(where, name, entry))
        for number, key in enumerate(self._list(f"{where}.keys", entry.get("keys"))):
            self._key(f"{where}.keys[{number}]", name, key)

    def _key(self, where: str, name: str, key: Any) -> None:
        digest, expires = (key.get("sha256"), key.get("expires")) if isinstance(key, dict) else (key, None)
        if isinstance(key, dict):
            self._unknown(where, key, {"sha256", "expires"})
        if not isinstance(digest, str) or not _HASH.fullmatch(digest):
            self._problems.append(f"{where}: expected the SHA-256 of a key, 64 hexadecimal digits (headrace key)")
        elif digest in self.hashes:
            self._problems.append(f"{where}: the same key is there twice")
        elif expires is not None and not isinstance(expires, datetime):
            self._problems.append(f"{where}.expires: expected a time such as 2027-01-31T00:00:00Z")
        else:
            self.hashes[digest] = (name, expires if expires is None or expires.tzinfo else expires.replace(tzinfo=UTC))

    def _grant(self, where: str, name: str, entry: Mapping[str, Any]) -> Grant:
        roles = set()
        for role in self._list(f"{where}.roles", entry.get("roles")):
            try:
                roles.add(Role(role))
            except ValueError:
                expected = ", ".join(each.value for each in Role)
                self._problems.append(f"{where}.roles: expected some of {expected}, got {role!r}")
        models = self._list(f"{where}.models", entry.get("models", ["*"]))
        if not all(isinstance(model, str) and model for model in models):
            self._problems.append(f"{where}.models: expected names of models, with * and ? for any characters")
            models = []
        return Grant(name, frozenset(roles), tuple(models), self._limits(f"{where}.limits", entry.get("limits")))

    def _limits(self, where: str, entry: Any) -> Limits:
        if entry is None:
            return Limits()
        if not isinstance(entry, dict):
            self._problems.append(f"{where}: expected a mapping")
            return Limits()
        self._unknown(where, entry, set(Limits.__dataclass_fields__))
        values: dict[str, Any] = {}
        for field in Limits.__dataclass_fields__:
            value = entry.get(field)
            whole = field != "requests_per_second"
            if value is None:
                continue
            kind = int if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 1e12:
                self._problems.append(
                    f"{where}.{field}: expected {'an integer' if whole else 'a number'} above 0, got {value!r}"
                )
            else:
                values[field] = value
        if "burst" in values and "requests_per_second" not in values:
            self._problems.append(f"{where}.burst: has no effect without requests_per_second")
        return Limits(**values)

    def _list(self, where: str, value: Any) -> list[Any]:
        if value is None:
            return []
        if not isinstance(value, list):
            self._problems.append(f"{where}: expected a list, got {value!r}")
            return []
        return value

    def _unknown(self, where: str, entry: Mapping[Any, Any], known: set[str]) -> None:
        for name in sorted(set(map(str, entry)) - known):
            self._problems.append(f"{where}.{name}: no such entry; there are {', '.join(sorted(known))}")


def _signature(path: str) -> _Signature:
    try:
        status = Path(path).stat()
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino
