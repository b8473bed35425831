"""What every engine behind `headrace_backends.llm.engine` does, as tests: a class of them, and the listener they use.

A test class derives from `EngineContract` and has a fixture `engine` that yields (engine, Heard), open. Prompts are what
`prompt` makes of a number, so that an engine with a script can be asked too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from headrace_backends.llm.engine import EngineCall, Told
from headrace_backends.llm.request import FinishReason
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_protocol.errors import ErrorCode, ErrorDetail

GREEDY = SamplingParams(temperature=0, max_tokens=6)
WAIT_S = 60


class Heard:
    """A listener that keeps what it was told."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._by_call: dict[int, list[Told]] = {}
        self.broken: Exception | None = None

    def told(self, news: Sequence[Told]) -> None:
        with self._changed:
            for told in news:
                self._by_call.setdefault(told.number, []).append(told)
            self._changed.notify_all()

    def broke(self, error: Exception) -> None:
        with self._changed:
            self.broken = error
            self._changed.notify_all()

    def of(self, number: int) -> list[Told]:
        with self._changed:
            return list(self._by_call.get(number, ()))

    def until(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, WAIT_S), "nothing more was told"

    def end(self, number: int, choices: int = 1) -> list[Told]:
        """Wait for the end of a call; return all that was told of it."""

        def ended() -> bool:
            news = self._by_call.get(number, [])
            finished = sum(output.finished for told in news for output in told.outputs)
            return finished >= choices or any(told.error or told.vectors is not None for told in news)

        self.until(ended)
        return self.of(number)

    def answer(self, number: int, choices: int = 1) -> list[Told]:
        """Wait for the end of a call that nothing goes wrong with."""
        news = self.end(number, choices)
        assert news[-1].error is None, news[-1].error
        return news

    def refusal(self, number: int) -> Exception:
        news = self.end(number)
        assert len(news) == 1, "something was told before the refusal"
        assert news[0].error is not None
        return news[0].error


def text_of(news: Sequence[Told], index: int = 0) -> str:
    return "".join(output.text for told in news for output in told.outputs if output.index == index)


def tokens_of(news: Sequence[Told], index: int = 0) -> list[int]:
    return [token for told in news for output in told.outputs if output.index == index for token in output.token_ids]


def last_of(news: Sequence[Told], index: int = 0):
    return [output for told in news for output in told.outputs if output.index == index][-1]


