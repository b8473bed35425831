"""Whatever a model of random weights says under a schema or a grammar is valid, in any company and however it is computed."""

from __future__ import annotations

import itertools
import json
import re

import jsonschema
import pytest

from headrace_backends.llm.admission import SchedulerConfig
from headrace_backends.llm.block_manager import BlockManager
from headrace_backends.llm.core import EngineCore
from headrace_backends.llm.grammar import ReasoningMarks
from headrace_backends.llm.grammar_source import grammars_of
from headrace_backends.llm.ngram import NgramConfig, NgramDrafter
from headrace_backends.llm.output import GenerationOutput
from headrace_backends.llm.request import FinishReason, GenerationRequest, Status
from headrace_backends.llm.runner import TorchRunner
from headrace_backends.llm.sampling_params import SamplingParams
from headrace_backends.llm.scheduler import Scheduler
from headrace_backends.llm.text_codec import HfTextCodec
from headrace_protocol.errors import ErrorCode, InferError
from headrace_protocol.generation import StructuredOutput
from language_models import BLOCK, byte_tokenizer, tiny

VOCAB = 512  # the tokenizer has 264
END, USER, ASSISTANT = 258, 259, 260
WAIT = 60


@pytest.fixture(scope="module")
def model():
    return tiny("llama", vocab_size=VOCAB, eos_token_id=END)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def engine_of(model, tokenizer):
    made = []

    def make(*, blocks=400, drafter=None, reasoning=None, **limits) -> Engine:
        made.append(grammars_of(tokenizer, {END}, VOCAB, reasoning=reasoning))
        return Engine(model, tokenizer, made[-1], blocks, drafter, limits)

    yield make
    for grammars in made:
        grammars.close()


class Engine:
    """A core with a tiny model, and what it told."""

    def __init__(self, model, tokenizer, grammars, blocks, drafter, limits) -> None:
        config = SchedulerConfig(**{"max_model_len": 512, "max_num_seqs": 64, "vocab_size": VOCAB, **limits})
        self.scheduler = Scheduler(config, BlockManager(blocks, BLOCK))
        self.core = EngineCore(self.scheduler, HfTextCodec(tokenizer, VOCAB), drafter, grammars)
        self.runner = TorchRunner(model, blocks, BLOCK, config.max_model_len)
        self.requests: list[GenerationRequest] = []
        self.told: dict[str, GenerationOutput] = {}
        self.refused: dict[str, InferError] = {}

    def add(self, *requests: GenerationRequest) -> None:
        for request in requests:
            assert self.core.add(request) is None
            self.requests.append(request)

    def step(self) -> int:
        """Compute what can run; return of how many requests."""
        self.refused.update(self.core.settle(0))
        step = self.core.schedule(0)
        if step:
            for output in self.core.update(step, self.runner.execute(step), 0):
                before = self.told.get(output.request_id)
                self.told[output.request_id] = output if before is None else before.followed_by(output)
        self.core.check_integrity()
        return len(step.scheduled)

    def run(self, *requests: GenerationRequest) -> dict[str, GenerationOutput]:
        self.add(*requests)
        for request in self.requests:
            if request.compilation is not None:
                request.compilation.exception(WAIT)
        while len(self.core):
            assert self.step() or not len(self.core)
        return self.told


def asked(name: str, kind: str, spec="", *, seed: int = 0, prompt=(104, 105), after_reasoning=True, **params):
    text = spec if isinstance(spec, str) else json.dumps(spec)
    closing = {ord(letter) - 33: 3.0 for letter in '"}],'}
    made = SamplingParams(**{"max_tokens": 400, "logit_bias": closing, **params})
    return GenerationRequest(
        name, prompt, made, seed, frozenset({END}), structured=StructuredOutput(kind, text, after_reasoning)
    )


