"""A language model without a model: the next token is a hash of all tokens before it, read back out of paged memory."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Sequence

import numpy as np

from headrace_backends.llm.logprobs import TokenLogprob, TokenLogprobs
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.step import ScheduledRequest, SchedulerOutput, StepResult, pools, verified

PIECES = [
    b"a",
    b"b",
    b"ab",
    b"ba ",
    b" ",
    b"\xe2",
    b"\x82\xac",
    b"\xc3\xa9",
    b"\xf0\x9f\x98",
    b"\x80",
    b"\xff",
    b"",
    b"c",
]
SPECIAL = 11
EOS = 13
VOCAB = 14


class ByteTokenizer:
    """Tokens are pieces of UTF-8, some of them parts of characters."""

    def encode(self, text: str) -> list[int]:
        return [PIECES.index(bytes([byte])) for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return b"".join(
            PIECES[token] if token != EOS else b"" if skip_special_tokens else b"<end>" for token in token_ids
        ).decode(errors="replace")


def next_token(tokens: Sequence[int], seed: int, k: int, *, greedy: bool) -> int:
    """Return the token after `tokens`: the k-th of the output."""
    drawn = 0 if greedy else zlib.crc32(f"{seed}/{k}".encode())
    return (zlib.crc32(bytes(tokens)) ^ drawn) % 9973 % VOCAB


def sampled_after(request: GenerationRequest, tokens: Sequence[int]) -> int:
    k = len(tokens) - request.num_prompt_tokens
    token = next_token(tokens, request.seed, k, greedy=request.params.greedy)
    banned = {*request.eos_token_ids, *request.params.stop_token_ids}
    while k < request.params.min_tokens and token in banned:
        token = (token + 1) % VOCAB
    return token


class PagedRunner:
    """Writes each token of a step into its slot, then reads each row's whole prefix through the block table."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.memory: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.num_tokens = 0
        self.num_steps = 0
        self.known: set[str] = set()
        self.poisoned: set[str] = set()
        """Requests with which no step can be computed."""
        self.broken: set[str] = set()
        """Requests that end with an error when next sampled."""
        self.fail_next = False

    def execute(self, step: SchedulerOutput) -> list[StepResult]:
        self.known -= set(step.finished_ids)
        for entry in step.scheduled:
            self.known.add(entry.request.id)
            assert entry.token_ids
            assert (
                list(entry.token_ids)
                == (entry.request.token_ids + entry.request.draft_token_ids)[entry.start : entry.end]
            )
        failing = self.fail_next or any(entry.request.id in self.poisoned for entry in step.scheduled)
        self.fail_next = False
        written: set[int] = set()
        for entry in step.scheduled:
            for at, (slot, token) in enumerate(
                zip(entry.slots(self.block_size), entry.token_ids, strict=True), entry.start
            ):
                assert slot >= self.block_size or entry.request.id == "probe", "the null block is nobody's"
                assert slot not in written, "two tokens went to one slot"
                written.add(slot)
                self.memory[slot] = (-1, -1) if failing else (token, self._state(entry, at, token))
        if failing:
            raise RuntimeError("the model broke")
        self.num_steps += 1
        self.num_tokens += len(written)
        return [self._result(entry) for entry in step.scheduled]

    def _held(self, entry: ScheduledRequest, at: int) -> tuple[int, int]:
        held = self.memory[entry.block_table[at // self.block_size] * self.block_size + at % self.block_size]
        assert held is not None, f"the slot of position {at} was never written"
        return held

    def _state(self, entry: ScheduledRequest, at: int, token: int) -> int:
        """As K and V do, what is written of a token depends on all before it; and on who may share it."""
        before = (
            self._held(entry, at - 1)[1]
            if at
            else zlib.crc32(f"{entry.request.cache_salt}{entry.request.lora}".encode())
        )
        return zlib.crc32(bytes([token]), before)

    def prefix(self, entry: ScheduledRequest, end: int) -> list[int]:
        """Read the tokens back, and that each was written after the ones before it."""
        tokens = []
        for at in range(end):
            token, state = self._held(entry, at)
            assert state == self._state(entry, at, token), f"position {at} belongs to another prefix"
            tokens.append(token)
        return tokens

    def _result(self, entry: ScheduledRequest) -> StepResult:
        request = entry.request
        if request.id in self.broken and entry.num_sampled_rows:
            return StepResult(error="this row broke")
        read = self.prefix(entry, entry.end)
        rows = [
            sampled_after(request, read[: entry.end - entry.num_sampled_rows + 1 + row])
            for row in range(entry.num_sampled_rows)
        ]
        tokens = verified(entry.draft_token_ids, rows) if rows else []
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = [TokenLogprobs(TokenLogprob(token, -1.0, 1)) for token in tokens]
        prompt_logprobs: list[TokenLogprobs] = []
        if request.params.prompt_logprobs is not None:
            end = min(entry.end + 1, request.num_prompt_tokens)
            prompt_logprobs = [
                TokenLogprobs(TokenLogprob(request.prompt_token_ids[at], -float(at), 1))
                for at in range(entry.start + 1, end)
            ]
        return StepResult(tokens, logprobs, prompt_logprobs, pooled=self._pooled(entry))

    def _pooled(self, entry: ScheduledRequest) -> np.ndarray | None:
        """A vector of two: sums of the tokens and of their places plus one, or those of the last token."""
        if not pools(entry):
            return None
        first = entry.start if entry.request.pooling == "mean" else entry.end - 1
        read = self.prefix(entry, entry.end)
        return np.array([[read[at], at + 1] for at in range(first, entry.end)], np.float32).sum(axis=0)


class Guesser:
    """Guesses badly and well: what it was told to, cut to length."""

    def __init__(self, right: float, most: int, seed: int = 0) -> None:
        self.right, self.most, self.seed = right, most, seed

    def propose(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        return [self._guess(request) for request in requests]

    def forget(self, request_id: str) -> None:
        pass

    def _guess(self, request: GenerationRequest) -> list[int]:
        tokens = list(request.token_ids)
        for at in range(self.most):
            token = sampled_after(request, tokens)
            wrong = zlib.crc32(f"{self.seed}{tokens}{at}".encode()) % 100 >= self.right * 100
            tokens.append((token + 1) % VOCAB if wrong else token)
        return tokens[request.num_tokens :]


def vector_of(request: GenerationRequest) -> list[float]:
    """Return what pooling a prompt gives."""
    prompt = list(request.prompt_token_ids)
    if request.pooling == "last":
        return [prompt[-1], len(prompt)]
    return [sum(prompt) / len(prompt), (len(prompt) + 1) / 2]


def expected(request: GenerationRequest, max_model_len: int) -> tuple[list[int], str, str, int | str | None]:
    """Return tokens, text, finish reason and stop reason of a request that runs alone, told in the plainest way."""
    params, tokens = request.params, list(request.prompt_token_ids)
    room = max_model_len - len(tokens)
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    output: list[int] = []
    text = ""
    while len(output) < most:
        token = sampled_after(request, tokens)
        tokens.append(token)
        output.append(token)
        may_stop = len(output) > params.min_tokens
        by_eos = may_stop and token in request.eos_token_ids and not params.ignore_eos
        by_token = may_stop and token in params.stop_token_ids
        before = len(text)
        if not (by_eos or by_token) or params.include_stop_str_in_output:
            text += decoder.decode(b"" if token == EOS else PIECES[token])
        ends = by_eos or by_token or len(output) == most
        if ends:
            text += decoder.decode(b"", final=True)
        found = []
        for order, stop in enumerate(params.stop):
            at = text.find(stop, max(0, before - len(stop) + 1))
            if may_stop and at >= 0:
                found.append((at + len(stop), order))
        if found:
            end, order = min(found)
            cut = text[:end] if params.include_stop_str_in_output else text[: end - len(params.stop[order])]
            return output, cut, "stop", params.stop[order]
        if by_eos or by_token:
            return output, text, "stop", None if by_eos else token
    return output, text, "length", None
