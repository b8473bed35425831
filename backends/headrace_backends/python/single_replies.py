"""Response senders of a model that is not decoupled: one response to a request, at the latest when its batch ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Final

from headrace_backends.api import BatchRequest
from headrace_backends.python.answers import Answers
from headrace_backends.python.errors import TritonModelException
from headrace_backends.python.response import InferenceResponse
from headrace_backends.python.sender import CLOSED


class SingleReplies:
    """The senders of one batch of a model that is not decoupled: each request gets one response."""

    __slots__ = ("answers", "ended", "lock", "over")

    def __init__(self, answers: Answers) -> None:
        self.answers: Final = answers
        self.lock: Final = threading.Lock()
        """Held while an answer is written into the batch's memory."""
        self.over = False
        """Whether the batch has been given back: nothing may be written any more."""
        self.ended: Final[SimpleQueue[int]] = SimpleQueue()
        """Numbers of the requests that were answered by their senders or can be no more, and -1 to look for cancels."""

    def look_for_cancels(self) -> None:
        """Wake whoever waits: a request was cancelled."""
        self.ended.put(-1)

    def wait(self, waiting: set[int], requests: Sequence[BatchRequest]) -> None:
        """Wait until the requests `waiting` were answered, cancelled, or their senders dropped."""
        while waiting:
            number = self.ended.get()
            waiting.discard(number)
            if number < 0:
                waiting.difference_update([index for index in waiting if requests[index].cancelled])

    def close(self) -> None:
        """Refuse what is sent from now on."""
        with self.lock:
            self.over = True


class SingleReply:
    """One response, to a request of a model that is not decoupled."""

    __slots__ = ("_closed", "_replies", "_request", "answered")

    def __init__(self, replies: SingleReplies, request: BatchRequest) -> None:
        self._replies = replies
        self._request = request
        self._closed = False
        self.answered = False

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        replies = self._replies
        with replies.lock:
            if self._closed:
                raise TritonModelException(CLOSED)
            if response is None:
                if not self.answered:
                    raise TritonModelException(
                        "Unable to send response: a model that is not decoupled has to send a response before, or with, the final flag."
                    )
            elif self.answered:
                raise TritonModelException(
                    "Unable to send response: a model that is not decoupled cannot send more than one."
                )
            elif not replies.over:
                replies.answers.answer(self._request, response)
            self.answered = True
            self._closed = final
        if response is not None:
            replies.ended.put(self._request.index)

    def answer_unless_sent(self, response: object) -> bool:
        """Answer by what `execute` returned; return whether the sender had not answered before."""
        replies = self._replies
        with replies.lock:
            if self.answered:
                return False
            self.answered = self._closed = True
            replies.answers.answer(self._request, response)
            return True

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def __del__(self) -> None:
        self._replies.ended.put(self._request.index)
