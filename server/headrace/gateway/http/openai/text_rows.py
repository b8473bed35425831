"""Rows of texts sent to a model that makes a vector or a score of each, in as many requests as they need: all or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.gateway.http import request as headers
from headrace.gateway.http.openai.declared import DeclaredModel
from headrace.gateway.http.openai.exchange import Exchange
from headrace.planes import Cancellable, DataPlane, Outcome
from headrace.types import InferenceRequest, InferenceResponse, InputTensor, OutputTensor, RequestedOutput
from headrace_protocol import datatype as dt
from headrace_protocol.errors import InferError, internal

MAX_UNDER_WAY: Final = 16
"""Requests of one client's request at a time: the queue is others' too."""


class Rows(NamedTuple):
    """What was made of the texts."""

    values: npt.NDArray[np.float32]
    """[texts, width]"""
    num_tokens: int
    """Of all texts together; 0 where the model does not count them."""


Done = Callable[[Rows | InferError], None]


class TextRows:
    """Implements Cancellable: the requests for some rows under way. `done` is called once, unless it is cancelled."""

    def __init__(
        self, data: DataPlane, model: DeclaredModel, columns: Sequence[Sequence[str]], exchange: Exchange, done: Done
    ) -> None:
        """`columns` has the texts of each of the model's inputs, a row each; one row at least."""
        self._data = data
        self._model = model
        self._columns = columns
        self._exchange = exchange
        self._done = done
        self._timeout_us = 0
        self._starts = range(0, len(columns[0]), model.max_rows)
        self._parts: dict[int, Rows] = {}
        self._under_way: dict[int, Cancellable] = {}
        self._next = 0
        self._over = False

    def begin(self, timeout_us: int = 0) -> None:
        """Send the first requests. Raises InferError, with none of them under way, where one is refused."""
        self._timeout_us = timeout_us
        try:
            self._send()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._over = True
        under_way, self._under_way = self._under_way, {}
        self._next = len(self._starts)
        for request in under_way.values():
            request.cancel()

    def _send(self) -> None:
        while self._next < len(self._starts) and len(self._under_way) < MAX_UNDER_WAY:
            number = self._next
            self._next += 1
            request = self._request(self._starts[number])
            self._under_way[number] = self._data.submit(request, partial(self._take, number))
            if request.trace is not None and not number:
                self._exchange.http.traced(request.trace, request.received_ns)

    def _request(self, start: int) -> InferenceRequest:
        model, exchange = self._model, self._exchange
        request = InferenceRequest(model.name, model.version, exchange.now_ns())
        request.id = exchange.request_id
        request.timeout_us = self._timeout_us
        request.trace_context = exchange.http.text(headers.TRACEPARENT)
        if not start:
            request.caller = exchange.http.caller  # counted once, as its client asked once
        request.sticky = exchange.http.sticky
        for (name, shape), column in zip(model.inputs, self._columns, strict=True):
            texts = column[start : start + model.max_rows]
            data = dt.encode_bytes([text.encode() for text in texts])
            request.inputs.append(InputTensor(name, dt.BYTES, (len(texts), *shape), data))
        request.outputs = [RequestedOutput(name) for name in (model.output, model.counts) if name is not None]
        return request

    def _take(self, number: int, outcome: Outcome) -> None:
        try:
            if self._over:  # it was cancelled in this turn of the loop
                return
            self._under_way.pop(number, None)
            if isinstance(outcome, InferError):
                raise outcome
            self._parts[number] = self._rows(outcome, number)
            self._send()
        except InferError as error:
            self.cancel()
            self._done(error)
            return
        finally:
            if isinstance(outcome, InferenceResponse):
                outcome.release()
        if not self._under_way:
            self._end()

    def _rows(self, response: InferenceResponse, number: int) -> Rows:
        model = self._model
        count = min(model.max_rows, len(self._columns[0]) - self._starts[number])
        with np.errstate(over="ignore"):
            values = _array(response, model.output).astype(np.float32)
        if values.size == 0 or values.size % count or (values.ndim and values.shape[0] != count and count > 1):
            raise internal(
                f"model '{model.name}' gave output '{model.output}' of shape {list(values.shape)} for {count} texts"
            )
        if not np.isfinite(values).all():
            raise internal(f"model '{model.name}' gave output '{model.output}' with what is no finite number")
        tokens = 0 if model.counts is None else int(_array(response, model.counts).sum())
        return Rows(values.reshape(count, -1), tokens)

    def _end(self) -> None:
        parts = [self._parts[number] for number in range(len(self._starts))]
        widths = {part.values.shape[1] for part in parts}
        if len(widths) > 1:
            self._done(internal(f"model '{self._model.name}' gave rows of different widths: {sorted(widths)}"))
        else:
            self._done(Rows(np.concatenate([part.values for part in parts]), sum(part.num_tokens for part in parts)))


def _array(response: InferenceResponse, name: str) -> npt.NDArray[np.generic]:
    for output in response.outputs:
        if output.name == name:
            return _decoded(output)
    raise internal(f"model '{response.model_name}' gave no output '{name}'")


def _decoded(output: OutputTensor) -> npt.NDArray[np.generic]:
    return dt.to_numpy(output.datatype, output.shape, output.data)
