"""The options about traces, old and new ones, to the settings that the server starts with."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.observability.otel_settings import OtelSettings
from headrace.observability.trace_settings import (
    COUNTS,
    LOG_FREQUENCIES,
    MODE,
    OTEL_MODE,
    RATES,
    TraceValues,
    parse_level,
    parse_number,
    problem_of,
)


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What is traced at first, and where that goes."""

    values: TraceValues
    file: str
    """"" = there is none, so nothing can be traced into it."""
    otel: OtelSettings | None = None
    """Where spans go, in mode opentelemetry; None = the mode is triton."""


_BSP: Final = {
    "bsp_max_queue_size": "max_queue_size",
    "bsp_schedule_delay": "schedule_delay_ms",
    "bsp_max_export_batch_size": "max_export_batch_size",
}
_MODES: Final = {
    "": ("rate", "level", "count", "mode"),
    MODE: ("file", "log-frequency"),
    OTEL_MODE: ("url", "resource", *_BSP),
}
"""The keys of --trace-config, by what stands before them."""
_NUMBERS: Final = {"rate": RATES, "count": COUNTS, "log-frequency": LOG_FREQUENCIES}
_DEPRECATED: Final = {
    "trace-file": "file",
    "trace-level": "level",
    "trace-rate": "rate",
    "trace-count": "count",
    "trace-log-frequency": "log-frequency",
}
"""Options of which --trace-config has taken the place, and its keys."""
_OLD_LEVELS: Final = {"MIN": "TIMESTAMPS", "MAX": "TIMESTAMPS"}

_Texts = dict[str, tuple[str, list[str]]]
"""Key -> what to call it in a sentence, and the texts given."""


def trace_settings(options: Mapping[str, Any], problems: list[str], warnings: list[str]) -> TraceSettings:
    """Return the settings that the parsed `options` make; adds what is wrong, and what is out of date."""
    texts = _new(options["trace-config"], problems)
    for option, key in _DEPRECATED.items():
        if not options[option]:
            continue
        prefix = f"{MODE}," if key in _MODES[MODE] else ""
        warnings.append(f"--{option} is deprecated: use --trace-config {prefix}{key}=...")
        if key in texts:
            problems.append(f"--{option}: --trace-config gives {key} too")
        else:
            texts[key] = (f"--{option}", list(options[option]))
    before = len(problems)
    values = TraceValues(level=_level(texts, problems), **_numbers(texts, problems))
    file = texts["file"][1][-1] if "file" in texts else ""
    otel = _otel(texts, problems)
    if len(problems) == before:
        problems += _conflicts(values, file, otel)
    return TraceSettings(values, file, otel)


def _new(triples: Sequence[tuple[str, str, str]], problems: list[str]) -> _Texts:
    texts: _Texts = {}
    for mode, key, text in triples:
        if mode not in _MODES:
            problems.append(f"--trace-config: unknown mode {mode!r}, expected {MODE} or {OTEL_MODE}")
        elif key not in _MODES[mode]:
            known = ", ".join(
                f"{prefix}{',' * bool(prefix)}{name}" for prefix, names in _MODES.items() for name in names
            )
            problems.append(f"--trace-config: unknown setting {mode}{',' * bool(mode)}{key}, expected one of {known}")
        elif key == "mode" and text.lower() not in (MODE, OTEL_MODE):
            problems.append(f"--trace-config: mode: expected {MODE} or {OTEL_MODE}, got {text!r}")
        else:
            texts.setdefault(key, (f"--trace-config: {key}", []))[1].append(text)
    return texts


def _level(texts: _Texts, problems: list[str]) -> tuple[str, ...]:
    name, given = texts.get("level", ("", ["OFF"]))
    try:
        return parse_level([_OLD_LEVELS.get(text.upper(), text.upper()) for text in given])
    except ValueError as error:
        problems.append(f"{name}: {error}")
        return ()


def _numbers(texts: _Texts, problems: list[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for key, allowed in _NUMBERS.items():
        name, given = texts.get(key, ("", []))
        for text in given:
            try:
                numbers[key.replace("-", "_")] = parse_number(text.strip(), allowed)
            except ValueError as error:
                problems.append(f"{name}: {error}")
    return numbers


def _otel(texts: _Texts, problems: list[str]) -> OtelSettings | None:
    """Return the settings of mode opentelemetry; None in the other one."""
    given = {key: texts[key][1] for key in _MODES[OTEL_MODE] if key in texts}
    if texts.get("mode", ("", [MODE]))[1][-1].lower() != OTEL_MODE:
        problems.extend(f"--trace-config: {OTEL_MODE},{key}: has no effect without mode={OTEL_MODE}" for key in given)
        return None
    values: dict[str, Any] = {}
    if "url" in given:
        values["url"] = given["url"][-1]
        if not values["url"].startswith(("http://", "https://")):
            problems.append(f"--trace-config: url: expected http://host:port/path, got {values['url']!r}")
    resource = {}
    for text in given.get("resource", ()):
        name, equals, value = text.partition("=")
        if not name or not equals:
            problems.append(f"--trace-config: resource: expected key=value, got {text!r}")
        resource[name] = value
    for key, name in _BSP.items():
        if key in given:
            try:
                values[name] = parse_number(given[key][-1].strip(), (1, 2**31 - 1))
            except ValueError as error:
                problems.append(f"--trace-config: {key}: {error}")
    return OtelSettings(resource=resource, **values)


def _conflicts(values: TraceValues, file: str, otel: OtelSettings | None) -> list[str]:
    if otel is not None and file:
        return [f"--trace-config: {MODE},file: has no effect with mode={OTEL_MODE}"]
    problem = problem_of(values, has_file=bool(file) or otel is not None)
    problems = [f"--trace-config: {problem}"] if problem else []
    if file and (problem := _problem_of_path(file)):
        problems.append(f"--trace-config: file: {problem}")
    return problems


def _problem_of_path(path: str) -> str:
    """Return why traces could not be written to `path`; "" where nothing speaks against it."""
    folder = Path(path).parent
    if not folder.is_dir():
        return f"{str(folder)!r} is no folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {str(folder)!r} cannot be written to"
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path!r}: {error.strerror}"
    return "" if stat.S_ISREG(status.st_mode) else f"{path!r} is there already, and no plain file"
