"""Logging: one record a line, levels and format from LogSettings, text from clients made harmless.

Loggers are named `headrace.*`; what libraries warn of takes the same way. Information goes to stdout, warnings and
errors to stderr, unless a file is given. LogControl changes levels and format while the server runs, never the file.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

from headrace.config import LogSettings
from headrace.flags import LOG_FORMATS, MOST_VERBOSE
from headrace.planes import LogValue
from headrace_protocol.errors import invalid, unsupported

_log = logging.getLogger(__name__)

VERBOSE_2: Final = logging.DEBUG - 1
"""The level of what --log-verbose=2 shows, beyond what 1 does: DEBUG."""
LONGEST_MESSAGE: Final = 4096
"""Characters of a message that are logged."""
_INNERMOST_FRAMES = 8
_LONGEST_VALUE = 80

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters, the terminal's escape among them
    "\u2028\u2029"  # line ends of Unicode
    "\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that turn the direction of text
    "\ud800-\udfff]"  # halves of surrogate pairs, which cannot be written
)
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escape(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """Return `text` cut to `longest` characters, without any that could end a line or steer a terminal."""
    if len(text) > longest:
        text = f"{text[:longest]}... ({len(text) - longest} characters more)"
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def _one_line(error: BaseException) -> str:
    """Return an exception and where it came from, innermost frame first."""
    frames = traceback.extract_tb(error.__traceback__)[: -_INNERMOST_FRAMES - 1 : -1]
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    return f"[{type(error).__name__}: {error}{' at ' if where else ''}{where}]"


class _Formatter(logging.Formatter):
    def __init__(self, *, iso8601: bool) -> None:
        super().__init__()
        self._iso8601 = iso8601

    def format(self, record: logging.LogRecord) -> str:
        letter = "E" if record.levelno >= logging.ERROR else "W" if record.levelno >= logging.WARNING else "I"
        if self._iso8601:
            moment = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            prefix = f"{moment} {letter}"
        else:
            seconds = time.localtime(record.created)
            micros = int(record.created % 1 * 1e6)
            prefix = f"{letter}{time.strftime('%m%d %H:%M:%S', seconds)}.{micros:06d}"
        line = f"{prefix} {record.process} {record.name}] {escape(record.getMessage())}"
        if record.exc_info and record.exc_info[1] is not None:
            line += " " + escape(_one_line(record.exc_info[1]))
        return line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
        }
        fields = getattr(record, "fields", None)
        if fields is None:
            entry["message"] = message if len(message) <= LONGEST_MESSAGE else escape(message)
        else:
            entry |= fields  # a line that has fields says no more than they do
        if record.exc_info and record.exc_info[1] is not None:
            entry["exception"] = "".join(traceback.format_exception(record.exc_info[1]))[-2 * LONGEST_MESSAGE :]
        return json.dumps(entry)


class _Filter(logging.Filter):
    """Passes the levels that are switched on, from `low` up to, not including, `high`."""

    def __init__(self, settings: LogSettings, low: int, high: int) -> None:
        super().__init__()
        self.settings = settings
        self._low = low
        self._high = high

    def filter(self, record: logging.LogRecord) -> bool:
        level = record.levelno
        if not self._low <= level < self._high:
            return False
        settings = self.settings
        if level >= logging.ERROR:
            return settings.error
        return settings.warning if level >= logging.WARNING else settings.info or level < logging.INFO


class _StandardHandler(logging.StreamHandler[TextIO]):
    """Writes to a standard stream; a type of its own, so that configure finds what it put there."""


class _FileHandler(logging.FileHandler):
    """Appends to the log file; a type of its own, for the same reason."""


_EVERY = logging.CRITICAL + 1


def configure(settings: LogSettings) -> None:
    """Make logging follow `settings`, in place of what an earlier call set.

    Raises OSError where the file cannot be opened; logging is then as it was.
    """
    handlers: list[logging.Handler] = []
    if settings.file:
        handlers.append(
            _with(_FileHandler(settings.file, encoding="utf-8", errors="backslashreplace"), settings, 0, _EVERY)
        )
    else:
        handlers.append(_with(_StandardHandler(sys.stdout), settings, 0, logging.WARNING))
        handlers.append(_with(_StandardHandler(sys.stderr), settings, logging.WARNING, _EVERY))
    reset()
    root = logging.getLogger()
    for handler in handlers:
        root.addHandler(handler)
    logging.getLogger("headrace").setLevel(level(settings))


def apply(settings: LogSettings) -> None:
    """Make what configure set follow `settings` from the next record on, all but its file."""
    for handler in _ours():
        handler.setFormatter(_formatter(settings))
        for each in handler.filters:
            if isinstance(each, _Filter):
                each.settings = settings
    logging.getLogger("headrace").setLevel(level(settings))


def reset() -> None:
    """Take away what configure set."""
    for handler in _ours():
        logging.getLogger().removeHandler(handler)
        handler.close()
    logging.getLogger("headrace").setLevel(logging.NOTSET)


def level(settings: LogSettings) -> int:
    """Return the lowest level of a headrace logger that is logged: verbose 1 is DEBUG, each step more one lower."""
    return logging.DEBUG + 1 - settings.verbose if settings.verbose else logging.INFO


def _ours() -> list[logging.Handler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, _StandardHandler | _FileHandler)]


def _formatter(settings: LogSettings) -> logging.Formatter:
    return _JsonFormatter() if settings.format == "json" else _Formatter(iso8601=settings.format == "ISO8601")


def _with(handler: logging.Handler, settings: LogSettings, low: int, high: int) -> logging.Handler:
    handler.setFormatter(_formatter(settings))
    handler.addFilter(_Filter(settings, low, high))
    return handler


class LogControl:
    """Implements planes.LogSettings over what configure set. Owned by the server; used from its event loop."""

    def __init__(self, settings: LogSettings) -> None:
        self._settings = settings

    def get(self) -> dict[str, LogValue]:
        """Return the settings in force."""
        settings = self._settings
        return {name: getattr(settings, field) for name, field in _FIELDS.items()}

    def update(self, changes: Mapping[str, LogValue]) -> dict[str, LogValue]:
        """Change settings, all or none, and return all; see planes.LogSettings."""
        for name, value in changes.items():
            _check(name, value)
        if changes:
            shown = self._settings.info
            told = ", ".join(f"{name}={value}" for name, value in changes.items())
            if shown:  # the call that switches information off is the last to be told
                _log.info("log settings are changed by a call: %s", told)
            fields: dict[str, Any] = {_FIELDS[name]: value for name, value in changes.items()}
            self._settings = replace(self._settings, **fields)
            apply(self._settings)
            if not shown:
                _log.info("log settings are changed by a call: %s", told)
        return self.get()


_FIELDS: Final = {
    "log_file": "file",
    "log_info": "info",
    "log_warning": "warning",
    "log_error": "error",
    "log_verbose_level": "verbose",
    "log_format": "format",
}
"""The fields of LogSettings by their names in the protocol."""


def _boolean(value: LogValue) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _verbosity(value: LogValue) -> str:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_VERBOSE
    return "" if good else f"an integer from 0 to {MOST_VERBOSE}"


def _format(value: LogValue) -> str:
    return "" if value in LOG_FORMATS else f"one of {', '.join(LOG_FORMATS)}"


_EXPECTED: Final[Mapping[str, Callable[[LogValue], str]]] = {
    "log_info": _boolean,
    "log_warning": _boolean,
    "log_error": _boolean,
    "log_verbose_level": _verbosity,
    "log_format": _format,
}
"""What each setting that can be changed expects of a value; "" where it is good."""


def _check(name: str, value: LogValue) -> None:
    if name == "log_file":
        raise unsupported("log_file: where the log goes is said when the server is started, and no call changes it")
    expected = _EXPECTED.get(name)
    if expected is None:
        raise invalid(f"unknown log setting {described(name)}, expected one of {', '.join(_EXPECTED)}")
    wanted = expected(value)
    if wanted:
        raise invalid(f"{name}: expected {wanted}, got {described(value)}")


def described(value: object) -> str:
    """Return a client's value for a sentence: on one line, and short."""
    if isinstance(value, str):
        return escape(repr(value[:_LONGEST_VALUE]))
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to write very large ones
        return "a number of more than 64 bits"
    return escape(repr(value), _LONGEST_VALUE)
