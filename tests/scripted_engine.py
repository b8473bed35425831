"""A language model that says what its prompt tells it to, token by token, and fails on demand: for tests of the doors.

    environment = scripted_engine.installed(tmp_path / "site")
    scripted_engine.add_model(repository, "echoer", tool_format="hermes")   # more are fields of its ModelCard
    with running(repository, env=environment) as server: ...

The tokens are bytes: token 65 is "A", 256 begins a text, 257 ends it, 258 is the special token "<|mark|>". A prompt of n
characters of ASCII has n tokens (and one more with add_special_tokens), and a text of k ASCII characters is k tokens, one a
step. The chat template writes `<|role|>content` and a newline of each message (content that is a list: its texts), then
`<|assistant|>`; tools, if any, first as `<|tools|>` and JSON. See `render`.

What a prompt asks for stands in it as `<<{...}>>`, a JSON object; the last one counts. Without one it is SAYS. Members:

    say           the text of the answer, or a list with one of each choice (the last goes for those beyond)
    tokens        the answer as tokens, in place of `say`
    repeat        how often the answer is said, one after another
    per_step      tokens of a step; 1
    finish        "stop" (the end of the text follows the answer; the default) or "length"
    cached        prompt tokens that count as found in the prefix cache
    refuse        "invalid", "too_long", "busy": the call fails before anything is told
    fail_after    after so many tokens (0: before the first) the call fails, INTERNAL
    error_after   after so many tokens its choice ends with finish reason "error"
    die_after     after so many tokens the process ends, without a word
    break_after   after so many tokens the engine breaks, and says so
    sick_after    after so many tokens the engine is not healthy any more
    hold, at      wait at token `at` (0: before the first) until another prompt has `release` of the same name
    release       let those go on that hold under this name

Limits (max_tokens, stop strings, stop_token_ids, ignore_eos) hold as in any engine. The k-th likeliest token at any place is the
chosen one + k, with the log probabilities -0.5, -1.5, ... Vectors of prompts have DIMENSIONS numbers, the counts of bytes by
value modulo DIMENSIONS, the first never 0.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace_backends.api import ModelContext
from headrace_backends.llm.backend import LlmBackend
from headrace_backends.llm.detokenizer import Detokenizer, GenerationText
from headrace_backends.llm.engine import EngineCall, EngineStats, Listener, Told
from headrace_backends.llm.logprobs import TokenLogprob, TokenLogprobs
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason
from headrace_backends.llm.stop import StopStrings
from headrace_protocol.errors import ErrorCode, ErrorDetail, InferError, internal, invalid, unavailable
from headrace_protocol.generation import ChatPrompt, ModelCard

SAYS = "Hello, world!"
BEGIN, END, MARK = 256, 257, 258
SPECIAL = {BEGIN: "<s>", END: "</s>", MARK: "<|mark|>"}
VOCAB = 320
DIMENSIONS = 8
OURS = {"scripted": "scripted_engine:ScriptedBackend"}
_SCRIPT = re.compile(r"<<(\{.*?\})>>", re.DOTALL)


def installed(folder: Path, backends: Mapping[str, str] = OURS) -> dict[str, str]:
    """Install this module below `folder` as the backend "scripted"; return the environment that finds it there."""
    information = folder / "scripted_engine-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-engine\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in backends.items()]
    (information / "entry_points.txt").write_text("\n".join(["[headrace.backends]", *lines, ""]))
    shutil.copy(__file__, folder)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def add_model(repository: Path, name: str, config: str = "", **card: Any) -> Path:
    """Write a scripted model; `card` are fields of its ModelCard. Return its directory."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.json").write_text(json.dumps(card))
    (repository / name / "config.pbtxt").write_text(f'backend: "scripted"\n{config}')
    return repository / name


def script(**members: Any) -> str:
    """Return the part of a prompt that has it answered like that."""
    return f"<<{json.dumps(members)}>>"


