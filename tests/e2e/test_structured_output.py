"""What a text has to be, asked with OpenAI's own client of a real server: kept, or refused with the field that is wrong."""

import json
import re

import openai
import pytest

from harness import running
from language_models import tiny_folder

QUESTION = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    tiny_folder(repository / "tiny" / "1")
    (repository / "tiny" / "config.pbtxt").write_text('backend: "llm"\n')
    with (
        running(repository) as server,
        openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def asked_for(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_an_answer_is_of_its_schema(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "sure": {"type": "boolean"}},
        "required": ["name", "sure"],
        "additionalProperties": False,
    }
    told = []
    for seed in range(4):
        answer = client.chat.completions.create(
            model="tiny", messages=QUESTION, response_format=asked_for(schema), max_tokens=150, seed=seed
        )
        (choice,) = answer.choices
        if choice.finish_reason == "stop":
            told.append(json.loads(choice.message.content))
    assert told
    assert all((set(each), type(each["sure"])) == ({"name", "sure"}, bool) for each in told)


def test_a_streamed_text_matches_its_pattern(client):
    chunks = client.completions.create(
        model="tiny", prompt="call ", max_tokens=30, stream=True, extra_body={"structured_outputs": {"regex": r"\d{3}-\d{4}"}}
    )  # fmt: skip
    assert re.fullmatch(r"\d{3}-\d{4}", "".join(chunk.choices[0].text for chunk in chunks))


@pytest.mark.parametrize(
    ("schema", "named"), [({"type": "nope"}, "nope"), ({"properties": {"foo": "bar"}}, "properties.foo")], ids=str
)
def test_a_schema_that_is_none_is_a_bad_request_that_says_where(client, schema, named):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=QUESTION, response_format=asked_for(schema))
    assert named in caught.value.body["message"]
    assert caught.value.body["param"] == "response_format"
