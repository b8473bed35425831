"""Our engine whole, from a folder to what it tells: tiny models with random weights, and SmolLM2."""

import contextlib
import queue
import random
import threading

import numpy as np
import pytest
import torch

from headrace_backends.llm.engine import EngineCall
from headrace_backends.llm.loading import load
from headrace_backends.llm.native import NativeEngine
from headrace_backends.llm.request import FinishReason
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.errors import ErrorCode, ErrorDetail, InferError
from headrace_protocol.generation import ChatPrompt, StructuredOutput
from language_models import generated_by_transformers, tiny_folder

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


class Heard:
    """A listener that keeps what it was told."""

    def __init__(self) -> None:
        self.queue: queue.Queue = queue.Queue()
        self.by_call: dict[int, list] = {}
        self.broken = threading.Event()

    def told(self, news) -> None:
        self.queue.put(list(news))

    def broke(self, _error) -> None:
        self.broken.set()

    def until(self, number: int) -> list:
        while not (news := self.by_call.get(number)) or not (news[-1].error or news[-1].scheduled_ns):
            for told in self.queue.get(timeout=60):
                self.by_call.setdefault(told.number, []).append(told)
        return news

    def tokens(self, number: int, count: int = 1) -> list[list[int]]:
        news = self.until(number)
        assert news[-1].error is None, news[-1].error
        made: list[list[int]] = [[] for _ in range(count)]
        for told in news:
            for output in told.outputs:
                made[output.index].extend(output.token_ids)
        return made

    def text(self, number: int) -> str:
        return "".join(output.text for told in self.until(number) for output in told.outputs)


@contextlib.contextmanager
def opened(source, **settings):
    threads = torch.get_num_threads()
    settings = {"model": str(source), "dtype": "float32", "num_gpu_blocks_override": 200, **settings}
    engine, heard = NativeEngine(source, settings, threads=1, device="cpu"), Heard()
    engine.open(heard)
    try:
        yield engine, heard
        core = engine._loop._core
        assert (len(core), core.scheduler.blocks.num_free) == (0, core.scheduler.blocks.num_usable)
        core.check_integrity()
    finally:
        engine.close()
        torch.set_num_threads(threads)


def call(number: int, *prompts, params=GREEDY, **more) -> EngineCall:
    return EngineCall(number, prompts, params, 0, **more)


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(258) for _ in range(numbers.randint(2, 60))] for _ in range(count)]


def test_the_tokens_are_those_of_transformers(folder):
    prompts = prompts_of(4)
    with opened(folder, max_num_batched_tokens=32) as (engine, heard):
        engine.submit(call(1, *prompts))
        model = load(folder, "float32").model
        assert heard.tokens(1, 4) == [generated_by_transformers(model, prompt, 12) for prompt in prompts]


def test_what_is_told_in_parts_is_what_the_tokens_say(folder):
    with opened(folder) as (engine, heard):
        engine.submit(call(1, [1, 2, 3], params=SamplingParams(max_tokens=40, ignore_eos=True, seed=5)))
        (tokens,) = heard.tokens(1)
        assert heard.text(1) == engine.text.decode(tokens, skip_special_tokens=True)


def test_a_seed_of_the_clients_begins_each_prompt_and_one_of_ours_does_not(folder):
    seeded = SamplingParams(max_tokens=8, ignore_eos=True, seed=5)
    drawn = SamplingParams(max_tokens=8, ignore_eos=True)
    with opened(folder) as (engine, heard):
        engine.submit(call(1, [1, 2], [1, 2], params=seeded))
        engine.submit(call(2, [1, 2], params=seeded))
        engine.submit(call(3, [1, 2], [1, 2], params=drawn, seed=5))
        first, second = heard.tokens(1, 2)
        assert first == second == heard.tokens(2)[0]
        first, second = heard.tokens(3, 2)
        assert first != second


