"""The options about the response cache, the old one and the new, to the settings that the server starts with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.flags import Parser, integer, text

OLD: Final = "response-cache-byte-size"


@dataclass(frozen=True, slots=True)
class LocalCacheSettings:
    """Answers are kept in the server's own memory."""

    size: int
    """Bytes, at most."""


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Where the Redis server is and how long it is waited for. Times in milliseconds."""

    host: str
    port: int
    user: str | None = None
    password: str | None = None
    db: int = 0
    connect_timeout_ms: int = 250
    socket_timeout_ms: int = 250
    """For one read or write."""
    wait_timeout_ms: int = 250
    """For one of the pool's connections to become free."""
    pool_size: int = 16
    ttl_s: int = 0
    """After which Redis forgets an entry; 0 = it decides by itself."""

    @property
    def patience_s(self) -> float:
        """Longest time that a lookup takes."""
        return (self.connect_timeout_ms + self.socket_timeout_ms + self.wait_timeout_ms) / 1000


CacheSettings = LocalCacheSettings | RedisSettings

_MILLISECONDS: Final = integer(1, 60_000)
_KEYS: Final[Mapping[str, Mapping[str, tuple[str, Parser]]]] = {
    "local": {"size": ("size", integer(1))},
    "redis": {
        "host": ("host", text),
        "port": ("port", integer(1, 65535)),
        "user": ("user", text),
        "password": ("password", text),
        "db": ("db", integer(0, 1 << 20)),
        "connect_timeout": ("connect_timeout_ms", _MILLISECONDS),
        "socket_timeout": ("socket_timeout_ms", _MILLISECONDS),
        "wait_timeout": ("wait_timeout_ms", _MILLISECONDS),
        "pool_size": ("pool_size", integer(1, 1024)),
        "ttl": ("ttl_s", integer(0, 1 << 31)),
    },
}
"""By cache, the keys of --cache-config: which setting each one is, and how it is read."""
_REQUIRED: Final = {"local": ("size",), "redis": ("host", "port")}
_FROM_ENVIRONMENT: Final = {"user": "TRITONCACHE_REDIS_USERNAME", "password": "TRITONCACHE_REDIS_PASSWORD"}
"""Where user and password come from that are not given as options: those every user of the machine can see."""


def cache_settings(
    options: Mapping[str, Any], environ: Mapping[str, str], problems: list[str], warnings: list[str]
) -> CacheSettings | None:
    """Return the settings that the parsed `options` make, None for no cache; adds what is wrong, or out of date."""
    given: Sequence[tuple[str, dict[str, str]]] = options["cache-config"]
    old: int = options[OLD]
    if old:
        warnings.append(f"--{OLD} is deprecated: use --cache-config local,size={old}")
        if given:
            problems.append(f"--{OLD}: --cache-config says which cache there is already; give one of the two")
        return LocalCacheSettings(old)
    caches = sorted({cache for cache, _ in given})
    if not caches:
        return None
    if len(caches) > 1:
        problems.append(f"--cache-config: a server has one response cache, got settings for {' and '.join(caches)}")
        return None
    (cache,) = caches
    if cache not in _KEYS:
        problems.append(f"--cache-config: unknown cache {cache!r}; there are {', '.join(_KEYS)}")
        return None
    texts = {key: value for _, values in given for key, value in values.items()}
    before = len(problems)
    values = _values(cache, texts, problems)
    if len(problems) > before:
        return None
    if cache == "local":
        return LocalCacheSettings(**values)
    for setting, variable in _FROM_ENVIRONMENT.items():
        if setting not in values and environ.get(variable):
            values[setting] = environ[variable]
    return RedisSettings(**values)


def _values(cache: str, texts: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in texts.items():
        if key not in _KEYS[cache]:
            problems.append(f"--cache-config {cache}: unknown setting {key!r}; there are {', '.join(_KEYS[cache])}")
            continue
        setting, parse = _KEYS[cache][key]
        try:
            values[setting] = parse(value)
        except ValueError as error:
            problems.append(f"--cache-config {cache},{key}: {error}")
    problems += [
        f"--cache-config {cache}: {key} is missing" for key in _REQUIRED[cache] if key not in texts or not texts[key]
    ]
    return values
