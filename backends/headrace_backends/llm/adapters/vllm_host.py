"""Serves one model by vLLM's AsyncLLM, in vLLM's own Python: the module that `engine_host` runs.

Everything here belongs to the event loop. Imports vLLM, and of ours only what is pure.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import vllm
from vllm import AsyncEngineArgs, SamplingParams
from vllm.exceptions import MaxQueuedTokensError, QueueOverflowError, VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from headrace_backends.llm.adapters.engine_host import Link
from headrace_backends.llm.adapters.hosted_wire import Abort, Broken, Closing, News, Opened, Submit, ToHost
from headrace_backends.llm.adapters.vllm_outputs import Telling
from headrace_backends.llm.adapters.vllm_params import repetition_arguments, sampling_arguments, structured_arguments
from headrace_backends.llm.adapters.vllm_requests import Requests
from headrace_backends.llm.adapters.vllm_stats import StatsSum
from headrace_backends.llm.engine import EngineCall, Told
from headrace_backends.llm.sampling_params import truncated
from headrace_backends.llm.settings_ignored import IGNORED
from headrace_protocol.errors import (
    ErrorCode,
    ErrorDetail,
    FailureReason,
    InferError,
    internal,
    invalid,
    unavailable,
    unsupported,
)
from headrace_protocol.generation import AdapterCard, ModelCard, Task

_STATS_S: Final = 0.25
"""Seconds that news of the statistics alone may wait for other news."""
_HEALTH_S: Final = 5
_CACHE: Final = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")
_TASKS: Final[tuple[Task, ...]] = ("generate", "embed")


async def serve(link: Link) -> None:
    """Load the model, then take calls until the other side closes."""
    host: list[_Host] = []

    class Logger(StatLoggerBase):  # type: ignore[misc]  # vLLM is not installed where types are checked
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            del vllm_config, engine_index

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            for each in host:
                each.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    engine = _engine(link.opening.arguments, [Logger])
    serving = _Host(link, engine, StatsSum(_cache_config(engine.vllm_config.cache_config)))
    link.send(await _opened(engine, link.opening.adapters))
    serving.tell_soon()
    host.append(serving)
    link.listen(serving.take)
    await serving.run()


def _engine(arguments: Mapping[str, Any], loggers: Sequence[Any]) -> AsyncLLM:
    """Load a model. Raises INVALID_ARG for arguments that vLLM does not have, or not with these values."""
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs) if field.init}
    unknown = sorted(set(arguments) - known - IGNORED)
    if unknown:
        raise invalid(f"model.json: vLLM {vllm.__version__} has no argument {', '.join(unknown)}")
    try:
        args = AsyncEngineArgs(**{name: value for name, value in arguments.items() if name in known})
        return AsyncLLM.from_engine_args(args, stat_loggers=list(loggers))
    except (TypeError, ValueError) as error:  # pydantic's are ValueErrors
        raise invalid(f"vLLM does not take this model: {error}") from error


async def _opened(engine: AsyncLLM, adapters: Mapping[str, str]) -> Opened:
    config = engine.model_config
    supported = set(await engine.get_supported_tasks())
    tokenizer = engine.get_tokenizer()
    tasks: list[Task] = [task for task in _TASKS if task in supported]
    most = config.max_logprobs
    card = ModelCard(
        max_model_len=config.max_model_len,
        vocab_size=config.get_vocab_size(),
        tasks=(*tasks, "tokenize", "detokenize"),
        engine="vllm",
        dtype=str(config.dtype).removeprefix("torch."),
        has_chat_template=bool(getattr(tokenizer, "chat_template", None)),
        adapters=tuple(AdapterCard(name) for name in adapters),
        sampling_defaults=_defaults(config.get_diff_sampling_param()),
        max_logprobs=config.get_vocab_size() if most < 0 else most,
        embedding_width=config.get_hidden_size() if "embed" in supported else 0,
    )
    return Opened(card, str(config.tokenizer), config.tokenizer_revision, bool(config.trust_remote_code))


def _cache_config(config: Any) -> dict[str, str]:
    return {name: str(getattr(config, name, None)) for name in _CACHE}


def _defaults(given: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in given.items() if isinstance(value, int | float)}


class _Host:
    """The calls under way: a task for each."""

    def __init__(self, link: Link, engine: AsyncLLM, stats: StatsSum) -> None:
        self._link: Final = link
        self._engine: Final = engine
        self._stats: Final = stats
        self._adapters: Final = {
            name: LoRARequest(name, number, path)
            for number, (name, path) in enumerate(link.opening.adapters.items(), 1)
        }
        self._tasks: Final[dict[int, asyncio.Task[None]]] = {}
        self._names: Final = itertools.count()
        self._news: list[Told] = []
        self._pending: asyncio.TimerHandle | asyncio.Handle | None = None
        self._pending_news = False
        self._closed: Final = asyncio.Event()

    async def run(self) -> None:
        """Serve until the end. Raises UNAVAILABLE when vLLM's engine is dead."""
        while not self._closed.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), _HEALTH_S)
            if self._engine.errored and not self._closed.is_set():
                raise _dead()

    def take(self, message: ToHost) -> None:
        """Take what the other side asks."""
        if isinstance(message, Submit):
            task = asyncio.get_running_loop().create_task(self._serve(message.call))
            self._tasks[message.call.number] = task
        elif isinstance(message, Abort):
            if (aborted := self._tasks.get(message.number)) is not None:
                aborted.cancel()
        elif isinstance(message, Closing):
            self._closed.set()

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Take what vLLM tells of a step."""
        self._stats.record(scheduler, iteration)
        self.tell_soon()

    def tell_soon(self) -> None:
        """Have the statistics told within some time."""
        if self._pending is None:
            self._pending = asyncio.get_running_loop().call_later(_STATS_S, self._flush)

    def _tell(self, told: Told) -> None:
        """Have this told in this turn of the loop, with all else of it."""
        self._news.append(told)
        if not self._pending_news:
            self._pending_news = True
            if self._pending is not None:
                self._pending.cancel()
            self._pending = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        news, self._news = self._news, []
        self._pending, self._pending_news = None, False
        self._link.send(News(news, self._stats.stats()))

    async def _serve(self, call: EngineCall) -> None:
        """Run one call to its end, whichever that is."""
        try:
            if call.beam is not None:
                raise unsupported(
                    "beam_width: vLLM's engine samples only; the engines headrace and llama_cpp search by beams"
                )
            if call.embed:
                self._tell(Told(call.number, vectors=await self._embed(call)))
            else:
                await self._generate(call)
        except InferError as error:
            self._tell(Told(call.number, error=error))
        except EngineDeadError:
            self._link.send(Broken(_dead()))
        except Exception as error:
            self._tell(Told(call.number, error=_error_of(error)))
        finally:
            self._tasks.pop(call.number, None)

    async def _generate(self, call: EngineCall) -> None:
        params, telling = self._sampling(call), Telling(call)
        async for at, output in self._outputs(call, params, room=int(call.params.max_tokens != 0)):
            self._tell(telling.told(at, output))

    async def _embed(self, call: EngineCall) -> np.ndarray[Any, np.dtype[np.float32]]:
        vectors: list[Any] = [None] * len(call.prompts)
        async for at, output in self._outputs(call, PoolingParams(task="embed", use_activation=False), room=0):
            if getattr(output, "error", None) is not None:
                raise unavailable(f"vLLM: {output.error.message}")
            vectors[at] = output.outputs.data.float().numpy()
        return np.stack(vectors)

    async def _outputs(self, call: EngineCall, params: Any, *, room: int) -> AsyncIterator[tuple[int, Any]]:
        """Have vLLM run all of a call's prompts; yield which prompt, and what is new of it."""
        adapter = self._adapter(call)
        prompts = [self._prompt(call, prompt, room=room) for prompt in call.prompts]
        async with Requests(self._engine) as requests:
            for prompt in prompts:
                name = f"{call.number}-{next(self._names)}"
                await requests.add(name, prompt, params, lora_request=adapter, priority=call.priority)
            async for at, output in requests.outputs():
                yield at, output

    def _sampling(self, call: EngineCall) -> SamplingParams:
        """Return the parameters as vLLM's. Without a seed of its own a call has none: vLLM is faster at that."""
        arguments = sampling_arguments(call.params)
        if call.structured is not None:
            arguments["structured_outputs"] = StructuredOutputsParams(**structured_arguments(call.structured))
        if (rule := repetition_arguments(call.params)) is not None:
            arguments["repetition_detection"] = RepetitionDetectionParams(**rule)
        return SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)

    def _prompt(self, call: EngineCall, prompt: Sequence[int], *, room: int) -> Any:
        """Return a prompt as vLLM takes it. Raises INVALID_ARG where it does not fit, as vLLM's own message is of no code."""
        most = self._engine.model_config.max_model_len
        tokens = list(truncated(prompt, call.params, most))
        if not tokens:
            raise invalid("the prompt has no tokens")
        if call.priority and self._engine.scheduler_config.policy == "fcfs":
            raise invalid(
                f"priority {call.priority}: this model serves in order of arrival; its scheduling_policy is not priority"
            )
        if len(tokens) + room > most:
            raise InferError(
                ErrorCode.INVALID_ARG,
                f"the prompt has {len(tokens)} tokens; with {room} to generate the model takes {most}",
                detail=ErrorDetail.CONTEXT_LENGTH,
            )
        return tokens_input(tokens, cache_salt=call.cache_salt)

    def _adapter(self, call: EngineCall) -> LoRARequest | None:
        if call.adapter is None:
            return None
        if call.adapter not in self._adapters:
            raise invalid(f"adapter: the model has none of the name '{call.adapter}'")
        return self._adapters[call.adapter]


def _dead() -> InferError:
    return unavailable("vLLM's engine has died; what it printed says why")


def _error_of(error: Exception) -> InferError:
    """Return vLLM's error as ours."""
    if isinstance(error, QueueOverflowError | MaxQueuedTokensError):
        message = "too much waits: max_num_queued_reqs or max_num_queued_tokens is reached"
        return InferError(ErrorCode.UNAVAILABLE, message, FailureReason.REJECTED, detail=ErrorDetail.QUEUE_FULL)
    if isinstance(error, VLLMClientError | ValueError | TypeError | NotImplementedError):
        return invalid(f"vLLM: {error}")
    return internal(f"vLLM: {type(error).__name__}: {error}")