def test_with_a_seed_of_the_models_the_same_calls_get_the_same_tokens(folder):
    told = []
    for _ in range(2):
        with opened(folder, seed=3) as (engine, heard):
            for number in (1, 2):
                engine.submit(
                    call(number, [1, 2], params=SamplingParams(max_tokens=8, ignore_eos=True), seed=len(told))
                )
            told.append([heard.tokens(1), heard.tokens(2)])
    assert told[0] == told[1]
    assert told[0][0] != told[0][1]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_those_of_the_models_last_hidden_states(folder, pooling):
    prompts = prompts_of(3)
    with opened(folder, pooling=pooling, max_num_batched_tokens=16, max_num_seqs=4) as (engine, heard):
        engine.submit(call(1, [5, 6, 7]))
        engine.submit(call(2, *prompts, embed=True))
        vectors = heard.until(2)[-1].vectors
        assert engine.card.embedding_width == 64
        model = load(folder, "float32").model
        with torch.inference_mode():
            states = [model.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
        wanted = [each.mean(0) if pooling == "mean" else each[-1] for each in states]
        np.testing.assert_allclose(vectors, np.stack([each.numpy() for each in wanted]), atol=1e-4)
        heard.until(1)


def test_a_text_is_what_its_schema_asks(folder):
    choice = StructuredOutput("choice", '["yes", "no"]')
    with opened(folder) as (engine, heard):
        engine.submit(call(1, [1, 2, 3], params=SamplingParams(max_tokens=20, seed=1), structured=choice))
        assert heard.text(1) in {"yes", "no"}
        engine.submit(call(2, [1, 2, 3], [1], structured=StructuredOutput("json_schema", '{"type": 3}')))
        assert heard.until(2)[-1].error.code is ErrorCode.INVALID_ARG


def test_guesses_change_no_token(folder):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, allowed_token_ids=(1, 2))
    with opened(folder) as (engine, heard):
        engine.submit(call(1, [1, 2, 3] * 5, params=params))
        plain = heard.tokens(1)
    with opened(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 4}) as (engine, heard):
        engine.submit(call(1, [1, 2, 3] * 5, params=params))
        assert heard.tokens(1) == plain
        stats = engine.stats()
        assert stats.totals["accepted_tokens"] == sum(stats.accepted_per_position) > 0


def test_what_was_said_before_is_found_again(folder):
    with opened(folder) as (engine, heard):
        for number in (1, 2):
            engine.submit(call(number, list(range(50))))
            heard.until(number)
        assert heard.until(2)[0].outputs[0].num_cached_tokens == 48
        totals = engine.stats().totals
        assert (totals["prefix_cache_queries"], totals["prefix_cache_hits"]) == (100, 48)


def test_refusals_are_told_with_their_detail(folder):
    with opened(folder, max_model_len=32) as (engine, heard):
        engine.submit(call(1, [1] * 32))
        told = heard.until(1)[-1].error
        assert (told.code, told.detail) == (ErrorCode.INVALID_ARG, ErrorDetail.CONTEXT_LENGTH)
        engine.submit(call(2, [1], priority=1))
        assert "scheduling policy is fcfs" in heard.until(2)[-1].error.message


def test_calls_come_and_go_in_any_order_and_no_block_is_lost(folder):
    numbers = random.Random(1)
    with opened(folder, num_gpu_blocks_override=34, max_num_batched_tokens=40, max_num_seqs=8) as (engine, heard):
        kept = []
        for number in range(60):
            params = SamplingParams(n=numbers.randint(1, 2), max_tokens=numbers.randint(1, 10), seed=number)
            engine.submit(
                call(number, *prompts_of(numbers.randint(1, 2), number), params=params, embed=number % 7 == 0)
            )
            if numbers.random() < 0.4:
                engine.abort(number)
            else:
                kept.append(number)
        for number in kept:
            assert heard.until(number)[-1].error is None
        assert engine.healthy()


def test_the_end_does_not_wait_for_the_calls(folder):
    threads = torch.get_num_threads()
    engine, heard = NativeEngine(folder, {"num_gpu_blocks_override": 200}, threads=1, device="cpu"), Heard()
    engine.open(heard)
    engine.submit(call(1, [1, 2], params=SamplingParams(max_tokens=500, ignore_eos=True)))
    engine.close()
    torch.set_num_threads(threads)
    assert heard.until(1)[-1].error.code is ErrorCode.UNAVAILABLE
    assert not engine.healthy()


