"""Where option texts come from: argv, environment and the YAML file, with their order of precedence. No values yet.

`gather` tells for each option the texts given and the name of their source, for error sentences.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from headrace.flags import FLAGS, Flag, Status, find_flag

Given = dict[str, tuple[str, list[str]]]
"""Option name -> (source, texts)."""

_PREFIX = "HEADRACE_"
_SEPARATOR = ";"
_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?$")
_KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://")


class UsageError(Exception):
    """A command line, environment or file that cannot be used; holds every problem found, not the first."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or nothing where no known name is close."""
    import difflib

    close = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def gather(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Given, list[str], list[str]]:
    """Return the texts of each option that is given and has effect, warnings, and problems."""
    warnings: list[str] = []
    problems: list[str] = []
    from_argv = _from_argv(argv, problems)
    from_environ = _from_environ(environ, warnings)
    named = {**from_environ, **from_argv}.get("config")
    from_file = _from_file(named[1][-1], problems) if named else {}
    given = {**from_file, **from_environ, **from_argv}
    for name, (source, texts) in list(given.items()):
        flag = FLAGS[name]
        if flag.status is Status.SERVED:
            continue
        del given[name]
        if flag.status is Status.IGNORED:
            warnings.append(f"{source} has no effect: {flag.help}")
        elif not all(flag.is_default(text) for text in texts):
            problems.append(f"{source} is not served: {flag.help}")
    return given, warnings, problems


def _add(given: Given, flag: Flag, source: str, text: str) -> None:
    given.setdefault(flag.name, (source, []))[1].append(text)


def _from_argv(argv: Sequence[str], problems: list[str]) -> Given:
    given: Given = {}
    words = deque(argv)
    while words:
        word = words.popleft()
        if not word.startswith("--") or word == "--":
            problems.append(f"unexpected argument {word!r}: options are written --name=value or --name value")
            continue
        name, equals, text = word[2:].partition("=")
        flag = find_flag(name)
        value_follows = not equals and words and not words[0].startswith("--")
        if flag is None:
            problems.append(f"unknown option --{name}{suggestion(f'--{name}', (f'--{known}' for known in FLAGS))}")
            if value_follows:
                words.popleft()
            continue
        if value_follows:
            text = words.popleft()
        elif not equals and flag.switch:
            text = "true"
        elif not equals:
            problems.append(f"--{name}: a value is missing")
            continue
        _add(given, flag, f"--{name}", text)
    return given


def _from_environ(environ: Mapping[str, str], warnings: list[str]) -> Given:
    given: Given = {}
    by_variable = {flag.variable: flag for flag in FLAGS.values()}
    for variable, text in environ.items():
        if not variable.startswith(_PREFIX):
            continue
        # Kubernetes puts variables of its own into every container: a service named headrace-http makes
        # HEADRACE_HTTP_PORT=tcp://10.0.0.1:80.
        if _KUBERNETES.search(variable) and (_KUBERNETES_VALUE.match(text) or variable not in by_variable):
            continue
        flag = by_variable.get(variable)
        if flag is None:
            warnings.append(f"environment variable {variable} is no option{suggestion(variable, by_variable)}")
            continue
        for part in text.split(_SEPARATOR) if flag.repeatable else [text]:
            _add(given, flag, variable, part)
    return given


def _from_file(path: str, problems: list[str]) -> Given:
    import yaml

    given: Given = {}
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"--config: cannot read {path}: {error}")
        return given
    except yaml.YAMLError as error:
        problems.append(f"--config: {path} is no YAML: {' '.join(str(error).split())}")
        return given
    if document is None:
        return given
    if not isinstance(document, dict):
        problems.append(f"--config: {path} must hold `option: value` lines, got {type(document).__name__}")
        return given
    for key, value in document.items():
        name = str(key).removeprefix("--").replace("_", "-")
        source = f"{path}: {key}"
        flag = find_flag(name)
        if flag is None:
            problems.append(f"{source}: unknown option{suggestion(name, FLAGS)}")
        elif name == "config":
            problems.append(f"{source}: a configuration file cannot name another one")
        elif flag.name in given:
            problems.append(f"{source}: is given twice")
        elif isinstance(value, list) and not flag.repeatable:
            problems.append(f"{source}: expected one value, got a list")
        else:
            for item in value if isinstance(value, list) else [value]:
                _add_item(given, flag, source, item, problems)
    return given


def _add_item(given: Given, flag: Flag, source: str, item: object, problems: list[str]) -> None:
    if isinstance(item, bool):
        _add(given, flag, source, "true" if item else "false")
    elif isinstance(item, str | int | float):
        _add(given, flag, source, str(item))
    else:
        problems.append(f"{source}: expected a text, number or boolean, got {type(item).__name__}")
