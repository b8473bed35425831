"""Whatever a client sends as sampling parameters: parameters within their ranges, or what is wrong; never an exception."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_backends.llm.parsing import _READERS, ParamLimits, Problem, parse
from headrace_backends.llm.sampling_params import SamplingParams

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([-1, 0, 1, 2, "1", "true"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("0123a", max_size=2), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*_READERS, "top_pp", ""])


@settings(deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=6), st.booleans(), st.sampled_from([None, 50]))
def test_any_object_is_parameters_or_problems(given: dict[str, object], texts: bool, vocab: int | None) -> None:
    read = parse(given, ParamLimits(texts=texts, vocab_size=vocab))
    if isinstance(read, list):
        assert read
        assert all(isinstance(problem, Problem) and problem.text for problem in read)
        return
    assert 1 <= read.n <= 128
    assert read.temperature == 0 or 0.01 <= read.temperature <= 2
    assert 0 < read.top_p <= 1
    assert read.top_k >= 0
    assert 0 < read.repetition_penalty < math.inf
    assert read.max_tokens is None or 1 <= read.max_tokens
    assert all(stop for stop in read.stop)
    assert read.seed is None or -(1 << 63) <= read.seed < 1 << 63


def test_nothing_given_is_the_defaults() -> None:
    assert parse({}, ParamLimits()) == SamplingParams()
    assert parse(dict.fromkeys(_READERS), ParamLimits()) == SamplingParams()


def test_every_parameter_can_be_given() -> None:
    assert set(_READERS) == set(SamplingParams.__struct_fields__)
