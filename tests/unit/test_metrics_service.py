"""The metrics service: who gets which format over HTTP, its limits, and its port."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from headrace.clock import SystemClock
from headrace.observability.metrics import MetricsCollector, MetricsServer, ModelMetrics
from headrace_protocol.errors import ErrorCode, InferError
from metrics_scrapes import Models, model, samples, settings


@contextlib.asynccontextmanager
async def serving(*models: ModelMetrics) -> AsyncIterator[str]:
    server = MetricsServer(settings(), MetricsCollector(Models(*models), settings(), SystemClock()))
    port = await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop()


async def test_metrics_are_served_as_text():
    async with serving(model()) as url, aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert samples(await response.text())['nv_inference_count{model="m",version="2"}'] == 4


async def test_openmetrics_is_served_to_whom_prefers_it():
    accept = {"Accept": "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"}
    async with (
        serving(model()) as url,
        aiohttp.ClientSession() as client,
        client.get(f"{url}/metrics", headers=accept) as answer,
    ):
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        assert (await answer.text()).endswith("# EOF\n")


async def test_gzip_is_served_to_whom_accepts_it():
    async with serving(model()) as url, aiohttp.ClientSession(auto_decompress=False) as client:
        async with client.get(f"{url}/metrics", headers={"Accept-Encoding": "gzip"}) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            assert b"nv_inference_count" in gzip.decompress(await response.read())
        async with client.get(f"{url}/metrics", headers={"Accept-Encoding": "identity"}) as response:
            assert "Content-Encoding" not in response.headers


async def test_other_paths_are_404_with_a_hint_and_other_methods_405():
    async with serving() as url, aiohttp.ClientSession() as client:
        async with client.get(f"{url}/") as response:
            assert response.status == 404
            assert "/metrics" in await response.text()
        async with client.post(f"{url}/metrics") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "GET"


async def test_more_scrapes_at_once_than_the_limit_are_refused():
    gate = asyncio.Event()
    entered = asyncio.Semaphore(0)

    class Waiting(MetricsCollector):
        async def collect(self, *, openmetrics: bool = False) -> CollectorRegistry:
            entered.release()
            await gate.wait()
            return await super().collect(openmetrics=openmetrics)

    server = MetricsServer(settings(), Waiting(Models(), settings(), SystemClock()))
    url = f"http://127.0.0.1:{await server.start()}/metrics"
    async with aiohttp.ClientSession() as client:

        async def status() -> int:
            async with client.get(url) as response:
                return response.status

        held = [asyncio.create_task(status()) for _ in range(4)]
        for _ in held:
            await entered.acquire()
        assert await status() == 503
        gate.set()
        assert await asyncio.gather(*held) == [200] * 4
        assert await status() == 200
    await server.stop()


async def test_a_taken_port_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken_settings = settings(argv=(f"--metrics-port={port}",))
        server = MetricsServer(taken_settings, MetricsCollector(Models(), taken_settings, SystemClock()))
        with pytest.raises(InferError, match=f"metrics service cannot listen on 127.0.0.1:{port}") as caught:
            await server.start()
        assert caught.value.code is ErrorCode.UNAVAILABLE
        await server.stop()


async def test_a_port_just_given_up_can_be_taken_at_once():
    server = MetricsServer(settings(), MetricsCollector(Models(), settings(), SystemClock()))
    port = await server.start()
    async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}/metrics") as response:
        await response.read()
    await server.stop()
    again = settings(argv=(f"--metrics-port={port}",))
    server = MetricsServer(again, MetricsCollector(Models(), again, SystemClock()))
    assert await server.start() == port
    await server.stop()


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0; q=0.8, text/plain;q=0.5", True),
        (";;;,,,q=", False),
    ],
)
async def test_openmetrics_is_served_where_it_is_asked_for_and_text_to_anyone_else(accept, openmetrics):
    async with (
        serving(model()) as url,
        aiohttp.ClientSession() as client,
        client.get(f"{url}/metrics", headers={"Accept": accept}) as answer,
    ):
        assert answer.status == 200
        assert answer.content_type == ("application/openmetrics-text" if openmetrics else "text/plain")
        assert (await answer.text()).endswith("# EOF\n") is openmetrics


@pytest.mark.parametrize("version", [b"newest", b"2.\xff", b"", b"1.0.0=1"])
async def test_a_version_that_makes_no_sense_is_no_error(version):
    accept = b"application/openmetrics-text; version=" + version
    async with serving(model()) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: h\r\nConnection: close\r\nAccept: " + accept + b"\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"nv_inference_count" in answer
