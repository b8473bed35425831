"""GET /v1/models and the names under which a model is asked for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from openai_door import OpenAIDoor, opened

ONCE = {"prompt": "Once"}


@pytest.fixture
async def door() -> AsyncIterator[OpenAIDoor]:
    async with opened() as started:
        yield started


async def got(door: OpenAIDoor, path: str) -> tuple[int, Any]:
    status, _, answer = await door.ask("GET", path)
    return status, json.loads(answer)


async def test_models_are_listed_under_each_of_their_names(door):
    status, answer = await got(door, "/v1/models")
    assert (status, answer["object"]) == (200, "list")
    told = {model["id"]: (model["root"], model["parent"], model["max_model_len"]) for model in answer["data"]}
    assert told == {
        "chatty": ("chatty", None, 256),
        "embedder": ("embedder", None, 64),
        "talker": ("chatty", None, 256),
        "org/talker": ("chatty", None, 256),
        "poet": ("chatty", "chatty", 256),
    }
    assert {model["object"] for model in answer["data"]} == {"model"}


@pytest.mark.parametrize("path", ["chatty", "talker", "org/talker", "org%2Ftalker", "poet", "chatty/versions/1"])
async def test_a_model_is_found_by_any_of_its_names(door, path):
    status, answer = await got(door, f"/v1/models/{path}")
    assert (status, answer["root"]) == (200, "chatty")
    assert answer["id"] == path.replace("%2F", "/")


@pytest.mark.parametrize("path", ["nope", "echo", "a/b/c", "%ff", ""])
async def test_what_is_no_language_model_is_not_found(door, path):
    status, answer = await got(door, f"/v1/models/{path}")
    assert status == (400 if path == "%ff" else 404)
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("asked", "version", "adapter"), [("talker", -1, None), ("poet", -1, "poet"), ("chatty/versions/1", 1, None)]
)
async def test_a_call_goes_to_the_model_of_that_name(door, asked, version, adapter):
    for _ in range(2):  # the second time the name is known
        task, call = await door.asked("/v1/completions", {**ONCE, "model": asked})
        assert (call.request.model_name, call.request.model_version) == ("chatty", version)
        assert call.call.adapter == adapter
        call.say("x")
        assert (await task)[2]["model"] == asked


async def test_a_name_goes_with_its_model(door):
    task, call = await door.asked("/v1/completions", {**ONCE, "model": "talker"})
    call.say("x")
    await task
    del door.data.cards["chatty"]
    status, _, answer = await door.post("/v1/completions", {**ONCE, "model": "talker"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_the_fingerprint_changes_with_the_model(door):
    seen = set()
    for length in (256, 256, 128):
        card = door.data.cards["chatty"]
        door.data.cards["chatty"] = type(card)(max_model_len=length, vocab_size=10)
        task, call = await door.asked("/v1/completions", {**ONCE, "model": "chatty"})
        call.say("x")
        seen.add((await task)[2]["system_fingerprint"])
    assert len(seen) == 2
