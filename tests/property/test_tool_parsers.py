"""However a model's text is cut into pieces, a client hears the same of it, and nothing of it is lost."""

from __future__ import annotations

import json
from keyword import iskeyword

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.gateway.http.openai.message import Part
from headrace.gateway.http.openai.reasoning import ReasoningSplitter
from headrace.gateway.http.openai.tools.formats import FORMATS
from headrace.gateway.http.openai.tools.reader import ChatReader
from spoken import Heard, added, heard, parser

EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
_FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "<|python_start|>"),
        *("<|python_end|>", "<think>", "</think>", '{"name": "f", "arguments": {"a": [1, "x}"]}}', "[f(a='1'), g()]"),
        *('{"name": "g"}', '"name"', '"arguments"', '"parameters"', "f(", "f{", "a=", "'''", '"""', "\\", '"', "'"),
        *("{", "}", "[", "]", "(", ")", ",", ";", ":", "null", "1.5", "true", " ", "\n", " " * 40, "word", "é", "🦀"),
    ]
)
_TEXTS = st.lists(_FRAGMENTS | st.text(max_size=3), max_size=25).map("".join)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "g", "a.b-c_9"]), st.dictionaries(st.text(), _JSON, max_size=4)),
    min_size=1,
    max_size=4,
)
_PROSE = st.text(st.characters(exclude_characters="<[{", exclude_categories=["Cs"]), max_size=30)


@st.composite
def _cut(draw, texts=_TEXTS):
    text = draw(texts)
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("tool_format", FORMATS)
@EXAMPLES
@given(_cut())
def test_how_a_text_is_cut_changes_nothing(tool_format, cut):
    text, pieces = cut
    whole = heard(parser(tool_format), [text])
    assert heard(parser(tool_format), pieces) == whole
    assert heard(parser(tool_format), text) == whole
    if not whole.calls:
        assert whole.content == text


def _answer(tool_format: str, calls: list[tuple[str, dict]]) -> str:
    texts = [(json.dumps(name), json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
    match tool_format:
        case "hermes":
            return "\n".join(
                f'<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>' for name, text in texts
            )
        case "llama3_json":
            return "; ".join(f'{{"name": {name}, "parameters": {text}}}' for name, text in texts)
        case "mistral":
            listed = ", ".join(f'{{"name": {name}, "arguments": {text}}}' for name, text in texts)
            return f"[TOOL_CALLS][{listed}]"
    return "".join(f"[TOOL_CALLS]{json.loads(name)}[ARGS]{text}" for name, text in texts)


@pytest.mark.parametrize("tool_format", ["hermes", "mistral", "named mistral"])
@EXAMPLES
@given(_PROSE, _CALLS, st.data())
def test_calls_come_out_as_they_went_in_behind_any_prose(tool_format, prose, calls, data):
    text = prose + _answer(tool_format, calls)
    _, pieces = data.draw(_cut(st.just(text)))
    told = heard(parser(tool_format.removeprefix("named ")), pieces)
    assert [(name, json.loads(arguments)) for name, arguments in told.calls] == calls
    assert told.content.rstrip() == prose.rstrip()


@EXAMPLES
@given(_CALLS, st.data())
def test_calls_of_llama_come_out_as_they_went_in(calls, data):
    _, pieces = data.draw(_cut(st.just(_answer("llama3_json", calls))))
    told = heard(parser("llama3_json", ["f", "g", "a.b-c_9"]), pieces)
    assert [(name, json.loads(arguments)) for name, arguments in told.calls] == calls
    assert not told.content


_NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not iskeyword(name))


@EXAMPLES
@given(st.lists(st.dictionaries(_NAMES, _JSON, max_size=3), min_size=1, max_size=3), st.data())
def test_calls_in_python_come_out_as_they_went_in(calls, data):
    listed = [f"f({', '.join(f'{key}={value!r}' for key, value in call.items())})" for call in calls]
    _, pieces = data.draw(_cut(st.just(f"[{', '.join(listed)}]")))
    told = heard(parser("pythonic"), pieces)
    assert [json.loads(arguments) for _, arguments in told.calls] == calls
    assert not told.content


@pytest.mark.parametrize("inside", [False, True])
@EXAMPLES
@given(_cut())
def test_thinking_is_the_same_however_it_is_cut(inside, cut):
    text, pieces = cut

    def read(pieces: list[str]) -> Heard:
        reader = ChatReader(parser("hermes"), ReasoningSplitter(inside=inside), lambda reason, calls: reason)
        parts: list[Part] = [part for piece in pieces for part in reader.feed(piece)]
        return added([*parts, *reader.end("stop")[0]])

    whole = read([text])
    assert read(pieces) == whole
    if not inside and not text.lstrip().startswith("<think>"):
        assert not whole.reasoning
