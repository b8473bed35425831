"""An engine's loop over fakes: a runner that can be held, grammars that are compiled when a test says so, and what was told."""

import queue
import threading
from concurrent.futures import Future

import msgspec

from headrace_backends.llm.admission import SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.core import EngineCore
from headrace_backends.llm.engine import EngineCall, Told
from headrace_backends.llm.engine_loop import EngineLoop
from headrace_backends.llm.request import GenerationRequest, child_seed
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.scheduler import Scheduler
from headrace_protocol.errors import InferError
from llm_fakes import EOS, VOCAB, ByteTokenizer, PagedRunner

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = (0, 1, 2, 0)


def requests_of(call: EngineCall) -> list[GenerationRequest]:
    params = msgspec.structs.replace(call.params, max_tokens=0) if call.embed else call.params
    return [
        GenerationRequest(
            f"{call.number}.{at}", prompt, params, child_seed(call.seed, at * params.n), frozenset({EOS}),
            priority=call.priority, index=at * params.n, structured=call.structured, pooling="mean" if call.embed else None,
        )
        for at, prompt in enumerate(call.prompts)
    ]  # fmt: skip


class Gate(PagedRunner):
    """A runner whose steps wait to be let through, once `hold` was called."""

    def __init__(self) -> None:
        super().__init__(60, 4)
        self.free = threading.Event()
        self.free.set()
        self.inside = threading.Event()
        self.fails = lambda _step: False

    def hold(self) -> None:
        self.inside.clear()
        self.free.clear()

    def execute(self, step):
        self.inside.set()
        assert self.free.wait(30)
        if self.fails(step):
            raise RuntimeError("the device is gone")
        return super().execute(step)


class Heard:
    """A listener that keeps what it was told by call."""

    def __init__(self) -> None:
        self.news: queue.Queue[list[Told]] = queue.Queue()
        self.by_call: dict[int, list[Told]] = {}
        self.error: InferError | None = None
        self.gone = threading.Event()

    def told(self, news) -> None:
        self.news.put(list(news))

    def broke(self, error: InferError) -> None:
        self.error = error
        self.gone.set()

    def listen(self) -> None:
        for told in self.news.get(timeout=30):
            self.by_call.setdefault(told.number, []).append(told)

    def until(self, number: int) -> list[Told]:
        """What is told of a call, to its end."""
        while not self.by_call.get(number) or not ended(self.by_call[number][-1]):
            self.listen()
        return self.by_call[number]


def ended(told: Told) -> bool:
    return told.error is not None or told.vectors is not None or told.scheduled_ns is not None


class Anything:
    """A grammar, and a text under it, that allows everything."""

    spoiled = may_end = complete = False

    def matcher(self):
        return self

    def accept(self, _token) -> None:
        pass

    def forced(self):
        return ()


class Grammars:
    """A source whose grammars are compiled when the test says so."""

    reasoning = None

    def __init__(self) -> None:
        self.futures: queue.Queue[Future] = queue.Queue()

    def compile(self, _structured) -> Future:
        future: Future = Future()
        self.futures.put(future)
        return future


class Loop:
    """A loop over fakes, and what it told."""

    def __init__(self, **limits) -> None:
        self.runner, self.heard = Gate(), Heard()
        config = SchedulerConfig(
            **{"max_model_len": 40, "max_num_seqs": 6, "max_num_batched_tokens": 24, "vocab_size": VOCAB, **limits}
        )
        self.grammars = Grammars()
        self.core = EngineCore(Scheduler(config, BlockManager(60, 4)), ByteTokenizer(), grammars=self.grammars)
        self.loop = EngineLoop(self.core, self.runner, self.heard, requests_of)
        self.loop.start()

    def submit(self, number: int, *prompts, params=PARAMS, **more) -> None:
        self.loop.submit(EngineCall(number, prompts or (PROMPT,), params, 0, **more))

    def nothing_is_left(self) -> None:
        blocks = self.core.scheduler.blocks
        self.core.check_integrity()
        assert (len(self.core), len(self.loop._book)) == (0, 0)
        assert blocks.num_free == blocks.num_usable
