"""POST /v1/embeddings: a vector of each text, by a language model or by any model that says it makes some."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.gateway.http.openai.declared import DeclaredModel
from headrace.gateway.http.openai.endpoint import CallEndpoint
from headrace.gateway.http.openai.errors import missing, refusal
from headrace.gateway.http.openai.exchange import Exchange
from headrace.gateway.http.openai.fields import Fields, read_body
from headrace.gateway.http.openai.sampling import read_timeout
from headrace.gateway.http.openai.text_rows import Rows
from headrace.gateway.http.openai.vectors import Model, begin_rows, begin_vectors, find_model, shaped
from headrace.gateway.http.request import Outlet, Streaming
from headrace.planes import Cancellable
from headrace_protocol.errors import InferError

MAX_INPUTS: Final = 2048
_FORMATS: Final = ("float", "base64")
_NAMES: Final = {"prompts": "input", "sampling": "truncate_prompt_tokens", "adapter": "model"}
"""What a backend names of a call, as the client named it."""

Prompt = str | list[int]


class RowsUnderWay:
    """Implements request.Streaming: rows under way that become one answer. `make` gives its JSON."""

    __slots__ = ("_exchange", "_make", "_outlet", "under_way")

    def __init__(self, exchange: Exchange, outlet: Outlet, make: Callable[[Rows], bytes]) -> None:
        self._exchange = exchange
        self._outlet = outlet
        self._make = make
        self.under_way: Cancellable | None = None

    def take(self, result: Rows | InferError) -> None:
        """Answer with what came of the rows."""
        self.under_way = None
        try:
            if isinstance(result, InferError):
                raise result
            answer = self._exchange.answer(self._make(result))
        except Exception as error:
            answer = self._exchange.failure(error)
        self._outlet.answer(answer)

    def resume(self) -> None:
        """Nothing waits."""

    def cancel(self) -> None:
        """Its client is gone."""
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            under_way.cancel()


class Embeddings(CallEndpoint):
    """The endpoint."""

    def begin(self, exchange: Exchange, outlet: Outlet) -> Streaming:
        """Read the request and begin its rows."""
        exchange.names = _NAMES
        fields = read_body(exchange.http)
        asked = fields.text("model")
        model = find_model(self._data, self._directory, asked, ("embedding",))
        base64_wanted = fields.choice("encoding_format", _FORMATS) == "base64"
        dimensions = fields.integer("dimensions", 1)
        normalize = fields.flag("normalize", True)
        timeout_us = read_timeout(fields)
        prompts = read_inputs(fields, model)
        name = asked if asked is not None else model.name

        def make(rows: Rows) -> bytes:
            vectors = rows.values  # a language model has shaped them already
            if isinstance(model, DeclaredModel):
                vectors = shaped(vectors, dimensions, normalize=normalize)
            return answer_of(vectors, rows.num_tokens, name, encoded=base64_wanted)

        under_way = RowsUnderWay(exchange, outlet, make)
        if isinstance(model, DeclaredModel):
            texts = [prompt for prompt in prompts if isinstance(prompt, str)]
            under_way.under_way = begin_rows(self._data, model, [texts], exchange, under_way.take, timeout_us)
        else:
            if dimensions is not None and model.card.embedding_width and dimensions > model.card.embedding_width:
                width = model.card.embedding_width
                raise refusal(f"'dimensions' is {dimensions}, and the model's vectors have {width}", "dimensions")
            truncated = fields.integer("truncate_prompt_tokens", -1)
            under_way.under_way = begin_vectors(
                self._data,
                model,
                prompts,
                exchange,
                under_way.take,
                normalize=normalize,
                dimensions=dimensions,
                sampling=None if truncated is None else {"truncate_prompt_tokens": truncated},
                add_special_tokens=fields.flag("add_special_tokens") if fields.has("add_special_tokens") else None,
                timeout_us=timeout_us,
            )
        return under_way


def read_inputs(fields: Fields, model: Model) -> list[Prompt]:
    """Return the texts, or tokens, of which vectors are wanted. Raises HttpError 400, which names the one at fault."""
    value = fields.any("input")
    if value is None:
        raise missing("input")
    if isinstance(value, str):
        return [_checked(fields, "input", value, model)]
    if not isinstance(value, list):
        raise fields.wrong("input", "a string, tokens, or an array of those", value)
    if not value:
        raise refusal("'input' is empty", "input")
    if type(value[0]) is int:
        return [_checked(fields, "input", value, model)]
    if len(value) > MAX_INPUTS:
        raise refusal(f"'input': {len(value)} texts, at most {MAX_INPUTS} are taken", "input")
    return [_checked(fields, f"input[{number}]", one, model) for number, one in enumerate(value)]


def _checked(fields: Fields, name: str, value: Any, model: Model) -> Prompt:
    if not isinstance(value, str | list):
        raise fields.wrong(name, "a string or an array of tokens", value)
    if not value:
        raise refusal(f"'{name}' is empty", name)
    if isinstance(value, str):
        return value
    if isinstance(model, DeclaredModel):
        raise refusal(f"'{name}': the model {model.name!r} takes texts, not tokens", name)
    size = model.card.vocab_size
    for token in value:
        if type(token) is not int or not 0 <= token < size:
            raise fields.wrong(name, f"tokens, which are integers from 0 to {size - 1}", token)
    return value


def answer_of(vectors: npt.NDArray[np.float32], num_tokens: int, model: str, *, encoded: bool) -> bytes:
    """Return the JSON of an answer with vectors [texts, width]; `encoded` writes each as base64 of its FP32 numbers."""
    if encoded:
        told: list[Any] = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    else:
        told = vectors.tolist()
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": number, "embedding": vector} for number, vector in enumerate(told)
            ],
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )
