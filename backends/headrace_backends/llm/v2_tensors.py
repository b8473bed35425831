"""A language model's tensors under KServe v2, those of Triton's vLLM backend: what they ask, and how they are answered.

A request holds either `text_input` with what goes with it, or `embedding_request`, or `generation_call`. Knows no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from headrace_backends.batch_request import BatchRequest
from headrace_backends.llm.asked_call import AskedCall, News
from headrace_backends.llm.call_reading import check_depth, wrong
from headrace_backends.llm.events import Spelling
from headrace_backends.llm.output import GenerationOutput
from headrace_protocol.datatype import Array
from headrace_protocol.generation import CALL_INPUT, EMBEDDING_OUTPUT, EVENT_OUTPUT, GenerationCall, StructuredOutput

RETURNS: Final = (
    "finish_reason",
    "cumulative_logprob",
    "logprobs",
    "num_input_tokens",
    "num_output_tokens",
)
"""Outputs beside the text, each asked for by an input `return_...`."""
_FLAGS: Final = ("stream", "exclude_input_in_output", *(f"return_{name}" for name in RETURNS))
INPUTS: Final[tuple[dict[str, Any], ...]] = tuple(
    {"name": name, "data_type": data_type, "dims": dims, "optional": True}
    for name, data_type, dims in (
        ("text_input", "TYPE_STRING", [1]),
        ("image", "TYPE_STRING", [-1]),
        ("stream", "TYPE_BOOL", [1]),
        ("sampling_parameters", "TYPE_STRING", [1]),
        ("exclude_input_in_output", "TYPE_BOOL", [1]),
        *((f"return_{name}", "TYPE_BOOL", [1]) for name in RETURNS),
        ("embedding_request", "TYPE_STRING", [1]),
        (CALL_INPUT, "TYPE_STRING", [1]),
    )
)
OUTPUTS: Final[tuple[dict[str, Any], ...]] = tuple(
    {"name": name, "data_type": data_type, "dims": dims}
    for name, data_type, dims in (
        ("text_output", "TYPE_STRING", [-1]),
        ("finish_reason", "TYPE_STRING", [-1]),
        ("cumulative_logprob", "TYPE_FP32", [-1]),
        ("logprobs", "TYPE_STRING", [-1]),
        ("num_input_tokens", "TYPE_UINT32", [1]),
        ("num_output_tokens", "TYPE_UINT32", [-1]),
        (EVENT_OUTPUT, "TYPE_STRING", [1]),
        (EMBEDDING_OUTPUT, "TYPE_FP32", [-1, -1]),
    )
)
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_STRUCTURED: Final = ("guided_decoding", "structured_outputs")
_KINDS: Final = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
"""vLLM's names of what a text has to be, and ours."""


def string_input(request: BatchRequest, name: str) -> bytes | None:
    """Return the one element of a string input, or None where the client left it out."""
    try:
        array = request.input(name)
    except KeyError:
        return None
    if array.size != 1:
        raise wrong(name, f"expected one element, got {array.size}")
    element = array.reshape(-1)[0]
    return element if isinstance(element, bytes) else str(element).encode()


def asked_outputs(request: BatchRequest) -> frozenset[str]:
    """Return the outputs that a request wants beside the text."""
    wanted = request.wanted or ()
    return frozenset(name for name in RETURNS if _flag(request, f"return_{name}") or name in wanted)


def read_generation(request: BatchRequest) -> GenerationCall:
    """Return what `text_input` and the tensors that go with it ask for. Raises InferError."""
    text = _text(request, "text_input")
    if text is None:
        raise wrong("text_input", "missing")
    if _has(request, "image"):
        raise wrong("image", "this model reads no images", unsupported=True)
    sampling = _sampling(request)
    stream = bool(_flag(request, "stream"))
    excludes = _flag(request, "exclude_input_in_output")
    if stream and excludes is False:
        raise wrong("exclude_input_in_output", "a streamed answer cannot begin with the prompt; leave it out")
    adapter = _popped_text(sampling, "lora_name")
    return GenerationCall(
        prompts=[text],
        structured=_structured(sampling),
        sampling=sampling,
        stream=stream,
        echo=not stream and not excludes,
        adapter=adapter,
    )


def read_embedding(raw: bytes) -> GenerationCall:
    """Return what `embedding_request` asks for: JSON with `input`, a text or tokens, and maybe `dimensions`."""
    given = _json_object(raw, "embedding_request")
    prompt = given.get("input")
    if not isinstance(prompt, str) and not (
        isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
    ):
        raise wrong("embedding_request", "input: expected a text, or a list of tokens")
    pooling = given.get("pooling_params")
    dimensions = given.get("dimensions")
    if isinstance(pooling, Mapping):
        dimensions = pooling.get("dimensions", dimensions)
    if dimensions is not None and (not isinstance(dimensions, int) or isinstance(dimensions, bool)):
        raise wrong("embedding_request", f"dimensions: expected an integer, got {dimensions!r:.40}")
    return GenerationCall("embed", prompts=[prompt], dimensions=dimensions)


