"""What texts grammars of each kind take, over tokenizers of each sort; and what is refused, by name, and soon."""

import json
import random
import re
import time

import numpy as np
import pytest

from headrace_backends.llm.grammar import GrammarError
from headrace_backends.llm.grammar_llguidance import LlgBuilder
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.generation import StructuredOutput
from language_models import byte_tokenizer, sentencepiece_tokenizer

VOCAB = 300
TOKENIZERS = {"bytes": (byte_tokenizer, 258), "sentencepiece": (sentencepiece_tokenizer, 2)}


@pytest.fixture(scope="module", params=TOKENIZERS)
def model(request):
    make, end = TOKENIZERS[request.param]
    tokenizer = make()
    return tokenizer, LlgBuilder(tokenizer, {end}, VOCAB), end


@pytest.fixture(scope="module")
def build():
    return LlgBuilder(byte_tokenizer(), {258}, VOCAB)


def taken(model, kind: str, spec: str, text: str) -> bool:
    """Whether the text is all taken, and may end."""
    tokenizer, build, _ = model
    matcher = build(StructuredOutput(kind, spec)).matcher()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if matcher.validate(tokens) < len(tokens):
        return False
    for token in tokens:
        matcher.accept(token)
    return matcher.may_end


PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
TAGS = json.dumps({
    "type": "structural_tag",
    "triggers": ["<f"],
    "structures": [{"begin": "<f=get>", "schema": {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}, "end": "</f>"}],
})  # fmt: skip
TEXTS = [
    ("json_object", "", '{"a": [1, -2.5e3, "é🙂", null], "b": {}}', '[{"a": 1}]'),
    ("json_schema", "{}", "[true, {}]", "nothing"),
    ("json_schema", "true", '"text"', "'text'"),
    ("json_schema", '{"type": "object", "title": "any"}', '{"x": {"y": 0.5}}', "0.5"),
    ("json_schema", PERSON, '{"name": "Zoë", "age": 41}', '{"name": "Zoë", "age": -1}'),
    ("json_schema", PERSON, '{\n  "name": "x",\n  "age": 0\n}', '{"name": "x"}'),
    ("json_schema", '{"type": "integer", "maximum": 20000000000}', "19999999999", "20000000001"),
    ("json_schema", '{"$ref": "#/$defs/n", "$defs": {"n": {"enum": [1, "two"]}}}', '"two"', "2"),
    ("regex", r"\d{3}-[a-z]+", "123-abc", "123-"),
    ("regex", r"^(ja|nein)$", "nein", "neinja"),
    ("regex", "a/b\n[\\d/]", "a/b\n7", "a/b 7"),
    ("regex", "(a+)+$", "aaaa", "aaab"),
    ("regex", r"[]*+*]+[^]**]\**x", "*]a**x", "*]*x"),
    ("regex", r"\d", "7", "\N{ARABIC-INDIC DIGIT SEVEN}"),
    ("choice", '["yes", "no", "not \\"sure\\""]', 'not "sure"', "maybe"),
    ("choice", '["a", "ab", "🙂\\n"]', "🙂\n", "b"),
    ("grammar", 'start: "a" NUMBER+\nNUMBER: /[0-9]/', "a12", "a"),
    ("grammar", 'root ::= "x" [a-c]* tail?\ntail ::= "!"', "xabc!", "xd"),
    ("structural_tag", TAGS, 'so: <f=get>{"a": 3}</f>, then <f=get>{"a": 4}</f> ok', 'so: <f=get>{"b": 3}</f>'),
    ("structural_tag", TAGS, "no call at all, and no tag < f", "<f=put>"),
]


@pytest.mark.parametrize(("kind", "spec", "good", "bad"), TEXTS)
def test_the_text_is_taken_and_the_other_is_not(model, kind, spec, good, bad):
    assert taken(model, kind, spec, good)
    assert not taken(model, kind, spec, bad)


