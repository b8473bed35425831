"""Logger: lines for the server's log out of a model's code."""

from __future__ import annotations

import enum
import logging
from typing import Final

_LOG: Final = logging.getLogger("headrace.python_model")
_LOG.setLevel(logging.DEBUG)


class LogLevel(enum.IntEnum):
    """How important a line is, with Triton's numbers."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_LEVELS: Final = {
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.VERBOSE: logging.DEBUG,
}


class Logger:
    """Functions that write to the server's log, with the model's name before the line. VERBOSE is its level debug."""

    LogLevel = LogLevel
    INFO: Final = LogLevel.INFO
    WARNING: Final = LogLevel.WARNING
    ERROR: Final = LogLevel.ERROR
    VERBOSE: Final = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: int = LogLevel.INFO) -> None:
        """Write a line at `level`. Raises TypeError where it is none."""
        try:
            _LOG.log(_LEVELS[LogLevel(level)], "%s", message)
        except ValueError:
            raise TypeError(f"Logger.log: expected one of Logger's levels, got {level!r}") from None

    @staticmethod
    def log_info(message: str) -> None:
        """Write an INFO line."""
        _LOG.info("%s", message)

    @staticmethod
    def log_warn(message: str) -> None:
        """Write a WARNING line."""
        _LOG.warning("%s", message)

    @staticmethod
    def log_error(message: str) -> None:
        """Write an ERROR line."""
        _LOG.error("%s", message)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Write a line that is shown where the server logs debug lines."""
        _LOG.debug("%s", message)
