"""A conversation with a language model over the OpenAI door: messages out, pieces of text in as they are made."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from headrace_protocol.errors import InferError, internal, invalid, unavailable

_LONGEST_LINE: Final = 1 << 20
"""Bytes of one event of the server's."""
_REASONING: Final = ("reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of the answer; `reasoning` is what the model thinks before it answers."""

    text: str
    reasoning: bool = False


@dataclass(slots=True)
class Reply:
    """How an answer ended, once it has."""

    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)


class Conversation:
    """One conversation. What was said stays and goes along with the next question. Not for two threads."""

    def __init__(
        self, url: str, model: str | None, *, system: str | None, options: Mapping[str, Any], timeout: float
    ) -> None:
        """Take the address of a server's HTTP door. Raises INVALID_ARG where it is none."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise invalid(f"{url!r}: {error}") from error
        if not parts.hostname or parts.scheme not in {"http", "https"}:
            raise invalid(f"expected http://host:port, got {url!r}")
        self._url = url
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._secure: Final = parts.scheme == "https"
        self._address: Final = (parts.hostname, port or (443 if self._secure else 8000))
        self._timeout: Final = timeout
        self._options = dict(options)
        self.model = model or self._only_model()
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, question: str, reply: Reply) -> Iterator[Piece]:
        """Say `question`; yield the answer in pieces, and tell `reply` how it ended.

        Dropping the iterator stops the model; what was said of the answer until then is kept. Raises InferError with the
        server's words; the question is then forgotten.
        """
        self.messages.append({"role": "user", "content": question})
        connection, said, failed = self._connect(), "", True
        try:
            for piece in self._events(connection, reply):
                said += "" if piece.reasoning else piece.text
                yield piece
            failed = False
        except GeneratorExit:
            failed = False
            raise
        finally:
            connection.close()
            if failed:
                self.messages.pop()
            else:
                self.messages.append({"role": "assistant", "content": said})

    def forget(self) -> None:
        """Begin anew: only what the system says stays."""
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(*self._address, timeout=self._timeout)

    def _events(self, connection: http.client.HTTPConnection, reply: Reply) -> Iterator[Piece]:
        body = {"model": self.model, "messages": self.messages, "stream": True, **self._options}
        body["stream_options"] = {"include_usage": True}
        response = self._send(connection, "POST", "/v1/chat/completions", json.dumps(body).encode())
        for line in self._lines(response):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = _object(data)
            if event.get("error"):
                raise internal(f"the server says: {_message(event)}")
            yield from _pieces(event, reply)
        if reply.finish_reason is None:
            raise unavailable(f"{self._url} ended the answer before its end")

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        while True:
            try:
                line = response.readline(_LONGEST_LINE)
            except (OSError, http.client.HTTPException) as error:
                raise unavailable(f"{self._url}: {str(error) or type(error).__name__}") from error
            if not line:
                return
            yield line.strip()

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, self._prefix + path, body=body, headers=headers)
            response = connection.getresponse()
            if response.status == http.HTTPStatus.OK:
                return response
            answer = response.read(_LONGEST_LINE)
        except (OSError, http.client.HTTPException) as error:
            raise unavailable(f"no answer from {self._url}: {str(error) or type(error).__name__}") from error
        raise invalid(f"the server says: {_explained(answer)} (HTTP {response.status})")

    def _only_model(self) -> str:
        connection = self._connect()
        try:
            listed = _object(self._send(connection, "GET", "/v1/models").read())
        finally:
            connection.close()
        names = [str(entry.get("id")) for entry in listed.get("data", ()) if isinstance(entry, dict)]
        if len(names) == 1:
            return names[0]
        raise invalid(f"name a model: the server has {', '.join(names) or 'no language model'}")


def _pieces(event: Mapping[str, Any], reply: Reply) -> Iterator[Piece]:
    reply.usage = event.get("usage") or reply.usage
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        thought = next((delta[name] for name in _REASONING if delta.get(name)), None)
        if thought:
            yield Piece(str(thought), reasoning=True)
        if delta.get("content"):
            yield Piece(str(delta["content"]))
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise internal(f"the server's answer is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise internal("the server's answer is no JSON object")
    return found


def _explained(answer: bytes) -> str:
    """Return the sentence of an answer that says what is wrong."""
    try:
        return _message(_object(answer))
    except InferError:
        return answer[:500].decode("utf-8", errors="replace") or "no explanation"


def _message(answer: Mapping[str, Any]) -> str:
    """Return the sentence of an error, in OpenAI's shape or ours."""
    error = answer.get("error")
    return str(error.get("message")) if isinstance(error, dict) else str(error)