def thing(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 6}
INT = {"type": "integer", "minimum": -50, "maximum": 2000}
LEAVES = [
    SHORT, INT, {"type": "number", "minimum": 0, "maximum": 1}, {"type": "boolean"}, {"type": "null"},
    {"enum": ["a", 1, None, True, {"x": [1]}]}, {"const": "só"}, {"type": "string", "pattern": "^[a-f]{2,5}$"},
    {"type": "string", "format": "date"}, {"type": "string", "format": "uuid"}, {"type": ["integer", "null"]},
    {"type": "string", "minLength": 3, "maxLength": 3},
]  # fmt: skip
SCHEMAS = [
    *LEAVES,
    *(thing(a=leaf) for leaf in LEAVES),
    *({"type": "array", "items": leaf, "minItems": 1, "maxItems": 3} for leaf in LEAVES),
    {},
    True,
    {"type": "object"},
    {"type": "integer", "exclusiveMinimum": 20_000_000_000, "maximum": 20_000_000_100},
    {"anyOf": [thing(kind={"const": "a"}, n=INT), thing(kind={"const": "b"}, s=SHORT)]},
    {"oneOf": [{"type": "boolean"}, thing(a=INT)]},
    {"type": "object", "properties": {"a": INT, "b": SHORT}, "additionalProperties": False},
    {"type": "object", "additionalProperties": INT, "maxProperties": 3},
    {"type": "array", "prefixItems": [INT, SHORT], "items": False, "minItems": 2},
    {"$ref": "#/$defs/p", "$defs": {"p": thing(x=INT, y={"$ref": "#/$defs/q"}), "q": {"type": "boolean"}}},
    {"$defs": {"tree": {"type": "object", "properties": {"v": INT, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}}, "required": ["v", "next"], "additionalProperties": False}}, "$ref": "#/$defs/tree"},
    {"allOf": [{"type": "object", "properties": {"a": INT}, "required": ["a"]}, {"properties": {"b": SHORT}, "required": ["b"]}], "additionalProperties": True},
    thing(person=thing(name=SHORT, tags={"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2}), ok={"type": "boolean"}),
    {"type": "array", "items": {"type": "array", "items": INT, "maxItems": 2}, "maxItems": 2},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10},
]  # fmt: skip
assert len(SCHEMAS) >= 50


def check(schema, output: GenerationOutput) -> bool:
    """Hold one text to its schema; whether it ended."""
    if output.finish_reason is FinishReason.LENGTH:
        return False
    assert output.finish_reason is FinishReason.STOP, output.error
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(output.text))
    return True


@pytest.fixture(scope="module")
def plain(engine_of):
    """Each schema's text with three seeds and without one, all in one engine and without guesses."""
    return engine_of().run(*all_of_them())


def all_of_them():
    return [
        asked(f"{at}/{seed}", "json_schema", schema, seed=seed, temperature=1.0 if seed else 0.0)
        for at, schema in enumerate(SCHEMAS)
        for seed in range(3)
    ]


def test_every_text_under_a_schema_is_valid_by_it(plain):
    ended = [check(SCHEMAS[int(name.split("/")[0])], output) for name, output in plain.items()]
    assert len(ended) == 3 * len(SCHEMAS)
    assert sum(ended) > 0.8 * len(ended)


def test_guesses_preemption_and_company_change_no_text(engine_of, plain):
    some = [request for request in all_of_them() if plain[request.id].num_output_tokens < 200][::2]
    drafter = NgramDrafter(NgramConfig(disable_above=64))
    engine = engine_of(blocks=17, drafter=drafter, max_model_len=256, max_num_seqs=24, max_num_batched_tokens=48)
    told = engine.run(*some)
    assert engine.scheduler.stats.num_preemptions > 0
    assert engine.scheduler.stats.num_accepted_tokens > 0
    for request in some:
        assert (told[request.id].text, told[request.id].token_ids) == (
            plain[request.id].text,
            plain[request.id].token_ids,
        )


