"""Reads a GenerationCall: checks all of it, makes tokens of its prompts, and answers what needs no engine.

Errors name the field that is wrong, by `param`. Everything that could cost much is bounded before it is begun.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from headrace_backends.llm.asked_call import AskedCall, AskedPrompt
from headrace_backends.llm.beam import MAX_WIDTH, BeamRules
from headrace_backends.llm.engine import TextCodec
from headrace_backends.llm.events import Spelling
from headrace_backends.llm.parsing import ParamLimits, parse
from headrace_backends.llm.sampling_params import SamplingParams, truncated
from headrace_protocol.errors import ErrorCode, ErrorDetail, InferError
from headrace_protocol.generation import CALL_DECODER, GenerationCall, GenerationEvent, ModelCard, PromptTold

MAX_DEPTH: Final = 64
"""Levels of JSON in a call."""
MAX_PROMPTS: Final = 2048
MAX_CHOICES: Final = 4096
"""Of all prompts of a call together."""
MAX_TEXT: Final = 16 << 20
"""Characters of all prompts of a call together."""
MAX_SPEC: Final = 1 << 20
"""Characters of the description of a structured output."""
LONGEST_TOKEN: Final = 128
"""Characters: a text of more than so many times the model's length does not fit, and is not looked at."""
MAX_LENGTH_PENALTY: Final = 10.0
MAX_PRIORITY: Final = (1 << 31) - 1
_BRACKETS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)
_UNCHECKED: Final = ("cache_salt", "adapter")
_LONGEST_NAME: Final = 1024
_THINK, _END_THINK = "<think>", "</think>"


