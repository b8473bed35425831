"""Every row of the protocol's table, at every door that has it, with the stock clients, against real servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.table import (
    access,
    arrays,
    generate,
    health,
    http_bodies,
    loading,
    memory,
    memory_use,
    models,
    parameters,
    refusals,
    repository,
    settings,
    streams,
)
from conformance.table.asking import asking
from conformance.table.cases import Case, judge, table
from harness import RunningServer, running

FLAGS = (
    *("--model-control-mode=explicit", "--exit-on-error=false", "--strict-readiness=false"),
    *(f"--load-model={name}" for name in models.LOADED),
)
OPEN = ("--allow-client-shm=true", "--allow-model-upload=true", "--trace-config=triton,file={traces}")
"""What is off by default and on for most of the table."""


@pytest.fixture(scope="module")
def open_ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return the client of a door of the server with these flags: the same one each time, for the whole module."""
    folder: Path = tmp_path_factory.mktemp("models")
    models.write(folder)
    traces = tmp_path_factory.mktemp("traces") / "trace.json"
    servers: dict[tuple[str, ...], RunningServer | BaseException] = {}
    opened: dict[tuple[str, ...], Any] = {}
    with contextlib.ExitStack() as stack:

        def open_one(door: str, *flags: str) -> Any:
            if door == "grpcio":
                flags = (*flags, "--grpc-transport=grpcio")
            if flags not in servers:
                try:
                    servers[flags] = stack.enter_context(
                        running(folder, *[flag.format(traces=traces) for flag in flags])
                    )
                except BaseException as error:
                    servers[flags] = error  # it is not tried again for each row
            server = servers[flags]
            if isinstance(server, BaseException):
                raise server
            if (door, *flags) not in opened:
                opened[door, *flags] = stack.enter_context(asking(server, door))
            return opened[door, *flags]

        yield open_one


@pytest.fixture
def ask(door: str, open_ask: Callable[..., Any]) -> Any:
    """A client of the door at hand, of the server that most of the table runs against."""
    return open_ask(door, *FLAGS, *OPEN)


@table(health.CASES)
def test_health_and_names(ask: Any, case: Case) -> None:
    judge(ask, case)


@table(arrays.CASES)
def test_tensors(ask: Any, case: Case) -> None:
    judge(ask, case)


@table(refusals.CASES)
def test_refused_inferences(ask: Any, case: Case) -> None:
    judge(ask, case)


@table(parameters.CASES)
def test_parameters_and_classes(ask: Any, case: Case) -> None:
    judge(ask, case)


@table(http_bodies.CASES)
def test_bodies_over_http(ask: Any, case: Case) -> None:
    judge(ask, case)


@table(repository.CASES, loading.CASES)
def test_the_repository(ask: Any, case: Case) -> None:
    judge(ask, case)


@table(settings.CASES)
def test_settings(ask: Any, case: Case) -> None:
    judge(ask, case)


@pytest.fixture(scope="module")
def planted() -> Iterator[None]:
    with memory.planted():
        yield


@pytest.mark.usefixtures("planted")
@table(memory.CASES, memory_use.CASES)
def test_shared_memory(ask: Any, case: Case) -> None:
    judge(ask, case)


@pytest.mark.usefixtures("planted")
@table(memory.CLOSED_CASES, loading.CLOSED_CASES, settings.CLOSED_CASES)
def test_what_is_off_by_default(open_ask: Callable[..., Any], door: str, case: Case) -> None:
    judge(open_ask(door, *FLAGS), case)


@table(repository.NONE_CASES, doors=("http", "grpc"))
def test_loading_where_it_is_not_allowed(open_ask: Callable[..., Any], door: str, case: Case) -> None:
    judge(open_ask(door, "--exit-on-error=false", "--strict-readiness=false"), case)


@table(streams.CASES, generate.CASES)
def test_streams_and_generate(ask: Any, case: Case) -> None:
    judge(ask, case)


@table(access.RESTRICTED_CASES, doors=("http", "grpc"))
def test_restricted_calls(open_ask: Callable[..., Any], door: str, case: Case) -> None:
    judge(open_ask(door, *FLAGS, *access.FLAGS), case, closed=True)


@table(access.FORWARDED_CASES)
def test_forwarded_headers(open_ask: Callable[..., Any], door: str, case: Case) -> None:
    judge(open_ask(door, *FLAGS, *access.FORWARD), case)
