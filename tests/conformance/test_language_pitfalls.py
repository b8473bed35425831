"""What servers of language models got wrong: each case against a real server, over a model whose tokens are bytes.

The map of pitfalls to tests is pitfalls_of_language_models.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import scripted_engine
from harness import RunningServer, running
from scripted_engine import script

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("language")
    (folder / "models").mkdir()
    environment = scripted_engine.installed(folder / "site")
    scripted_engine.add_model(folder / "models", "chatty", max_model_len=512)
    with running(folder / "models", env=environment) as started:
        yield started


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http}", timeout=30) as made:
        yield made
        answer = made.post(CHAT, json=chat("still well?"))
        assert answer.status_code == 200, "the server goes on"


def chat(text: str = "", **script_of: Any) -> dict[str, Any]:
    asked = text + (script(**script_of) if script_of else "")
    return {"model": "chatty", "messages": [{"role": "user", "content": asked}]}


def completion(text: str = "", **script_of: Any) -> dict[str, Any]:
    return {"model": "chatty", "prompt": text + (script(**script_of) if script_of else "")}


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the chunks of a stream that ends as it should."""
    answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def contents(chunks: list[Any]) -> list[str | None]:
    return [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]


# --- empty deltas while text is held back -----------------------------------------------------------------------------


def test_only_what_may_begin_a_stop_string_is_held_back_and_no_delta_is_empty(client):
    said = "abc 0123456 and 01234 then 0123456789 never"
    chunks = streamed(client, CHAT, {**chat(say=said), "stop": "0123456789"})
    assert contents(chunks)[0] == "", "the one chunk of the role"
    told = [text for text in contents(chunks)[1:-1] if text is not None]
    assert "" not in told
    assert "".join(told) == "abc 0123456 and 01234 then "
    assert told[:4] == ["a", "b", "c", " "], "nothing that cannot begin the stop string waits"
    assert "0123456 " in told, "what waited comes with the first character that cannot go on with it"
    assert contents(chunks)[-1] is None
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == "0123456789"


# --- max_tokens -------------------------------------------------------------------------------------------------------


