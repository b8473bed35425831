"""The edge table of gRPC."""

import grpc
import pytest

from headrace.gateway.grpc.errors import NUMBER, STATUS, details
from headrace_protocol.errors import ErrorCode


def test_every_code_has_a_status_other_than_ok():
    assert set(STATUS) == set(NUMBER) == set(ErrorCode)
    assert grpc.StatusCode.OK not in STATUS.values()


def test_the_table_is_that_of_the_protocol():
    assert NUMBER == {
        ErrorCode.UNKNOWN: 2,
        ErrorCode.INTERNAL: 13,
        ErrorCode.NOT_FOUND: 5,
        ErrorCode.INVALID_ARG: 3,
        ErrorCode.UNAVAILABLE: 14,
        ErrorCode.UNSUPPORTED: 12,
        ErrorCode.ALREADY_EXISTS: 6,
        ErrorCode.CANCELLED: 1,
    }


def test_a_short_sentence_is_kept_as_it_is():
    assert details("input 'é' is missing") == "input 'é' is missing"


@pytest.mark.parametrize("character", ["x", "é", "😀"])
def test_a_long_sentence_is_cut_to_what_a_trailer_holds(character):
    cut = details(character * 5000)
    assert len(cut.encode()) <= 2003
    assert set(cut) == {character, "."}
