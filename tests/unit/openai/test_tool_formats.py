"""What models write when they call tools, in each form, and what they write when they do not."""

from __future__ import annotations

import json

import pytest

from headrace.gateway.http.openai.message import CallArguments, CallBegun, Content
from headrace.gateway.http.openai.tools.call_reader import MAX_HELD
from spoken import Heard, heard, parser

WEATHER = ("get_weather", "get_time")


def told(tool_format: str, text: str, names=WEATHER, **options) -> tuple[str, list[tuple[str, str]]]:
    """Return content and calls of a text, having checked that single characters make the same of it."""
    whole = heard(parser(tool_format, names, **options), [text])
    assert heard(parser(tool_format, names, **options), text) == whole
    return whole.content, whole.calls


QWEN = """I'll look that up.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}}
</tool_call>
<tool_call>
{"name": "get_time", "arguments": {"zone": "Europe/Zurich"}}
</tool_call>"""


def test_hermes_and_qwen_write_calls_between_tags_behind_their_content():
    assert told("hermes", QWEN) == (
        "I'll look that up.",
        [("get_weather", '{"city": "Zürich", "days": [1, 2]}'), ("get_time", '{"zone": "Europe/Zurich"}')],
    )


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello there.\n", "Hello there.\n", []),
        ("  \n", "  \n", []),
        ("a < b and <tool> </tool_call>", "a < b and <tool> </tool_call>", []),
        ("<tool_call>get_weather(city)</tool_call>", "<tool_call>get_weather(city)</tool_call>", []),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"id": [7], "name": "f", "parameters": {}, "x": 1.5}</tool_call>\n', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}', "", [("f", "{}"), ("g", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\nDone.', "\nDone.", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', "}", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": ]}}</tool_call> x', " x", [("f", '{"a": ]}}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "cut o', "", [("f", '{"a": "cut o')]),
        ('Hm. <tool_call>{"name": "f', 'Hm. <tool_call>{"name": "f', []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ('<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": 5}', '<tool_call>{"name": "f", "arguments": 5}', []),
        ('<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        ('<tool_call>{"name": "\\ud83d"}', '<tool_call>{"name": "\\ud83d"}', []),
        (
            '<tool_call>{"name": "f", "arguments": "{\\ud83d}"}',
            '<tool_call>{"name": "f", "arguments": "{\\ud83d}"}',
            [],
        ),
        (
            '<tool_call>oops <tool_call>{"name": "f", "arguments": {}}</tool_call>',
            "<tool_call>oops",
            [("f", "{}")],
        ),
    ],
)
def test_hermes(text, content, calls):
    assert told("hermes", text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
            "",
            [("get_weather", '{"city": "Oslo"}')],
        ),
        (
            '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo"}}',
            "",
            [("get_weather", '{"city": "Oslo"}')],
        ),
        (
            '{"name": "get_weather", "parameters": {}}; {"name": "get_time", "arguments": {"z": 1}}\n',
            "",
            [("get_weather", "{}"), ("get_time", '{"z": 1}')],
        ),
        ('[{"name": "get_time", "parameters": {}}]', "", [("get_time", "{}")]),
        ('{"name": "Paris", "parameters": {}}', '{"name": "Paris", "parameters": {}}', []),
        ('{"answer": 42}', '{"answer": 42}', []),
        ("[1, 2, 3]", "[1, 2, 3]", []),
        ("[]", "[]", []),
        ('Sure: {"name": "get_time", "parameters": {}}', 'Sure: {"name": "get_time", "parameters": {}}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ('{"name": "get_time", "parameters": {}} Bye', " Bye", [("get_time", "{}")]),
        ('{"name": "get_time", "parameters": {"z": "cut', "", [("get_time", '{"z": "cut')]),
        ('{"name": "get_time", "parameters": {"z": }} more]', " more]", [("get_time", '{"z": }')]),
        ('{"name": "get_time", "parameters": {"z": ]} more', "", [("get_time", '{"z": ]} more')]),
        ('{"name": "get_ti', '{"name": "get_ti', []),
        ('\n<|python_tag|> {"name": "get_ti', '\n<|python_tag|> {"name": "get_ti', []),
        ('\n<|python_tag|> {"a": 1}', '\n<|python_tag|> {"a": 1}', []),
        (" " * 100 + '{"name": "get_time"}', " " * 100 + '{"name": "get_time"}', []),
    ],
)
def test_llama3_json(text, content, calls):
    assert told("llama3_json", text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bern"}}, {"name": "f", "arguments": {}}]',
            "",
            [("get_weather", '{"city": "Bern"}'), ("f", "{}")],
        ),
        ('Let me see.[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abc"}]', "Let me see.", [("f", "{}")]),
        (
            '[TOOL_CALLS]get_weather{"city": "Bern"}[TOOL_CALLS]get_time[CALL_ID]a1B2c3D4e[ARGS]{"z": {"y": 1}}',
            "",
            [("get_weather", '{"city": "Bern"}'), ("get_time", '{"z": {"y": 1}}')],
        ),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        ("[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
        ("[TOOL_CALLS]two words{}", "[TOOL_CALLS]two words{}", []),
        ("[TOOL_CALL] f", "[TOOL_CALL] f", []),
        ('[TOOL_CALLS]f{"a": ]} rest', "", [("f", '{"a": ]} rest')]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, oops', ", oops", [("f", "{}")]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}, ', "", [("f", "{}")]),
        ("[TOOL_CALLS]" + "x" * 600, "[TOOL_CALLS]" + "x" * 600, []),
    ],
)
def test_mistral(text, content, calls):
    assert told("mistral", text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            "[get_weather(city=\"San Francisco\", metric='C'), get_time()]",
            "",
            [("get_weather", '{"city": "San Francisco", "metric": "C"}'), ("get_time", "{}")],
        ),
        (
            "<|python_start|>[get_time(z=['a', \"b)\"], at={'h': -1.5, 'ok': True, 'no': None, 'j': false})]<|python_end|>",
            "",
            [("get_time", '{"z": ["a", "b)"], "at": {"h": -1.5, "ok": true, "no": null, "j": false}}')],
        ),
        ('[get_time(a="""say "hi)" \\"""", b="")]', "", [("get_time", '{"a": "say \\"hi)\\" \\"", "b": ""}')]),
        (
            "[get_time(s='it\\'s'),\n get_time(t=(1, 2))]\n",
            "",
            [("get_time", '{"s": "it\'s"}'), ("get_time", '{"t": [1, 2]}')],
        ),
        ("[1] As the source says", "[1] As the source says", []),
        ("[get_time]", "[get_time]", []),
        ("[]", "[]", []),
        ("[unknown(a=1)]", "[unknown(a=1)]", []),
        ("[get_time(open('x').read())]", "[get_time(open('x').read())]", []),
        ("[get_time(a=open('x').read())]", "[get_time(a=open('x').read())]", []),
        ("[get_time(**{'a': 1})]", "[get_time(**{'a': 1})]", []),
        ("[get_time(a=1e999)]", "[get_time(a=1e999)]", []),
        ("[get_time(a=b'x')]", "[get_time(a=b'x')]", []),
        ("[get_time(a={1: 2})]", "[get_time(a={1: 2})]", []),
        ("[get_time(a=1, a=2)]", "[get_time(a=1, a=2)]", []),
        ("[get_time(a=" + "9" * 5000 + ")]", "[get_time(a=" + "9" * 5000 + ")]", []),
        ("[get_time(a=" + "[" * 200 + "]" * 200 + ")]", "[get_time(a=" + "[" * 200 + "]" * 200 + ")]", []),
        ("[get_time(a=" + "-" * 20000 + "1)]", "[get_time(a=" + "-" * 20000 + "1)]", []),
        ("[get_time(a='\\ud83d')]", "[get_time(a='\\ud83d')]", []),
        ("[get_time(a=1), oops", ", oops", [("get_time", '{"a": 1}')]),
        ("[get_time(a=1), get_time(b=", ", get_time(b=", [("get_time", '{"a": 1}')]),
        ("[get_time(a=1)] and so on", " and so on", [("get_time", '{"a": 1}')]),
        ("I would call [get_time()]", "I would call [get_time()]", []),
    ],
)
def test_pythonic(text, content, calls):
    assert told("pythonic", text) == (content, calls)