def test_echo_without_a_token_gives_the_prompt_and_its_log_probabilities(client):
    body = {"model": "chatty", "prompt": "Yes", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = client.post(COMPLETIONS, json={**body, "add_special_tokens": False}).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Yes", "length")
    assert choice["logprobs"]["tokens"] == ["Y", "e", "s"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("member", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize(
    ("value", "status", "tokens", "reason"),
    [
        (0, 400, None, None),
        (-1, 400, None, None),
        (1, 200, 1, "length"),
        (None, 200, 512 - len("<|user|>go<<>><|assistant|>") - 30, "length"),
        (2**31, 200, 512 - len("<|user|>go<<>><|assistant|>") - 30, "length"),
    ],
)
def test_how_many_tokens_a_chat_gets(client, member, value, status, tokens, reason):
    answer = client.post(CHAT, json={**chat("go", say="a", repeat=1000), member: value})
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == member
        return
    (choice,) = answer.json()["choices"]
    usage = answer.json()["usage"]
    assert choice["finish_reason"] == reason
    if value == 1:
        assert usage["completion_tokens"] == tokens
    else:
        assert usage["total_tokens"] == 512, "the window is filled"


def test_of_both_limits_the_newer_one_holds(client):
    answer = client.post(CHAT, json={**chat(say="abcdef"), "max_tokens": 5, "max_completion_tokens": 2}).json()
    assert answer["choices"][0]["message"]["content"] == "ab"


# --- empty prompts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "param"),
    [("", "prompt"), ([""], "prompt[0]"), ([], "prompt"), ([[]], "prompt[0]"), (["a", ""], "prompt[1]")],
)
def test_an_empty_prompt_is_refused_by_its_place(client, prompt, param):
    answer = client.post(COMPLETIONS, json={"model": "chatty", "prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_conversation_without_messages_is_refused(client):
    answer = client.post(CHAT, json={"model": "chatty", "messages": []})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_a_message_without_text_is_fine(client):
    assert client.post(CHAT, json=chat("")).status_code == 200


# --- usage in a stream ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion)], ids=["chat", "completion"])
def test_usage_comes_once_at_the_end_for_those_who_asked(client, path, make, n):
    body = {**make(say=["ab", "abcd"]), "n": n}
    plain = streamed(client, path, body)
    assert not any("usage" in chunk for chunk in plain)
    assert all(chunk["choices"] for chunk in plain)
    asked = streamed(client, path, {**body, "stream_options": {"include_usage": True}})
    assert [chunk["usage"] for chunk in asked[:-1]] == [None] * (len(asked) - 1)
    assert asked[-1]["choices"] == []
    whole = client.post(path, json=body).json()["usage"]
    assert asked[-1]["usage"] == whole
    assert whole["completion_tokens"] == 3 + (5 if n == 2 else 0)
    assert len({chunk["id"] for chunk in asked}) == 1


def test_options_of_a_stream_without_a_stream_are_refused(client):
    answer = client.post(CHAT, json={**chat("x"), "stream_options": {"include_usage": True}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


# --- log probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [0, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_completion_are_complete_and_in_place(client, logprobs, stream):
    body = {**completion("é", say="x🎉yz"), "echo": True, "logprobs": logprobs, "max_tokens": 7, "stop": "zz"}
    if stream:
        choices = [choice for chunk in streamed(client, COMPLETIONS, body) for choice in chunk["choices"]]
    else:
        choices = client.post(COMPLETIONS, json=body).json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    lists = {name: [x for choice in choices for x in choice["logprobs"][name]] for name in choices[0]["logprobs"]}
    prompt = body["prompt"]
    assert text == prompt + "x🎉yz"
    tokens = len(prompt.encode()) + 1 + len("x🎉yz".encode())
    assert [len(one) for one in lists.values()] == [tokens] * 4
    characters = [at for at, character in enumerate(text) for _ in character.encode()]
    starts = [at if first else at + 1 for at, first in begins(text)]
    assert lists["text_offset"] == [0, *starts]
    assert len(characters) + 1 == tokens
    assert {len(top) for top in lists["top_logprobs"] if top} <= {max(1, logprobs), logprobs + 1, 1, *range(1, 7)}


def begins(text: str) -> list[tuple[int, bool]]:
    """Return of each byte of a text the character it belongs to, and whether it is its first."""
    return [(at, not number) for at, character in enumerate(text) for number in range(len(character.encode()))]


@pytest.mark.parametrize(
    ("members", "status", "param"),
    [
        ({"logprobs": True, "top_logprobs": 0}, 200, None),
        ({"logprobs": True, "top_logprobs": 20}, 200, None),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"top_logprobs": 1}, 400, "top_logprobs"),
    ],
)
def test_how_many_likely_tokens_a_chat_may_be_told(client, members, status, param):
    answer = client.post(CHAT, json={**chat("x"), **members})
    assert answer.status_code == status
    if param is None:
        entries = answer.json()["choices"][0]["logprobs"]["content"]
        assert {len(entry["top_logprobs"]) for entry in entries} == {members["top_logprobs"]}
    else:
        assert answer.json()["error"]["param"] == param


def test_no_log_probability_is_lost_while_text_is_held_back(client):
    body = {**chat(say="ab012x"), "stop": "0123456789", "logprobs": True}
    chunks = streamed(client, CHAT, body)
    told = [
        (
            choice["delta"].get("content"),
            [entry["token"] for entry in (choice["logprobs"] or {"content": ()})["content"]],
        )
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    tokens = [token for _, of_chunk in told for token in of_chunk]
    assert tokens[:6] == list("ab012x")
    assert ("012x", ["0", "1", "2", "x"]) in told


# --- failures after the stream began ----------------------------------------------------------------------------------


def failing(server: RunningServer, client: httpx.Client, path: str, body: dict[str, Any], name: str) -> str:
    """Return a stream that fails at its fourth token, once its client has three: `name` is where it waits for that."""
    text = ""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        for piece in answer.iter_text():
            text += piece
            if name and ('"content":"c"' in text or '"text":"c"' in text):
                httpx.post(
                    f"http://{server.http}{COMPLETIONS}", json=completion(release=name)
                )  # it may die with the other
                name = ""
    server.wait_status("/v2/models/chatty/ready", 200)
    return text


@pytest.mark.parametrize("how", ["fail_after", "die_after"])
@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion)], ids=["chat", "completion"])
def test_a_failure_before_the_first_token_is_a_status(server, client, path, make, how):
    answer = client.post(path, json={**make(**{how: 0}), "stream": True})
    assert answer.status_code in (500, 503)
    assert answer.json()["error"]["type"] == "server_error"
    server.wait_status("/v2/models/chatty/ready", 200)


@pytest.mark.parametrize("how", ["fail_after", "die_after", "error_after"])
@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion)], ids=["chat", "completion"])
def test_a_failure_after_three_tokens_is_an_event_and_the_end(server, client, path, make, how):
    name = f"{how}-{path}"
    after = 4 if how == "error_after" else 3  # a choice breaks off with a token
    text = failing(server, client, path, make(say="abcdef", hold=name, at=3, **{how: after}), name)
    *_, error, done, end = text.split("\n\n")
    assert set(json.loads(error.removeprefix("data: "))["error"]) == {"message", "type", "param", "code"}
    assert (done, end) == ("data: [DONE]", "")


