"""What a request says of tools: what is read of it, what is refused, and what the text then has to be."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from headrace.gateway.http.errors import HttpError
from headrace.gateway.http.openai.fields import Fields
from headrace.gateway.http.openai.tools.plan import ToolPlan, plan_tools
from spoken import Heard, heard

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "get_time"}}


def planned(body: dict[str, Any], tool_format: str | None = "hermes") -> ToolPlan:
    return plan_tools(Fields(body), "m", tool_format)


def schema_of(plan: ToolPlan) -> dict[str, Any]:
    assert plan.structured is not None and plan.structured.kind == "json_schema"
    return json.loads(plan.structured.spec)


def read(plan: ToolPlan, text: str) -> Heard:
    count = itertools.count(1)
    parser = plan.parser(lambda: f"c{next(count)}")
    assert parser is not None
    whole = heard(parser, [text])
    count = itertools.count(1)
    assert heard(plan.parser(lambda: f"c{next(count)}"), text) == whole
    return whole


def test_a_request_without_tools_wants_none():
    plan = planned({}, None)
    assert (plan.choice.kind, plan.told, plan.structured, plan.parser(str)) == ("none", None, None, None)
    assert plan.finish_reason("stop", 0) == "stop"


def test_tools_are_shown_to_the_template_as_they_are_written_and_the_model_chooses():
    plan = planned({"tools": [WEATHER, TIME]})
    assert plan.choice.kind == "auto"
    assert plan.told == [WEATHER, TIME]
    assert plan.structured is None
    assert read(plan, '<tool_call>{"name": "x"}').calls == [("x", "{}")]


def test_tools_that_are_not_to_be_called_are_shown_and_the_text_is_content():
    plan = planned({"tools": [WEATHER], "tool_choice": "none"}, None)
    assert plan.told == [WEATHER]
    assert plan.parser(str) is None


def test_a_call_that_is_required_is_an_array_of_calls():
    plan = planned({"tools": [WEATHER, TIME], "tool_choice": "required"}, None)
    schema = schema_of(plan)
    calls = schema["items"]["anyOf"]
    assert [call["properties"]["name"]["enum"] for call in calls] == [["get_weather"], ["get_time"]]
    assert calls[0]["properties"]["parameters"] == {"$ref": "#/$defs/f0"}
    assert schema["$defs"]["f0"] == SCHEMA
    assert schema["$defs"]["f1"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert schema["minItems"] == 1
    assert "maxItems" not in schema
    text = '[{"name": "get_weather", "parameters": {"city": "Rom"}}, {"name": "get_time", "parameters": {}}]'
    assert read(plan, text) == Heard("", [("get_weather", '{"city": "Rom"}'), ("get_time", "{}")], "", ("c1", "c2"))
    assert plan.finish_reason("stop", 2) == "tool_calls"
    assert plan.finish_reason("length", 2) == "length"
    assert plan.finish_reason("stop", 0) == "stop"


def test_one_call_at_a_time_is_an_array_of_one():
    plan = planned({"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}, None)
    assert schema_of(plan)["maxItems"] == 1
    assert schema_of(plan)["items"]["properties"]["name"] == {"type": "string", "enum": ["get_weather"]}


def test_a_named_function_is_called_with_the_whole_text_and_ends_with_stop():
    choice = {"type": "function", "function": {"name": "get_weather"}}
    plan = planned({"tools": [TIME, WEATHER], "tool_choice": choice}, None)
    assert schema_of(plan) == SCHEMA
    assert read(plan, ' {"city": "Rom",\n "x": " "} \n').calls == [("get_weather", '{"city": "Rom",\n "x": " "}')]
    assert read(plan, ' {"ci').calls == [("get_weather", '{"ci')]
    assert read(plan, "  ").calls == []
    assert plan.finish_reason("stop", 1) == "stop"
    assert plan.finish_reason("length", 1) == "length"


def test_some_of_the_tools_may_be_allowed():
    def allowing(mode, *names):
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        return planned({"tools": [WEATHER, TIME], "tool_choice": choice}, "llama3_json")

    plan = allowing("auto", "get_time")
    assert plan.told == [WEATHER, TIME]
    assert read(plan, '{"name": "get_time", "parameters": {}}').calls == [("get_time", "{}")]
    assert read(plan, '{"name": "get_weather", "parameters": {}}').calls == []
    plan = allowing("required", "get_weather")
    assert schema_of(plan)["items"]["properties"]["name"]["enum"] == ["get_weather"]
    assert plan.finish_reason("stop", 1) == "tool_calls"
    with pytest.raises(HttpError, match="there is no tool 'x'"):
        allowing("auto", "get_time", "x")
    with pytest.raises(HttpError) as refused:
        allowing("auto")
    assert refused.value.param == "tool_choice.allowed_tools.tools"


def test_references_of_a_schema_hold_where_it_is_moved_to():
    schema = {
        "properties": {"a": {"$ref": "#/$defs/A"}, "self": {"$ref": "#"}, "$ref": {"const": {"$ref": "#"}}},
        "items": [{"$ref": "https://elsewhere/x"}],
        "$defs": {"A": {"enum": [{"$ref": "#/x"}]}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    moved = schema_of(planned({"tools": [tool], "tool_choice": "required"}, None))["$defs"]["f0"]
    assert moved == {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/f0/$defs/A"},
            "self": {"$ref": "#/$defs/f0"},
            "$ref": {"const": {"$ref": "#"}},
        },
        "items": [{"$ref": "https://elsewhere/x"}],
        "$defs": {"A": {"enum": [{"$ref": "#/x"}]}},
    }


def test_calls_of_strict_functions_keep_to_their_schemas_where_the_model_is_free_to_make_some():
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    plan = planned({"tools": [strict, TIME]})
    assert plan.structured is not None and plan.structured.kind == "structural_tag"
    told = json.loads(plan.structured.spec)
    assert told["triggers"] == ["<tool_call>"]
    assert [one["schema"] for one in told["structures"]] == [SCHEMA, {"type": "object"}]
    begin, end = told["structures"][0]["begin"], told["structures"][0]["end"]
    assert read(plan, f'{begin}{{"city": "Rom"}}{end}').calls == [("get_weather", '{"city": "Rom"}')]
    assert planned({"tools": [strict], "response_format": {"type": "text"}}).structured is not None
    assert planned({"tools": [strict], "response_format": {"type": "json_object"}}).structured is None
    assert planned({"tools": [strict]}, "llama3_json").structured is None


def test_mistrals_marker_is_a_special_token_that_has_to_stay_in_the_text():
    assert planned({"tools": [TIME]}, "mistral").keeps_special_tokens
    assert not planned({"tools": [TIME]}, "hermes").keeps_special_tokens
    assert not planned({"tools": [TIME], "tool_choice": "required"}, "mistral").keeps_special_tokens


def test_functions_of_old_are_tools_with_one_call_and_an_ending_of_their_own():
    plan = planned({"functions": [WEATHER["function"], TIME["function"]]})
    assert plan.told == [WEATHER, TIME]
    assert (plan.choice.kind, plan.legacy, plan.parallel) == ("auto", True, False)
    assert plan.finish_reason("stop", 1) == "function_call"
    named = planned({"functions": [WEATHER["function"]], "function_call": {"name": "get_weather"}}, None)
    assert (named.choice, named.finish_reason("stop", 1)) == (("named", {"get_weather"}), "stop")
    assert planned({"functions": [TIME["function"]], "function_call": "none"}).choice.kind == "none"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"tools": []}, "tools", "invalid_value"),
        ({"tools": {}}, "tools", "invalid_value"),
        ({"tools": ["x"]}, "tools[0]", "invalid_value"),
        ({"tools": [TIME] * 129}, "tools", "invalid_value"),
        ({"tools": [TIME, TIME]}, "tools[1].function.name", "invalid_value"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "missing_required_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing_required_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools[0].function.name", "invalid_value"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools[0].function.parameters",
            "invalid_value",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
            "invalid_value",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}]},
            "tools[0].function.parameters.properties",
            "invalid_value",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]},
            "tools[0].function.strict",
            "invalid_value",
        ),
        ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
        ({"tools": [TIME], "tool_choice": "any"}, "tool_choice", "invalid_value"),
        ({"tools": [TIME], "tool_choice": 5}, "tool_choice", "invalid_value"),
        ({"tools": [TIME], "tool_choice": {}}, "tool_choice.type", "missing_required_parameter"),
        ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice.function", "missing_required_parameter"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
            "invalid_value",
        ),
        ({"tools": [TIME], "parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_value"),
        ({"tools": [TIME], "functions": [TIME["function"]]}, "functions", "invalid_value"),
        ({"function_call": "auto"}, "functions", "invalid_value"),
        ({"functions": [TIME["function"]], "function_call": "required"}, "function_call", "invalid_value"),
        ({"functions": [TIME["function"]], "function_call": {"name": "g"}}, "function_call.name", "invalid_value"),
    ],
)
def test_what_is_wrong_is_named(body, param, code):
    with pytest.raises(HttpError) as raised:
        planned(body)
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, param, code)


@pytest.mark.parametrize("tool_format", [None, "harmony"])
def test_a_model_whose_calls_cannot_be_read_is_said_so_unless_the_grammar_makes_them(tool_format):
    with pytest.raises(HttpError, match="tool_choice 'required'") as raised:
        planned({"tools": [TIME]}, tool_format)
    assert (raised.value.param, raised.value.code) == ("tools", "unsupported_parameter")
    assert planned({"tools": [TIME], "tool_choice": "required"}, tool_format).choice.kind == "required"
