"""One request at OpenAI's doors: its id, when it came, and what the headers of its answer say of that."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from secrets import token_hex
from typing import Final

from headrace.clock import Clock
from headrace.gateway.http.answer import Answer
from headrace.gateway.http.anthropic.errors import is_anthropic
from headrace.gateway.http.errors import failure
from headrace.gateway.http.openai.account import Account
from headrace.gateway.http.paths import path_of
from headrace.gateway.http.request import REQUEST_ID, HttpRequest
from headrace_protocol.errors import InferError

_ID: Final = re.compile(r"[!-~]{1,128}")
"""What a client may call its request: it comes back in a header and in ids."""


def random_id() -> str:
    """Return an id that no other request has."""
    return token_hex(12)


class Exchange:
    """Of one request, from its head to its answer."""

    __slots__ = ("_clock", "account", "created", "http", "names", "request_id")

    def __init__(self, http: HttpRequest, clock: Clock, new_id: Callable[[], str] = random_id) -> None:
        self.http = http
        self._clock = clock
        given = http.text(REQUEST_ID)
        self.request_id = given if given is not None and _ID.fullmatch(given) else new_id()
        self.created = clock.wall_ns() // 1_000_000_000
        """Unix time in seconds."""
        self.account: Account | None = None
        """Of its call, where somebody wants one."""
        self.names: Mapping[str, str] = {}
        """What a backend names of a call, as the client named it: for errors."""

    def now_ns(self) -> int:
        """Return the time on the clock that does not go back."""
        return self._clock.now_ns()

    def settle(self) -> None:
        """Close its call's account, if it has one."""
        account, self.account = self.account, None
        if account is not None:
            account.settle()

    def headers(self) -> dict[str, str]:
        """Return the headers of an answer that begins now."""
        took_ms = max(0, self._clock.now_ns() - self.http.began_ns) // 1_000_000
        headers = {"x-request-id": self.request_id, "openai-processing-ms": str(took_ms)}
        if is_anthropic(path_of(self.http.url)):
            headers["request-id"] = self.request_id
        return headers

    def answer(self, body: bytes) -> Answer:
        """Return the answer with this JSON."""
        return Answer(body, headers=self.headers())

    def failure(self, error: Exception) -> Answer:
        """Return what the client is told of a failure."""
        if isinstance(error, InferError) and error.param is not None and error.param in self.names:
            error = self._in_the_words_of_the_client(error, error.param, self.names[error.param])
        answer = failure(error, self.http.url)
        answer.headers = {**(answer.headers or {}), **self.headers()}
        return answer

    @staticmethod
    def _in_the_words_of_the_client(error: InferError, param: str, name: str) -> InferError:
        message = error.message
        if message.startswith((f"{param}:", f"{param}[")):
            message = name + message.removeprefix(param)
        return InferError(error.code, message, error.reason, detail=error.detail, param=name)
