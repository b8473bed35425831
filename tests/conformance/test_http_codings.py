"""Compressed bodies over HTTP, both ways."""

from __future__ import annotations

import gzip
import json
import struct
import zlib

import pytest

from http_door import GOOD, HEADER_LENGTH, error_of

LONG = {"inputs": [{"name": "INPUT0", "shape": [1000], "datatype": "INT32", "data": [7] * 1000}]}


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        ("gzip", "gzip"),
        ("gzip, deflate", "gzip"),
        ("deflate", "deflate"),
        ("gzip;q=0", None),
        ("identity", None),
        ("br", None),
    ],
)
async def test_an_answer_is_encoded_if_and_only_if_it_says_so(door, accept, coding):
    status, headers, body = await door.infer(LONG, Accept_Encoding=accept)
    assert status == 200
    assert headers.get("Content-Encoding") == coding
    text = {"gzip": gzip.decompress, "deflate": zlib.decompress, None: bytes}[coding](body)
    assert json.loads(text)["outputs"][0]["data"] == [7] * 1000


async def test_the_header_length_counts_the_json_before_compression(door):
    status, headers, body = await door.infer(
        LONG | {"parameters": {"binary_data_output": True}}, Accept_Encoding="gzip"
    )
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    plain = gzip.decompress(body)
    size = int(headers[HEADER_LENGTH])
    assert json.loads(plain[:size])["outputs"][0]["parameters"] == {"binary_data_size": 4000}
    assert plain[size:] == struct.pack("<i", 7) * 1000


async def test_errors_are_encoded_as_asked_too(door):
    bad = {"inputs": [{"name": "N" * 2000, "shape": [1], "datatype": "INT8", "data": [300]}]}
    status, headers, body = await door.infer(bad, Accept_Encoding="gzip")
    assert (status, headers["Content-Encoding"]) == (400, "gzip")
    assert "got 300" in error_of(gzip.decompress(body))
    assert "Content-Encoding" not in (await door.infer({}, Accept_Encoding="gzip"))[1]


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, lambda data: zlib.compress(data)[2:-4]])
async def test_compressed_requests_are_read_with_their_binary_part(door, pack):
    head = {"inputs": [{"name": "INPUT0", "shape": [4], "datatype": "UINT8", "parameters": {"binary_data_size": 4}}]}
    text = json.dumps(head).encode()
    coding = "gzip" if pack is gzip.compress else "deflate"
    status, _, body = await door.infer(
        pack(text + b"\1\2\3\4"), Content_Encoding=coding, **{HEADER_LENGTH: str(len(text))}
    )
    assert status == 200
    assert json.loads(body)["outputs"][0]["data"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        ("br", b"x", 415),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), 415),
        ("gzip", gzip.compress(json.dumps(GOOD).encode())[:-3], 400),
        ("gzip", gzip.compress(json.dumps(GOOD).encode()) + b"garbage", 400),
        ("gzip", json.dumps(GOOD).encode(), 400),
        ("gzip", gzip.compress(bytes(50 << 20)), 413),
        ("deflate", zlib.compress(bytes(50 << 20)), 413),
    ],
)
async def test_bad_compressed_bodies_are_refused_and_the_server_stays_well(door, coding, body, status):
    got, headers, answer = await door.infer(body, Content_Encoding=coding)
    assert got == status
    assert error_of(answer)
    assert headers.get("Accept-Encoding") == ("gzip, deflate" if status == 415 else None)
    assert await door.is_well()
