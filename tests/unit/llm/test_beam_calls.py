"""Calls for a beam search as the backend reads them."""

from __future__ import annotations

import pytest

import scripted_engine
from headrace_backends.llm.beam import BeamRules
from headrace_backends.llm.call_reading import CallReader
from headrace_backends.llm.events import Spelling
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.generation import GenerationCall, ModelCard
from scripted_engine import ByteText

DEFAULTS = {"temperature": 0.5, "repetition_penalty": 1.1}


def read(engine: str = "headrace", **call):
    text = ByteText()
    card = ModelCard(100, scripted_engine.VOCAB, engine=engine, sampling_defaults=DEFAULTS)
    return CallReader(card, text, Spelling(text)).read(GenerationCall(prompts=["hi"], **call))


def test_width_and_penalty_are_passed_on_and_what_makers_recommend_for_sampling_is_not() -> None:
    asked = read(beam_width=4, length_penalty=0.5, sampling={"n": 2})
    assert asked.beam == BeamRules(4, 0.5)
    assert (asked.params.n, asked.params.repetition_penalty) == (2, 1.0)
    assert read().beam is None
    assert read().params.repetition_penalty == 1.1


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 33}, "beam_width"),
        ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty"),
        ({"beam_width": 2, "best_of": 3}, "best_of"),
    ],
)
def test_what_is_wrong_with_it_is_named(call, field) -> None:
    with pytest.raises(InferError) as caught:
        read(**call)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARG, field)


def test_other_engines_say_that_they_do_not_search() -> None:
    with pytest.raises(InferError, match="the engine vllm has no beam search") as caught:
        read("vllm", beam_width=2)
    assert caught.value.code is ErrorCode.UNSUPPORTED
