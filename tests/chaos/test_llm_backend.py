"""A language model whose process is killed, or that is loaded anew, while many are being answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from figures import backend_pid
from harness import RunningServer, running
from language_models import tiny_folder
from llm_hostility_server import idle, repository_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
SHORT = {"model": "tiny", "messages": [{"role": "user", "content": "well?"}], "temperature": 0, "max_tokens": 8}
LONG = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "go"}],
    "max_tokens": 3900,
    "ignore_eos": True,
    "seed": 1,
}
AT_ONCE_S = 5.0
"""On a busy machine; whoever hung would hang for ever."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("killed")
    model = tiny_folder(folder / "model", vocab_size=512, max_position_embeddings=4096)
    limits = {"max_model_len": 4096, "num_gpu_blocks_override": 4200}
    repository = repository_of(folder / "models", model, **limits)
    with running(repository, "--model-control-mode=explicit", "--load-model=tiny") as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: RunningServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{server.http}", timeout=60) as made:
        yield made


async def short(client: httpx.AsyncClient) -> Any:
    answer = await client.post(CHAT, json=SHORT)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


class Streamed:
    """A long chat, streamed; or a generate_stream."""

    def __init__(self, client: httpx.AsyncClient, path: str = CHAT) -> None:
        self.began = asyncio.Event()
        self.text = ""
        self.task = asyncio.create_task(self._read(client, path))

    async def _read(self, client: httpx.AsyncClient, path: str) -> None:
        body: dict[str, Any] = {**LONG, "stream": True}
        if path != CHAT:
            body = {
                "text_input": "go",
                "stream": True,
                "parameters": {"max_tokens": 3900, "ignore_eos": True, "seed": 1},
            }
        async with client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            async for piece in answer.aiter_text():
                self.text += piece
                if self.text.count("data: ") > 2:
                    self.began.set()


async def test_what_a_killed_process_was_saying_fails_at_once_and_it_comes_back(
    server: RunningServer, client: httpx.AsyncClient
) -> None:
    expected = await short(client)
    streams = [Streamed(client) for _ in range(4)] + [Streamed(client, "/v2/models/tiny/generate_stream")]
    whole = [asyncio.create_task(client.post(CHAT, json=LONG)) for _ in range(2)]
    await asyncio.wait_for(asyncio.gather(*(stream.began.wait() for stream in streams)), 60)
    os.kill(backend_pid(server, "tiny"), signal.SIGKILL)
    killed = time.monotonic()
    await asyncio.gather(*(stream.task for stream in streams))
    answers = await asyncio.gather(*whole)
    assert time.monotonic() - killed < AT_ONCE_S
    for stream in streams:
        last = stream.text.removesuffix("data: [DONE]\n\n").rstrip().rpartition("data: ")[2]
        error = json.loads(last)["error"]
        message = error if isinstance(error, str) else error["message"]
        assert "backend process" in message
    for answer in answers:
        assert answer.status_code == 503, answer.text
        assert "backend process" in answer.json()["error"]["message"]
    await asyncio.to_thread(server.wait_for_log, "tiny:1 serves again", 120)
    assert await short(client) == expected
    assert "left behind" not in str(idle(server))


@contextlib.contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """Have the system refuse every new descriptor of a process."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


async def test_an_answer_for_which_there_is_no_descriptor_fails_alone(
    server: RunningServer, client: httpx.AsyncClient
) -> None:
    process = backend_pid(server, "tiny")
    large = {**SHORT, "max_tokens": 200, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    expected = await short(client)
    stream = Streamed(client)
    await asyncio.wait_for(stream.began.wait(), 60)
    with no_descriptors(process):
        refused = await client.post(CHAT, json=large)
        assert refused.status_code == 503, refused.text
        assert "Too many open files" in refused.json()["error"]["message"]
        assert await short(client) == expected
    assert not stream.task.done(), "it was under way meanwhile"
    await stream.task
    assert stream.text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in stream.text
    answer = await client.post(CHAT, json=large)
    assert answer.status_code == 200, answer.text
    assert backend_pid(server, "tiny") == process
    assert "left behind" not in str(idle(server))


async def test_loading_anew_loses_nothing_that_was_accepted(server: RunningServer, client: httpx.AsyncClient) -> None:
    expected = await short(client)
    before = backend_pid(server, "tiny")
    stopped = asyncio.Event()

    async def ask() -> int:
        count = 0
        while not stopped.is_set():
            assert await short(client) == expected
            count += 1
        return count

    asking = [asyncio.create_task(ask()) for _ in range(4)]
    stream = Streamed(client)
    await asyncio.wait_for(stream.began.wait(), 60)
    answer = await client.post("/v2/repository/models/tiny/load", json={"parameters": {"config": json.dumps(NAMED)}})
    assert answer.status_code == 200, answer.text
    assert await short(client) == expected
    assert backend_pid(server, "tiny") != before
    stopped.set()
    assert min(await asyncio.gather(*asking)) > 0
    await stream.task
    assert stream.text.endswith("data: [DONE]\n\n")
    assert '"error"' not in stream.text
    assert '"finish_reason":"length"' in stream.text


NAMED = {"name": "tiny", "backend": "llm", "parameters": {"again": {"string_value": "1"}}}
"""Something of the configuration is another, so that the model is loaded anew."""
