"""`headrace chat`: a conversation with a language model in the terminal, its tokens as they come."""

# ruff: noqa: T201 - printing is what a command does
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from headrace.client.conversation import Conversation, Piece, Reply
from headrace.observability.logging import escape
from headrace.subcommand import WordParser
from headrace_protocol.errors import InferError

_EPILOG = """\
Without a message it reads lines: each is a question, /new begins a new conversation, /quit or Ctrl-D ends. Ctrl-C stops an
answer. A message, or what is piped in, is one question. OPENAI_API_KEY is sent where it is set.

  headrace chat http://localhost:8000 smollm2
  echo 'What is a headrace?' | headrace chat http://localhost:8000
"""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_INTERRUPTED = 130


def run(words: Sequence[str]) -> int:
    """Hold the conversation that `words` ask for; return the exit status."""
    parser = WordParser("headrace chat", "Talk with a language model.", _EPILOG)
    parser.add_argument("url", help="the server's HTTP door, http://host:port")
    parser.add_argument("model", nargs="?", help="may be left out where the server has one only")
    parser.add_argument("--message", "-m", help="ask this, and end")
    parser.add_argument("--system", help="what the model is told before the conversation")
    parser.add_argument("--temperature", type=float, help="0 always takes the likeliest token")
    parser.add_argument("--top-p", type=float, help="only the likeliest tokens, of so much probability together")
    parser.add_argument("--max-tokens", type=int, help="longest answer, in tokens")
    parser.add_argument("--seed", type=int, help="makes an answer repeatable")
    parser.add_argument(
        "--stats", action="store_true", help="tell the number of tokens and their speed after an answer"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds without a token (%(default)s)")
    try:
        arguments = parser.parse_args(words)
    except SystemExit as stop:  # argparse exits by itself, for --help too; main returns a status instead.
        return int(stop.code or 0)
    try:
        conversation = Conversation(
            arguments.url,
            arguments.model,
            system=arguments.system,
            options=_options(arguments),
            timeout=arguments.timeout,
        )
        return _talk(conversation, arguments, sys.stdin)
    except InferError as error:
        print(escape(error.message), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
    return {name: value for name, value in given.items() if value is not None}


def _talk(conversation: Conversation, arguments: argparse.Namespace, source: TextIO) -> int:
    if arguments.message is not None or not source.isatty():
        question = arguments.message if arguments.message is not None else source.read()
        _answer(conversation, question, stats=arguments.stats)
        return 0
    print(f"{conversation.model} at {arguments.url}: /new begins anew, /quit ends", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return 0
        if line == "/quit":
            return 0
        if line == "/new":
            conversation.forget()
        elif line:
            _answer_one_of_many(conversation, line, stats=arguments.stats)


def _answer_one_of_many(conversation: Conversation, question: str, *, stats: bool) -> None:
    """Answer; what goes wrong with one question does not end the conversation."""
    try:
        _answer(conversation, question, stats=stats)
    except InferError as error:
        print(escape(error.message), file=sys.stderr)
    except KeyboardInterrupt:
        print()


def _answer(conversation: Conversation, question: str, *, stats: bool) -> None:
    reply, started, first = Reply(), time.monotonic(), None
    dim = sys.stdout.isatty()
    pieces = conversation.ask(question, reply)
    try:
        for piece in pieces:
            first = first or time.monotonic()
            print(_shown(piece, dim=dim), end="", flush=True)
    finally:
        pieces.close()  # type: ignore[attr-defined]  # a generator: closing it stops the model
    print()
    if stats:
        _tell(reply, started, first)


def _shown(piece: Piece, *, dim: bool) -> str:
    """Return text that may go to a terminal: lines as they are, nothing that could steer it."""
    lines = piece.text.replace("\r\n", "\n").split("\n")
    text = "\n".join("\t".join(escape(part) for part in line.split("\t")) for line in lines)
    return f"{_DIM}{text}{_PLAIN}" if piece.reasoning and dim else text


def _tell(reply: Reply, started: float, first: float | None) -> None:
    now = time.monotonic()
    tokens = int(reply.usage.get("completion_tokens") or 0)
    parts = [f"{tokens} tokens"]
    if first is not None and now > first and tokens > 1:
        parts.append(f"{(tokens - 1) / (now - first):.1f} tokens/s")
        parts.append(f"first after {first - started:.2f} s")
    if reply.finish_reason not in {None, "stop"}:
        parts.append(f"ended by {reply.finish_reason}")
    print(escape(", ".join(parts)), file=sys.stderr)