@pytest.mark.parametrize("how", ["fail_after", "die_after"])
def test_generate_stream_tells_of_a_failure_too_and_ends(server, client, how):
    name = f"{how}-generate"
    body = {"text_input": script(say="abcdef", hold=name, at=3, **{how: 3})}
    text = ""
    with client.stream("POST", "/v2/models/chatty/generate_stream", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        for piece in answer.iter_text():
            text += piece
            if text.count("data: ") == 3 and name:
                httpx.post(
                    f"http://{server.http}{COMPLETIONS}", json=completion(release=name)
                )  # it may die with the other
                name = ""
    last = text.split("\n\n")[-2]
    assert "error" in json.loads(last.removeprefix("data: "))
    server.wait_status("/v2/models/chatty/ready", 200)


def test_no_choices_are_refused_with_a_status_also_where_they_are_streamed(client):
    answer = client.post(CHAT, json={**chat("x"), "n": 0, "stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


# --- one request, a thousand jobs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"prompt": ["a"] * 100_000}, "prompt"),
        ({"prompt": ["a"] * 1000, "n": 100}, "n"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": "x" * (1 << 20)}, "stop"),
        ({"n": 10**6}, "n"),
        ({"best_of": 10**6}, "best_of"),
        ({"bad_words": ["x"] * 100_000}, "bad_words"),
    ],
)
def test_what_would_be_very_much_work_is_refused_before_it_waits(server, client, members, param):
    before = counted(server)
    answer = client.post(COMPLETIONS, json={"model": "chatty", "prompt": "a", **members})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert counted(server) == before, "no request came to the model"


def counted(server: RunningServer) -> list[str]:
    names = ("nv_inference_count", "nv_inference_request_success", "nv_inference_request_failure")
    return [line for line in server.metrics().splitlines() if line.startswith(names)]


def test_headers_without_number_or_end_are_refused(client):
    many = client.post(CHAT, json=chat("x"), headers={f"x-{number}": "y" for number in range(2_000)})
    assert many.status_code == 431
    large = client.post(CHAT, json=chat("x"), headers={"x-large": "y" * (1 << 17)})
    assert large.status_code == 431
    for answer in (many, large):
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
