"""A language model's v2 tensors, those of Triton's vLLM backend: what is asked for by them, and how it is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_backends.conformance import Case, LoadedModel, check_backend, loaded
from headrace_backends.conformance.model import Answer
from headrace_backends.llm.v2_tensors import INPUTS, OUTPUTS
from headrace_protocol.errors import ErrorCode
from headrace_protocol.generation import EVENT_DECODER
from scripted_engine import DIMENSIONS, ScriptedBackend, script

CARD = {"max_model_len": 1024, "adapters": [{"name": "french"}]}


def case(folder: Path, *, decoupled: bool = True, **card: Any) -> Case:
    (folder / "1").mkdir()
    (folder / "1" / "model.json").write_text(json.dumps(CARD | card))
    config = {
        "name": "m",
        "max_batch_size": 0,
        "input": [*INPUTS],
        "output": [*OUTPUTS],
        "model_transaction_policy": {"decoupled": decoupled},
    }
    endless = {"text_input": strings("x" + script(hold="for ever"))}
    return Case(folder, config, {"text_input": strings("hi")}, slow_inputs=endless)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[LoadedModel]:
    with loaded(ScriptedBackend, case(tmp_path)) as model:
        yield model


def strings(*elements: str | bytes) -> np.ndarray:
    return np.array([element.encode() if isinstance(element, str) else element for element in elements], np.object_)


def tensors(given: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        name: np.array([value]) if isinstance(value, bool) else strings(value)
        for name, value in given.items()
        if value is not None
    }


def ask(
    model: LoadedModel, text: str | None = "hi", parameters: dict[str, Any] | None = None, **given: Any
) -> list[Answer]:
    """Return the answers to a request; values that are no text and no truth value are written as JSON."""
    given = {k: v if isinstance(v, str | bool) else json.dumps(v) for k, v in given.items()}
    batch = model.batch([tensors({"text_input": text, **given})], [parameters])
    (answers,) = model.stream(batch)
    return [answer for answer in answers if not answer.empty]


def texts(answers: list[Answer], name: str = "text_output") -> list[list[str]]:
    return [[element.decode() for element in answer.outputs[name]] for answer in answers]


def failure(answers: list[Answer]) -> tuple[str, str]:
    return answers[-1].code, answers[-1].message


def test_the_backend_keeps_to_what_headrace_expects_of_one(tmp_path: Path) -> None:
    check_backend(ScriptedBackend, case(tmp_path))


def test_an_answer_in_one_piece_begins_with_the_prompt_unless_that_is_excluded(model: LoadedModel) -> None:
    assert texts(ask(model)) == [["hiHello, world!"]]
    assert texts(ask(model, exclude_input_in_output=False)) == [["hiHello, world!"]]
    assert texts(ask(model, exclude_input_in_output=True)) == [["Hello, world!"]]


def test_a_streamed_answer_has_new_text_alone_in_each_response(model: LoadedModel) -> None:
    answers = ask(model, stream=True)
    assert "".join(text for (text,) in texts(answers)) == "Hello, world!"
    assert len(answers) > 10
    assert [answer.final for answer in answers] == [False] * (len(answers) - 1) + [True]


def test_a_streamed_answer_cannot_begin_with_the_prompt(model: LoadedModel) -> None:
    code, message = failure(ask(model, stream=True, exclude_input_in_output=False))
    assert code == ErrorCode.INVALID_ARG.value
    assert "exclude_input_in_output" in message


def test_sampling_parameters_come_as_a_tensor_or_as_parameters_of_the_request(model: LoadedModel) -> None:
    say = "say: " + script(say="one two three four five six")
    assert texts(ask(model, say, {"max_tokens": 3}, exclude_input_in_output=True)) == [["one"]]
    assert texts(ask(model, say, sampling_parameters={"max_tokens": "3"}, exclude_input_in_output=True)) == [["one"]]
    both = ask(
        model, say, {"max_tokens": 9, "stop": "t"}, sampling_parameters={"max_tokens": 3}, exclude_input_in_output=True
    )
    assert texts(both) == [["one"]], "the tensor goes before"
    assert texts(ask(model, say, {"sampling_parameters": '{"stop": ["two"]}', "exclude_input_in_output": True})) == [
        ["one "]
    ]


def test_a_request_streams_by_its_parameters_too(model: LoadedModel) -> None:
    assert len(ask(model, parameters={"stream": True})) > 10
    code, message = failure(ask(model, parameters={"stream": "yes"}))
    assert (code, message.partition(":")[0]) == (ErrorCode.INVALID_ARG.value, "stream")


def test_a_parameter_that_nobody_knows_is_refused_and_what_reads_like_a_header_is_not(model: LoadedModel) -> None:
    code, message = failure(ask(model, parameters={"max_token": 3}))
    assert code == ErrorCode.INVALID_ARG.value
    assert "max_tokens" in message
    assert texts(ask(model, parameters={"x-request-id": "7", "triton_enable_empty_final_response": True}))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"text": None}, "text_input"),
        ({"text": b"\xff"}, "text_input"),
        ({"text": "x" * 2000}, "text_input"),
        ({"embedding_request": {"input": [999]}}, "embedding_request"),
        ({"sampling_parameters": "nonsense"}, "sampling_parameters"),
        ({"sampling_parameters": [1]}, "sampling_parameters"),
        ({"sampling_parameters": {"temperature": 7}}, "temperature"),
        ({"sampling_parameters": "[" * 100}, "sampling_parameters"),
        ({"sampling_parameters": {"lora_name": 7}}, "lora_name"),
        ({"sampling_parameters": {"guided_decoding": {}}}, "guided_decoding"),
        ({"sampling_parameters": {"guided_decoding": 7}}, "guided_decoding"),
        ({"image": "aGk="}, "image"),
        ({"embedding_request": "nonsense"}, "embedding_request"),
        ({"embedding_request": {"input": []}}, "embedding_request"),
        ({"embedding_request": {"input": "x", "dimensions": "a"}}, "embedding_request"),
        ({"generation_call": "nonsense"}, "generation_call"),
    ],
)
def test_what_is_wrong_is_named(model: LoadedModel, given: dict[str, Any], field: str) -> None:
    code, message = failure(ask(model, **given))
    assert code in (ErrorCode.INVALID_ARG.value, ErrorCode.UNSUPPORTED.value)
    assert message.startswith(field)


def test_an_adapter_is_asked_for_by_name(model: LoadedModel) -> None:
    assert texts(ask(model, sampling_parameters={"lora_name": "french"}))
    assert model.backend._engine.submitted[-1].adapter == "french"
    code, message = failure(ask(model, sampling_parameters={"lora_name": "german"}))
    assert code == ErrorCode.NOT_FOUND.value
    assert "french" in message


@pytest.mark.parametrize("name", ["guided_decoding", "structured_outputs"])
def test_the_form_of_the_text_is_asked_for_under_both_of_its_names(model: LoadedModel, name: str) -> None:
    for given, kind, spec in [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"json_object": True}, "json_object", ""),
    ]:
        assert texts(ask(model, sampling_parameters={name: given}))
        structured = model.backend._engine.submitted[-1].structured
        assert (structured.kind, structured.spec) == (kind, spec)


def test_each_further_output_is_there_where_it_is_asked_for(model: LoadedModel) -> None:
    (plain,) = ask(model)
    assert list(plain.outputs) == ["text_output"]
    (answer,) = ask(
        model,
        "ab" + script(say="no"),
        sampling_parameters={"logprobs": 2},
        **dict.fromkeys([name["name"] for name in INPUTS if name["name"].startswith("return_")], True),
    )
    outputs = answer.outputs
    assert outputs["finish_reason"].tolist() == [b"stop"]
    assert outputs["cumulative_logprob"].tolist() == [-1.5]
    assert outputs["num_input_tokens"].tolist() == [len("ab" + script(say="no")) + 1]
    assert outputs["num_output_tokens"].tolist() == [3]
    first, second, end = json.loads(outputs["logprobs"][0])
    assert first == {
        "110": {"logprob": -0.5, "rank": 1, "decoded_token": "n"},
        "111": {"logprob": -1.5, "rank": 2, "decoded_token": "o"},
    }
    assert len(second) == len(end) == 2


def test_the_further_outputs_of_a_stream_are_those_of_each_response(model: LoadedModel) -> None:
    wanted = dict.fromkeys(["return_finish_reason", "return_num_output_tokens", "return_cumulative_logprob"], True)
    answers = ask(model, "x" + script(say="abc"), stream=True, **wanted)
    assert [answer.outputs["finish_reason"][0] for answer in answers] == [b"None"] * 3 + [b"stop"]
    assert [int(answer.outputs["num_output_tokens"][0]) for answer in answers] == [1, 1, 1, 1]
    assert [float(answer.outputs["cumulative_logprob"][0]) for answer in answers] == [-0.5, -1.0, -1.5, -2.0]
    logprobs = ask(model, "x" + script(say="a"), return_logprobs=True)
    assert texts(logprobs, "logprobs") == [["null"]], "none were asked of the model"


def test_several_choices_are_elements_of_the_outputs(model: LoadedModel) -> None:
    say = "x" + script(say=["one", "four"])
    given = {"sampling_parameters": {"n": 2}, "exclude_input_in_output": True, "return_num_output_tokens": True}
    (answer,) = ask(model, say, **given)
    assert texts([answer]) == [["one", "four"]]
    assert answer.outputs["num_output_tokens"].tolist() == [4, 5]
    streamed = texts(ask(model, say, sampling_parameters={"n": 2}, stream=True))
    assert ["".join(parts) for parts in zip(*streamed, strict=True)] == ["one", "four"]


def test_an_embedding_is_text_and_a_tensor_by_the_other_way_to_ask(model: LoadedModel) -> None:
    (answer,) = ask(model, "", embedding_request={"input": "hello", "pooling_params": {}}, return_num_input_tokens=True)
    vector = json.loads(answer.outputs["text_output"][0])
    assert len(vector) == DIMENSIONS
    assert np.isclose(np.linalg.norm(vector), 1)
    assert answer.outputs["num_input_tokens"].tolist() == [6]
    call = {"task": "embed", "prompts": ["hello", "x"], "dimensions": 3}
    (answer,) = ask(model, None, generation_call=call)
    assert answer.outputs["embedding"].shape == (2, 3)
    assert np.allclose(np.linalg.norm(answer.outputs["embedding"], axis=1), 1)
    (answer,) = ask(model, None, generation_call={"task": "embed", "prompts": [[0, 0, 1]], "normalize": False})
    assert answer.outputs["embedding"][0, :2].tolist() == [3, 1]


def test_a_call_is_answered_by_events(model: LoadedModel) -> None:
    call = {"prompts": ["x" + script(say="ab")], "stream": True, "sampling": {"logprobs": 1}, "return_token_ids": True}
    answers = ask(model, None, generation_call=call)
    events = [EVENT_DECODER.decode(answer.outputs["generation_event"][0]) for answer in answers]
    assert events[0].prompts[0].num_tokens == len(events[0].prompts[0].token_ids)
    assert not events[1].prompts
    assert [choice.text for event in events for choice in event.choices] == ["a", "b", ""]
    assert [choice.token_ids for event in events for choice in event.choices] == [(97,), (98,), (257,)]
    chosen = events[0].choices[0].logprobs[0].chosen
    assert (chosen.token, chosen.bytes, chosen.logprob, chosen.rank) == ("a", (97,), -0.5, 1)
    assert events[-1].choices[0].logprobs[0].chosen.bytes is None, "a special token"
    assert events[-1].choices[0].finish_reason == "stop"
    assert [event.timing is not None for event in events] == [False, False, True]
    assert events[-1].timing.decode_ns > 0


def test_texts_are_made_tokens_by_a_call(model: LoadedModel) -> None:
    (answer,) = ask(model, None, generation_call={"task": "tokenize", "prompts": ["hi"]})
    event = EVENT_DECODER.decode(answer.outputs["generation_event"][0])
    assert event.prompts[0].token_ids == (256, 104, 105)


def test_a_failure_before_the_first_token_and_one_after_some_are_both_told(model: LoadedModel) -> None:
    for after in (0, 3):
        answers = ask(model, "x" + script(fail_after=after), stream=True)
        assert failure(answers) == (ErrorCode.INTERNAL.value, "the script says so")
        assert len(answers) == after + 1
    assert failure(ask(model, "x" + script(error_after=2), stream=True))[0] == ErrorCode.INTERNAL.value
    assert failure(ask(model, "x" + script(fail_after=2)))[0] == ErrorCode.INTERNAL.value


def test_what_the_engine_refuses_is_told_as_it_says(model: LoadedModel) -> None:
    assert failure(ask(model, "x" + script(refuse="busy")))[0] == ErrorCode.UNAVAILABLE.value
    assert failure(ask(model, "x" + script(refuse="too_long")))[0] == ErrorCode.INVALID_ARG.value


def test_a_cancelled_request_leaves_the_engine_at_once(model: LoadedModel) -> None:
    batch = model.batch([tensors({"text_input": "x" + script(hold="for ever")})])
    model.execute(batch)
    batch.cancel(0)
    ((answer,),) = model.ended(batch)
    assert answer.code == ErrorCode.CANCELLED.value
    assert model.backend._engine.aborted == [1]
    assert not model.backend._engine._running


def test_a_stream_that_is_held_back_goes_on_where_it_was(model: LoadedModel) -> None:
    batch = model.batch([tensors({"text_input": "x" + script(say="abcdef", hold="pause", at=3), "stream": True})])
    model.execute(batch)
    assert model.streams.wait(batch, lambda answers: len(answers[0]) == 3, 10)
    batch.flow(0, paused=True)
    ask(model, "x" + script(release="pause", say="done"))
    assert len(model.streams.so_far(batch)[0]) == 3, "it said no more"
    batch.flow(0, paused=False)
    (answers,) = model.ended(batch)
    assert "".join(text for (text,) in texts(answers)) == "abcdef"


def test_a_model_that_is_not_decoupled_answers_once(tmp_path: Path) -> None:
    with loaded(ScriptedBackend, case(tmp_path, decoupled=False)) as model:
        (answer,) = model.run(model.batch([tensors({"text_input": "hi"})]))
        assert texts([answer]) == [["hiHello, world!"]]
        (answer,) = model.run(model.batch([tensors({"text_input": "hi", "stream": True})]))
        assert (answer.code, answer.message.partition(":")[0]) == (ErrorCode.INVALID_ARG.value, "stream")
        (answer,) = model.run(model.batch([tensors({"text_input": "x" + script(fail_after=2)})]))
        assert answer.code == ErrorCode.INTERNAL.value