class CallReader:
    """Reads calls of one model. Thread-safe."""

    def __init__(self, card: ModelCard, codec: TextCodec, spelling: Spelling) -> None:
        self._card: Final = card
        self._codec: Final = codec
        self._spelling: Final = spelling
        self._adapters: Final = frozenset(adapter.name for adapter in card.adapters)

    def read(self, call: GenerationCall, *, texts: bool = False, sums: bool = False) -> AskedCall:
        """Return what the engine has to do for a call to generate or to embed.

        `texts`: numbers among the sampling parameters may be strings. `sums`: the choices' log probabilities are told in
        sum. Raises InferError.
        """
        self._check(call)
        params = self._params(call, texts=texts)
        asked_logprobs = params.logprobs is not None
        if sums and not asked_logprobs:
            params = msgspec.structs.replace(params, logprobs=0)
        told_n = params.n
        if call.best_of is not None:
            params = _with_best_of(params, call)
        count = 1 if call.chat is not None else len(call.prompts or ())
        if count * params.n > MAX_CHOICES:
            raise wrong("n", f"{count} prompts of {params.n} choices each are more than {MAX_CHOICES} at once")
        prompts = self._prompts(call, params)
        if call.task == "embed":
            params = msgspec.structs.replace(params, n=1, max_tokens=0, min_tokens=0, logprobs=None)
        return AskedCall(
            prompts,
            params,
            told_n=told_n,
            tells_logprobs=asked_logprobs,
            stream=call.stream and call.task == "generate",
            echo=call.echo,
            return_token_ids=call.return_token_ids,
            structured=call.structured,
            priority=call.priority,
            cache_salt=call.cache_salt,
            adapter=call.adapter,
            beam=None if call.beam_width is None else BeamRules(call.beam_width, call.length_penalty),
            embed=call.task == "embed",
            dimensions=call.dimensions,
            normalize=call.normalize,
        )

    def answer(self, call: GenerationCall) -> GenerationEvent | None:
        """Return the answer to a call that needs no engine; None for others. Raises InferError."""
        if call.task == "tokenize":
            self._check(call)
            return GenerationEvent(tuple(self._tokenized(call, each) for each in self._tokens(call)))
        if call.task == "detokenize":
            self._check(call)
            tokens = (call.prompts or [""])[0]
            if call.chat is not None or len(call.prompts or ()) != 1 or isinstance(tokens, str):
                raise wrong("prompts", "detokenize takes one prompt, of tokens")
            self._check_tokens(tokens, "prompts[0]")
            return GenerationEvent(text=self._codec.decode(tokens, skip_special_tokens=False))
        return None

    def _tokenized(self, call: GenerationCall, each: tuple[str | None, Sequence[int]]) -> PromptTold:
        text, tokens = each
        strings = tuple(self._spelling.of(token)[0] for token in tokens) if call.return_token_strings else None
        return PromptTold(len(tokens), text=text if call.echo else None, token_ids=tuple(tokens), token_strings=strings)

    # --- checks ---------------------------------------------------------------------------------------------------

    def _check(self, call: GenerationCall) -> None:
        if call.task not in self._card.tasks:
            raise wrong(
                "task", f"this model does not {call.task}; it can {', '.join(self._card.tasks)}", unsupported=True
            )
        if (call.prompts is None) == (call.chat is None):
            raise wrong("prompts", "a call has either prompts or chat")
        count = 1 if call.prompts is None else len(call.prompts)
        if not 1 <= count <= MAX_PROMPTS:
            raise wrong("prompts", f"expected 1 to {MAX_PROMPTS} of them, got {count}")
        if call.adapter is not None and call.adapter not in self._adapters:
            known = ", ".join(sorted(self._adapters)) or "none"
            message = f"the model has no adapter '{call.adapter[:80]}'; there are: {known}"
            raise InferError(ErrorCode.NOT_FOUND, message, param="adapter")
        for name in _UNCHECKED:
            if len(getattr(call, name) or "") > _LONGEST_NAME:
                raise wrong(name, f"longer than {_LONGEST_NAME} characters")
        if abs(call.priority) > MAX_PRIORITY:
            raise wrong("priority", f"expected an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {call.priority}")
        if call.structured is not None and len(call.structured.spec) > MAX_SPEC:
            raise wrong("structured", f"a description of more than {MAX_SPEC} characters")
        if call.beam_width is not None:
            self._check_beam(call, call.beam_width)
        if call.dimensions is not None and not 1 <= call.dimensions <= max(1, self._card.embedding_width):
            width = self._card.embedding_width
            raise wrong("dimensions", f"expected an integer from 1 to {width}, got {call.dimensions}")

    def _check_beam(self, call: GenerationCall, width: int) -> None:
        if self._card.engine != "headrace":
            raise wrong("beam_width", f"the engine {self._card.engine} has no beam search here", unsupported=True)
        if not 1 <= width <= MAX_WIDTH:
            raise wrong("beam_width", f"expected an integer from 1 to {MAX_WIDTH}, got {width}")
        if call.best_of is not None:
            raise wrong("best_of", "a beam search has no best_of: beam_width says of how many texts the best are told")
        if not -MAX_LENGTH_PENALTY <= call.length_penalty <= MAX_LENGTH_PENALTY:
            limit = MAX_LENGTH_PENALTY
            raise wrong("length_penalty", f"expected a number from {-limit} to {limit}, got {call.length_penalty}")

    def _params(self, call: GenerationCall, *, texts: bool) -> SamplingParams:
        # What a model's makers recommend is for sampling; a search would refuse their penalties.
        defaults = self._card.sampling_defaults if call.beam_width is None else {}
        given = {**defaults, **{k: v for k, v in call.sampling.items() if v is not None}}
        limits = ParamLimits(
            vocab_size=self._card.vocab_size, max_logprobs=self._card.max_logprobs, allow_no_tokens=True, texts=texts
        )
        params = parse(given, limits)
        if isinstance(params, list):
            raise wrong(params[0].field, "; ".join(map(str, params)), named=True)
        if call.chat is not None and "max_tokens" not in given:
            return msgspec.structs.replace(params, max_tokens=None)
        return params

    # --- prompts --------------------------------------------------------------------------------------------------

    def _prompts(self, call: GenerationCall, params: SamplingParams) -> tuple[AskedPrompt, ...]:
        """Return the prompts as tokens, each with room for what is wanted."""
        field = "chat" if call.chat is not None else "prompts"
        length = self._card.max_model_len
        least = 0 if params.max_tokens == 0 or call.task == "embed" else 1
        reasons = self._card.reasoning_format is not None
        prompts = []
        for text, tokens in self._tokens(call):
            kept = truncated(tokens, params, length)
            if not kept:
                raise wrong(field, "the prompt has no tokens")
            if len(kept) + least > length:
                raise too_long(field, f"the prompt has {len(kept)} tokens", length)
            whole = text
            if (call.echo or reasons) and (text is None or len(kept) < len(tokens)):
                whole = self._codec.decode(kept, skip_special_tokens=False)
            thinking = reasons and whole is not None and whole.rfind(_THINK) > whole.rfind(_END_THINK)
            prompts.append(AskedPrompt(kept, whole if call.echo else None, thinking))
        return tuple(prompts)

    def _tokens(self, call: GenerationCall) -> list[tuple[str | None, Sequence[int]]]:
        """Return the text, where there is one, and the tokens of each prompt."""
        if call.chat is not None:
            try:
                text = self._codec.render(call.chat)
            except InferError as error:
                error.param = error.param or "chat"
                raise
            self._check_length(len(text), "chat")
            return [(text, self._encode(text, "chat", special=call.add_special_tokens or False))]
        found: list[tuple[str | None, Sequence[int]]] = []
        prompts, total = call.prompts or (), 0
        for at, prompt in enumerate(prompts):
            where = f"prompts[{at}]" if len(prompts) > 1 else "prompts"
            if isinstance(prompt, str):
                total += len(prompt)
                if total > MAX_TEXT:
                    raise wrong("prompts", f"more than {MAX_TEXT} characters together")
                self._check_length(len(prompt), where)
                special = True if call.add_special_tokens is None else call.add_special_tokens
                found.append((prompt, self._encode(prompt, where, special=special)))
            else:
                self._check_tokens(prompt, where)
                found.append((None, prompt))
        return found

    def _encode(self, text: str, where: str, *, special: bool) -> list[int]:
        try:
            return self._codec.encode(text, add_special_tokens=special)
        except InferError as error:
            error.param = error.param or where
            raise

    def _check_length(self, characters: int, where: str) -> None:
        if characters > self._card.max_model_len * LONGEST_TOKEN:
            raise too_long(where, f"the prompt has {characters} characters", self._card.max_model_len)

    def _check_tokens(self, tokens: Sequence[int], where: str) -> None:
        vocab = self._card.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
            bad = next(token for token in tokens if not 0 <= token < vocab)
            raise wrong(where, f"expected token ids below {vocab}, got {bad}")


