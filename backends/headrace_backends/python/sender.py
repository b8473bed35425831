"""InferenceResponseSender: what a model answers a request with, and what stands behind it."""

from __future__ import annotations

from typing import Final, Protocol

from headrace_backends.python.errors import TritonModelException
from headrace_backends.python.response import InferenceResponse

COMPLETE_FINAL: Final = 1
"""The flag of a request's last response, or of the end without one."""
CLOSED: Final = "Unable to send response: this request has had its final response, its sender is closed."


class Reply(Protocol):
    """How one request is answered by a sender."""

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        """Send a response, or only end the request. Raises TritonModelException."""
        ...

    def is_cancelled(self) -> bool:
        """Return whether nobody waits any more."""
        ...


class InferenceResponseSender:
    """Sends the responses of one request, from any thread, also after `execute` has returned."""

    __slots__ = ("_reply",)

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send `response`; with the flag TRITONSERVER_RESPONSE_COMPLETE_FINAL it, or nothing, is the last one.

        Raises TritonModelException where the request has had its last response, or the response cannot be sent.
        """
        if flags not in (0, COMPLETE_FINAL):
            raise TritonModelException(
                f"Unable to send response: the only flag is TRITONSERVER_RESPONSE_COMPLETE_FINAL ({COMPLETE_FINAL}), got {flags}."
            )
        if response is None:
            if not flags:
                raise TritonModelException("Unable to send response: there is neither a response nor the final flag.")
        elif not isinstance(response, InferenceResponse):
            raise TypeError(f"send: expected an InferenceResponse, got {type(response).__name__}")
        self._reply.send(response, final=bool(flags))

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for the request's responses any more."""
        return self._reply.is_cancelled()
