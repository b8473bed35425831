"""What a model thinks, set apart from what it says."""

from __future__ import annotations

import random
import re

import pytest

from headrace.gateway.http.errors import HttpError
from headrace.gateway.http.openai.directory import LanguageModel
from headrace.gateway.http.openai.fields import Fields
from headrace.gateway.http.openai.message import CallBegun, Content, Reasoning
from headrace.gateway.http.openai.reasoning import ReasoningSplitter, template_arguments
from headrace.gateway.http.openai.tools.chat_plan import plan_chat
from headrace.gateway.http.openai.tools.reader import ChatReader
from headrace_protocol.generation import ModelCard
from spoken import added

TOOL = {"type": "function", "function": {"name": "f"}}


def model(**card) -> LanguageModel:
    return LanguageModel(id="m", name="m", version=-1, card=ModelCard(100, 50, **card), fingerprint="fp")


def split(pieces, *, inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside=inside)
    told = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
    return "".join(reasoning for reasoning, _ in told), "".join(answer for _, answer in told)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "answer"),
    [
        ("<think>\nHm. 1 < 2\n</think>\n\nYes.\n", False, "Hm. 1 < 2", "Yes.\n"),
        ("\n<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
        ("<thinking>", False, "", "<thinking>"),
        ("<think>never ends </thin", False, "never ends </thin", ""),
        ("<thi", False, "", "<thi"),
        ("  ", False, "", "  "),
        ("", False, "", ""),
        ("<think></think>Yes", False, "", "Yes"),
        ("<think>", False, "", ""),
        ("Hm.\n</think>\nYes", True, "Hm.", "Yes"),
        ("<think>Hm.</think>Yes", True, "Hm.", "Yes"),
        ("never ends", True, "never ends", ""),
        ("<thi", True, "<thi", ""),
        (" " * 100 + "<think>a", False, "", " " * 100 + "<think>a"),
    ],
)
def test_thinking_is_set_apart(text, inside, reasoning, answer):
    assert split([text], inside=inside) == (reasoning, answer)
    assert split(text, inside=inside) == (reasoning, answer)


def test_tokens_are_thought_from_the_first_marker_to_the_last():
    reader = ChatReader(None, ReasoningSplitter(inside=False), lambda reason, calls: reason)
    seen = []
    for piece in ["<th", "ink>", "Hm", ".", "</th", "ink>", "\n", "Yes"]:
        reader.feed(piece)
        seen.append(reader.reasoning)
    assert seen == [True, True, True, True, True, False, False, False]


def test_an_answer_without_thinking_counts_no_token_as_thought():
    reader = ChatReader(None, ReasoningSplitter(inside=False), lambda reason, calls: reason)
    for piece in ["\n", "Yes", "."]:
        reader.feed(piece)
        assert not reader.reasoning


def test_a_call_behind_the_thinking_is_read_and_one_within_it_is_thought():
    plan = plan_chat(Fields({"tools": [TOOL]}), model(tool_format="hermes", reasoning_format="think_tags"))
    reader = plan.reader(in_reasoning=True)
    parts = reader.feed('<tool_call>{"name": "g"}</tool_call></think>\n<tool_call>{"name": "f"}</tool_call>')
    rest, reason = reader.end("stop")
    told = added([*parts, *rest])
    assert (told.reasoning, told.content, told.calls) == ('<tool_call>{"name": "g"}</tool_call>', "", [("f", "{}")])
    assert reason == "tool_calls"


def test_thinking_is_left_out_where_it_is_not_wanted():
    plan = plan_chat(Fields({"include_reasoning": False}), model(reasoning_format="think_tags"))
    reader = plan.reader(in_reasoning=False)
    assert reader.feed("<think>Hm.") == []
    assert reader.reasoning
    assert reader.feed("</think>Yes") == [Content("Yes")]
    assert reader.end("stop") == ([], "stop")


def test_a_model_that_does_not_think_and_calls_nothing_needs_no_reader():
    assert plan_chat(Fields({}), model()).reader(in_reasoning=False) is None
    assert plan_chat(Fields({}), model(reasoning_format="harmony")).reader(in_reasoning=True) is None


def test_thinking_is_told_apart_as_it_comes():
    reader = plan_chat(Fields({}), model(reasoning_format="think_tags")).reader(in_reasoning=False)
    assert reader.feed("<think>\n") == []
    assert reader.feed("Hm") == [Reasoning("Hm")]
    assert reader.feed(" a</") == [Reasoning(" a")]
    assert reader.feed("b>") == [Reasoning("</b>")]
    assert reader.feed("</think>\n") == []
    assert reader.feed("Yes") == [Content("Yes")]


@pytest.mark.parametrize(
    ("tool_format", "pattern"), [("hermes", r"call_[a-zA-Z0-9]{24}"), ("mistral", r"[a-zA-Z0-9]{9}")]
)
def test_calls_have_ids_that_the_models_template_takes(tool_format, pattern):
    text = {"hermes": '<tool_call>{"name": "f"}', "mistral": '[TOOL_CALLS][{"name": "f"}'}[tool_format]
    plan = plan_chat(Fields({"tools": [TOOL]}), model(tool_format=tool_format), random.Random(1))
    ids = set()
    for _ in range(20):
        (call,) = plan.reader(in_reasoning=False).feed(text + "}")[:1]
        assert isinstance(call, CallBegun)
        ids.add(call.id)
    assert len(ids) == 20
    assert all(re.fullmatch(pattern, identifier) for identifier in ids)


def test_an_effort_reaches_the_template_and_none_turns_thinking_off():
    assert template_arguments(Fields({})) is None
    assert template_arguments(Fields({"reasoning_effort": "high"})) == {"reasoning_effort": "high"}
    assert template_arguments(Fields({"reasoning_effort": "none"})) == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    with pytest.raises(HttpError, match="one of none, minimal"):
        template_arguments(Fields({"reasoning_effort": "much"}))
