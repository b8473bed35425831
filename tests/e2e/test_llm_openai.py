"""SmolLM2-135M as a user starts it, asked by OpenAI's own client: every form of answer, many clients at once, and those who leave."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from figures import backend_pid, wait_until
from harness import RunningServer, running
from llm_doors import figure

MODEL = "smollm2"
TEMPLATE = """{% if tools %}<|im_start|>system
You call functions. They are:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}To call one write <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call> and nothing else.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for call in message.tool_calls or [] %}<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>
{%- else %}{{ message['content'] }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."
TOWN = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 16}},
    "required": ["town"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": told, "parameters": TOWN}}
    for name, told in (("get_weather", "Tell the weather of a town"), ("get_time", "Tell what time it is in a town"))
]


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


WORD = {"type": "string", "maxLength": 12}
SCHEMAS = [
    thing(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    thing(colours={"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3}),
    thing(ok={"type": "boolean"}, why={"anyOf": [WORD, {"type": "null"}]}),
    thing(at={"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"}, day={"type": "string", "format": "date"}),
    thing(x={"type": "number", "minimum": 0, "maximum": 1}, inner=thing(y=WORD)),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    folder = repository / MODEL / "1"
    folder.mkdir(parents=True)
    settings = {"model": str(smollm2), "max_model_len": 1024, "num_gpu_blocks_override": 400}
    # Without the prefix cache the same prompt is computed in the same pieces, so that bf16 rounds alike.
    settings |= {"enable_prefix_caching": False, "chat_template": TEMPLATE, "tool_call_parser": "hermes"}
    (folder / "model.json").write_text(json.dumps(settings))
    with running(repository) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(server: RunningServer) -> Iterator[None]:
    yield
    wait_until("all blocks are back and nothing runs", lambda: idle(server))


def idle(server: RunningServer) -> bool:
    names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    return all(figure(server, f"headrace_llm_{name}", MODEL) == 0 for name in names)


def asking(text: str, **more: Any) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def text_of(answer: Any) -> str:
    (choice,) = answer.choices
    return str(choice.message.content)


def pieces(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_a_chat_answers_and_counts(client: OpenAI) -> None:
    answer = client.chat.completions.create(**asking(FRANCE))
    assert text_of(answer) == PARIS
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    told = asked_of(client, "tokenize", messages=asking(FRANCE)["messages"])
    assert answer.usage.prompt_tokens == told["count"]
    assert answer.usage.total_tokens == told["count"] + answer.usage.completion_tokens


def asked_of(client: OpenAI, path: str, **body: Any) -> Any:
    root = str(client.base_url).removesuffix("/v1/")
    return client.post(f"{root}/{path}", body={"model": MODEL, **body}, cast_to=object)


@pytest.mark.parametrize(
    "more", [{}, {"temperature": 0.9, "seed": 5}, {"stop": [" fox"]}], ids=["greedy", "drawn", "stop"]
)
def test_the_pieces_of_a_stream_are_the_whole_answer(client: OpenAI, more: Any) -> None:
    asked = asking(
        "Repeat: the quick brown fox jumps. Then write a line in French.", max_tokens=24, **{"temperature": 0} | more
    )
    whole = client.chat.completions.create(**asked)
    *told, usage = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert pieces(told) == text_of(whole)
    assert told[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert usage.usage == whole.usage or usage.usage.model_dump() == whole.usage.model_dump()


def test_completions_of_several_prompts_keep_their_order(client: OpenAI) -> None:
    prompts = ["The capital of France is", "One, two, three, four,"]
    asked: Any = {"model": MODEL, "temperature": 0, "max_tokens": 3}
    together = client.completions.create(prompt=prompts, **asked)
    assert [choice.index for choice in together.choices] == [0, 1]
    assert "Paris" in together.choices[0].text
    assert "five" in together.choices[1].text
    echoed = client.completions.create(prompt=prompts[0], echo=True, logprobs=1, **asked).choices[0]
    assert echoed.text.startswith(prompts[0])
    assert echoed.logprobs is not None and "".join(echoed.logprobs.tokens or ()) == echoed.text


def weather(town: str) -> list[Any]:
    arguments = json.dumps({"town": town})
    call = {"id": f"call_{town}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "user", "content": f"What is the weather in {town}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_calls_a_tool_by_itself_is_understood(client: OpenAI, stream: bool) -> None:
    asked: Any = asking("", tools=TOOLS, max_tokens=60)
    asked["messages"] = [*weather("Rome"), *weather("Oslo"), *weather("Bath"), *weather("Paris")[:1]]
    if stream:
        with client.chat.completions.stream(**asked) as events:
            answer: Any = events.get_final_completion()
    else:
        answer = client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"town": "Paris"})


@pytest.mark.parametrize("named", [None, "get_time"])
def test_a_tool_that_has_to_be_called_is_called_with_arguments_of_its_schema(client: OpenAI, named: str | None) -> None:
    choice: Any = "required" if named is None else {"type": "function", "function": {"name": named}}
    for seed in range(3):
        asked = asking(
            "What now in Paris?", tools=TOOLS, tool_choice=choice, temperature=1.0, seed=seed, max_tokens=120
        )
        answer = client.chat.completions.create(**asked).choices[0]
        assert answer.message.tool_calls, answer
        for call in answer.message.tool_calls:
            assert call.type == "function"
            assert call.function.name in ({named} if named else {"get_weather", "get_time"})
            if answer.finish_reason != "length":
                jsonschema.validate(json.loads(call.function.arguments), TOWN)


def test_a_hundred_of_a_hundred_answers_keep_to_their_schema(client: OpenAI) -> None:
    def ask(number: int) -> tuple[dict[str, Any], Any]:
        schema = SCHEMAS[number % len(SCHEMAS)]
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
        question = f"Describe thing {number} as JSON."
        asked = asking(question, response_format=form, temperature=1.0, seed=number, max_tokens=256)
        return schema, client.chat.completions.create(**asked).choices[0]

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(100)))
    for schema, choice in answers:
        assert choice.finish_reason == "stop", choice
        checker = jsonschema.FormatChecker()
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(choice.message.content))
    assert len({choice.message.content for _, choice in answers}) > 50


def test_texts_keep_to_patterns_choices_and_any_json(client: OpenAI) -> None:
    def ask(**constraint: Any) -> str:
        more = (
            {"extra_body": {"structured_outputs": constraint}}
            if constraint
            else {"response_format": {"type": "json_object"}}
        )
        return text_of(client.chat.completions.create(**asking("A date, please.", max_tokens=120, **more)))

    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", ask(regex=r"\d{4}-\d{2}-\d{2}"))
    assert ask(choice=["tomorrow", "today"]) in {"tomorrow", "today"}
    assert ask().startswith("{")


def test_log_probabilities_are_those_of_the_tokens(client: OpenAI) -> None:
    answer = client.chat.completions.create(**asking(FRANCE, logprobs=True, top_logprobs=3)).choices[0]
    assert answer.logprobs is not None
    entries = answer.logprobs.content or []
    assert "".join(entry.token for entry in entries).removesuffix("<|im_end|>") == PARIS
    for entry in entries:
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy takes the likeliest"
        assert sum(math.exp(each.logprob) for each in entry.top_logprobs) <= 1.001


def test_choices_are_drawn_apart_and_a_seed_draws_them_again(client: OpenAI) -> None:
    asked = asking("Tell me a story.", n=3, seed=7, temperature=1.0, max_tokens=12)
    first, second = (
        [each.message.content for each in client.chat.completions.create(**asked).choices] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 3


def test_stop_strings_and_lengths_end_a_text(client: OpenAI) -> None:
    answer = client.chat.completions.create(**asking(FRANCE, stop=[" Paris"])).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("The capital of France is", "stop")
    answer = client.chat.completions.create(**asking(FRANCE, max_completion_tokens=2)).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("The capital", "length")


def test_vectors_say_what_is_alike(client: OpenAI) -> None:
    texts = ["The cat sits on the mat.", "A cat is sitting on a mat.", "Interest rates rose again."]
    answer = client.embeddings.create(model=MODEL, input=texts)
    one, other, far = (each.embedding for each in answer.data)
    assert len(one) == 576
    assert math.isclose(math.hypot(*one), 1, rel_tol=1e-3)
    product = [sum(a * b for a, b in zip(one, each, strict=True)) for each in (other, far)]
    assert product[0] > product[1]


def test_tokens_go_there_and_back(client: OpenAI) -> None:
    text = "Zwölf Boxkämpfer 🎉"
    tokens = asked_of(client, "tokenize", prompt=text)["tokens"]
    assert asked_of(client, "detokenize", tokens=tokens) == {"prompt": text}


def test_clients_at_once_each_get_their_own(client: OpenAI) -> None:
    def ask(number: int) -> str:
        asked = asking(FRANCE) if number % 2 else asking(f"Say the number {number}.", max_tokens=8)
        if number % 3:
            return text_of(client.chat.completions.create(**asked))
        return pieces(client.chat.completions.create(**asked, stream=True))

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(32)))
    assert set(answers[1::2]) == {PARIS}


async def test_whoever_leaves_ends_their_generation_and_nobody_elses(server: RunningServer) -> None:
    async with AsyncOpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=60) as client:
        long: Any = asking("Count to a thousand.", max_tokens=900)
        long["extra_body"] = {"ignore_eos": True}
        made = generated(server)
        streams = [await client.chat.completions.create(**long, stream=True) for _ in range(3)]
        waiting = [asyncio.create_task(client.chat.completions.create(**long)) for _ in range(2)]
        for stream in streams:
            async for _ in first_of(stream, 3):
                pass
        await asyncio.to_thread(
            wait_until, "all five run", lambda: figure(server, "headrace_llm_num_requests_running", MODEL) == 5
        )
        for stream in streams:
            await stream.close()
        for task in waiting:
            task.cancel()
        assert text_of(await client.chat.completions.create(**asking(FRANCE))) == PARIS
        await asyncio.to_thread(wait_until, "none of the five runs", lambda: idle(server))
        at_rest = generated(server)
        assert at_rest - made < 5 * 450, "they went on to their end"
        assert text_of(await client.chat.completions.create(**asking(FRANCE))) == PARIS
        assert generated(server) - at_rest <= 9, "somebody is still generated for"