NESTED = '{"type": "array", "items": ' * 100 + "{}" + "}" * 100
WRONG = [
    ("json_schema", '{"type": "object", "properties": {"foo": "bar"}}', 'json_schema.properties.foo: expected a schema.*"bar"'),
    ("json_schema", '{"type": "nope"}', "nope"),
    ("json_schema", '{"$ref": "#"}', "no text fits it"),
    ("json_schema", '{"$ref": "http://127.0.0.1/x"}', r"\$ref: expected a reference within the schema.*127"),
    ("json_schema", '{"$ref": "file:///etc/passwd"}', "within the schema"),
    ("json_schema", NESTED, "nested deeper than 64 levels"),
    ("json_schema", "[" * 100_000, "nested deeper than 64 levels"),
    ("json_schema", json.dumps({"description": "x" * 1_000_000}), "1000019 bytes are more than are taken"),
    ("json_schema", json.dumps({"properties": {f"p{at}": {} for at in range(6000)}}), "6000 properties are more"),
    ("json_schema", json.dumps({"enum": list(range(20_000))}), "20000 values of enum are more"),
    ("json_schema", '{"minimum": 5, "maximum": 4, "type": "integer"}', "minimum"),
    ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ("json_schema", '{"properties": []}', "properties: expected an object"),
    ("json_schema", '{"enum": 3}', "enum: expected a list, got 3"),
    ("json_schema", '{"a":', "not JSON"),
    ("json_schema", '"' + '\\\\"' * 80_000, "not JSON"),
    ("json_schema", '"' + '\\"' * 80_000, "not JSON"),
    ("json_schema", "", "expected a description of the text, got nothing"),
    ("json_schema", '"text"', "expected a schema"),
    ("json_schema", "false", "no text fits it"),
    ("regex", "foo**", "repeats a repetition"),
    ("regex", "x{2}*", "repeats a repetition"),
    ("regex", "[" * 16_000, "cannot be compiled"),
    ("regex", "(", "cannot be compiled"),
    ("regex", "a(?=b)", "look"),
    ("regex", r"(a)\1", "backreferences"),
    ("regex", r"[^\x00-\U0010FFFF]", "no text fits it"),
    ("regex", "(" * 5000 + ")" * 5000, "cannot be compiled"),
    ("regex", "a" * 20_000, "20000 bytes are more"),
    ("choice", '{"a": 1}', "expected a list of texts"),
    ("choice", "[]", "expected a list of texts"),
    ("choice", '["a", 3]', r"choice\[1\]: expected a text that is not empty, got 3"),
    ("choice", '["a", ""]', r"choice\[1\]"),
    ("choice", json.dumps([str(at) for at in range(20_000)]), "20000 texts are more"),
    ("grammar", "start: missing", "missing"),
    ("grammar", "nonsense", "cannot be compiled"),
    ("grammar", "\n".join(f"r{at} ::= r{at + 1}" for at in range(2000)), "2000 rules are more than are taken"),
    ("grammar", "root ::= " + "(" * 5000, "cannot be compiled"),
    ("structural_tag", '{"type": "structural_tag", "triggers": [], "structures": []}', "one structure and one trigger"),
    ("structural_tag", '{"type": "structural_tag", "format": {}}', "structures"),
    ("structural_tag", TAGS.replace("<f=get>", "<g>"), "does not begin with a trigger"),
    ("structural_tag", TAGS.replace('{"type": "integer"}', "7"), "expected a schema.*7"),
    ("structural_tag", re.sub('"schema": .*, "end"', '"schema": false, "end"', TAGS), r"structures\[0\].schema: no text fits it"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "spec", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_what_cannot_be_a_grammar_is_refused_by_name_and_soon(build, kind, spec, message):
    began = time.thread_time()
    with pytest.raises(InferError, match=message) as caught:
        build(StructuredOutput(kind, spec))
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message.startswith(kind)
    assert len(caught.value.message) < 500
    assert time.thread_time() - began < 1


COSTLY = [
    ("regex", "(a?){500}a{500}"),
    ("regex", ".*(a|b)*[ab]{12}.*[cd]{14}.*[ef]{16}.*"),
    ("regex", r"(\w+\s*)+x" * 50),
    ("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
    ("json_schema", json.dumps({"type": "string", "minLength": 100_000})),
    ("json_schema", json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 100_000})),
    ("json_schema", json.dumps({"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(3000)}})),
    ("grammar", "start: " + " | ".join(f"r{at}" for at in range(300)) + "\n" + "\n".join(f'r{at}: "x"* r{(at * 7 + 1) % 300} | "y{at}"' for at in range(300))),
    ("grammar", 'start: a\na: a a | "x" | b\nb: a b | "x"'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "spec"), COSTLY, ids=lambda value: str(value)[:40])
def test_a_costly_grammar_ends_in_an_error_of_its_own_before_it_costs_much(build, kind, spec):
    began = time.thread_time()
    try:
        grammar = build(StructuredOutput(kind, spec))
    except InferError as error:
        assert error.code is ErrorCode.INVALID_ARG
    else:
        walk(grammar.matcher(), 258, 40, random.Random(0), most_s=0.5)
    assert time.thread_time() - began < 5


def walk(matcher, end, most, numbers, *, most_s=0.5) -> list[int] | None:
    """Choose what may come at random; the tokens of a text that ended, None if it did not or its grammar gave up."""
    row, tokens = np.zeros(-(-VOCAB // 32), np.uint32), []
    while not matcher.complete and len(tokens) < most:
        began = time.thread_time()
        try:
            matcher.fill(row)
        except GrammarError:
            return None
        assert time.thread_time() - began < most_s
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert len(allowed)
        assert (end in allowed) == matcher.may_end
        token = int(numbers.choice(allowed))
        if token == end:
            return tokens
        matcher.accept(token)
        tokens.append(token)
    return tokens if matcher.complete else None


ENDING = [
    ("json_schema", '{"type": "string", "maxLength": 12}', None),
    ("json_schema", PERSON.replace('"string"', '"string", "maxLength": 5'), None),
    ("regex", "(🙂|[a-zé ]){3,9}", "(🙂|[a-zé ]){3,9}"),
    ("choice", '["é🙂", "ß"]', "é🙂|ß"),
]


@pytest.mark.parametrize(("kind", "spec", "pattern"), ENDING)
def test_whatever_is_chosen_of_the_masks_makes_a_text_that_fits(model, kind, spec, pattern):
    tokenizer, build, end = model
    grammar, numbers = build(StructuredOutput(kind, spec)), random.Random(0)
    made = [tokens for _ in range(30) if (tokens := walk(grammar.matcher(), end, 300, numbers)) is not None]
    assert len(made) > 10
    for tokens in made:
        text = tokenizer.decode(tokens)
        assert re.fullmatch(pattern, text) if pattern else json.loads(text) is not None


UNENDING = [
    *((spec, before, more) for spec in ("{}", '{"type": "array"}') for before, more in (("[", " "), ("[1", "1"), ("[0.1", "1"), ("[1e1", "1"))),
    (PERSON, "{", " "),
    (PERSON, '{"name": "\\"", "age": 1', "1"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "before", "more"), UNENDING)
def test_blanks_and_digits_go_on_for_so_long_only(model, spec, before, more):
    tokenizer, build, _ = model
    matcher = build(StructuredOutput("json_schema", spec)).matcher()
    tokens = tokenizer.encode(before, add_special_tokens=False)
    assert matcher.validate(tokens) == len(tokens)
    for token in tokens:
        matcher.accept(token)
    (again,) = tokenizer.encode(f"a{more}", add_special_tokens=False)[-1:]
    row = np.zeros(-(-VOCAB // 32), np.uint32)
    for _ in range(70):
        matcher.fill(row)
        if not row[again // 32] >> again % 32 & 1:
            return
        matcher.accept(again)
    pytest.fail("they went on")


def test_digits_in_a_string_are_not_a_number(model):
    spec = json.dumps({"type": "string", "pattern": "^1{60}$"})
    tokenizer, build, end = model
    tokens = walk(build(StructuredOutput("json_schema", spec)).matcher(), end, 400, random.Random(5))
    assert tokens is not None
    assert tokenizer.decode(tokens) == f'"{"1" * 60}"'


def test_special_tokens_are_never_a_texts(build):
    row = np.zeros(-(-VOCAB // 32), np.uint32)
    matcher = build(StructuredOutput("regex", "(.|\n)*")).matcher()
    matcher.fill(row)
    allowed = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
    assert allowed & set(range(256, VOCAB)) == {256, 257, 258}


def test_what_was_taken_is_taken_back(build):
    matcher = build(StructuredOutput("regex", "abc")).matcher()
    tokens = byte_tokenizer().encode("abc", add_special_tokens=False)
    for token in tokens:
        matcher.accept(token)
    assert matcher.complete
    matcher.rollback(2)
    assert matcher.validate(tokens[1:]) == 2
    assert not matcher.may_end


def test_what_can_only_come_next_is_told(build):
    tokenizer = byte_tokenizer()
    matcher = build(StructuredOutput("choice", '["left hand", "left foot"]')).matcher()
    matcher.accept(tokenizer.encode("l", add_special_tokens=False)[0])
    assert tokenizer.decode(matcher.forced()).startswith("eft")


def test_a_tokenizer_that_cannot_be_read_is_named():
    with pytest.raises(InferError) as caught:
        LlgBuilder(object(), {0}, 10)
    assert caught.value.code is ErrorCode.UNSUPPORTED
