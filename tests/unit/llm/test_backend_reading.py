"""GenerationCalls as the backend reads them: what is passed on to the engine, and which field an error names."""

from __future__ import annotations

import json
from typing import Any

import pytest

import scripted_engine
from headrace_backends.llm.asked_call import AskedCall
from headrace_backends.llm.call_reading import LONGEST_TOKEN, MAX_DEPTH, CallReader, decode_call
from headrace_backends.llm.events import Spelling
from headrace_protocol.errors import ErrorCode, ErrorDetail, InferError
from headrace_protocol.generation import AdapterCard, GenerationCall, ModelCard
from scripted_engine import BEGIN, ByteText

LENGTH = 100
TASKS = ("generate", "embed", "tokenize", "detokenize")
HI = {"messages": [{"role": "user", "content": "hi"}]}


def reader(**card: Any) -> CallReader:
    text = ByteText()
    given = {"tasks": TASKS, "embedding_width": 8, **card}
    return CallReader(ModelCard(LENGTH, scripted_engine.VOCAB, **given), text, Spelling(text))


def read(_reader: CallReader | None = None, **call: Any) -> AskedCall:
    if not {"prompts", "chat"} & set(call):
        call["prompts"] = ["hi"]
    return (_reader or reader()).read(decode_call(json.dumps(call).encode()))


def refused(_reader: CallReader | None = None, **call: Any) -> InferError:
    with pytest.raises(InferError) as raised:
        read(_reader, **call)
    return raised.value


def test_a_text_becomes_tokens_with_the_special_ones_and_tokens_stay_as_they_are() -> None:
    asked = read(prompts=["hi", [7, 8]])
    assert [list(prompt.token_ids) for prompt in asked.prompts] == [[BEGIN, 104, 105], [7, 8]]
    assert list(read(add_special_tokens=False).prompts[0].token_ids) == [104, 105]


def test_a_conversation_is_rendered_without_special_tokens_of_the_tokenizers() -> None:
    prompt = bytes(read(chat=HI).prompts[0].token_ids)
    assert prompt == b"<|user|>hi\n<|assistant|>"


def test_a_conversation_goes_on_as_long_as_there_is_room_and_a_prompt_for_sixteen_tokens() -> None:
    assert read(chat=HI).params.max_tokens is None
    assert read(chat=HI, sampling={"max_tokens": None}).params.max_tokens is None
    assert read(chat=HI, sampling={"max_tokens": 5}).params.max_tokens == 5
    assert read().params.max_tokens == 16


def test_the_models_defaults_hold_where_the_client_said_nothing() -> None:
    defaults = reader(sampling_defaults={"temperature": 0.5, "top_k": 40})
    params = read(defaults, sampling={"top_k": 7, "temperature": None}).params
    assert (params.temperature, params.top_k) == (0.5, 7)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"sampling": {"temperature": 9}}, "temperature"),
        ({"sampling": {"max_tokens": -1}}, "max_tokens"),
        ({"sampling": {"bogus": 1}}, "bogus"),
        ({"prompts": [[1, 999]]}, "prompts"),
        ({"prompts": [[-1]]}, "prompts"),
        ({"prompts": [[]]}, "prompts"),
        ({"prompts": []}, "prompts"),
        ({"prompts": ["x"] * 3000}, "prompts"),
        ({"prompts": ["a"], "chat": HI}, "prompts"),
        ({"prompts": [""], "add_special_tokens": False}, "prompts"),
        ({"prompts": ["x"] * 64, "sampling": {"n": 128}}, "n"),
        ({"best_of": 1, "sampling": {"n": 2}}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"adapter": "none such"}, "adapter"),
        ({"cache_salt": "x" * 5000}, "cache_salt"),
        ({"priority": 1 << 40}, "priority"),
        ({"structured": {"kind": "regex", "spec": "x" * (2 << 20)}}, "structured"),
        ({"structured": {"kind": "nonsense"}}, "structured"),
        ({"task": "embed", "dimensions": 9}, "dimensions"),
        ({"task": "detokenize", "prompts": ["text"]}, None),
        ({"prompts": "no list"}, "prompts"),
        ({"bogus": 1}, "generation_call"),
    ],
)
def test_a_field_that_is_wrong_is_named(call: dict[str, Any], param: str | None) -> None:
    if call.get("task") == "detokenize":
        with pytest.raises(InferError) as raised:
            reader().answer(decode_call(json.dumps(call).encode()))
        error = raised.value
        param = "prompts"
    else:
        error = refused(**call)
    assert error.param == param
    assert error.code in (ErrorCode.INVALID_ARG, ErrorCode.NOT_FOUND)
    assert error.detail is None


