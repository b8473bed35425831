"""Reasoning ends when it has had its budget, and not before."""

import pytest

from headrace_backends.llm.grammar import ReasoningMarks
from headrace_backends.llm.request import GenerationRequest
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.thinking import forced_token
from headrace_protocol.generation import StructuredOutput
from language_models import Engine, request, tiny

START, END, OTHER_END = 500, 501, 502
ONE = ReasoningMarks((START,), (END,))
TWO = ReasoningMarks((START,), (END, OTHER_END))


def forced(prompt, output, budget=3, marks=ONE, **more):
    params = SamplingParams(thinking_token_budget=budget)
    return forced_token(GenerationRequest("x", prompt, params, 0, reasoning=marks, **more), output)


@pytest.mark.parametrize(
    ("prompt", "output", "token"),
    [
        ([START], [1, 2], None),
        ([START], [1, 2, 3], END),
        ([START], [1, 2, 3, END, 4], None),
        ([START, 1, END], [1, 2, 3, 4], None),
        ([1], [1, 2, 3, 4, 5], None),
        ([1], [START, 1, 2], None),
        ([1], [START, 1, 2, 3], END),
        ([START, 9, END, START, 8], [1, 2, 3], END),
    ],
)
def test_tokens_count_from_where_the_reasoning_begins(prompt, output, token):
    assert forced(prompt, output) == token


def test_a_budget_of_nothing_ends_it_at_once():
    assert forced([START], [], budget=0) == END


def test_an_end_of_several_tokens_is_forced_one_after_another():
    assert forced([START], [1, 2, 3], marks=TWO) == END
    assert forced([START], [1, 2, 3, END], marks=TWO) == OTHER_END
    assert forced([START], [1, 2, 3, END, OTHER_END], marks=TWO) is None


def test_nothing_is_forced_without_a_budget_without_marks_or_against_a_grammar():
    assert forced([START], [1] * 9, budget=None) is None
    assert forced([START], [1] * 9, marks=None) is None
    assert forced([START], [1] * 9, structured=StructuredOutput("json_object", after_reasoning=False)) is None


def test_a_model_goes_on_behind_the_forced_end_however_it_is_computed():
    model = tiny()
    params = SamplingParams(
        temperature=0, max_tokens=16, ignore_eos=True, thinking_token_budget=5, logprobs=0, bad_words=()
    )

    def run(drafts=None, **limits):
        asked = [request(str(at), [7 + at, START, 9], params, reasoning=TWO) for at in range(3)]
        return Engine(model, **limits).run(asked, drafts)

    tokens = run()
    assert all(each[5:7] == [END, OTHER_END] for each in tokens)
    assert run(max_num_seqs=1) == tokens
    assert run(lambda each: tokens[int(each.id)][each.num_output_tokens :][:4]) == tokens
    assert run(lambda each: [1, 2, 3]) == tokens
