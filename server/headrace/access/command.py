"""`headrace key`: a new key, and what the access file keeps of it."""

# ruff: noqa: T201 - printing is what a command does
from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence

from headrace.access.caller import Role
from headrace.access.table import key_hash
from headrace.subcommand import WordParser

_EPILOG = """\
The key goes to standard output and is nowhere kept; the entry for the file of --access-file to standard error. With
--hash the key is read from standard input, and its SHA-256 printed alone.

  headrace key search-team --role infer >search-team.key 2>>access.yaml
"""


def run(words: Sequence[str]) -> int:
    """Make the key that `words` ask for; return the exit status."""
    parser = WordParser("headrace key", "Make an API key.", _EPILOG)
    parser.add_argument("name", nargs="?", help="of the caller")
    parser.add_argument(
        "--role", action="append", choices=[role.value for role in Role], help="of the caller; repeat for each (infer)"
    )
    parser.add_argument("--hash", action="store_true", help="print the SHA-256 of the key on standard input")
    try:
        arguments = parser.parse_args(words)
        if (arguments.name is None) != arguments.hash:
            parser.error("give the name of a caller, or --hash")
    except SystemExit as stop:  # argparse exits by itself, for --help too; main returns a status instead.
        return int(stop.code or 0)
    if arguments.hash:
        print(key_hash(sys.stdin.readline().strip()))
        return 0
    key = f"hr-{secrets.token_urlsafe(32)}"
    print(key)
    roles = ", ".join(arguments.role or [Role.INFER.value])
    print(f"- name: {arguments.name}\n  roles: [{roles}]\n  keys:\n  - sha256: {key_hash(key)}", file=sys.stderr)
    return 0