def test_ids_are_made_for_each_call_in_order():
    assert heard(parser("hermes", WEATHER), [QWEN]).ids == ("c1", "c2")


@pytest.mark.parametrize("tool_format", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_all_calls_but_the_first_are_dropped_where_calls_may_not_be_parallel(tool_format):
    texts = {
        "hermes": '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g"}</tool_call>',
        "llama3_json": '{"name": "f", "parameters": {}};{"name": "g", "parameters": {"a": 1}}',
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {}},{"name": "g", "arguments": {"a": 1}}]',
        "pythonic": "[f(), g(a=1)]",
    }
    assert told(tool_format, texts[tool_format], ("f", "g"), parallel=False) == ("", [("f", "{}")])


def test_only_what_may_begin_a_marker_is_held_back():
    reader = parser("hermes")
    assert reader.feed("Text <") == [Content("Text")]
    assert reader.feed("b> and <tool_") == [Content(" <b> and")]
    assert reader.feed('call>{"name": "f", "argu') == []
    assert reader.feed('ments": {"ci') == [CallBegun(0, "c1", "f"), CallArguments(0, '{"ci')]
    assert reader.feed('ty": "B') == [CallArguments(0, 'ty": "B')]
    assert reader.feed('ern"}') == [CallArguments(0, 'ern"}')]
    assert reader.feed("}</tool_call>") == []
    assert reader.finish() == []


def test_an_answer_in_json_is_told_as_soon_as_it_is_known_to_be_no_call():
    reader = parser("llama3_json")
    assert reader.feed('{"total') == []
    assert reader.feed('": ') == [Content('{"total": ')]
    assert reader.feed("42}") == [Content("42}")]


@pytest.mark.parametrize(
    ("tool_format", "head"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "'),
        ("mistral", '[TOOL_CALLS][{"arguments": {"a": "'),
        ("llama3_json", '{"parameters": {"a": "'),
        ("pythonic", "[f(a='"),
    ],
)
def test_what_is_held_back_is_bounded_and_comes_out_as_content(tool_format, head):
    reader = parser(tool_format)
    text = head + "x" * (2 * MAX_HELD)
    kept = sum(len(part.text) for part in reader.feed(text))
    assert kept >= len(text) - MAX_HELD - len(head)
    pieces = [text[at : at + 1000] for at in range(0, len(text), 1000)]
    assert heard(parser(tool_format), pieces) == heard(parser(tool_format), [text]) == Heard(text, [])


def test_arguments_of_a_megabyte_are_passed_on():
    arguments = json.dumps({"a": "x" * (1 << 20)})
    assert told("hermes", f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>') == (
        "",
        [("f", arguments)],
    )


def test_a_thousand_calls_are_read_in_one_piece():
    calls = ", ".join(f'{{"name": "f", "arguments": {{"a": {number}}}}}' for number in range(1000))
    text = f"[TOOL_CALLS][{calls}]"
    assert len(heard(parser("mistral"), [text]).calls) == 1000
