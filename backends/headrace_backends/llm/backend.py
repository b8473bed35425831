"""LlmBackend: a language model behind the backend API. It reads requests, hands them to an engine, and has them told.

One process is one engine, however many instances it has. `execute` only reads, checks, makes tokens and hands over, so
that an instance is free for the next request while those before it are generated.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from typing import ClassVar, Final

from headrace_backends.api import Batch, BatchRequest, ModelContext, ModelDescription
from headrace_backends.llm.asked_call import Reading
from headrace_backends.llm.call_reading import CallReader, decode_call, renamed, wrong
from headrace_backends.llm.description import completed
from headrace_backends.llm.engine import Engine, EngineCall
from headrace_backends.llm.engines import make_engine
from headrace_backends.llm.events import EventForm, Spelling, written
from headrace_backends.llm.metrics import LlmMetrics
from headrace_backends.llm.open_calls import OpenCall
from headrace_backends.llm.telling import MOST_JOINED, Teller
from headrace_backends.llm.v2_tensors import V2Form, asked_outputs, read_embedding, read_generation, string_input
from headrace_protocol.errors import InferError, unavailable
from headrace_protocol.generation import CALL_INPUT

EXIT_BROKEN: Final = 5
"""Status of a process whose engine could not go on."""
_LOG: Final = logging.getLogger(__name__)


class LlmBackend:
    """Serves one language model, by whichever engine its model.json names."""

    fork_safe: ClassVar[bool] = True
    threads: ClassVar[bool] = True
    most_joined: ClassVar[int] = MOST_JOINED
    """Steps that may be told at once; 1 has each told by itself."""

    def make_engine(self, model: ModelContext) -> Engine:
        """Return the model's engine, not open."""
        environment = model.backend_config.get("vllm-environment")
        defaults = {} if environment is None else {"vllm": {"vllm_environment": environment}}
        try:
            return make_engine(model.version_directory, threads=model.threads, device=_device(model), defaults=defaults)
        except ModuleNotFoundError as error:
            extra = "llama-cpp" if error.name == "llama_cpp" else "llm"
            raise unavailable(f"{error.name} is not installed: pip install headrace[{extra}]") from error

    def initialize(self, model: ModelContext) -> ModelDescription:
        """Load the model and start its engine; describes the tensors of Triton's vLLM backend, and ours."""
        self._engine = self.make_engine(model)
        self._numbers = itertools.count(1)
        self._seeds = random.SystemRandom()
        self._teller = Teller(self._engine.abort, self._end_process, most_joined=self.most_joined)
        self._engine.open(self._teller)
        card = self._engine.card
        config = completed(model.config, card)
        self._decoupled: bool = config["model_transaction_policy"]["decoupled"]
        self._spelling = Spelling(self._engine.text)
        self._event_form = EventForm(self._spelling)
        self._reader = CallReader(card, self._engine.text, self._spelling)
        self._teller.observer = _metrics(model, self._engine, self._teller)
        self._teller.start()
        return ModelDescription(config=config, replaces=True, is_ready=self._engine.healthy)

    def execute(self, batch: Batch) -> None:
        """Hand the requests over to the engine, or answer those that need none."""
        calls: list[OpenCall] = []
        for request in batch.requests:
            try:
                call = self._begin(request)
            except InferError as error:
                request.fail(error)
            else:
                if call is not None:
                    calls.append(call)

        def look() -> None:
            for call in calls:
                self._teller.look(call)

        batch.on_cancel(look)
        batch.on_flow(look)
        for call in calls:
            if self._decoupled:
                call.request.defer()
            else:
                call.ended.wait()

    def finalize(self) -> None:
        """End the engine."""
        self._engine.close()
        self._teller.close()

    def _begin(self, request: BatchRequest) -> OpenCall | None:
        """Submit a request to the engine; None where it is answered already. Raises InferError."""
        arrival_ns = time.monotonic_ns()
        reading = self._read(request)
        asked, form = reading.call, reading.form
        if asked is None or form is None:
            request.respond(reading.answer)
            return None
        if asked.stream and not self._decoupled:
            raise wrong(
                "stream", "the model answers once: model_transaction_policy.decoupled is false in its configuration"
            )
        number = next(self._numbers)
        call = OpenCall(number, request, asked, form, arrival_ns, decoupled=self._decoupled)
        self._teller.add(call)
        self._engine.submit(
            EngineCall(
                number,
                tuple(prompt.token_ids for prompt in asked.prompts),
                asked.params,
                arrival_ns,
                seed=self._seeds.getrandbits(63),
                structured=asked.structured,
                priority=asked.priority,
                cache_salt=asked.cache_salt,
                adapter=asked.adapter,
                beam=asked.beam,
                embed=asked.embed,
            )
        )
        return call

    def _read(self, request: BatchRequest) -> Reading:
        raw = string_input(request, CALL_INPUT)
        embedding = string_input(request, "embedding_request")
        if raw is not None:
            call = decode_call(raw)
            if call.resumes:
                _LOG.info("request %s comes a second time, since its first attempt was not answered", request.id)
            event = self._reader.answer(call)
            if event is not None:
                return Reading(answer=written(event))
            return Reading(self._reader.read(call), self._event_form)
        names = asked_outputs(request)
        call = read_generation(request) if embedding is None else read_embedding(embedding)
        try:
            asked = self._reader.read(call, texts=True, sums="cumulative_logprob" in names)
        except InferError as error:
            raise renamed(error, "prompts", "text_input" if embedding is None else "embedding_request") from None
        return Reading(asked, V2Form(names, self._spelling))

    def _end_process(self, error: InferError) -> None:
        """End the process, whose engine cannot go on: another takes its place."""
        _LOG.error("the engine cannot go on, and the process ends: %s", error.message)
        os._exit(EXIT_BROKEN)


def _metrics(model: ModelContext, engine: Engine, teller: Teller) -> LlmMetrics | None:
    """Return what counts, or None where there is no server to tell."""
    labels = {"model": model.name, "version": str(model.version), "engine": str(model.device)}
    try:
        return LlmMetrics(model.server, labels, engine, teller.calls)
    except InferError as error:
        _LOG.warning("the model has no metrics: %s", error.message)
        return None


def _device(model: ModelContext) -> str:
    """Return where the model is to run: KIND_MODEL leaves that to us, who take a GPU where there is one."""
    if model.kind == "KIND_GPU":
        return f"cuda:{model.device}"
    if model.kind == "KIND_CPU":
        return "cpu"
    import torch  # heavy, and what `make_engine` imports next

    return "cuda:0" if torch.cuda.is_available() else "cpu"