KINDS = [
    ("regex", r"[a-c]{3}(-\d+)?x", r"[a-c]{3}(-\d+)?x"),
    ("regex", "(é|🙂){2,4}", "(é|🙂){2,4}"),
    ("choice", '["yes", "no", "yes and no"]', "yes( and no)?|no"),
    ("grammar", 'start: "<" WORD ("," WORD)? ">"\nWORD: /[a-z]{1,3}/', "<[a-z]{1,3}(,[a-z]{1,3})?>"),
    ("grammar", 'root ::= "f(" arg ")"\narg ::= "x" | "y" arg', r"f\(y*x\)"),
]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_texts_fit_their_pattern_choice_or_grammar(engine_of, temperature):
    requests = [
        asked(f"{at}/{seed}", kind, spec, seed=seed, temperature=temperature, logit_bias=None)
        for at, (kind, spec, _) in enumerate(KINDS)
        for seed in range(8)
    ]
    for name, output in engine_of().run(*requests).items():
        assert output.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}
        if output.finish_reason is FinishReason.STOP:
            assert re.fullmatch(KINDS[int(name.split("/")[0])][2], output.text)


def test_choices_of_one_request_each_go_their_own_way(engine_of):
    told = engine_of().run(asked("r", "regex", "[a-z]{8}", n=6))
    texts = [output.text for output in told.values()]
    assert len(set(texts)) > 1
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts)


def test_a_length_cuts_the_text_and_says_so(engine_of):
    (told,) = engine_of().run(asked("r", "regex", "[a-z]{8}", max_tokens=3)).values()
    assert (told.finish_reason, len(told.text)) == (FinishReason.LENGTH, 3)


def test_the_last_token_that_fits_ends_a_text_although_the_end_is_ignored(engine_of):
    (told,) = engine_of().run(asked("r", "regex", "[a-z]{8}", max_tokens=20, ignore_eos=True, min_tokens=15)).values()
    assert (told.finish_reason, len(told.text), told.num_output_tokens) == (FinishReason.STOP, 8, len(told.token_ids))


def test_a_stop_token_ends_a_text_only_where_it_may_end(engine_of):
    bias = {USER: 100.0}
    requests = [
        asked(str(seed), "regex", "[a-z]{4}([a-z]{4})?", seed=seed, logit_bias=bias, stop_token_ids=(USER,))
        for seed in range(4)
    ]
    for output in engine_of().run(*requests).values():
        assert (len(output.text), output.stop_reason) == (4, USER)


def test_what_other_parameters_leave_nothing_of_is_an_error_of_its_own(engine_of):
    engine = engine_of()
    told = engine.run(
        asked("none", "regex", "[a-z]+", allowed_token_ids=(ord("A") - 33,)), asked("other", "regex", "[a-z]{4}")
    )
    assert told["none"].finish_reason is FinishReason.ERROR
    assert "the grammar" in told["none"].error
    assert told["other"].finish_reason is FinishReason.STOP


def test_a_grammar_that_becomes_too_costly_ends_its_request_and_no_other(engine_of):
    names = range(200)
    costly = "start: " + " | ".join(f"r{at}" for at in names) + "\n"
    costly += "\n".join(f'r{at}: "a" r{at} "b" | "a" r{(at + 1) % 200} "c" | "a"' for at in names)
    told = engine_of().run(asked("costly", "grammar", costly), asked("other", "regex", "[a-z]{40}"))
    assert told["other"].finish_reason is FinishReason.STOP
    assert told.get("costly") is None or told["costly"].finish_reason is not None


def test_a_description_that_is_wrong_is_refused_and_others_run(engine_of):
    engine = engine_of()
    told = engine.run(asked("wrong", "json_schema", {"type": "nope"}, n=2), asked("right", "choice", '["a", "b"]'))
    assert set(engine.refused) == {"wrong", "wrong/1"}
    assert engine.refused["wrong"].code is ErrorCode.INVALID_ARG
    assert told["right"].text in {"a", "b"}
    assert "wrong" not in told


