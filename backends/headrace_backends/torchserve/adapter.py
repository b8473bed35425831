"""The model.py of an imported archive is this class: rows of strings go to the handler, and its answers come back.

Input `data` is the body of a request to TorchServe, output `result` that of its answer. The request parameter
`content_type` says how a body is read: JSON is parsed, text decoded, anything else stays bytes. All rows of all
requests of a batch are one list for the handler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from headrace_backends.python.errors import TritonError
from headrace_backends.python.process import get_model_dir
from headrace_backends.python.request import InferenceRequest
from headrace_backends.python.response import InferenceResponse
from headrace_backends.python.tensor import Tensor
from headrace_backends.torchserve.context import Context
from headrace_backends.torchserve.handler import load_handler

FOLDER: Final = "mar"
"""Beside model.py: what was in the archive."""
MANIFEST: Final = "MAR-INF/MANIFEST.json"
SETTINGS: Final = "settings.json"
"""Beside model.py: the archive's model-config.yaml."""
INPUT: Final = "data"
OUTPUT: Final = "result"
_FIRST_ERROR: Final = 400
_CODES: Final = {
    400: TritonError.INVALID_ARG,
    404: TritonError.NOT_FOUND,
    413: TritonError.INVALID_ARG,
    501: TritonError.UNSUPPORTED,
    503: TritonError.UNAVAILABLE,
}


class _Rows(NamedTuple):
    """The rows of one request, or why it has none."""

    entries: list[dict[str, Any]]
    parameters: dict[str, str]
    id: str
    error: TritonError | None = None


class TritonPythonModel:
    """Runs one handler."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the handler."""
        beside = Path(get_model_dir())
        directory = beside / FOLDER
        manifest = json.loads((directory / MANIFEST).read_bytes())
        settings = json.loads((beside / SETTINGS).read_bytes())
        gpu = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
        self._context = Context(args["model_name"], directory, manifest, settings, gpu)
        self._handle = load_handler(directory, manifest, self._context)

    def execute(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
        """Have the handler answer all rows at once, and share its answers out."""
        asked = [_rows(request) for request in requests]
        entries = [entry for rows in asked for entry in rows.entries]
        self._context.begin([(rows.id, rows.parameters) for rows in asked for _ in rows.entries])
        answers = self._answers(entries) if entries else []
        responses = []
        start = 0
        for rows in asked:
            end = start + len(rows.entries)
            responses.append(self._response(answers, start, end) if rows.error is None else _failed(rows.error))
            start = end
        return responses

    def _answers(self, entries: list[dict[str, Any]]) -> list[Any]:
        answers = self._handle(entries, self._context)
        if not isinstance(answers, (list, tuple)):
            raise TypeError(f"the handler has to return a list, one item for each row, got {type(answers).__name__}")
        if len(answers) != len(entries):
            raise ValueError(f"the handler returned {len(answers)} items for {len(entries)} rows")
        return list(answers)

    def _response(self, answers: list[Any], start: int, end: int) -> InferenceResponse:
        said: dict[str, str] = {}
        for request in self._context.request_processor[start:end]:
            code, phrase = request.status
            if code >= _FIRST_ERROR:
                text = phrase or f"the handler answered with status {code}"
                return _failed(TritonError(text, _CODES.get(code, TritonError.INTERNAL)))
            said.update(request.said)
        result = np.empty((end - start, 1), np.object_)
        try:
            result[:, 0] = [_encoded(answer) for answer in answers[start:end]]
        except (TypeError, ValueError) as error:
            return _failed(TritonError(f"what the handler returned cannot be sent: {error}"))
        return InferenceResponse([Tensor(OUTPUT, result)], None, said or None)


def _rows(request: InferenceRequest) -> _Rows:
    parameters = {name: str(value) for name, value in json.loads(request.parameters()).items()}
    tensor = next(tensor for tensor in request.inputs() if tensor.name() == INPUT)
    entries = []
    kind = parameters.get("content_type", "")
    for row, body in enumerate(tensor.as_numpy().reshape(-1).tolist()):
        try:
            value = _decoded(body, kind)
        except (ValueError, RecursionError) as error:
            text = f"row {row} of input '{INPUT}' is not what content_type {kind!r} says: {error}"
            return _Rows([], parameters, request.request_id(), TritonError(text, TritonError.INVALID_ARG))
        entries.append({"body": value, "data": value})
    return _Rows(entries, parameters, request.request_id())


def _decoded(body: bytes, kind: str) -> Any:
    if kind.startswith("application/json"):
        return json.loads(body)
    return body.decode() if kind.startswith("text/") else bytearray(body)


def _encoded(answer: Any) -> bytes:
    """Return an item of the handler's list as TorchServe writes it: bytes and text as they are, the rest as JSON."""
    if isinstance(answer, (bytes, bytearray)):
        return bytes(answer)
    if isinstance(answer, str):
        return answer.encode()
    for method in ("tolist", "to_dict"):  # tensors and arrays, data frames
        if hasattr(answer, method):
            answer = getattr(answer, method)()
            break
    return json.dumps(answer, ensure_ascii=False).encode()


def _failed(error: TritonError) -> InferenceResponse:
    return InferenceResponse([], error)
