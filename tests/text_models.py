"""An HTTP door over models that say they make vectors or scores of texts, beside the language models of openai_door.

`vectors` makes [length, number of a's, 2] of up to 4 texts a request, and counts a token for each character; `single` takes
a text a request and does not count; `ranker` scores a pair by the characters that both have. A text "fail" fails,
"nan" makes what is no number, "short" a row too few, "hold" waits until it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import numpy as np

from headrace.gateway.http.settings import HttpSettings
from headrace.types import InferenceRequest, InferenceResponse, ModelMetadata, OutputTensor, TensorMetadata
from headrace_protocol import datatype as dt
from headrace_protocol._generated import model_config_pb2 as pb
from headrace_protocol.errors import invalid
from headrace_protocol.generation import EMBEDDING_OUTPUT, ENCODER, EVENT_OUTPUT, GenerationEvent, PromptTold
from http_door import SETTINGS
from openai_door import Call, LanguagePlane, OpenAIDoor

_TEXT = TensorMetadata("TEXT", "BYTES", (-1, 1))
_VECTOR = TensorMetadata("VECTOR", "FP32", (-1, 3))
_COUNT = TensorMetadata("TOKENS", "INT32", (-1, 1))
_PAIR = (TensorMetadata("QUERY", "BYTES", (-1, 1)), TensorMetadata("DOCUMENT", "BYTES", (-1, 1)))
_SCORE = TensorMetadata("SCORE", "FP32", (-1, 1))
MODELS: dict[str, tuple[dict[str, str], int, tuple[TensorMetadata, ...], tuple[TensorMetadata, ...]]] = {
    "vectors": ({"task": "embedding", "token_count_output": "TOKENS"}, 4, (_TEXT,), (_VECTOR, _COUNT)),
    "single": (
        {"task": "embedding"},
        0,
        (TensorMetadata("TEXT", "BYTES", (1,)),),
        (TensorMetadata("VECTOR", "FP32", (3,)),),
    ),
    "ranker": ({"task": "rerank"}, 4, _PAIR, (_SCORE,)),
    "other": ({}, 4, (_TEXT,), (_VECTOR,)),
}
"""Parameters, max_batch_size, inputs and outputs of each."""


class TextPlane(LanguagePlane):
    """A planes.DataPlane with those models in it."""

    def __init__(self) -> None:
        super().__init__()
        self.declared = dict(MODELS)
        self.holding = asyncio.Event()
        self.under_way = self.most_under_way = 0

    def models(self) -> list[tuple[str, int]]:
        return [*super().models(), *((name, 1) for name in sorted(self.declared))]

    def model_config(self, name: str, version: int) -> pb.ModelConfig:
        if name not in self.declared:
            return super().model_config(name, version)
        said, max_batch_size, inputs, _ = self.declared[name]
        return pb.ModelConfig(
            name=name,
            max_batch_size=max_batch_size,
            input=[pb.ModelInput(name=tensor.name) for tensor in inputs],
            parameters={key: pb.ModelParameter(string_value=text) for key, text in said.items()},
        )

    def model_metadata(self, name: str, version: int) -> ModelMetadata:
        if name not in self.declared:
            return super().model_metadata(name, version)
        _, _, inputs, outputs = self.declared[name]
        return ModelMetadata(name, ("1",), "onnxruntime", inputs, outputs)

    async def infer(self, request: InferenceRequest) -> InferenceResponse:
        if request.model_name not in self.declared:
            return await super().infer(request)
        self.requests.append(request)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self._answer(request)
        finally:
            self.under_way -= 1

    async def _answer(self, request: InferenceRequest) -> InferenceResponse:
        if self.failure is not None:
            raise self.failure
        columns = [
            [one.decode() for one in dt.decode_bytes(tensor.data, dt.element_count(tensor.shape))]
            for tensor in request.inputs
        ]
        await asyncio.sleep(0)
        texts = columns[-1]
        if "hold" in texts:
            self.holding.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if "fail" in texts:
            raise invalid("the model takes no 'fail'")
        if request.model_name == "ranker":
            scores = [len(set(query) & set(text)) for query, text in zip(*columns, strict=True)]
            outputs = [_tensor("SCORE", np.array(scores, np.float32)[:, None])]
        else:
            rows = np.array([[len(text), text.count("a"), 2] for text in texts], np.float32)
            if "nan" in texts:
                rows[0, 0] = np.nan
            rows = rows[1:] if "short" in texts else rows
            counts = np.array([[len(text)] for text in texts], np.int32)
            outputs = [
                _tensor("VECTOR", rows if request.model_name != "single" else rows[0]),
                _tensor("TOKENS", counts),
            ]
        wanted = {output.name for output in request.outputs or ()}
        self.answered += 1
        kept = [output for output in outputs if output.name in wanted]
        return InferenceResponse(request.model_name, 1, kept, release=self._release)


def _tensor(name: str, values: np.ndarray) -> OutputTensor:
    datatype = dt.of_numpy(values.dtype)
    assert datatype is not None
    return OutputTensor(name, datatype, values.shape, values.tobytes())


def tell_vectors(call: Call, vectors: np.ndarray, tokens: tuple[int, ...]) -> None:
    """Answer a call of task embed: vectors [texts, width], and how many tokens each text had."""
    payload = ENCODER.encode(GenerationEvent(prompts=tuple(PromptTold(count) for count in tokens)))
    outputs = [
        OutputTensor(EVENT_OUTPUT, dt.BYTES, (1,), len(payload).to_bytes(4, "little") + payload),
        OutputTensor(EMBEDDING_OUTPUT, dt.FP32, vectors.shape, vectors.astype(np.float32).tobytes()),
    ]
    call._on_outcome(InferenceResponse("embedder", 1, outputs))


class TextDoor(OpenAIDoor):
    data: TextPlane


@contextlib.asynccontextmanager
async def opened(settings: HttpSettings = SETTINGS) -> AsyncIterator[TextDoor]:
    """Start a door; stop it when the block ends. Every answer that a model gave has to be released by then."""
    door = TextDoor(settings, TextPlane())
    door.port = await door.gateway.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{door.port}", auto_decompress=False) as door.client:
            yield door
        assert door.data.answered == door.data.released
    finally:
        await door.gateway.stop(1)
