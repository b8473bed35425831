"""RequestReader: bytes in, whole requests out, whatever the pieces in which they come; limits; what ends a connection."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.http.admission import Admission
from headrace.gateway.http.compression import Coding
from headrace.gateway.http.paths import path_of
from headrace.gateway.http.reader import RequestReader, headers_to_read
from headrace.gateway.http.request import Handler, HttpRequest
from headrace.gateway.http.routes import Endpoint, Route
from headrace.gateway.http.settings import HttpSettings

SETTINGS = HttpSettings(max_input_size=100_000, max_body_size=200_000, max_header_line=1000, max_headers=20)
INFER = "/v2/models/m/infer"


def reader(settings: HttpSettings = SETTINGS) -> RequestReader:
    """Return a reader in front of endpoints that are known by kind alone."""
    takes_body = (Endpoint.INFER, Endpoint.LOAD, Endpoint.UNLOAD, Endpoint.INDEX)
    handlers = {
        endpoint: Handler(service=ignored, binary=endpoint is Endpoint.INFER)
        if endpoint in takes_body
        else Handler(reply=ignored)
        for endpoint in Endpoint
    }
    return RequestReader(settings, Admission(settings, handlers).admit, headers_to_read(settings))


def ignored(_request: HttpRequest, _route: Route) -> None:
    return


def post(body: bytes = b"", *headers: str, path: str = INFER, length: bool = True) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", *headers]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


def fed(stream: bytes, cuts: list[int] | None = None, to: RequestReader | None = None) -> list[HttpRequest]:
    """Feed `stream`, cut at the given places, as a connection would: into the room where there is one."""
    to = to or reader()
    edges = [0, *sorted(cut for cut in cuts or () if cut <= len(stream)), len(stream)]
    for start, end in zip(edges, edges[1:], strict=False):
        piece = stream[start:end]
        while piece and not to.ended:
            if to.room is not None:
                count = min(len(to.room), len(piece))
                to.room[:count] = piece[:count]
                to.filled(count)
            else:
                count = min(65536, len(piece))
                to.feed(piece[:count])
            piece = piece[count:]
    return list(to.ready)


def told(request: HttpRequest) -> tuple[int, str]:
    assert request.early is not None
    return request.early.status, json.loads(request.early.body)["error"]


STREAM = b"".join(
    [
        post(b'{"a":1}', "Accept-Encoding: gzip", "X-Empty:", "ACCEPT-encoding:  deflate "),
        b"GET /v2/health/live HTTP/1.1\r\n\r\n",
        post(chunked(b"abc", b"d" * 300, b"e"), "Transfer-Encoding: chunked", length=False),
        post(bytes(range(256)) * 300, "Content-Encoding: gzip"),
        post(b"x" * 30_000, path="/v2/nowhere"),
        post(b"h2c", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ"),
        post(b"", "Content-Type: application/json"),
        b"GET /v2 HTTP/1.0\r\n\r\n",
    ]
)


def check_stream(requests: list[HttpRequest]) -> None:
    assert [bytes(request.body) for request in requests] == [
        b'{"a":1}',
        b"",
        b"abc" + b"d" * 300 + b"e",
        bytes(range(256)) * 300,
        b"x" * 30_000,
        b"h2c",
        b"",
        b"",
    ]
    assert requests[0].text(b"accept-encoding") == "gzip, deflate"
    assert requests[3].coding is Coding.GZIP
    assert [request.keep_alive for request in requests] == [True] * 7 + [False]
    assert [request.old for request in requests] == [False] * 7 + [True]
    assert [request.early is not None for request in requests] == [index == 4 for index in range(8)]


def test_requests_one_after_the_other_are_read_with_their_bodies():
    check_stream(fed(STREAM))


def test_requests_are_read_alike_when_every_byte_comes_alone():
    check_stream(fed(STREAM, list(range(len(STREAM)))))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_requests_are_read_alike_whatever_the_pieces(cuts):
    check_stream(fed(STREAM, cuts))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=30), st.integers(0, 2000), st.lists(st.integers(0, 2000), max_size=5))
def test_damaged_requests_are_refused_or_read_and_never_raise(noise, at, cuts):
    stream = STREAM[:at] + noise + STREAM[at + len(noise) :]
    requests = fed(stream, cuts)
    for request in requests:
        assert (request.target is None) <= (request.early is not None)
        if request.early is not None:
            assert 400 <= told(request)[0] <= 505


def test_a_large_body_is_received_into_its_place():
    under_test = reader()
    under_test.feed(post(b"", "Content-Length: 90000", length=False) + b"begin")
    assert under_test.room is not None
    assert len(under_test.room) == 90000 - 5
    under_test.room[:] = bytes(90000 - 5)
    under_test.filled(90000 - 5)
    (request,) = under_test.ready
    assert bytes(request.body) == b"begin".ljust(90000, b"\0")
    assert fed(post(b"next"), to=under_test)[1].body == b"next"


def test_a_body_that_comes_in_one_piece_is_not_put_together():
    (request,) = fed(post(b"whole"))
    assert type(request.body) is bytes


@pytest.mark.parametrize(
    ("stream", "status", "reason"),
    [
        (post(b"", "Content-Length: 100001", length=False), 413, "a body of 100001 bytes was announced"),
        (post(chunked(b"x" * 60_000, b"x" * 60_000), "Transfer-Encoding: chunked", length=False), 413, "is longer"),
        (post(chunked(*[b"x"] * 65_537), "Transfer-Encoding: chunked", length=False), 413, "more than 65536 chunks"),
        (b"GET /v2/models HTTP/1.1\r\nContent-Length: 65537\r\n\r\n", 413, "the limit for this request is 65536"),
        (post(b"x", "X: " + "y" * 1001), 431, "larger than the server takes"),
        (post(b"x", path="/v2?" + "y" * 1001), 431, "larger than the server takes"),
        (post(b"x", *["X: y"] * 19), 431, "larger than the server takes"),
        (post(b"x", *["X: y"] * 5000)[:-5], 431, "larger than the server takes"),
        (post(b"x", "Transfer-Encoding: gzip, chunked", length=False), 501, "chunked"),
        (post(b"x", "Transfer-Encoding: chunked"), 400, "not well-formed HTTP"),
        (post(b"", "Content-Length: 1", "Content-Length: 1", length=False), 400, "not well-formed HTTP"),
        (post(b"", "Content-Length: 1, 1", length=False), 400, "not well-formed HTTP"),
        (post(b"-1\r\n", "Transfer-Encoding: chunked", length=False), 400, "not well-formed HTTP"),
        (post(b"fffffffffffffffff\r\n", "Transfer-Encoding: chunked", length=False), 400, "not well-formed HTTP"),
        (post(b"", "X: 1\r\n folded"), 400, "not well-formed HTTP"),
        (b"GET /v2 HTTP/1.1\nHost: x\n\n", 400, "not well-formed HTTP"),
        (b"GET /v2 HTTP/2.0\r\n\r\n", 505, "HTTP/2.0 is not served"),
        (b"GET /v2\r\n\r\n", 505, "HTTP/0.9 is not served"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "not well-formed HTTP"),
        (b"CONNECT x:80 HTTP/1.1\r\n\r\nhello", 404, "no such path"),
        (post(b"", "Content-Length: 70000", path="/v2/nowhere", length=False), 404, "no such path"),
        (post(chunked(b"x" * 70_000), "Transfer-Encoding: chunked", path="/no", length=False), 404, "no such path"),
        (post(b"", "Content-Length: 9", "Expect: 100-continue", path="/no", length=False), 404, "no such path"),
    ],
)
def test_what_cannot_be_read_is_refused_and_ends_the_connection(stream, status, reason):
    under_test = reader()
    (request,) = fed(stream, to=under_test)
    got, sentence = told(request)
    assert (got, reason in sentence) == (status, True), sentence
    assert under_test.ended
    assert not request.keep_alive
    assert not request.whole


def test_a_body_may_have_65536_chunks():
    (request,) = fed(post(chunked(*[b"x"] * 65_536), "Transfer-Encoding: chunked", length=False))
    assert (request.early, len(request.body)) == (None, 65_536)


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /", b"a"),
        (b"GET /v2 HTTP/1.1\r\nX: ", b"a"),
        (b"GET /v2 HTTP/1.1\r\n", b"a"),
        (post(b"1", "Transfer-Encoding: chunked", length=False), b"0"),
        (post(b"1;", "Transfer-Encoding: chunked", length=False), b"a"),
        (post(b"0\r\nT: ", "Transfer-Encoding: chunked", length=False), b"a"),
        (post(b"0\r\n", "Transfer-Encoding: chunked", length=False), b"T: a\r\n"),
    ],
)
def test_a_line_or_trailer_section_without_end_is_cut_off(begin, more):
    under_test = reader()
    under_test.feed(begin)
    for _ in range(70_000):
        under_test.feed(more)
        if under_test.ended:
            break
    (request,) = under_test.ready
    assert told(request)[0] in (400, 413, 431)


def test_what_was_read_before_a_fault_is_answered_before_it():
    requests = fed(post(b"good") + b"\0\0nonsense")
    assert [request.early is None for request in requests] == [True, False]


def test_nothing_is_read_after_the_last_request():
    under_test = reader()
    requests = fed(post(b"1", "Connection: close") + post(b"2"), to=under_test)
    assert [request.body for request in requests] == [b"1"]
    assert under_test.ended
    assert under_test.surplus


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [
        ("1.1", None, True),
        ("1.1", "close", False),
        ("1.1", "Close", False),
        ("1.1", "keep-alive", True),
        ("1.0", None, False),
        ("1.0", "keep-alive", True),
    ],
)
def test_a_connection_is_kept_by_the_rules_of_its_version(version, connection, keep_alive):
    header = f"Connection: {connection}\r\n" if connection else ""
    (request,) = fed(f"GET /v2 HTTP/{version}\r\n{header}\r\n".encode())
    assert (request.keep_alive, request.old) == (keep_alive, version == "1.0")


def test_all_headers_are_kept_only_where_some_are_forwarded():
    assert fed(post(b"", "X-Tag: blue"))[0].headers is None
    keeping = HttpSettings(header_forward_pattern="x-")
    assert (b"X-Tag", b"blue") in fed(post(b"", "X-Tag: blue"), to=reader(keeping))[0].headers
    upgrade = post(b"body", "X-Tag: blue", "Connection: upgrade", "Upgrade: h2c")
    (request,) = fed(upgrade, to=reader(keeping))
    assert (b"X-Tag", b"blue") in request.headers
    assert request.body == b"body"


@pytest.mark.parametrize(
    ("url", "path"),
    [
        (b"/v2/models?x=/y", "/v2/models"),
        (b"/v2#f?q", "/v2"),
        (b"http://host:1/v2/models", "/v2/models"),
        (b"http://host", "/"),
        (b"*", "*"),
        (b"//v2", "//v2"),
    ],
)
def test_the_path_of_a_request_target(url, path):
    assert path_of(url) == path