class EngineContract:
    """Tests of an open engine. Numbers of calls are never used twice, since engines are shared."""

    numbers = iter(range(1, 1_000_000))
    embeds = True
    echoes_prompt_logprobs = True

    def prompt(self, engine, number: int = 0) -> list[int]:
        return engine.text.encode(f"Once upon a time there were {number} frogs and a", add_special_tokens=False)

    def submit(self, engine, *prompts: Sequence[int], params: SamplingParams = GREEDY, **more) -> int:
        number = next(self.numbers)
        engine.submit(EngineCall(number, prompts, params, 0, **more))
        return number

    def test_a_text_comes_in_parts_that_are_what_its_tokens_say(self, engine):
        engine, heard = engine
        news = heard.answer(self.submit(engine, self.prompt(engine)))
        tokens = tokens_of(news)
        assert len(tokens) == 6
        assert text_of(news) == engine.text.decode(tokens, skip_special_tokens=True)
        last = last_of(news)
        assert (last.finish_reason, last.stop_reason, last.num_output_tokens) == (FinishReason.LENGTH, None, 6)
        assert last.num_prompt_tokens == len(self.prompt(engine))
        assert sum(output.finished for told in news for output in told.outputs) == 1

    def test_when_it_ran_is_told_at_the_end(self, engine):
        engine, heard = engine
        news = heard.answer(self.submit(engine, self.prompt(engine)))
        assert news[-1].scheduled_ns <= news[-1].first_token_ns

    def test_the_same_prompt_has_the_same_likeliest_text(self, engine):
        engine, heard = engine
        first, second = (heard.answer(self.submit(engine, self.prompt(engine, 3))) for _ in range(2))
        assert tokens_of(first) == tokens_of(second)

    def test_a_seed_gives_the_same_text_again(self, engine):
        engine, heard = engine
        drawn = SamplingParams(seed=11, max_tokens=6, ignore_eos=True)
        first, second = (heard.answer(self.submit(engine, self.prompt(engine), params=drawn)) for _ in range(2))
        assert tokens_of(first) == tokens_of(second)

    def test_all_choices_of_all_prompts_are_told(self, engine):
        engine, heard = engine
        params = SamplingParams(n=2, max_tokens=4, ignore_eos=True)
        news = heard.answer(self.submit(engine, *(self.prompt(engine, k) for k in range(3)), params=params), 6)
        assert [len(tokens_of(news, index)) for index in range(6)] == [4] * 6
        assert all(last_of(news, index).finish_reason is FinishReason.LENGTH for index in range(6))

    def test_calls_side_by_side_get_what_they_get_alone(self, engine):
        engine, heard = engine
        alone = [heard.answer(self.submit(engine, self.prompt(engine, k))) for k in range(5)]
        together = [self.submit(engine, self.prompt(engine, k)) for k in range(5)]
        assert [text_of(heard.answer(number)) for number in together] == [text_of(news) for news in alone]

    def test_a_stop_string_ends_the_text_before_it(self, engine):
        engine, heard = engine
        whole = text_of(heard.answer(self.submit(engine, self.prompt(engine))))
        stop = whole[2:4]
        stopping = SamplingParams(temperature=0, max_tokens=6, stop=(stop,))
        news = heard.answer(self.submit(engine, self.prompt(engine), params=stopping))
        assert text_of(news) == whole[: whole.index(stop)]
        last = last_of(news)
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop)

    def test_a_stop_token_ends_the_text(self, engine):
        engine, heard = engine
        tokens = tokens_of(heard.answer(self.submit(engine, self.prompt(engine))))
        stopping = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=(tokens[3],))
        news = heard.answer(self.submit(engine, self.prompt(engine), params=stopping))
        last = last_of(news)
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, tokens[3])
        assert tokens_of(news) == tokens[: tokens.index(tokens[3]) + 1]

    def test_each_token_has_its_log_probability(self, engine):
        engine, heard = engine
        params = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
        news = heard.answer(self.submit(engine, self.prompt(engine), params=params))
        entries = [entry for told in news for output in told.outputs for entry in output.logprobs or ()]
        assert [entry.chosen.token_id for entry in entries] == tokens_of(news)
        for entry in entries:
            assert (entry.chosen.rank, len(entry.top), entry.top[0]) == (1, 2, entry.chosen)
            assert 0 >= entry.top[0].logprob >= entry.top[1].logprob
        total = sum(entry.chosen.logprob for entry in entries)
        assert abs(last_of(news).cumulative_logprob - total) < 1e-3

    def test_a_prompt_can_be_rated_without_an_answer(self, engine):
        engine, heard = engine
        prompt = self.prompt(engine)
        params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        news = heard.answer(self.submit(engine, prompt, params=params))
        assert (tokens_of(news), text_of(news), last_of(news).finish_reason) == ([], "", FinishReason.LENGTH)
        if self.echoes_prompt_logprobs:
            (told,) = [output.prompt_logprobs for each in news for output in each.outputs if output.prompt_logprobs]
            assert told[0] is None
            assert [entry.chosen.token_id for entry in told[1:]] == prompt[1:]

    def test_a_prompt_that_leaves_no_room_is_refused_as_that(self, engine):
        engine, heard = engine
        prompt = self.prompt(engine)
        long = (prompt * (engine.card.max_model_len // len(prompt) + 1))[: engine.card.max_model_len]
        error = heard.refusal(self.submit(engine, long))
        assert (error.code, error.detail) == (ErrorCode.INVALID_ARG, ErrorDetail.CONTEXT_LENGTH)

    def test_of_several_prompts_one_that_is_refused_refuses_all(self, engine):
        engine, heard = engine
        error = heard.refusal(self.submit(engine, self.prompt(engine), []))
        assert error.code is ErrorCode.INVALID_ARG

    def test_a_token_that_there_is_not_is_refused(self, engine):
        engine, heard = engine
        error = heard.refusal(self.submit(engine, [engine.card.vocab_size + 7]))
        assert error.code is ErrorCode.INVALID_ARG

    def test_of_a_call_that_is_aborted_nothing_more_is_told_and_others_go_on(self, engine):
        engine, heard = engine
        endless = SamplingParams(temperature=0, max_tokens=engine.card.max_model_len // 2, ignore_eos=True)
        aborted = self.submit(engine, self.prompt(engine), params=endless)
        heard.until(lambda: bool(heard._by_call.get(aborted)))
        engine.abort(aborted)
        heard.answer(self.submit(engine, self.prompt(engine, 1)))
        told = len(heard.of(aborted))
        heard.answer(self.submit(engine, self.prompt(engine, 2)))
        assert len(heard.of(aborted)) == told
        assert not any(output.finished for each in heard.of(aborted) for output in each.outputs)

    def test_an_abort_of_a_call_that_there_is_not_does_nothing(self, engine):
        engine, heard = engine
        engine.abort(999_999_999)
        ended = self.submit(engine, self.prompt(engine))
        news = heard.answer(ended)
        engine.abort(ended)
        heard.answer(self.submit(engine, self.prompt(engine)))
        assert len(heard.of(ended)) == len(news)

    def test_vectors_are_those_of_the_prompts(self, engine):
        engine, heard = engine
        number = self.submit(engine, self.prompt(engine), self.prompt(engine, 1), embed=True)
        if not self.embeds:
            assert heard.refusal(number).code in {ErrorCode.INVALID_ARG, ErrorCode.UNSUPPORTED}
            return
        news = heard.answer(number)
        vectors = news[-1].vectors
        assert (vectors.shape, vectors.dtype) == ((2, engine.card.embedding_width), np.float32)
        assert not np.allclose(vectors[0], vectors[1])

    def test_totals_grow_with_what_is_done(self, engine):
        engine, heard = engine
        before = dict(engine.stats().totals)
        heard.answer(self.submit(engine, self.prompt(engine)))
        wanted = before.get("generation_tokens", 0) + 6
        assert _soon(lambda: engine.stats().totals.get("generation_tokens", 0) >= wanted)
        assert engine.healthy()
        assert heard.broken is None

    def test_texts_and_tokens_are_each_others(self, engine):
        engine, _ = engine
        text = "Ünder the 東京 tree, it's 12 o'clock."
        tokens = engine.text.encode(text, add_special_tokens=False)
        assert engine.text.decode(tokens, skip_special_tokens=True) == text
        assert b"".join(engine.text.token_bytes(token) or b"" for token in tokens).decode() == text
        assert engine.text.token_bytes(engine.card.vocab_size + 7) is None


def _soon(holds: Callable[[], bool]) -> bool:
    """Ask again until it holds: statistics have no moment at which they come."""
    pause = threading.Event()
    for _ in range(500):
        if holds():
            return True
        pause.wait(0.02)
    return False
