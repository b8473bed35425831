"""The `headrace` command and its subcommands: parses words, calls the module that does the work, prints.

Heavy modules are imported where they are needed, so that help and mistakes are answered at once.
"""

# ruff: noqa: T201 - printing is what a command does
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from headrace import __version__
from headrace.flags import FLAGS, SERVED, Flag, Status
from headrace.options import UsageError, suggestion

_SUMMARY = """\
usage: headrace <command> [...]

  serve    serve the models of a repository
  check    say what is wrong with a repository's models, without serving them
  infer    send one request to a server and print the answer
  chat     talk with a language model
  rollout  say which version of a model gets its requests
  key      make an API key for the file of --access-file
  import   make a model of a TorchServe archive
  version  print the version

headrace <command> --help tells a command's options.
"""
_SERVE_USAGE = "usage: headrace serve --model-repository DIR [--option=value ...]"
_CHECK_USAGE = "usage: headrace check DIR... [--print-config] [--option=value ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit status."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # Whoever read our output, `head` say, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": _serve,
        "check": _check,
        "infer": _infer,
        "chat": _chat,
        "rollout": _rollout,
        "key": _key,
        "import": _import,
        "version": _version,
    }
    if not words or words[0] in {"-h", "--help", "help"}:
        print(_SUMMARY, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 1
    if words[0] == "--version":
        return _version([])
    command = commands.get(words[0])
    if command is None:
        hint = (
            "; options follow a command: headrace serve ..."
            if words[0].startswith("-")
            else suggestion(words[0], commands)
        )
        return _mistake("usage: headrace <command> [...]", "headrace --help", [f"unknown command {words[0]!r}{hint}"])
    return command(words[1:])


def _serve(words: list[str]) -> int:
    if "--help" in words or "-h" in words:
        print(_serve_help())
        return 0
    from headrace.config import load_config

    try:
        config = load_config(words)
    except UsageError as error:
        return _mistake(_SERVE_USAGE, "headrace serve --help", error.problems)
    from headrace.app import serve

    return serve(config)


def _check(words: list[str]) -> int:
    if "--help" in words or "-h" in words:
        print(
            f"{_CHECK_USAGE}\n\n--print-config prints each model's complete configuration. Options are those of serve."
        )
        return 0
    from headrace.config import load_config

    print_config = "--print-config" in words
    repositories: list[str] = []
    options = [word for word in words if word != "--print-config"]
    while options and not options[0].startswith("-"):
        repositories.append(options.pop(0))
    try:
        config = load_config([*(f"--model-repository={repository}" for repository in repositories), *options])
    except UsageError as error:
        return _mistake(_CHECK_USAGE, "headrace check --help", error.problems)
    from headrace.checking import check_repositories

    return check_repositories(config, print_config)


def _infer(words: list[str]) -> int:
    from headrace.client.command import run

    return run(words)


def _chat(words: list[str]) -> int:
    from headrace.client.chat import run

    return run(words)


def _rollout(words: list[str]) -> int:
    from headrace.rollout.command import run

    return run(words)


def _key(words: list[str]) -> int:
    from headrace.access.command import run

    return run(words)


def _import(words: list[str]) -> int:
    from headrace.importing.command import run

    return run(words)


def _version(words: list[str]) -> int:
    if words:
        return _mistake("usage: headrace version", "headrace --help", [f"unexpected argument {words[0]!r}"])
    print(f"headrace {__version__}")
    return 0


def _mistake(usage: str, help_command: str, problems: Sequence[str]) -> int:
    print(f"{usage}   ({help_command} tells more)", file=sys.stderr)
    for problem in problems:
        print(f"  {problem}", file=sys.stderr)
    return 1


def _serve_help() -> str:
    lines = [
        _SERVE_USAGE,
        "",
        "Every option may also be set by an environment variable (HEADRACE_HTTP_PORT for --http-port; several values of",
        "a repeatable one with ; between) or in the YAML file of --config. argv goes before environment before file.",
        "",
    ]
    lines.extend(_help_line(flag) for flag in SERVED)
    ignored = sorted(flag.name for flag in FLAGS.values() if flag.status is Status.IGNORED)
    refused = sorted(flag.name for flag in FLAGS.values() if flag.status is Status.REFUSED)
    lines += ["", f"Accepted without effect: {', '.join(ignored)}.", f"Not served: {', '.join(refused)}."]
    return "\n".join(lines)


def _help_line(flag: Flag) -> str:
    head = f"  --{flag.name} {flag.kind or 'N'}{' ...' if flag.repeatable else ''}"
    default = f" (default {flag.default})" if flag.default else ""
    gap = f"\n{'':44}" if len(head) > 42 else " " * (44 - len(head))
    return f"{head}{gap}{flag.help}{default}"