def _with_best_of(params: SamplingParams, call: GenerationCall) -> SamplingParams:
    """Have the engine generate more choices than are told, with what their likelihood is told by."""
    best_of, most = call.best_of or 0, ParamLimits().max_n
    if not params.n <= best_of <= most:
        raise wrong("best_of", f"expected an integer from n, {params.n}, to {most}, got {best_of}")
    if best_of == params.n:
        return params
    if call.stream:
        raise wrong("best_of", f"{best_of} choices, of which {params.n} are told, cannot be streamed")
    return msgspec.structs.replace(params, n=best_of, logprobs=0 if params.logprobs is None else params.logprobs)


def decode_call(raw: bytes) -> GenerationCall:
    """Return the call that JSON text holds. Raises INVALID_ARG with the field that is wrong."""
    check_depth(raw, "generation_call")
    try:
        return CALL_DECODER.decode(raw)
    except msgspec.ValidationError as error:
        text = str(error)
        found = re.search(r"at `\$\.(\w+)", text)
        raise wrong("generation_call" if found is None else found[1], text) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise wrong("generation_call", f"not JSON: {error}") from None


def check_depth(raw: bytes, where: str) -> None:
    """Raise INVALID_ARG where JSON is nested deeper than MAX_DEPTH."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for found in _BRACKETS.finditer(raw):
        first = raw[found.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise wrong(where, f"JSON nested deeper than {MAX_DEPTH} levels")
        elif first in b"]}":
            depth -= 1


def wrong(field: str, message: str, *, unsupported: bool = False, named: bool = False) -> InferError:
    """Return the error of a field; `named`: the message says already which it is."""
    code = ErrorCode.UNSUPPORTED if unsupported else ErrorCode.INVALID_ARG
    return InferError(code, message if named else f"{field}: {message}", param=field.partition("[")[0])


def renamed(error: InferError, field: str, name: str) -> InferError:
    """Return an error of a field as its client knows the field."""
    if error.param != field:
        return error
    message = error.message.replace(field, name, 1) if error.message.startswith(field) else error.message
    return InferError(error.code, message, error.reason, detail=error.detail, param=name)


def too_long(where: str, found: str, length: int) -> InferError:
    """Return the error of a prompt that leaves no room."""
    message = f"{where}: {found}; the model takes {length} tokens, those that it generates included"
    return InferError(ErrorCode.INVALID_ARG, message, detail=ErrorDetail.CONTEXT_LENGTH, param=where.partition("[")[0])
