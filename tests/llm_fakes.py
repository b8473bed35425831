"""A language model without a model: the next token is a hash of all tokens before it, read back out of paged memory."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from headrace_backends.llm.grammar import GrammarError
from headrace_backends.llm.logprobs import TokenLogprob, TokenLogprobs
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.step import ScheduledRequest, SchedulerOutput, StepResult, pools, verified
from headrace_protocol.errors import invalid
from headrace_protocol.generation import StructuredOutput

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
    text = tokens[request.num_prompt_tokens :]
    free = not on_ladder(request) or is_whole(request, text)  # behind the end nothing that comes is told
    allowed = range(VOCAB) if free else may_come(request, text)
    while (k < request.params.min_tokens and token in banned) or token not in allowed:
        token = (token + 1) % VOCAB
    return token


class Ladder:
    """A grammar of so many tokens: even and odd ones by what came before, and at the end of each four two that are certain."""

    spoiled = False

    def __init__(self, length: int) -> None:
        self._length = length

    def matcher(self) -> Rungs:
        return Rungs(self._length)

    @staticmethod
    def next_of(text: Sequence[int]) -> set[int]:
        """Return the tokens that may follow, but for those that end a text; it may end after every second."""
        if len(text) % 4 >= 2:
            return {0}
        return {token for token in range(EOS) if token % 2 == (sum(text) + len(text)) % 2}


class Rungs:
    """One text on a ladder."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._text: list[int] = []

    def accept(self, token_id: int) -> None:
        if self.complete or token_id not in Ladder.next_of(self._text):
            raise GrammarError(f"{token_id} cannot follow {self._text}")
        self._text.append(token_id)

    def validate(self, token_ids: Sequence[int]) -> int:
        text = list(self._text)
        for at, token in enumerate(token_ids):
            if len(text) == self._length or token not in Ladder.next_of(text):
                return at
            text.append(token)
        return len(token_ids)

    def rollback(self, count: int) -> None:
        del self._text[len(self._text) - count :]

    def fill(self, row: np.ndarray) -> None:
        row[:] = 0
        for token in set() if self.complete else Ladder.next_of(self._text):
            row[token // 32] |= np.int32(1 << token % 32)

    def forced(self) -> Sequence[int]:
        left = self._length - len(self._text)
        return [0] * min(left, 4 - len(self._text) % 4) if len(self._text) % 4 >= 2 else []

    @property
    def may_end(self) -> bool:
        return len(self._text) % 2 == 0 or self.complete

    @property
    def complete(self) -> bool:
        return len(self._text) == self._length


class Compiles:
    """A grammar source whose descriptions are lengths of ladders, compiled when the test says so; others are refused."""

    reasoning = None

    def __init__(self) -> None:
        self.pending: list[tuple[Future, str]] = []

    def compile(self, structured: StructuredOutput) -> Future:
        self.pending.append((Future(), structured.spec))
        return self.pending[-1][0]

    def finish(self, which: int) -> None:
        future, spec = self.pending.pop(which % len(self.pending))
        if spec.isdecimal():
            future.set_result(Ladder(int(spec)))
        else:
            future.set_exception(invalid("no ladder"))


def may_come(request: GenerationRequest, text: Sequence[int]) -> set[int]:
    """Return the tokens that may come after the output so far: what the grammar allows, and what ends a text that may end."""
    ends = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else request.eos_token_ids)
    whole = is_whole(request, text)
    return (set() if whole else Ladder.next_of(text)) | (ends if whole or len(text) % 2 == 0 else set())


def is_whole(request: GenerationRequest, text: Sequence[int]) -> bool:
    """Say whether the request's grammar lets nothing follow an output."""
    return on_ladder(request) and len(text) >= int(request.structured.spec)


def on_ladder(request: GenerationRequest) -> bool:
    """Say whether the request's text is kept to a `Ladder`."""
    return request.structured is not None and request.structured.spec.isdecimal()


def check_masks(entry: ScheduledRequest) -> None:
    """Assert that the state of a request's grammar is that of its output, however that came to be computed."""
    request = entry.request
    rows = np.full((entry.num_sampled_rows, 1), -1, np.int32)
    assert request.grammar is not None
    assert request.grammar.fill(rows, entry.draft_token_ids) is None
    for at, row in enumerate(rows):
        allowed = may_come(request, [*request.output_token_ids, *entry.draft_token_ids[:at]])
        assert {token for token in range(VOCAB) if row[0] >> token & 1} == allowed


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
        if on_ladder(request) and entry.num_sampled_rows:
            check_masks(entry)
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
        whole = is_whole(request, output)
        ends = by_eos or by_token or whole or len(output) == most
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
        if by_eos or by_token or whole:
            return output, text, "stop", token if by_token and not by_eos else None
    return output, text, "length", None
