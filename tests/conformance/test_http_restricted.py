"""Endpoints that an operator restricts: nothing of them is told to who does not show the header."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headrace.gateway.http.routes import PATHS
from headrace.gateway.restricted import KINDS, by_kind, parse_group
from http_door import GOOD, SETTINGS, error_of, opened

GROUPS = [
    "inference,metadata:X-Key=s3cret",
    f"{','.join(k for k in KINDS if k not in ('inference', 'metadata', 'health'))}:admin=root",
]
RESTRICTED = replace(SETTINGS, restricted=by_kind(map(parse_group, GROUPS)))
NAMES = {"model": "echo", "version": "1", "repository": "r", "region": "x"}


@pytest.mark.parametrize("path", PATHS)
async def test_every_endpoint_but_those_of_open_kinds_is_closed_without_the_header(path):
    endpoint = PATHS[path]
    async with opened(RESTRICTED) as door:
        for method in (*endpoint.methods, "DELETE", "OPTIONS"):
            status, _, body = await door.ask(method, path.format(**NAMES), {})
            if endpoint.kind == "health":
                assert status != 403
                continue
            assert status == 403, "before anything is said about the method"
            header = "x-key" if endpoint.kind in ("inference", "metadata") else "admin"
            told = json.loads(body)["error"]["message"] if endpoint.kind == "openai" else error_of(body)
            assert f"'{header}'" in told
            assert "s3cret" not in told
        assert door.control.calls == door.data.requests == []


async def test_the_header_with_its_value_opens_its_kinds_alone():
    async with opened(RESTRICTED) as door:
        assert (await door.infer(GOOD, x_key="s3cret"))[0] == 200
        assert (await door.infer(GOOD, X_KEY="s3cret"))[0] == 200
        assert (await door.ask("GET", "/v2", x_key="s3cret"))[0] == 200
        assert (await door.ask("GET", "/v2/models/echo/infer", x_key="s3cret"))[0] == 405
        assert (await door.ask("GET", "/v2/models/stats", x_key="s3cret"))[0] == 403
        assert (await door.ask("GET", "/v2/models/stats", admin="root"))[0] == 200


@pytest.mark.parametrize("value", ["", "s3cre", "s3cret2", "S3CRET", "s3cret, s3cret"])
async def test_another_value_opens_nothing(value):
    async with opened(RESTRICTED) as door:
        assert (await door.infer(GOOD, x_key=value))[0] == 403
        assert (await door.infer(GOOD, admin="s3cret"))[0] == 403


async def test_a_header_sent_twice_opens_nothing():
    async with opened(RESTRICTED) as door:
        answer = await door.raw(b"GET /v2 HTTP/1.1\r\nx-key: s3cret\r\nX-Key: s3cret\r\nConnection: close\r\n\r\n")
        assert answer.split()[1] == b"403"


@pytest.mark.parametrize("path", ["//v2", "/v2/", "/%76%32", "/v2/models/echo/%69nfer", "/v2/./models/echo"])
async def test_no_other_spelling_of_a_path_leads_around(path):
    async with opened(RESTRICTED) as door:
        answer = await door.raw(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
        assert answer.split()[1] == b"404"


async def test_a_query_and_an_absolute_form_are_closed_too():
    async with opened(RESTRICTED) as door:
        for target in (b"/v2?x-key=s3cret", b"http://host/v2"):
            answer = await door.raw(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
            assert answer.split()[1] == b"403"
