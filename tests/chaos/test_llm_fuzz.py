"""Hundreds of hostile requests at every door of a language model: after each, a good one is answered as ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness import RunningServer, running
from language_models import tiny_folder
from llm_hostility import Hostility
from llm_hostility_server import idle, repository_of


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("hostile")
    with running(repository_of(folder / "models", tiny_folder(folder / "model", vocab_size=512))) as started:
        yield started


def test_no_request_stops_the_engine_or_changes_anothers_answer(server: RunningServer) -> None:
    hostility = Hostility(server, seed=1)
    hostility.run(400)
    hostility.close()
    assert hostility.faults == []
    assert idle(server) is None
    assert {"HTTP 200", "HTTP 400", "half sent", "left", "slow readers", "gRPC OK"} <= set(hostility.seen)
