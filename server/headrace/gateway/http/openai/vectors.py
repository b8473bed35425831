"""Vectors of texts, by a language model that embeds or by any model that says it does: found by name, asked alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from headrace.gateway.http.openai.call import begin, event_of
from headrace.gateway.http.openai.declared import DeclaredModel, DeclaredTask, declared_names, find_declared
from headrace.gateway.http.openai.directory import LanguageModel, ModelDirectory
from headrace.gateway.http.openai.errors import missing, refusal
from headrace.gateway.http.openai.exchange import Exchange
from headrace.gateway.http.openai.text_rows import Done, Rows, TextRows
from headrace.gateway.version import parse_version
from headrace.planes import Cancellable, DataPlane, Outcome
from headrace.types import LATEST, InferenceResponse
from headrace_protocol import datatype as dt
from headrace_protocol.errors import ErrorCode, InferError, internal
from headrace_protocol.generation import CARD_PARAMETER, EMBEDDING_OUTPUT, GenerationCall

_OF_A_VERSION: Final = "/versions/"
Model = LanguageModel | DeclaredModel


def find_model(data: DataPlane, directory: ModelDirectory, asked: str | None, tasks: Sequence[DeclaredTask]) -> Model:
    """Return the model of this name, which does one of the declared tasks or embeds as a language model.

    Without a name it is the only one there is. Raises HttpError 404, 400; InferError UNAVAILABLE, INTERNAL.
    """
    if asked is None:
        asked = _only(data, directory, tasks)
    name, found, version = asked.partition(_OF_A_VERSION)
    number = parse_version(version) if found else LATEST
    try:
        for task in tasks:
            declared = find_declared(data, name, number, task)
            if declared is not None:
                return declared
        known = CARD_PARAMETER in data.model_config(name, number).parameters
    except InferError as error:
        if error.code is not ErrorCode.NOT_FOUND:
            raise
        known = True  # as an alias or an adapter, or not at all
    if not known:
        raise refusal(
            f"the model {asked[:200]!r} makes no vectors of texts that its configuration tells of (parameter 'task')",
            "model",
            "unsupported_model",
        )
    model = directory.find(asked, "embed")
    model.check_task("embed", "embeddings")
    return model


def _only(data: DataPlane, directory: ModelDirectory, tasks: Sequence[DeclaredTask]) -> str:
    names = [name for task in tasks for name in declared_names(data, task)]
    names += [model.id for model in directory.all() if model.id == model.name and "embed" in model.card.tasks]
    if len(names) == 1:
        return names[0]
    if not names:
        raise missing("model")
    raise refusal(f"'model' is missing; it is one of {', '.join(names[:20])}", "model", "missing_required_parameter")


def begin_vectors(
    data: DataPlane,
    model: LanguageModel,
    prompts: Sequence[str | list[int]],
    exchange: Exchange,
    done: Done,
    *,
    normalize: bool = True,
    dimensions: int | None = None,
    sampling: Mapping[str, Any] | None = None,
    add_special_tokens: bool | None = None,
    timeout_us: int = 0,
) -> Cancellable:
    """Have a language model make a vector of each prompt. Raises InferError where it is refused at once."""
    call = GenerationCall(
        "embed",
        prompts=list(prompts),
        sampling=dict(sampling or {}),
        add_special_tokens=add_special_tokens,
        adapter=model.adapter,
        dimensions=dimensions,
        normalize=normalize,
    )
    vectors = _LanguageVectors(len(prompts), exchange, done)
    vectors.under_way = begin(data, model, call, exchange, vectors.take, timeout_us)
    return vectors


def begin_rows(
    data: DataPlane,
    model: DeclaredModel,
    columns: Sequence[Sequence[str]],
    exchange: Exchange,
    done: Done,
    timeout_us: int = 0,
) -> Cancellable:
    """Have a model that says so make a row of each row of texts. Raises InferError where it is refused at once."""
    rows = TextRows(data, model, columns, exchange, done)
    rows.begin(timeout_us)
    return rows


def shaped(values: npt.NDArray[np.float32], dimensions: int | None, *, normalize: bool) -> npt.NDArray[np.float32]:
    """Return vectors [texts, width] cut to their first `dimensions` numbers, and of length 1 if that is wanted.

    Raises HttpError 400 where they have fewer. What is cut is normalised in any case: it is a vector of its own.
    """
    width = values.shape[1]
    if dimensions is not None and dimensions > width:
        raise refusal(f"'dimensions' is {dimensions}, and the model's vectors have {width}", "dimensions")
    cut = dimensions is not None and dimensions < width
    kept = values[:, :dimensions] if cut else values
    if not (normalize or cut):
        return kept
    lengths = np.linalg.norm(kept, axis=1, keepdims=True)
    lengths[lengths == 0] = 1
    scaled: npt.NDArray[np.float32] = kept / lengths
    return scaled


class _LanguageVectors:
    """Implements Cancellable: a call of task embed under way."""

    def __init__(self, count: int, exchange: Exchange, done: Done) -> None:
        self._count = count
        self._exchange = exchange
        self._done = done
        self._rows: list[npt.NDArray[np.float32]] = []
        self._tokens = 0
        self.under_way: Cancellable | None = None

    def take(self, outcome: Outcome) -> None:
        """Take the next outcome of the call."""
        if isinstance(outcome, InferError):
            self.under_way = None
            self._exchange.settle()
            self._done(outcome)
            return
        final = outcome.final
        if final:
            self.under_way = None
        try:
            self._read(outcome)
        except InferError as error:
            self.cancel()
            self._done(error)
            return
        finally:
            outcome.release()
        if final:
            self._exchange.settle()
            self._end()

    def cancel(self) -> None:
        """Nobody waits any more."""
        under_way, self.under_way = self.under_way, None
        self._exchange.settle()
        if under_way is not None:
            under_way.cancel()

    def _read(self, response: InferenceResponse) -> None:
        event = event_of(response)
        if event is not None:
            if self._exchange.account is not None:
                self._exchange.account.take(event)
            self._tokens += sum(prompt.num_tokens for prompt in event.prompts)
        for output in response.outputs:
            if output.name == EMBEDDING_OUTPUT and output.datatype is dt.FP32 and len(output.shape) == 2:
                values = np.frombuffer(output.data, np.float32).reshape(output.shape)
                if not np.isfinite(values).all():
                    raise internal(f"model '{response.model_name}' gave a vector with what is no finite number")
                if self._rows and values.shape[1] != self._rows[0].shape[1]:
                    raise internal(
                        f"model '{response.model_name}' gave vectors of {values.shape[1]} numbers, and of others"
                    )
                self._rows.append(values.copy())

    def _end(self) -> None:
        values = np.concatenate(self._rows) if self._rows else np.zeros((0, 0), np.float32)
        if len(values) == self._count:
            self._done(Rows(values, self._tokens))
        else:
            self._done(internal(f"the model gave {len(values)} vectors for {self._count} texts"))