def generated(server: RunningServer) -> float:
    return figure(server, "headrace_llm_generation_tokens_total", MODEL)


async def first_of(stream: Any, count: int) -> Any:
    for _ in range(count):
        yield await anext(stream)


def test_refusals_are_the_clients_own_errors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asking("many words " * 2000))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**asking("x"), "model": "nobody"})


README = (Path(__file__).resolve().parents[2] / "README.md").read_text().partition("## Language models")[2]


def typed(server: RunningServer, argv: list[str], **more: Any) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_readme_says_to_type_answers(server: RunningServer) -> None:
    """At the makers' temperature, which the sample's settings have."""
    text = README.partition("\n## ")[0].replace("localhost:8000", server.http)
    if shutil.which("curl"):
        command = text.partition("```sh\n")[2].partition("```")[0].replace("\\\n", " ")
        answer = json.loads(typed(server, shlex.split(command.replace('"messages"', '"temperature": 0.2, "messages"'))))
        assert "Paris" in answer["choices"][0]["message"]["content"]
    program = textwrap.dedent(text.partition("(`pip install openai`):\n")[2])
    asked = program.replace("stream=True", "stream=True, temperature=0.2")
    assert "Paris" in typed(server, [sys.executable, "-c", asked])
    chat = next(line for line in text.splitlines() if "headrace chat" in line).partition("#")[0].split()[1:]
    argv = [sys.executable, "-m", "headrace", *chat, "--temperature", "0.2", "--message", FRANCE]
    assert "Paris" in typed(server, argv)


def test_a_new_process_draws_the_same_by_a_seed(client: OpenAI, server: RunningServer) -> None:
    asked = asking("Tell me a story.", n=2, seed=11, temperature=1.0, max_tokens=12)
    before = [each.message.content for each in client.chat.completions.create(**asked).choices]
    os.kill(backend_pid(server, MODEL), signal.SIGKILL)
    server.wait_for_log(f"{MODEL}:1 serves again", 120)
    assert [each.message.content for each in client.chat.completions.create(**asked).choices] == before