class ByteText:
    """The tokenizer: bytes, and three special tokens that text does not make."""

    def __init__(self, *, template: bool = True) -> None:
        self._template = template

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [BEGIN] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        pieces = [
            bytes([token]) if token < 256 else b"" if skip_special_tokens else SPECIAL.get(token, f"<{token}>").encode()
            for token in token_ids
        ]
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else None

    def render(self, chat: ChatPrompt) -> str:
        """Return the conversation as prompt; `<think>` is opened where the keyword `thinking` says so."""
        if not self._template:
            raise invalid("the model has no chat template")
        parts = [f"<|tools|>{json.dumps(chat.tools)}\n"] if chat.tools else []
        for message in chat.messages:
            content = message.get("content") or ""
            if not isinstance(content, str):
                content = "".join(part.get("text", "") for part in content)
            parts.append(f"<|{message['role']}|>{content}\n")
        if chat.continue_final_message:
            parts[-1] = parts[-1].removesuffix("\n")
        elif chat.add_generation_prompt:
            parts.append("<|assistant|>")
        if (chat.chat_template_kwargs or {}).get("thinking"):
            parts.append("<think>")
        return "".join(parts)


class _Plain:
    """The tokenizer as the detokenizer wants it."""

    def __init__(self, text: ByteText) -> None:
        self._text = text

    def encode(self, text: str) -> list[int]:
        return self._text.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._text.decode(token_ids, skip_special_tokens=skip_special_tokens)


class _Choice:
    """One of a call's generations."""

    def __init__(self, call: EngineCall, prompt: int, choice: int, script: dict[str, Any], text: ByteText) -> None:
        self.index = prompt * call.params.n + choice
        self.prompt = call.prompts[prompt]
        self.params = call.params
        self.script = script
        said = script.get("tokens")
        if said is None:
            texts = script.get("say", SAYS)
            said = (texts if isinstance(texts, str) else texts[min(choice, len(texts) - 1)]).encode()
        self.tokens = [*said] * script.get("repeat", 1) + [END] * (script.get("finish", "stop") == "stop")
        detokenizer = Detokenizer(_Plain(text), self.prompt, skip_special_tokens=call.params.skip_special_tokens)
        stop = StopStrings(call.params.stop, include=call.params.include_stop_str_in_output)
        self.text = GenerationText(detokenizer, stop)
        self.output: list[int] = []
        self.cumulative = 0.0
        self.prompt_told = False
        room = script["max_model_len"] - len(self.prompt)
        self.most = room if self.params.max_tokens is None else min(room, self.params.max_tokens)

    def step(self) -> GenerationOutput:
        """Say the next tokens."""
        new: list[int] = []
        ending: tuple[FinishReason, int | str | None] | None = (FinishReason.LENGTH, None) if not self.most else None
        while ending is None and len(new) < self.script.get("per_step", 1):
            token = self.tokens[len(self.output)] if len(self.output) < len(self.tokens) else END
            self.output.append(token)
            new.append(token)
            ending = self._ending(token)
        if self.script.get("error_after", -1) == len(self.output):
            return self._told(new, FinishReason.ERROR, None, "the script says so")
        return self._told(new, *(ending or (None, None)))

    def _ending(self, token: int) -> tuple[FinishReason, int | str | None] | None:
        may_stop = len(self.output) > self.params.min_tokens
        if may_stop and token == END and not self.params.ignore_eos:
            return FinishReason.STOP, None
        if may_stop and token in self.params.stop_token_ids:
            return FinishReason.STOP, token
        matched = self.text.append(token, check_stop=may_stop)
        if matched is not None:
            return FinishReason.STOP, matched
        over = len(self.output) >= self.most
        over = over or (self.script.get("finish") == "length" and len(self.output) >= len(self.tokens))
        if over:
            matched = self.text.finish(check_stop=may_stop)
            return (FinishReason.LENGTH, None) if matched is None else (FinishReason.STOP, matched)
        return None

    def _told(
        self, new: list[int], reason: FinishReason | None, stop: int | str | None, error: str | None = None
    ) -> GenerationOutput:
        wanted = self.params.logprobs
        logprobs = None if wanted is None else tuple(_logprobs(token, wanted) for token in new)
        self.cumulative -= 0.5 * len(new)
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None and not self.prompt_told:
            rest = [_logprobs(token, self.params.prompt_logprobs) for token in self.prompt[1:]]
            prompt_logprobs = (None, *rest)
        self.prompt_told = True
        return GenerationOutput(
            request_id="",
            index=self.index,
            text=self.text.take(final=reason is not None),
            token_ids=tuple(new),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=stop,
            error=error,
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=self.script.get("cached", 0),
            num_output_tokens=len(self.output),
            cumulative_logprob=None if wanted is None else self.cumulative,
        )