class V2Form:
    """Answers by `text_output` and the outputs that were asked for, with an element for each choice."""

    def __init__(self, names: frozenset[str], spelling: Spelling) -> None:
        """`names` are the outputs that are told beside the text."""
        self._names: Final = names
        self._spelling: Final = spelling

    def write(self, call: AskedCall, news: News) -> Mapping[str, Array]:
        """Return the outputs of one response: of each choice what is new."""
        if news.vectors is not None:
            told: dict[str, Array] = {"text_output": _strings([json.dumps(news.vectors[0].tolist()).encode()])}
            if "num_input_tokens" in self._names:
                told["num_input_tokens"] = np.array([len(call.prompts[0].token_ids)], np.uint32)
            return told
        choices: list[GenerationOutput | None] = [None] * call.told_n
        for output in news.outputs:
            choices[output.index] = output
        before = call.prompts[0].text or "" if call.echo and news.prompts is not None else ""
        told = {"text_output": _strings([(before + ("" if one is None else one.text)).encode() for one in choices])}
        for name in self._names:
            told[name] = self._write(name, call, choices)
        return told

    def _write(self, name: str, call: AskedCall, choices: list[GenerationOutput | None]) -> Array:
        if name == "num_input_tokens":
            return np.array([len(call.prompts[0].token_ids)], np.uint32)
        if name == "num_output_tokens":
            return np.array([0 if one is None else len(one.token_ids) for one in choices], np.uint32)
        if name == "cumulative_logprob":
            found = [None if one is None else one.cumulative_logprob for one in choices]
            return np.array([np.nan if each is None else each for each in found], np.float32)
        if name == "finish_reason":
            return _strings([_reason(one) for one in choices])
        return _strings([self._logprobs(call, one) for one in choices])

    def _logprobs(self, call: AskedCall, output: GenerationOutput | None) -> bytes:
        """Return, as JSON, an object for each new token: of each token id how likely it was."""
        if output is None or output.logprobs is None or not call.tells_logprobs:
            return b"null"
        told = []
        for entry in output.logprobs:
            tokens = {}
            for one in (*entry.top, entry.chosen):
                text = self._spelling.of(one.token_id)[0]
                logprob = one.logprob if np.isfinite(one.logprob) else None
                tokens[str(one.token_id)] = {"logprob": logprob, "rank": one.rank, "decoded_token": text}
            told.append(tokens)
        return msgspec.json.encode(told)


def _reason(output: GenerationOutput | None) -> bytes:
    """Return why a choice ended; of one that goes on, "None", as Triton's clients know it."""
    return b"None" if output is None or output.finish_reason is None else output.finish_reason.value.encode()


def _strings(elements: list[bytes]) -> Array:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def _has(request: BatchRequest, name: str) -> bool:
    try:
        return request.input(name).size > 0
    except KeyError:
        return False


def _flag(request: BatchRequest, name: str) -> bool | None:
    """Return a truth value, from the input of that name or from the request's parameters; None where neither is there."""
    try:
        array = request.input(name)
    except KeyError:
        given = request.parameters.get(name)
        if given is None or isinstance(given, bool):
            return given
        raise wrong(name, f"expected true or false, got {given!r:.40}") from None
    if array.size != 1:
        raise wrong(name, f"expected one element, got {array.size}")
    return bool(array.reshape(-1)[0])


def _text(request: BatchRequest, name: str) -> str | None:
    raw = string_input(request, name)
    try:
        return None if raw is None else raw.decode()
    except UnicodeDecodeError as error:
        raise wrong(name, f"not UTF-8: {error.reason} at byte {error.start}") from None


def _sampling(request: BatchRequest) -> dict[str, Any]:
    """Return sampling parameters: those of the request, and above them those of the input `sampling_parameters`.

    Parameters of the request that read like no name of ours may come from elsewhere, such as headers that are passed on.
    """
    given: dict[str, Any] = {
        name: value
        for name, value in request.parameters.items()
        if _NAME.fullmatch(name) and not name.startswith("triton_") and name not in _FLAGS
    }
    raw = string_input(request, "sampling_parameters")
    text = given.pop("sampling_parameters", None)
    if raw is None and isinstance(text, str):
        raw = text.encode()
    return given if raw is None else given | _json_object(raw, "sampling_parameters")


def _json_object(raw: bytes, name: str) -> dict[str, Any]:
    check_depth(raw, name)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise wrong(name, f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise wrong(name, f"expected a JSON object, got {type(found).__name__}")
    return found


def _popped_text(given: dict[str, Any], name: str) -> str | None:
    value = given.pop(name, None)
    if value is not None and not isinstance(value, str):
        raise wrong(name, f"expected a string, got {value!r:.40}")
    return value


def _structured(sampling: dict[str, Any]) -> StructuredOutput | None:
    """Take out what the text has to be: {"json": ...}, {"regex": ...} and the like, under either of vLLM's names."""
    found: StructuredOutput | None = None
    for name in _STRUCTURED:
        given = sampling.pop(name, None)
        if isinstance(given, str):
            given = _json_object(given.encode(), name)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise wrong(name, f"expected an object, got {given!r:.40}")
        asked = {key: value for key, value in given.items() if key in _KINDS and value not in (None, False)}
        if len(asked) != 1 or found is not None:
            raise wrong(name, f"expected exactly one of {', '.join(_KINDS)}")
        kind, value = asked.popitem()
        spec = "" if kind == "json_object" else value if isinstance(value, str) else json.dumps(value)
        found = msgspec.convert({"kind": _KINDS[kind], "spec": spec}, StructuredOutput)
    return found
