"""Content codings: inflating under a limit, what damaged bodies get, and how the answer's coding is chosen."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest

from headrace.gateway.http.compression import Coding, compress, inflate, request_coding, response_coding
from headrace.gateway.http.errors import HttpError
from headrace_protocol.errors import ErrorCode, InferError

TEXT = b"headrace leads water to a turbine. " * 100
LIMIT = 1 << 20


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


ENCODED = {
    "gzip": (Coding.GZIP, gzip.compress(TEXT)),
    "zlib": (Coding.DEFLATE, zlib.compress(TEXT)),
    "raw": (Coding.DEFLATE, raw_deflate(TEXT)),
}


@pytest.mark.parametrize("form", ENCODED)
def test_each_form_is_inflated(form):
    coding, body = ENCODED[form]
    assert inflate(body, coding, LIMIT) == TEXT


def test_identity_passes_through():
    assert inflate(TEXT, Coding.IDENTITY, 1) is TEXT


@pytest.mark.parametrize("form", ENCODED)
def test_a_body_of_exactly_the_limit_passes_and_one_byte_more_does_not(form):
    coding, body = ENCODED[form]
    assert inflate(body, coding, len(TEXT)) == TEXT
    with pytest.raises(HttpError, match=f"larger than {len(TEXT) - 1} bytes") as caught:
        inflate(body, coding, len(TEXT) - 1)
    assert caught.value.status == 413


def test_a_bomb_costs_no_more_than_the_limit():
    bomb = gzip.compress(bytes(100 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(HttpError):
            inflate(bomb, Coding.GZIP, LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 4 * LIMIT
    finally:
        tracemalloc.stop()


def test_members_of_gzip_are_joined_and_bounded_together():
    body = gzip.compress(b"a" * 600) + gzip.compress(b"") + gzip.compress(b"b" * 600)
    assert inflate(body, Coding.GZIP, LIMIT) == b"a" * 600 + b"b" * 600
    with pytest.raises(HttpError, match="larger than 1000 bytes"):
        inflate(body, Coding.GZIP, 1000)


def test_a_member_that_crosses_a_reading_step_is_followed_by_the_next():
    noise = bytes(range(256)) * 300
    stored = gzip.compress(noise, compresslevel=0)
    assert len(stored) > 65536
    assert inflate(stored * 3, Coding.GZIP, LIMIT) == noise * 3


def test_too_many_members_are_refused():
    with pytest.raises(InferError, match="more than 10000 members"):
        inflate(gzip.compress(b"") * 10001, Coding.GZIP, LIMIT)


@pytest.mark.parametrize("form", ENCODED)
@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_body_cut_short_is_refused(form, cut):
    coding, body = ENCODED[form]
    with pytest.raises(InferError, match="ends before its data") as caught:
        inflate(body[:-cut], coding, LIMIT)
    assert caught.value.code is ErrorCode.INVALID_ARG


@pytest.mark.parametrize("form", ENCODED)
@pytest.mark.parametrize("garbage", [b"x", b"\0\0\0", b'{"inputs":[]}'])
def test_bytes_after_the_end_are_refused(form, garbage):
    coding, body = ENCODED[form]
    with pytest.raises(InferError) as caught:
        inflate(body + garbage, coding, LIMIT)
    assert caught.value.code is ErrorCode.INVALID_ARG


@pytest.mark.parametrize("coding", [Coding.GZIP, Coding.DEFLATE])
@pytest.mark.parametrize("body", [b'{"inputs":[]}', b"\x1f\x8b", b"\xff" * 100, TEXT])
def test_what_is_not_compressed_is_refused(coding, body):
    with pytest.raises(InferError):
        inflate(body, coding, LIMIT)


def test_a_wrong_checksum_is_refused():
    body = bytearray(gzip.compress(TEXT))
    body[-6] ^= 1
    with pytest.raises(InferError, match="damaged"):
        inflate(bytes(body), Coding.GZIP, LIMIT)


@pytest.mark.parametrize(
    ("values", "coding"),
    [
        ([], Coding.IDENTITY),
        ([""], Coding.IDENTITY),
        (["identity"], Coding.IDENTITY),
        (["GZip"], Coding.GZIP),
        (["x-gzip"], Coding.GZIP),
        ([" deflate "], Coding.DEFLATE),
        (["identity, gzip"], Coding.GZIP),
    ],
)
def test_content_encoding_is_read(values, coding):
    assert request_coding(values) is coding


@pytest.mark.parametrize("values", [["br"], ["gzip, gzip"], ["gzip", "deflate"], ["gzip;q=1"], ["*"]])
def test_other_content_encodings_are_refused_with_the_accepted_list(values):
    with pytest.raises(HttpError) as caught:
        request_coding(values)
    assert caught.value.status == 415
    assert caught.value.headers == {"Accept-Encoding": "gzip, deflate"}


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        ("gzip", Coding.GZIP),
        ("deflate, gzip", Coding.DEFLATE),
        ("gzip, deflate", Coding.GZIP),
        ("gzip, deflate, br, zstd", Coding.GZIP),
        ("gzip;q=0", Coding.IDENTITY),
        ("gzip;q=0, deflate", Coding.DEFLATE),
        ("gzip;q=0.000", Coding.IDENTITY),
        ("gzip;q=0.4, deflate;q=0.5", Coding.DEFLATE),
        ("gzip;q=0.5, identity;q=0.8", Coding.IDENTITY),
        ("identity, gzip", Coding.IDENTITY),
        ("GZIP ; Q=1", Coding.GZIP),
        ("identity", Coding.IDENTITY),
        ("br", Coding.IDENTITY),
        ("*", Coding.IDENTITY),
        ("", Coding.IDENTITY),
        ("gzip;q=nan", Coding.IDENTITY),
        ("gzip;q=2", Coding.IDENTITY),
        ("gzip;q=x, deflate;q=0.1", Coding.DEFLATE),
        (";;,=;q=,", Coding.IDENTITY),
    ],
)
def test_the_answer_takes_the_coding_with_the_highest_weight(accept, coding):
    assert response_coding(accept) is coding


@pytest.mark.parametrize("coding", list(Coding))
def test_what_is_compressed_here_can_be_inflated_here(coding):
    assert inflate(compress(TEXT, coding), coding, LIMIT) == TEXT


def test_answers_are_readable_by_standard_decoders():
    assert gzip.decompress(compress(TEXT, Coding.GZIP)) == TEXT
    assert zlib.decompress(compress(TEXT, Coding.DEFLATE)) == TEXT
