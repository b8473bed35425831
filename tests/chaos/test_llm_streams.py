"""Many long streams of a language model at once, read in every way: each comes to its end, whole, and nothing is left.

`LLM_STREAM_ROUNDS=100 pytest tests/chaos/test_llm_streams.py` looks for longer.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import scripted_engine
from harness import RunningServer, running
from llm_readers import MODEL, Plan, Readers

ROUNDS = int(os.environ.get("LLM_STREAM_ROUNDS", "2"))
"""Of each kind."""
TOKENS = 2000
BIG = ("chat", "completion", "grpc")
"""The doors whose events are so large that 6000 of them hardly ever fit into the kernel's buffers."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The repository, and the environment in which its backend is found."""
    folder = tmp_path_factory.mktemp("streams")
    scripted_engine.add_model(folder / "models", MODEL, max_model_len=4 * TOKENS)
    return folder / "models", scripted_engine.installed(folder / "site")


@pytest.fixture(scope="module")
def server(installed: tuple[Path, dict[str, str]]) -> Iterator[RunningServer]:
    with running(installed[0], env=installed[1]) as started:
        yield started


@pytest.mark.parametrize(("streams", "per_step"), [(16, 1), (64, 25)])
async def test_streams_that_are_read_in_every_way_are_whole(server: RunningServer, streams: int, per_step: int) -> None:
    readers = Readers(server)
    try:
        for seed in range(ROUNDS):
            chance = random.Random(seed)
            await readers.run([Plan.of(chance, TOKENS, per_step) for _ in range(streams)])
            readers.check_nothing_left()
    finally:
        readers.close()


async def test_what_is_told_while_nobody_reads_is_held_back_and_joined(server: RunningServer) -> None:
    readers = Readers(server)
    followers = await readers.run([Plan(door, "late", 3 * TOKENS, 1, 0, 0.0) for door in BIG])
    readers.check_nothing_left()
    readers.close()
    pieces = sum(follower.pieces for follower in followers)
    assert pieces < 0.8 * len(BIG) * 3 * TOKENS, list(map(str, followers))


@pytest.mark.parametrize("number", range(ROUNDS))
async def test_the_first_streams_of_a_server_are_whole(installed: tuple[Path, dict[str, str]], number: int) -> None:
    with running(installed[0], env=installed[1]) as fresh:
        readers = Readers(fresh)
        await readers.run([Plan.of(random.Random(number), TOKENS // 2, 1, ["fast"]) for _ in range(16)])
        readers.check_nothing_left()
        readers.close()
