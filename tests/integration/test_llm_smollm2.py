"""SmolLM2-135M, read from its GGUF file: the same tokens as transformers' own generation, however they are computed."""

import pytest
import torch

from headrace_backends.llm.loading import load
from headrace_backends.llm.ngram import NgramConfig, NgramDrafter
from headrace_backends.llm.sampling_params import SamplingParams
from language_models import Engine, generated_by_transformers, request, smollm2_folder

COUNT = 16
END = 2
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, min_tokens=COUNT)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, max_tokens=COUNT, ignore_eos=True)
QUESTIONS = (
    "What is the capital of France?",
    "Write a poem about rivers.",
    "Count from one to ten.",
    "Why is the sky blue? Answer for a child of six years, in a few short sentences.",
    "def fibonacci(n):",
)


@pytest.fixture(scope="module")
def loaded():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads wait for each other longer than they compute where cores are shared
    yield load(smollm2_folder(), "float32")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prompts(loaded):
    """Chats: their first block, and more, is the same."""
    template = loaded.tokenizer.apply_chat_template
    return [
        template([{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False)
        for question in QUESTIONS
    ]


@pytest.fixture(scope="module")
def expected(loaded, prompts):
    return [generated_by_transformers(loaded.model, prompt, COUNT) for prompt in prompts]


def _run(engine, prompts, params=GREEDY):
    ends = frozenset({END})
    requests = [request(str(at), prompt, params, seed=at, eos_token_ids=ends) for at, prompt in enumerate(prompts)]
    return engine.run(requests), requests


def test_the_chat_template_and_the_end_of_a_turn_come_from_the_file(loaded, prompts):
    assert loaded.tokenizer.decode(prompts[0]).endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    assert loaded.eos_token_ids == {END} == {loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert (loaded.vocab_size, loaded.max_model_len) == (49152, 8192)
    answer = request("a", prompts[0], SamplingParams(temperature=0), eos_token_ids=loaded.eos_token_ids)
    (tokens,) = Engine(loaded.model).run([answer])
    assert loaded.tokenizer.decode(tokens) == "The capital of France is Paris.<|im_end|>"


def test_one_by_one(loaded, prompts, expected):
    assert _run(Engine(loaded.model, max_num_seqs=1), prompts[:2])[0] == expected[:2]


def test_in_one_batch(loaded, prompts, expected):
    assert _run(Engine(loaded.model), prompts)[0] == expected


def test_in_chunks(loaded, prompts, expected):
    assert _run(Engine(loaded.model, max_num_batched_tokens=23, max_num_seqs=8), prompts)[0] == expected


def test_after_preemption(loaded, prompts, expected):
    tokens, requests = _run(Engine(loaded.model, blocks=14, max_model_len=96), prompts)
    assert tokens == expected
    assert sum(each.num_preemptions for each in requests) > 0


def test_with_cached_prefixes(loaded, prompts, expected):
    engine = Engine(loaded.model, prefix_caching=True, max_num_seqs=3)
    tokens, requests = _run(engine, prompts)
    assert tokens == expected
    assert sum(each.num_cached_tokens > 0 for each in requests) >= 3


def test_a_seed_gives_the_same_tokens_in_any_batch(loaded, prompts):
    together, _ = _run(Engine(loaded.model), prompts, SEEDED)
    tight = Engine(loaded.model, blocks=14, max_model_len=96, max_num_batched_tokens=48)
    assert _run(tight, prompts, SEEDED)[0] == together
    assert _run(Engine(loaded.model), prompts[:1], SEEDED)[0] == together[:1]
    assert len({tuple(tokens) for tokens in together}) == len(prompts)


def test_bf16_parts_from_transformers_only_where_two_tokens_are_as_likely(loaded, prompts):
    """bf16 keeps 8 bits: logits of 16 to 32 lie 0.125 apart."""
    model = loaded.model.to(torch.bfloat16)
    tokens, _ = _run(Engine(model), prompts[:2])
    for prompt, ours in zip(prompts, tokens, strict=False):
        theirs = generated_by_transformers(model, prompt, COUNT)
        at = next((at for at in range(COUNT) if ours[at] != theirs[at]), None)
        if at is not None:
            model.set_attn_implementation("sdpa")
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *theirs[:at]]])).logits[0, -1].float()
            assert abs(logits[ours[at]] - logits[theirs[at]]) <= 0.25
            assert min(logits[ours[at]], logits[theirs[at]]) >= logits.max() - 0.25


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_with_guesses_from_the_prompt(loaded, temperature):
    """Most guesses are right where the answer repeats the prompt, and none changes a token."""
    chat = [{"role": "user", "content": "Repeat this text word for word: " + "The lion of Lindau looks over the lake."}]
    prompt = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    params = SamplingParams(temperature=temperature, max_tokens=COUNT, ignore_eos=True)
    drafter, engine = NgramDrafter(NgramConfig()), Engine(loaded.model)
    guess = lambda one: drafter.propose([one])[0] if one.output_token_ids else []  # noqa: E731
    guessed = engine.run([request("guessed", prompt, params, seed=3)], drafts=guess)
    assert guessed == Engine(loaded.model).run([request("plain", prompt, params, seed=3)])
    stats = engine.scheduler.stats
    assert stats.num_accepted_tokens > 0
    assert len(engine.steps) < COUNT
