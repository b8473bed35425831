"""Steps by sequences in place of block tables: whatever is shared, cut back or lost, tokens follow from those before them."""

import random

import pytest

from headrace_backends.llm.adapters.llama_cpp_runner import LlamaCppRunner
from headrace_backends.llm.sampling_params import SamplingParams
from language_models import Engine, request
from llama_cpp_fakes import VOCAB, WIDTH, CellMemory, next_token

SIZE = 16  # what language_models.Engine has for blocks
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def engine(*, blocks=40, sequences=24, keep=True, batch=32, adapters=None, **limits) -> tuple[Engine, CellMemory]:
    memory = CellMemory((blocks - 1) * SIZE, batch)
    runner = LlamaCppRunner(memory, VOCAB, SIZE, sequences, adapters or {}, keep_prefixes=keep)
    made = Engine(None, blocks=blocks, max_model_len=200, prefix_caching=keep, runner=runner, **limits)
    return made, memory


def expected(prompt, count=12, adapter=None) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, adapter))
    return tokens[len(prompt) :]


def prompts_of(count: int, seed: int, longest: int = 90) -> list[list[int]]:
    numbers = random.Random(seed)
    shared = [numbers.randrange(VOCAB) for _ in range(48)]
    return [
        shared[: numbers.choice([0, 0, 16, 40, 48])]
        + [numbers.randrange(VOCAB) for _ in range(numbers.randint(1, longest - 48))]
        for _ in range(count)
    ]


def run(made: Engine, prompts, *, name="r", drafts=None, **more) -> list[list[int]]:
    return made.run([request(f"{name}{at}", prompt, GREEDY, **more) for at, prompt in enumerate(prompts)], drafts)


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 24, "max_num_seqs": 8}, {"max_num_seqs": 1}])
def test_the_tokens_follow_from_those_before_them_in_any_batch(limits):
    made, _ = engine(**limits)
    prompts = prompts_of(12, 1)
    assert run(made, prompts) == [expected(prompt) for prompt in prompts]


def test_a_step_of_more_tokens_than_a_batch_is_computed_in_several():
    made, memory = engine(batch=7, max_num_batched_tokens=64)
    prompts = prompts_of(4, 2)
    assert run(made, prompts) == [expected(prompt) for prompt in prompts]
    assert memory.batches > len(made.steps)


def test_preempted_requests_go_on_where_they_were():
    made, _ = engine(blocks=16, max_num_seqs=8)
    prompts = prompts_of(8, 3)
    assert run(made, prompts) == [expected(prompt) for prompt in prompts]
    assert made.scheduler.stats.num_preemptions


def test_a_prefix_that_was_computed_is_not_computed_again():
    made, memory = engine()
    prompt = prompts_of(1, 4, 90)[0] + [1] * 40
    first = run(made, [prompt])
    decoded = memory.decoded
    assert run(made, [prompt], name="again") == first == [expected(prompt)]
    assert memory.decoded - decoded < SIZE + len(first[0])
    assert made.scheduler.stats.prefix_cache_hits >= len(prompt) - SIZE


def test_requests_of_one_step_share_what_the_step_computes():
    made, memory = engine()
    prompt = [3] * 50
    assert run(made, [prompt, prompt, prompt]) == [expected(prompt)] * 3
    assert memory.decoded < 3 * 50 + 3 * 12
    assert made.scheduler.stats.prefix_cache_hits == 2 * 48


def test_without_prefixes_nothing_is_kept():
    made, memory = engine(keep=False)
    prompt = [3] * 50
    assert run(made, [prompt]) == run(made, [prompt], name="again") == [expected(prompt)]
    assert made.scheduler.stats.prefix_cache_hits == 0
    made.runner._book.begin(["again0"])
    assert memory.cells == []


def test_what_was_cached_and_is_gone_is_computed_again():
    made, memory = engine(sequences=3, max_num_seqs=2)
    prompts = prompts_of(6, 5)
    first = run(made, prompts)
    assert first == [expected(prompt) for prompt in prompts]
    assert run(made, prompts, name="again") == first
    assert made.scheduler.stats.prefix_cache_hits


def test_guesses_that_are_wrong_are_taken_back():
    made, _ = engine(max_num_batched_tokens=64)
    numbers = random.Random(6)

    def drafts(ongoing):
        right = expected(ongoing.token_ids, 3)
        return right[: numbers.randint(0, 3)] + [numbers.randrange(VOCAB)]

    prompts = prompts_of(6, 6)
    assert run(made, prompts, drafts=drafts) == [expected(prompt) for prompt in prompts]
    assert 0 < made.scheduler.stats.num_accepted_tokens < made.scheduler.stats.num_draft_tokens


def test_a_step_that_fails_costs_no_request_its_tokens():
    made, memory = engine()
    prompts = prompts_of(4, 7)
    run(made, prompts, name="before")
    requests = [request(f"r{at}", prompt, GREEDY) for at, prompt in enumerate(prompts)]
    for each in requests:
        assert made.scheduler.add(each) is None
    for now in range(500):
        step = made.scheduler.schedule(now)
        if not step:
            break
        memory.fail_next = now in {1, 2, 9}
        try:
            made.scheduler.update(step, made.runner.execute(step), now)
        except RuntimeError:
            made.scheduler.fail(step, "no room", now)
        made.scheduler.check_integrity()
    done = [each for each in requests if each.error is None]
    assert len(done) >= 3
    assert [list(each.output_token_ids) for each in done] == [expected(each.prompt_token_ids) for each in done]


def test_each_request_has_its_own_adapter():
    made, _ = engine(adapters={"a": "a", "b": "b"})
    prompt = [5] * 40
    requests = [request(str(lora), prompt, GREEDY, lora=lora) for lora in ("a", None, "b")]
    assert made.run(requests) == [expected(prompt, adapter=lora) for lora in ("a", None, "b")]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_are_of_the_prompts_hidden_states(pooling):
    made, _ = engine(max_num_batched_tokens=32)
    params = SamplingParams(max_tokens=0)
    prompts = [[2] * 50, [4, 5], [2] * 50]
    made.run([request(f"r{at}", prompt, params, pooling=pooling) for at, prompt in enumerate(prompts)])
    for at, prompt in enumerate(prompts):
        parts = [result.pooled for result in made.results[f"r{at}"] if result.pooled is not None]
        length = len(prompt)
        if pooling == "last":
            assert [part.tolist() for part in parts] == [[length, prompt[-1], sum(prompt)]]
        else:
            computed = sum(
                len(entry.token_ids) for step in made.steps for entry in step.scheduled if entry.request.id == f"r{at}"
            )
            first = length - computed
            total = sum(parts)
            assert total.shape == (WIDTH,)
            assert total[0] == sum(range(first + 1, length + 1))


def test_what_nobody_owns_is_not_kept():
    from headrace_backends.llm.step import ScheduledRequest, SchedulerOutput

    made, memory = engine()
    probe = request("probe", [0], GREEDY)
    for _ in range(3):
        (result,) = made.runner.execute(SchedulerOutput((ScheduledRequest(probe, 0, (0,), 0, 1, (0,)),), 1))
        assert result.token_ids == [next_token([0])]
        assert memory.cells == []