def test_a_model_whose_device_is_gone_breaks_its_engine(folder):
    threads = torch.get_num_threads()
    engine, heard = NativeEngine(folder, {"num_gpu_blocks_override": 200}, threads=1, device="cpu"), Heard()
    engine.open(heard)

    def gone(_step):
        raise RuntimeError("no device")

    engine._loop._runner.execute = gone
    for number in range(5):
        engine.submit(call(number, [1, 2]))
    assert heard.broken.wait(60)
    assert not engine.healthy()
    engine.close()
    torch.set_num_threads(threads)


def test_the_card_says_what_the_model_is(folder):
    with opened(folder, max_model_len=256, served_model_name=["one"], override_generation_config={"top_p": 0.5}) as (
        engine,
        _,
    ):
        card = engine.card
        assert (card.max_model_len, card.vocab_size, card.dtype) == (256, 512, "float32")
        assert (card.has_chat_template, card.tool_format, card.reasoning_format) == (True, None, None)
        assert (card.aliases, card.sampling_defaults) == (("one",), {"top_p": 0.5})
        assert card.tasks == ("generate", "embed", "tokenize", "detokenize")


def test_requests_that_no_forward_can_compute_cost_the_others_nothing(folder):
    """More of them than steps that may fail in a row: the token that is tried then shows that the model is well."""
    bad, prompts = 77, [[token for token in prompt if token != 77] for prompt in prompts_of(4)]
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=1, allowed_token_ids=tuple(range(70)))
    with opened(folder) as (engine, heard):
        engine.submit(call(1, *prompts, params=params))
        alone = heard.tokens(1, 4)

        def refuse(_module, inputs):
            if bool((inputs[0] == bad).any()):
                raise RuntimeError("a token that cannot be")

        hook = engine._loop._runner._model.get_input_embeddings().register_forward_pre_hook(refuse)
        engine.submit(call(2, *prompts, params=params))
        for number in range(10, 18):
            engine.submit(call(number, [5, bad, 6]))
        assert heard.tokens(2, 4) == alone
        for number in range(10, 18):
            assert heard.until(number)[-1].outputs[-1].error == "RuntimeError: a token that cannot be"
        hook.remove()
        assert engine.healthy()


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"max_model_len": 1000}, "max_model_len: 1000 tokens are more than the model was made for, 512"),
        ({"num_gpu_blocks_override": 4, "max_model_len": 512}, "needs 33"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens: 4 is less than max_num_seqs"),
        ({"kv_cache_memory_bytes": 1, "num_gpu_blocks_override": None}, "the KV cache has 0 blocks"),
    ],
)
def test_settings_that_the_model_cannot_keep_are_refused_at_load(folder, settings, part):
    threads = torch.get_num_threads()
    with pytest.raises(InferError) as caught:
        NativeEngine(folder, {"num_gpu_blocks_override": 200, **settings}, threads=1, device="cpu").open(Heard())
    torch.set_num_threads(threads)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert part in caught.value.message


def test_a_length_that_is_not_given_is_what_fits(folder):
    with opened(folder, num_gpu_blocks_override=11) as (engine, _):
        assert engine.card.max_model_len == 160


def test_smollm2_answers_as_it_always_does(smollm2):
    with opened(smollm2, dtype="bfloat16", max_model_len=256) as (engine, heard):
        prompt = engine.text.render(ChatPrompt([{"role": "user", "content": "What is the capital of France?"}]))
        tokens = engine.text.encode(prompt, add_special_tokens=False)
        engine.submit(call(1, tokens, params=SamplingParams(temperature=0, max_tokens=24)))
        assert heard.text(1) == "The capital of France is Paris."
        assert heard.until(1)[-1].outputs[-1].finish_reason is FinishReason.STOP
