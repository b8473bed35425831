"""OpenCall: one call between the engine and its client. It gathers what is told and says what is to be sent, and when.

Pure but for the request that it answers. Belongs to the thread that tells (`telling.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Event
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace_backends.batch_request import BatchRequest
from headrace_backends.llm.asked_call import AskedCall, Form, News, PromptNote
from headrace_backends.llm.engine import Told
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason
from headrace_protocol.datatype import Array
from headrace_protocol.errors import InferError, internal
from headrace_protocol.generation import Timing

MAX_HELD: Final = 1 << 21
"""Log probabilities that are kept for one client, who reads too slowly or wants everything at once."""


class OpenCall:
    """A call under way."""

    __slots__ = (
        "_first",
        "_held",
        "_logprobs",
        "_notes",
        "_vectors",
        "_visible",
        "arrival_ns",
        "asked",
        "decoupled",
        "ended",
        "error",
        "first_token_ns",
        "form",
        "left",
        "longest",
        "number",
        "preemptions",
        "request",
        "scheduled_ns",
        "spoken",
    )

    def __init__(
        self,
        number: int,
        request: BatchRequest,
        asked: AskedCall,
        form: Form,
        arrival_ns: int,
        *,
        decoupled: bool = True,
    ) -> None:
        self.number: Final = number
        self.request: Final = request
        self.asked: Final = asked
        self.form: Final = form
        self.arrival_ns: Final = arrival_ns
        self.decoupled: Final = decoupled
        """Whether its request may have many responses."""
        self.ended: Final = Event()
        """Set once its request has had its last response."""
        self.error: InferError | None = None
        self.scheduled_ns: int | None = None
        self.first_token_ns: int | None = None
        self.spoken: dict[int, list[int]] = {}
        """Of each choice that has said something, when it did first and last. For the metrics, as is `longest`."""
        self.longest = 0
        """Tokens of its longest choice that has ended."""
        self.preemptions = 0
        self.left = len(asked.prompts) * asked.params.n
        """Choices that have not ended."""
        self._held: dict[int, list[GenerationOutput]] = {}
        """Of each choice, in the engine's order, what has not been sent."""
        self._logprobs = 0
        self._visible = False
        """Whether something of that can be seen by the client."""
        self._notes: list[PromptNote | None] = [None] * len(asked.prompts)
        self._first = True
        self._vectors: NDArray[np.float32] | None = None

    @property
    def finished(self) -> bool:
        """Whether the engine has told all, or that it failed."""
        return not self.left or self.error is not None

    @property
    def due(self) -> bool:
        """Whether something can be sent."""
        if self.finished:
            return True
        if not self.asked.stream:
            return False
        if self.asked.params.prompt_logprobs is not None and self._first and None in self._notes:
            return False
        return self._visible

    def take(self, told: Told, now_ns: int) -> None:
        """Take what a step told of this call."""
        self.preemptions = max(self.preemptions, told.num_preemptions)
        if self.scheduled_ns is None:
            self.scheduled_ns = told.scheduled_ns
        if self.first_token_ns is None:
            self.first_token_ns = told.first_token_ns or (now_ns if told.outputs else None)
        if told.error is not None:
            self.error = told.error
            return
        if told.vectors is not None:
            self._vectors = told.vectors
            self.left = 0
            return
        for output in told.outputs:
            self._take_output(output)

    def _take_output(self, output: GenerationOutput) -> None:
        asked, n = self.asked, self.asked.params.n
        prompt = output.index // n
        note = self._notes[prompt]
        if note is None:
            note = self._notes[prompt] = PromptNote(output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            note.logprobs = output.prompt_logprobs
            self._logprobs += sum(len(entry.top) for entry in output.prompt_logprobs if entry is not None)
        if output.finish_reason is not None:
            self.left -= 1
            if output.finish_reason is FinishReason.ERROR and len(self._notes) * n == 1:
                self.error = internal(output.error or "the model failed")
        if output.logprobs is not None:
            self._logprobs += sum(1 + len(entry.top) for entry in output.logprobs)
        self._held.setdefault(output.index, []).append(output)
        self._visible = (
            self._visible
            or self._first
            or bool(output.text)
            or output.finish_reason is not None
            or (bool(output.token_ids) and (asked.return_token_ids or asked.tells_logprobs))
        )

    @property
    def too_much(self) -> bool:
        """Whether more is held than a client may have held."""
        return self._logprobs > MAX_HELD

    def response(self, now_ns: int) -> Mapping[str, Array]:
        """Return what is due as outputs; nothing is held any more."""
        outputs = [joined(held) for held in self._held.values()]
        if not self.asked.stream:
            outputs = _likeliest(outputs, self.asked)
        notes = [note or PromptNote() for note in self._notes] if self._first else None
        timing = self._timing(now_ns) if self.finished else None
        self._first, self._visible, self._logprobs = False, False, 0
        self._held.clear()
        return self.form.write(self.asked, News(outputs, notes, timing, self._shown_vectors()))

    def _timing(self, now_ns: int) -> Timing:
        scheduled = self.scheduled_ns or now_ns
        first = self.first_token_ns or now_ns
        return Timing(
            max(0, scheduled - self.arrival_ns), max(0, first - scheduled), max(0, now_ns - first), self.preemptions
        )

    def _shown_vectors(self) -> NDArray[np.float32] | None:
        vectors = self._vectors
        if vectors is None:
            return None
        if self.asked.dimensions is not None:
            vectors = vectors[:, : self.asked.dimensions]
        if self.asked.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
        return np.ascontiguousarray(vectors, np.float32)


def joined(outputs: Sequence[GenerationOutput]) -> GenerationOutput:
    """Return the outputs of one choice, in their order, as one."""
    if len(outputs) == 1:
        return outputs[0]
    told = [output.logprobs for output in outputs if output.logprobs is not None]
    return msgspec.structs.replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(entry for entries in told for entry in entries) if told else None,
    )


def _likeliest(outputs: list[GenerationOutput], asked: AskedCall) -> list[GenerationOutput]:
    """Return, of each prompt, the choices that are told, under the indexes that the client sees."""
    n, told_n = asked.params.n, asked.told_n
    outputs.sort(key=lambda output: output.index)
    if told_n >= n:
        return outputs
    told = []
    for prompt in range(len(asked.prompts)):
        own = [output for output in outputs if output.index // n == prompt]
        own.sort(key=_mean_logprob, reverse=True)
        told += [msgspec.structs.replace(output, index=prompt * told_n + at) for at, output in enumerate(own[:told_n])]
    return told


def _mean_logprob(output: GenerationOutput) -> float:
    if output.cumulative_logprob is None or output.finish_reason is FinishReason.ERROR:
        return -np.inf
    return output.cumulative_logprob / max(1, output.num_output_tokens)
