"""A model of random weights calls the tools that it has to, with arguments that keep to their schemas, whatever it thinks of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from harness import RunningServer, running
from language_models import byte_tokenizer, tiny_folder

ASKED = 12
SIZES = {"type": "string", "enum": ["small", "large"]}
SCHEMAS: dict[str, Any] = {
    "order": {
        "type": "object",
        "properties": {"size": {"$ref": "#/$defs/size"}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["size", "count"],
        "additionalProperties": False,
        "$defs": {"size": SIZES},
    },
    "cancel": {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}},
        "required": ["sure"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in SCHEMAS.items()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tiny_folder(tmp_path_factory.mktemp("tiny") / "model", tokenizer=byte_tokenizer(), vocab_size=512)
    repository = tmp_path_factory.mktemp("models")
    (repository / "tiny" / "1").mkdir(parents=True)
    settings = {
        "model": str(folder),
        "max_model_len": 512,
        "num_gpu_blocks_override": 256,
        "tool_call_parser": "hermes",
    }
    (repository / "tiny" / "1" / "model.json").write_text(json.dumps(settings))
    with running(repository, ready=False) as started:
        started.wait_ready(180)  # a busy machine compiles kernels for a while
        yield started


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(client: OpenAI, seed: int, choice: Any) -> Any:
    return client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        seed=seed,
        temperature=1,
    ).choices[0]


def checked(choice: Any) -> str:
    (call,) = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert choice.message.content is None
    return call.function.name


def test_each_required_call_is_of_a_tool_and_keeps_to_its_schema(client: OpenAI) -> None:
    with ThreadPoolExecutor(ASKED) as pool:
        choices = list(pool.map(lambda seed: ask(client, seed, "required"), range(ASKED)))
    assert {checked(choice) for choice in choices} == set(SCHEMAS)
    assert {choice.finish_reason for choice in choices} == {"tool_calls"}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": "bar"}},
        {"properties": {"a": {"type": "nope"}}},
        {"properties": {"a": {"$ref": "#/$defs/nothing"}}, "required": ["a"]},
        {"properties": {"a": {"pattern": "(", "type": "string"}}, "required": ["a"]},
    ],
)
def test_a_schema_that_cannot_be_kept_is_told_before_anything_is_generated(client: OpenAI, schema: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], tools=[tool], tool_choice=choice
            )
        assert refused.value.param == "tools"


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_tool_is_called_and_no_other(client: OpenAI, name: str) -> None:
    choice = ask(client, 1, {"type": "function", "function": {"name": name}})
    assert checked(choice) == name
    assert choice.finish_reason == "stop"