def _logprobs(token: int, most: int) -> TokenLogprobs:
    count = VOCAB if most == -1 else most
    top = tuple(TokenLogprob((token + k) % VOCAB, -0.5 - k, k + 1) for k in range(count))
    return TokenLogprobs(TokenLogprob(token, -0.5, 1), top)


class _Running:
    """A call under way."""

    def __init__(self, call: EngineCall, scripts: list[dict[str, Any]], text: ByteText) -> None:
        self.call = call
        self.script = scripts[0]
        self.scheduled_ns: int | None = None
        self.first_token_ns: int | None = None
        self.choices = [
            _Choice(call, prompt, choice, script, text)
            for prompt, script in enumerate(scripts)
            for choice in range(call.params.n)
        ]

    @property
    def at(self) -> int:
        """Tokens that its first choice has said."""
        return len(self.choices[0].output) if self.choices else -1


class ScriptedEngine:
    """An engine of headrace_backends.llm.engine."""

    def __init__(self, card: Mapping[str, Any] | None = None) -> None:
        template = (card or {}).get("has_chat_template", True)
        defaults = {
            "max_model_len": 4096,
            "vocab_size": VOCAB,
            "has_chat_template": True,
            "embedding_width": DIMENSIONS,
        }
        tasks = ("generate", "embed", "tokenize", "detokenize")
        given = {"engine": "scripted", "dtype": "bytes", "tasks": tasks, **defaults, **(card or {})}
        self._card = msgspec.convert(given, ModelCard)
        self._text = ByteText(template=template)
        self._changed = threading.Condition()
        self._arrived: list[EngineCall] = []
        self._running: dict[int, _Running] = {}
        self._aborted: set[int] = set()
        self._released: set[str] = set()
        self._healthy = True
        self._ended = False
        self._totals = {"prompt_tokens": 0, "generation_tokens": 0, "steps": 0, "step_tokens": 0}
        self.submitted: list[EngineCall] = []
        self.aborted: list[int] = []

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="scripted-engine", daemon=True)
        self._thread.start()

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def text(self) -> ByteText:
        return self._text

    def submit(self, call: EngineCall) -> None:
        with self._changed:
            self.submitted.append(call)
            self._arrived.append(call)
            self._changed.notify_all()

    def abort(self, number: int) -> None:
        with self._changed:
            self.aborted.append(number)
            self._aborted.add(number)
            self._changed.notify_all()

    def stats(self) -> EngineStats:
        running = dict(self._running)
        waiting = sum(1 for each in running.values() if self._held(each) and not each.at)
        blocks = sum(len(choice.prompt) + len(choice.output) for each in running.values() for choice in each.choices)
        return EngineStats(len(running) - waiting, waiting, min(1.0, blocks / 100_000), totals=dict(self._totals))

    def healthy(self) -> bool:
        return self._healthy and self._thread.is_alive()

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a fault of the script or of ours: calls must not wait for ever
            self._healthy = False
            self._listener.broke(internal(f"the scripted engine failed: {type(error).__name__}: {error}"))

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._arrived or self._aborted or self._due())
                if self._ended:
                    return
                arrived, self._arrived = self._arrived, []
                aborted, self._aborted = self._aborted, set()
            news = [told for call in arrived if call.number not in aborted for told in self._take(call)]
            for number in aborted:
                self._running.pop(number, None)
            news += [self._step(running) for running in self._due()]
            self._totals["steps"] += 1
            if news:
                self._listener.told(news)

    def _due(self) -> list[_Running]:
        return [running for running in self._running.values() if not self._held(running)]

    def _held(self, running: _Running) -> bool:
        hold = running.script.get("hold")
        return hold is not None and hold not in self._released and running.at == running.script.get("at", 0)

    def _take(self, call: EngineCall) -> list[Told]:
        scripts = [self._script(prompt) for prompt in call.prompts]
        refused = _REFUSALS.get(scripts[0].get("refuse", ""))
        if refused is not None:
            return [Told(call.number, error=refused)]
        if "release" in scripts[0]:
            self._released.add(scripts[0]["release"])
        self._totals["prompt_tokens"] += sum(map(len, call.prompts))
        if call.embed:
            vectors = np.zeros((len(call.prompts), DIMENSIONS), np.float32)
            for row, prompt in enumerate(call.prompts):
                vectors[row] = np.bincount(np.array(prompt) % DIMENSIONS, minlength=DIMENSIONS)
                vectors[row, 0] += 1
            return [Told(call.number, vectors=vectors, scheduled_ns=time.monotonic_ns())]
        self._running[call.number] = _Running(call, scripts, self._text)
        return []

    def _script(self, prompt: Sequence[int]) -> dict[str, Any]:
        found = _SCRIPT.findall(self._text.decode(prompt, skip_special_tokens=True))
        return {"max_model_len": self._card.max_model_len, **(json.loads(found[-1]) if found else {})}

    def _step(self, running: _Running) -> Told:
        number, at = running.call.number, running.at
        error = self._misbehave(running.script, at)
        if error is not None:
            del self._running[number]
            return Told(number, error=error)
        running.scheduled_ns = running.scheduled_ns or time.monotonic_ns()
        outputs = [choice.step() for choice in running.choices]
        running.choices = [
            choice for choice, output in zip(running.choices, outputs, strict=True) if not output.finished
        ]
        running.first_token_ns = running.first_token_ns or time.monotonic_ns()
        self._totals["generation_tokens"] += sum(len(output.token_ids) for output in outputs)
        if not running.choices:
            del self._running[number]
        return Told(number, outputs, scheduled_ns=running.scheduled_ns, first_token_ns=running.first_token_ns)

    def _misbehave(self, script: Mapping[str, Any], at: int) -> InferError | None:
        if script.get("die_after") == at:
            os._exit(9)
        if script.get("break_after") == at:
            error = unavailable("the engine broke: the script says so")
            self._healthy = False
            self._listener.told([Told(number, error=error) for number in self._running])
            self._listener.broke(error)
        if script.get("sick_after") == at:
            self._healthy = False
        return internal("the script says so") if script.get("fail_after") == at else None


_REFUSALS = {
    "invalid": InferError(ErrorCode.INVALID_ARG, "the script refuses it", param="sampling"),
    "too_long": InferError(
        ErrorCode.INVALID_ARG, "the prompt is too long", detail=ErrorDetail.CONTEXT_LENGTH, param="prompts"
    ),
    "busy": InferError(ErrorCode.UNAVAILABLE, "too much waits", detail=ErrorDetail.QUEUE_FULL),
}


class ScriptedBackend(LlmBackend):
    """The language model backend with a ScriptedEngine; model.json has fields of its card. Each step is told by itself."""

    most_joined = 1

    def make_engine(self, model: ModelContext) -> ScriptedEngine:
        return ScriptedEngine(json.loads((model.version_directory / "model.json").read_bytes()))
