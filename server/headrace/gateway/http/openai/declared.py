"""Models of the repository that say in their configuration that they make vectors or scores of texts.

Any model or ensemble may: `parameters { key: "task" value { string_value: "embedding" } }`, or `"rerank"`. Which tensors
are which is told by further parameters, where there is more than one that it could be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from headrace.planes import DataPlane
from headrace.types import TensorMetadata
from headrace_protocol import datatype as dt
from headrace_protocol.errors import ErrorCode, InferError, internal

DeclaredTask = Literal["embedding", "rerank"]
TASK: Final = "task"
TEXT_INPUT: Final = "text_input"
QUERY_INPUT: Final = "query_input"
DOCUMENT_INPUT: Final = "document_input"
OUTPUT: Final[Mapping[DeclaredTask, str]] = {"embedding": "embedding_output", "rerank": "score_output"}
COUNT_OUTPUT: Final = "token_count_output"
MAX_ROWS: Final = 256
"""Texts of one request to a model without a batch dimension of its own, whose tensors take any number."""

_FLOATS: Final = (dt.FP32.name, dt.FP16.name, dt.FP64.name)
_INTEGERS: Final = (dt.INT32.name, dt.INT64.name, dt.UINT32.name, dt.UINT64.name)


class DeclaredModel(NamedTuple):
    """A model that takes rows of texts."""

    name: str
    version: int
    task: DeclaredTask
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    """Names of its text inputs, each with the shape of a request less its first dimension."""
    output: str
    counts: str | None
    """The output with the number of tokens of each row."""
    max_rows: int
    """Rows of one request."""


def find_declared(data: DataPlane, name: str, version: int, task: DeclaredTask) -> DeclaredModel | None:
    """Return the model if it says that it does the task, None if it does not.

    Raises InferError NOT_FOUND, UNAVAILABLE, and INTERNAL where what it says does not fit its tensors.
    """
    config = data.model_config(name, version)
    said = {key: parameter.string_value for key, parameter in config.parameters.items()}
    if said.get(TASK) != task:
        return None
    metadata = data.model_metadata(name, version)
    batches = config.max_batch_size > 0
    texts = [tensor for tensor in metadata.inputs if tensor.datatype == dt.BYTES.name]
    names = [said.get(TEXT_INPUT)] if task == "embedding" else [said.get(QUERY_INPUT), said.get(DOCUMENT_INPUT)]
    found = _text_inputs(name, names, texts)
    optional = {tensor.name for tensor in config.input if tensor.optional}
    for tensor in metadata.inputs:
        if tensor not in found and tensor.name not in optional:
            raise _unfit(name, f"its input '{tensor.name}' is none of the texts")
    rows = {tensor.shape[0] if tensor.shape else 1 for tensor in found}
    output = _output(name, said.get(OUTPUT[task]), metadata.outputs, _FLOATS)
    counts = said.get(COUNT_OUTPUT)
    return DeclaredModel(
        name,
        version,
        task,
        tuple((tensor.name, _row_shape(name, tensor)) for tensor in found),
        output,
        None if counts is None else _output(name, counts, metadata.outputs, _INTEGERS),
        config.max_batch_size if batches else MAX_ROWS if rows == {-1} else 1,
    )


def declared_names(data: DataPlane, task: DeclaredTask) -> list[str]:
    """Return the names of all models that say they do the task and are ready."""
    found = []
    for name in dict.fromkeys(name for name, _ in data.models()):
        try:
            parameters = data.model_config(name, -1).parameters
        except InferError as error:
            if error.code in (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE):
                continue
            raise
        if TASK in parameters and parameters[TASK].string_value == task:
            found.append(name)
    return found


def _text_inputs(model: str, names: Sequence[str | None], texts: Sequence[TensorMetadata]) -> list[TensorMetadata]:
    """Return the text inputs in order: those that are named, and in place of others the rest as the model has them."""
    by_name = {tensor.name: tensor for tensor in texts}
    rest = [tensor for tensor in texts if tensor.name not in names]
    found = []
    for name in names:
        if name is not None and name not in by_name:
            raise _unfit(model, f"it has no input '{name}' of texts")
        if name is None and not rest:
            raise _unfit(model, f"it has {len(texts)} inputs of texts, and {len(names)} are needed")
        found.append(rest.pop(0) if name is None else by_name[name])
    return found


def _output(model: str, name: str | None, outputs: Sequence[TensorMetadata], datatypes: Sequence[str]) -> str:
    fitting = [tensor.name for tensor in outputs if tensor.datatype in datatypes]
    if name is None and len(fitting) == 1:
        return fitting[0]
    if name is None:
        raise _unfit(model, f"it has {len(fitting)} outputs of {', '.join(datatypes)}; a parameter has to name the one")
    if name not in fitting:
        raise _unfit(model, f"it has no output '{name}' of {', '.join(datatypes)}")
    return name


def _row_shape(model: str, tensor: TensorMetadata) -> tuple[int, ...]:
    """Return the shape of one row of texts: one element."""
    if any(dim not in (1, -1) for dim in tensor.shape[1:]):
        raise _unfit(model, f"its input '{tensor.name}' takes {list(tensor.shape[1:])} texts a row, and not one")
    return (1,) * len(tensor.shape[1:])


def _unfit(model: str, why: str) -> InferError:
    return internal(f"model '{model}' says in its parameters what it does not do: {why}")
