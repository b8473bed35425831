"""`headrace rollout`: what an operator says about the versions of a model, as one call to a running server each."""

# ruff: noqa: T201 - printing is what a command does
from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from headrace.observability.logging import escape
from headrace.subcommand import WordParser
from headrace_protocol.errors import InferError, internal, invalid, unavailable

_EPILOG = """\
Without a command it tells the status. All of it is explained in docs/rollout.md.

  headrace rollout http://localhost:8000 digits
  headrace rollout http://localhost:8000 digits load 3
  headrace rollout http://localhost:8000 digits canary 3 --weight 10 --max-error-rate 0.05
  headrace rollout http://localhost:8000 digits promote 3
  headrace rollout http://localhost:8000 digits rollback
  headrace rollout http://localhost:8000 digits shadow 3 --percent 20
  headrace rollout http://localhost:8000 digits shadow off
  headrace rollout http://localhost:8000 digits switch 3 --load --unload-old
"""
_GUARD: Final = ("max_error_rate", "max_error_rate_above_default", "max_p99_ms", "max_p99_ratio")
_GUARD_WHOLE: Final = ("min_requests", "window_secs")


def run(words: Sequence[str]) -> int:
    """Do what `words` ask for and print how the model's versions stand then; return the exit status."""
    try:
        arguments = _parser().parse_args(words)
    except SystemExit as stop:  # argparse exits by itself, for --help too; main returns a status instead.
        return 1 if stop.code else 0
    try:
        told = _Server(arguments.url, arguments.key_file, arguments.timeout).obey(arguments)
    except InferError as error:
        print(escape(error.message), file=sys.stderr)
        return 1
    print(json.dumps(told, indent=2) if arguments.json else render(told))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = WordParser("headrace rollout", "Say which version of a model gets the requests that name none.", _EPILOG)
    parser.add_argument("url", help="the server's HTTP door, http://host:port")
    parser.add_argument("model")
    parser.add_argument("--key-file", type=Path, help="file with an admin's API key, where the server asks for keys")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for an answer (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the status as JSON")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    commands.add_parser("status", help="how the versions stand (what is done without a command)")
    commands.add_parser("reset", help="go back to what the model's configuration says")
    for name, text in (
        ("default", "the version that gets what no other does"),
        ("promote", "make a version the default, and end all weights"),
        ("load", "load one version beside those that serve"),
        ("unload", "unload one version, once no request is in it"),
    ):
        commands.add_parser(name, help=text).add_argument("version", type=int)
    rollback = commands.add_parser("rollback", help="end one weight, or all of them")
    rollback.add_argument("version", type=int, nargs="?")
    canary = commands.add_parser("canary", help="give a version a part of the requests")
    canary.add_argument("version", type=int)
    canary.add_argument("--weight", type=float, required=True, help="percent; 0 takes it away")
    canary.add_argument("--sticky-parameter", help="request parameter that keeps callers with a version")
    for option in _GUARD:
        canary.add_argument(f"--{option.replace('_', '-')}", type=float, help="bound of the guard")
    for option in _GUARD_WHOLE:
        canary.add_argument(f"--{option.replace('_', '-')}", type=int, help="of the guard")
    shadow = commands.add_parser("shadow", help="send a version a part of the requests, and drop its answers")
    shadow.add_argument("version", help="or off")
    shadow.add_argument("--percent", type=float, default=100.0, help="(%(default)s)")
    shadow.add_argument("--max-in-flight", type=int, help="what would be more is not sent")
    shadow.add_argument("--timeout-secs", type=float, help="after which one is given up")
    shadow.add_argument("--streams", action="store_true", help="also where any number of responses may come")
    switch = commands.add_parser("switch", help="make a version the default once it is ready")
    switch.add_argument("version", type=int)
    switch.add_argument("--load", action="store_true", help="load it first, where it does not serve")
    switch.add_argument("--unload-old", action="store_true", help="unload what was the default")
    switch.add_argument("--timeout-secs", type=float, help="how long it may take to be ready")
    return parser


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the options that were given and say something."""
    return {name: value for name in names if (value := getattr(arguments, name)) not in (None, False)}


class _Server:
    """A server's HTTP door. Raises InferError with its own words for whatever it refuses."""

    def __init__(self, url: str, key_file: Path | None, timeout: float) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise invalid(f"{url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise invalid(f"expected http://host:port, got {url!r}")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, port or (443 if parts.scheme == "https" else 8000), timeout=timeout)
        self._url = url
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key_file is not None:
            try:
                self._headers["Authorization"] = f"Bearer {key_file.read_text().strip()}"
            except (OSError, UnicodeDecodeError) as error:
                raise invalid(f"--key-file: cannot be read: {error}") from None

    def obey(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """Do what the command says; return the status after it."""
        model = quote(arguments.model, safe="")
        traffic = f"/v2/models/{model}/traffic"
        command = arguments.command or "status"
        if command in ("load", "unload"):
            self._ask(
                "POST", f"/v2/repository/models/{model}/{command}", {"parameters": {"version": arguments.version}}
            )
        if command in ("status", "load", "unload"):
            return self._ask("GET", traffic)
        before = self._ask("GET", traffic)["policy"] if command == "canary" else {}
        return self._ask("POST", traffic, changes(arguments, before))

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        try:
            text = None if body is None else json.dumps(body)
            self._connection.request(method, self._prefix + path, text, self._headers)
            answer = self._connection.getresponse()
            told = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise unavailable(f"no answer from {self._url}: {str(error) or type(error).__name__}") from None
        finally:
            self._connection.close()
        try:
            document = json.loads(told) if told else {}
        except ValueError:
            document = {}
        if answer.status != http.HTTPStatus.OK:
            message = document.get("error") if isinstance(document, dict) else None
            raise invalid(f"the server says: {message or told[:500].decode(errors='replace')} (HTTP {answer.status})")
        if not isinstance(document, dict):
            raise internal("the server's answer is no JSON object")
        return document


def changes(arguments: argparse.Namespace, before: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the call that a command makes; `before` is the policy of a canary's model."""
    command = arguments.command
    if command == "reset":
        return {"reset": True}
    if command in ("default", "promote"):
        return {command: arguments.version}
    if command == "rollback":
        return {"rollback": True if arguments.version is None else arguments.version}
    if command == "switch":
        return {"switch": {"version": arguments.version, **_given(arguments, ("load", "unload_old", "timeout_secs"))}}
    if command == "shadow":
        if arguments.version == "off":
            return {"shadow": None}
        options = _given(arguments, ("percent", "max_in_flight", "timeout_secs", "streams"))
        return {"shadow": {"version": arguments.version, **options}}
    made: dict[str, Any] = {"weights": {**before.get("weights", {}), str(arguments.version): arguments.weight}}
    made |= _given(arguments, ("sticky_parameter",))
    guard = _given(arguments, (*_GUARD, *_GUARD_WHOLE))
    if guard:
        made["guard"] = {**before.get("guard", {}), **guard}
    return made


def render(told: dict[str, Any]) -> str:
    """Return a status as text."""
    lines = [f"model {told['model']}, default version {told['default']}, policy set by {told['set_by']}"]
    for version in told["versions"]:
        state = "ready" if version["ready"] else "NOT READY"
        counts = f"{version['answered']} answered, {version['failed']} failed"
        lines.append(f"  version {version['version']}: {version['weight']:g} % of the requests, {state}, {counts}")
    for version, counts in told["shadows"].items():
        shown = ", ".join(f"{count} {name}" for name, count in counts.items())
        lines.append(f"  shadow {version}: {shown}, {told['shadow_in_flight']} under way")
    for name in ("guard", "shadow"):
        if name in told["policy"]:
            shown = ", ".join(f"{key} {value}" for key, value in told["policy"][name].items())
            lines.append(f"  {name}: {shown}")
    lines += [
        f"  {back['at']} version {back['version']} rolled back ({back['reason']}): {back['text']}"
        for back in told["rollbacks"]
    ]
    return "\n".join(map(escape, lines))
