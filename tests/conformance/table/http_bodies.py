"""Rows of the table that only HTTP has: bodies that are no request, and lengths that contradict each other."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

from conformance.table.cases import Case

BECAUSE = "it is a matter of JSON, or of HTTP"
PATH = "/v2/models/text/infer"
GOOD = {"name": "INPUT0", "shape": [1], "datatype": "BYTES", "data": ["a"]}
FLOATS = "/v2/models/four/infer"
HEAD = json.dumps(
    {"inputs": [{"name": "INPUT0", "shape": [4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}]}
).encode()


def _case(name: str, body: Any, says: str = "", code: str = "INVALID_ARG", path: str = PATH, **headers: str) -> Case:
    fixed = {key.replace("_", "-"): value for key, value in headers.items()}
    return Case(
        name,
        lambda ask: ask.call("POST", path, body, fixed),
        code,
        says,
        only="http",
        because=BECAUSE,
    )


def _wrong_kinds() -> Iterator[Case]:
    """A field of the wrong kind: the one that killed a server in the field, and its relatives."""
    input_members: list[tuple[str, Any]] = [
        *[("shape", value) for value in ("-1", {}, [1.5], [None], ["1"], [[1]], None, 1, [True], [2**64], [-1])],
        *[("data", value) for value in ({}, [[1], {}], [{"b64": "AA=="}], "a", 5, None, [None])],
        *[("datatype", value) for value in (5, None, [], {}, True)],
        *[("name", value) for value in (5, None, [], {})],
        *[("parameters", value) for value in ([], "x", 5)],
    ]
    for member, value in input_members:
        yield _case(f"{member} {json.dumps(value)} of an input", {"inputs": [GOOD | {member: value}]}, member)
    members: list[tuple[str, Any]] = [
        *[("inputs", value) for value in ({}, [7], None, "x", [], [[]], [None])],
        *[("outputs", value) for value in ("x", {}, [7], [{}], [{"name": 5}], [{"name": "OUTPUT0", "parameters": []}])],
        *[("parameters", value) for value in ([], "x", 5, True)],
        *[("id", value) for value in (5, [], {}, True)],
    ]
    for member, value in members:
        says = "input" if (member, value) == ("inputs", []) else member
        yield _case(f"{member} {json.dumps(value)} of the request", {"inputs": [GOOD]} | {member: value}, says)
    for missing in ("name", "shape", "datatype", "data"):
        yield _case(
            f"no {missing}", {"inputs": [{key: value for key, value in GOOD.items() if key != missing}]}, missing
        )
    yield _case(
        "the report's own case",
        b'{"inputs":[{"name":"INPUT0","shape":"-1","datatype":"STRING","data":[{"b64":"AA=="}]}]}',
        "shape|datatype",
    )


def _no_json() -> Iterator[Case]:
    whole = json.dumps({"inputs": [GOOD]}).encode()
    for body in (b"", b"[]", b"null", b"5", b'"x"', b"{}", b"\0", b"\xff\xfe", b"{" * 50, b"]", b"\xef\xbb\xbf{}"):
        yield _case(f"the body {body!r}", body)
    for size in (1, len(whole) // 2, len(whole) - 1):
        yield _case(f"a body cut to {size} of {len(whole)} bytes", whole[:size], "JSON|inputs")
    yield _case("a body and more", whole + b"x", "JSON")
    yield _case("a member twice", b'{"inputs":[],"inputs":[]}', "input")
    yield _case("a lone surrogate", whole.replace(b'"a"', b'"\\ud800"'), "JSON|data")
    yield _case("NaN as text", whole.replace(b'"a"', b"NaN"), "data")
    yield _case("a number of 400 digits", whole.replace(b'"a"', b"9" * 400), "data|JSON")


def _deep() -> Iterator[Case]:
    depth = 500_000

    def deep(where: bytes, opening: bytes, closing: bytes) -> bytes:
        return (
            json.dumps({"inputs": [GOOD], "parameters": {"p": "HERE"}})
            .encode()
            .replace(where, opening * depth + closing * depth)
        )

    yield _case("500000 arrays in data", deep(b'["a"]', b"[", b"]"), "nested 100")
    yield _case("500000 arrays in a parameter", deep(b'"HERE"', b"[", b"]"), "nested 100")
    yield _case("500000 arrays that are not closed", deep(b'["a"]', b"[", b"")[:depth], "nested 100")
    yield _case("500000 objects in data", deep(b'["a"]', b'{"a":', b"}"), "nested 100")
    yield _case(
        "101 arrays in data",
        json.dumps({"inputs": [GOOD | {"data": "HERE"}]}).replace('"HERE"', "[" * 101 + "]" * 101).encode(),
        "nested 100",
    )
    for path in ("/v2/repository/index", "/v2/repository/models/simple/load", "/v2/repository/models/simple/unload"):
        yield _case(f"500000 arrays for {path}", b"[" * depth, "nested 100", path=path)
        yield _case(
            f"500000 objects as parameters for {path}",
            b'{"parameters":' + b'{"a":' * depth + b"}" * depth + b"}",
            "nested 100",
            path=path,
        )


def _lengths() -> Iterator[Case]:
    """The binary part and the lengths that tell of it, one thing changed at a time."""
    header = "Inference-Header-Content-Length"
    data = bytes(16)

    def case(name: str, head: bytes, tail: bytes, length: object, says: str) -> Case:
        headers = {} if length is None else {header: str(length)}
        return _case(name, head + tail, says, path=FLOATS, **headers)

    size = len(HEAD)
    yield case("no header length", HEAD, data, None, header)
    yield case("header length 0", HEAD, data, 0, "INPUT0|raw")
    for value in (-1, "abc", "1e3", "", " ", f"{size}.0", f"+{size}", "0x10", "٣", 2**31, 2**63, "9" * 50):
        shown = ascii(value)
        if isinstance(value, str) and not value.isascii():
            continue  # http.client sends Latin-1 alone
        yield case(f"header length {shown}", HEAD, data, value, header)
    yield case("a header length one beyond the body", HEAD, data, size + 17, header)
    yield case("a header length one less than the JSON", HEAD, data, size - 1, "JSON")
    yield case("a header length one more than the JSON", HEAD, data, size + 1, "JSON|INPUT0")
    for wrong in (15, 17, 0, -16, "16", 2**63, 2**64, 1.5, None, True, [16]):
        head = HEAD.replace(b"16", json.dumps(wrong).encode())
        yield case(f"binary_data_size {wrong!r}", head, data, len(head), "INPUT0 binary_data_size")
    yield case("one byte too few", HEAD, data[:-1], size, "INPUT0 16 15")
    yield case("one byte that nobody claims", HEAD, data + b"x", size, "1")
    both = HEAD.replace(b'"shape"', b'"data": [1, 2, 3, 4], "shape"')
    yield case("data and binary_data_size", both, data, len(both), "INPUT0 data binary_data_size")
    none = json.dumps({"inputs": [{"name": "INPUT0", "shape": [4], "datatype": "FP32"}]}).encode()
    yield case("neither data nor binary_data_size", none, b"", None, "INPUT0 data binary_data_size")
    two = json.dumps(
        {"inputs": [json.loads(HEAD)["inputs"][0] | {"name": name} for name in ("INPUT0", "INPUT1")]}
    ).encode()
    yield case("two inputs that claim more than there is", two, data + data[:8], len(two), "INPUT1 16 8")
    yield case(
        "a header length and no binary data",
        none.replace(b"}]", b', "data": [1, 2, 3, 4]}]'),
        b"xx",
        len(none) + 24,
        "",
    )


def _raw() -> Iterator[Case]:
    """A raw request: header length 0, the body is the one input."""
    header = {"Inference-Header-Content-Length": "0"}

    def answered(model: str, body: bytes, wanted: Any) -> Case:
        def check(answer: Any) -> None:
            assert answer.arrays["OUTPUT0"].tolist() == wanted

        return Case(
            f"a raw request of {len(body)} bytes to {model}",
            lambda ask: ask.infer_bytes(model, body, 0),
            check=check,
            only="http",
            because=BECAUSE,
        )

    yield answered("four", bytes(16), [0.0] * 4)
    yield answered("echo", bytes(12), [0.0] * 3)
    yield answered("echo", b"", [])
    yield answered("text", b"a text", [b"a text"])
    yield answered("text", b"", [b""])
    yield _case("a raw request of a wrong size", bytes(15), "INPUT0 15", path=FLOATS, **header)
    yield _case("a raw request of a part of an element", bytes(7), "INPUT0 7", path="/v2/models/echo/infer", **header)
    yield _case("a raw request for two inputs", bytes(128), "simple 2", path="/v2/models/simple/infer", **header)
    yield _case("a raw request for many inputs", bytes(16), "plane 14", path="/v2/models/plane/infer", **header)


def _codings() -> Iterator[Case]:
    whole = json.dumps({"inputs": [GOOD]}).encode()
    for coding in ("br", "zstd", "compress", "gzip, gzip", "gzip2", "x"):
        yield _case(
            f"Content-Encoding: {coding}",
            gzip.compress(whole),
            coding.split(",")[0],
            "UNKNOWN_CODING",
            Content_Encoding=coding,
        )
    for coding, body in [
        ("gzip", gzip.compress(whole)),
        ("deflate", zlib.compress(whole)),
        ("identity", whole),
        ("GZIP", gzip.compress(whole)),
    ]:
        yield _case(f"a body in {coding}", body, code="OK", Content_Encoding=coding)
    for coding in ("gzip", "deflate"):
        yield _case(f"plain text as {coding}", whole, coding, Content_Encoding=coding)
    yield _case("gzip cut short", gzip.compress(whole)[:-9], "gzip", Content_Encoding="gzip")
    yield _case("gzip with a wrong sum", gzip.compress(whole)[:-8] + bytes(8), "gzip", Content_Encoding="gzip")
    yield _case("gzip and more", gzip.compress(whole) + b"more", "gzip", Content_Encoding="gzip")
    halves = gzip.compress(whole[:20]) + gzip.compress(whole[20:])
    yield _case("gzip in two members", halves, code="OK", Content_Encoding="gzip")
    yield _case("deflate without its frame", zlib.compress(whole)[2:-4], code="OK", Content_Encoding="deflate")
    bomb = gzip.compress(bytes(200 << 20), 1)
    yield _case("200 MB of zeros in gzip", bomb, "67108864", "TOO_LARGE", Content_Encoding="gzip")


def _members() -> Iterator[Case]:
    """What the client did not send is not in the answer, not even as null; what it sent is there as it was."""

    def answered(name: str, extra: dict[str, Any], **wanted: Any) -> Case:
        def check(told: Any) -> None:
            assert told.pop("outputs") == [{"name": "OUTPUT0", "datatype": "BYTES", "shape": [1], "data": ["a"]}]
            assert told == {"model_name": "text", "model_version": "1", **wanted}

        return Case(
            name, lambda ask: ask.post(PATH, {"inputs": [GOOD], **extra}), check=check, only="http", because=BECAUSE
        )

    yield answered("an answer without id, parameters and more", {})
    yield answered("an empty id comes back", {"id": ""}, id="")
    yield answered("an id beyond ASCII comes back", {"id": "é-1"}, id="é-1")
    yield answered("null for what may be absent", {"id": None, "parameters": None, "outputs": None})
    yield answered("empty objects for what may be absent", {"parameters": {}, "outputs": []})


def _paths() -> Iterator[Case]:
    def asks(name: str, method: str, path: str, code: str, says: str = "") -> Case:
        return Case(name, lambda ask: ask.call(method, path), code, says, only="http", because=BECAUSE)

    for path in (
        "/",
        "/v1/nothing",
        "/v2/",
        "/v2/nope",
        "/v2/models/simple/",
        "/v2/models/simple/nope",
        "/v2/health",
        "/v2/models//infer",
        "/v2/models/simple/versions",
        "/v2/models/simple/versions/1/",
        "/v2/models/simple/infer/x",
        "/v2/repository",
        "/v2/systemsharedmemory",
        "/v2/trace",
        "/metrics",
    ):
        yield asks(f"the path {path}", "GET", path, "NOT_FOUND", "path")
    for method, path in [
        ("GET", PATH),
        ("POST", "/v2/health/live"),
        ("DELETE", "/v2/models/text"),
        ("PUT", PATH),
        ("POST", "/v2"),
        ("GET", "/v2/repository/index"),
    ]:
        yield asks(f"{method} {path}", method, path, "NO_SUCH_METHOD", "method|allowed|POST|GET")
    yield asks("a query changes nothing", "GET", "/v2/health/live?x=1&y", "OK")
    yield asks("percent-escapes in a name", "GET", "/v2/models/%73imple/ready", "OK")
    yield asks("percent-escapes that are no UTF-8", "GET", "/v2/models/%ff/ready", "INVALID_ARG", "UTF-8")


CASES = [*_wrong_kinds(), *_no_json(), *_deep(), *_lengths(), *_raw(), *_codings(), *_members(), *_paths()]