def test_everything_wrong_with_the_sampling_parameters_is_told_at_once() -> None:
    error = refused(sampling={"temperature": 9, "top_p": 9})
    assert "temperature: " in error.message
    assert "top_p: " in error.message


def test_a_prompt_without_room_for_a_token_is_too_long_and_one_with_room_for_one_is_not() -> None:
    assert read(prompts=[[1] * (LENGTH - 1)])
    error = refused(prompts=[[1] * LENGTH])
    assert (error.detail, error.param) == (ErrorDetail.CONTEXT_LENGTH, "prompts")
    assert read(prompts=[[1] * LENGTH], sampling={"max_tokens": 0})
    assert read(prompts=[[1] * LENGTH], task="embed")
    long = {"messages": [{"role": "user", "content": "x" * LENGTH}]}
    assert refused(chat=long).param == "chat"


def test_a_text_that_cannot_fit_is_refused_before_it_is_made_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = reader()
    monkeypatch.setattr(ByteText, "encode", lambda *_args, **_kwargs: pytest.fail("it was made tokens"))
    error = refused(calls, prompts=["x" * (LENGTH * LONGEST_TOKEN + 1)])
    assert error.detail is ErrorDetail.CONTEXT_LENGTH


def test_a_prompt_is_cut_to_the_length_that_is_asked_for() -> None:
    asked = read(prompts=[[1, 2, 3, 4]], sampling={"truncate_prompt_tokens": 2})
    assert list(asked.prompts[0].token_ids) == [3, 4]
    whole = read(prompts=[list(range(LENGTH + 50))], sampling={"truncate_prompt_tokens": -1})
    assert len(whole.prompts[0].token_ids) == LENGTH - 1


def test_an_echoed_prompt_is_the_clients_text_or_that_of_its_tokens() -> None:
    asked = read(prompts=["hé", [104, 105]], echo=True)
    assert [prompt.text for prompt in asked.prompts] == ["hé", "hi"]
    assert read(prompts=["hello"], echo=True, sampling={"truncate_prompt_tokens": 2}).prompts[0].text == "lo"
    assert read(prompts=["hi"]).prompts[0].text is None


def test_a_prompt_that_opens_the_models_reasoning_is_told_so() -> None:
    thinking = reader(reasoning_format="think_tags")
    kwargs = {"chat_template_kwargs": {"thinking": True}}
    assert read(thinking, chat=HI | kwargs).prompts[0].in_reasoning
    assert not read(thinking, chat=HI).prompts[0].in_reasoning
    assert not read(thinking, prompts=["<think>a</think>"]).prompts[0].in_reasoning
    assert not read(chat=HI | kwargs).prompts[0].in_reasoning, "a model that does not reason"


def test_the_best_of_several_needs_their_log_probabilities_which_are_not_told() -> None:
    asked = read(best_of=4, sampling={"n": 2})
    assert (asked.params.n, asked.told_n, asked.params.logprobs, asked.tells_logprobs) == (4, 2, 0, False)
    asked = read(best_of=2, sampling={"n": 2}, stream=True)
    assert (asked.params.n, asked.told_n, asked.params.logprobs) == (2, 2, None)


def test_a_task_that_the_model_has_not_is_unsupported() -> None:
    error = refused(reader(tasks=("generate",)), task="embed")
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED, "task")


def test_a_known_adapter_is_passed_on() -> None:
    assert read(reader(adapters=(AdapterCard("french"),)), adapter="french").adapter == "french"


def test_texts_are_made_tokens_without_the_engine() -> None:
    event = reader().answer(GenerationCall("tokenize", prompts=["hé"], return_token_strings=True))
    assert event is not None
    (told,) = event.prompts
    assert (told.num_tokens, told.token_ids) == (4, (BEGIN, 104, 0xC3, 0xA9))
    assert told.token_strings == ("<s>", "h", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}")
    event = reader().answer(GenerationCall("detokenize", prompts=[[BEGIN, 104, 0xC3, 0xA9]]))
    assert event is not None
    assert event.text == "<s>hé"
    assert reader().answer(GenerationCall()) is None


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'{"prompts": ["\\ud800"]}'])
def test_what_is_no_call_is_refused(raw: bytes) -> None:
    with pytest.raises(InferError) as raised:
        decode_call(raw)
    assert raised.value.code is ErrorCode.INVALID_ARG


def test_json_that_is_nested_too_deep_is_refused_and_brackets_in_texts_are_not_counted() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    with pytest.raises(InferError, match="nested deeper"):
        decode_call(f'{{"sampling": {{"stop": {deep}}}}}'.encode())
    assert decode_call(json.dumps({"prompts": ['\\"[' * 1000] * 3}).encode())