def test_who_waits_for_a_grammar_blocks_nobody(engine_of):
    engine = engine_of()
    held = asked("held", "regex", "[a-z]{4}")
    free = GenerationRequest("free", (104, 105), SamplingParams(max_tokens=5, temperature=0), 0)
    engine.add(held)
    compilation, held.compilation = held.compilation, None  # as if it never came to an end
    engine.add(free)
    while not free.finished:
        assert engine.step() == 1
    assert held.status is Status.WAITING_FOR_GRAMMAR
    assert engine.scheduler.num_waiting == 1
    held.compilation = compilation
    assert re.fullmatch("[a-z]{4}", engine.run()["held"].text)


def test_who_waits_for_a_grammar_can_be_ended(engine_of):
    engine = engine_of()
    engine.add(asked("held", "regex", "[a-z]{4}"))
    assert engine.core.abort("held", 0).finish_reason is FinishReason.ABORT
    assert engine.run() == {}
    assert len(engine.core) == 0


def test_without_grammars_no_text_can_be_kept_to_one(model, tokenizer):
    core = Engine(model, tokenizer, None, 60, None, {}).core
    assert "schema" in core.add(asked("r", "json_object")).message


@pytest.mark.parametrize("seed", range(3))
def test_reasoning_is_free_and_the_text_behind_it_is_not(engine_of, seed):
    engine = engine_of(reasoning=ReasoningMarks((USER,), (ASSISTANT,)), drafter=NgramDrafter(NgramConfig()))
    bias = {ASSISTANT: 4.0}
    requests = [
        asked("opened", "choice", '["yes", "no"]', seed=seed, prompt=(104, USER), logit_bias=bias),
        asked("opens", "choice", '["yes", "no"]', seed=seed, logit_bias={USER: 30.0, ASSISTANT: 30.0}),
        asked("at once", "choice", '["yes", "no"]', seed=seed, logit_bias={USER: -100.0}),
        asked("held", "choice", '["yes", "no"]', seed=seed, prompt=(104, USER), after_reasoning=False),
    ]
    told = engine.run(*requests)
    assert told["opens"].token_ids[0] == USER
    for name in ("opened", "opens"):
        tokens = list(told[name].token_ids)
        assert ASSISTANT in tokens
        behind = engine.core._tokenizer.decode(tokens[tokens.index(ASSISTANT) + 1 :], skip_special_tokens=True)
        assert behind in {"yes", "no"}
    assert {told["at once"].text, told["held"].text} <= {"yes", "no"}


def test_forced_tokens_are_computed_at_once(engine_of):
    """A text of which most can only come in one way takes fewer steps than it has tokens."""
    engine = engine_of()
    engine.add(asked("r", "choice", '["always the very same words", "another beginning"]'))
    engine.requests[0].compilation.result(WAIT)
    steps = sum(1 for _ in itertools.takewhile(bool, (engine.step() for _ in range(100))))
    assert steps < engine.told["r"].num_output_tokens / 2


def test_two_hundred_descriptions_at_once_delay_nobody_and_leave_no_more_than_are_kept(engine_of):
    engine = engine_of(max_num_seqs=300, max_num_batched_tokens=2048)
    free = GenerationRequest("free", (104, 105), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True), 0)
    engine.add(free)
    engine.step()
    for at in range(200):
        spec = thing(**{f"a{at}": INT}) if at % 4 else {"type": "nope", "title": str(at)}
        engine.add(asked(str(at), "json_schema", spec, max_tokens=2))
    while not free.finished:
        before = free.num_output_tokens
        assert engine.step()
        assert free.num_output_tokens == before + 1
    told = engine.run()
    assert (len(told), len(engine.refused)) == (151, 50)
    assert len(engine.core._grammars) == 128
