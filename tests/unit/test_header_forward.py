"""Headers that become request parameters."""

import pytest

from headrace.config import load_config
from headrace.gateway.header_forward import compile_pattern, forward
from headrace.options import UsageError
from headrace.types import InferenceRequest
from headrace_protocol.errors import ErrorCode, InferError


def forwarded(pattern, headers, parameters=None):
    request = InferenceRequest("m")
    request.parameters = parameters
    compiled = compile_pattern(pattern)
    assert compiled is not None
    forward(request, headers, compiled)
    return request.parameters


def test_no_pattern_forwards_nothing():
    assert compile_pattern("") is None


def test_names_are_searched_without_regard_to_case():
    headers = [(b"X-Tenant", b"a"), (b"my-x-tenant", b"b"), (b"other", b"c")]

    assert forwarded("x-ten", headers) == {"X-Tenant": "a", "my-x-tenant": "b"}


def test_case_counts_where_the_pattern_says_so():
    assert forwarded("(?-i)X-", [(b"X-Tenant", b"a"), (b"x-tenant", b"b")]) == {"X-Tenant": "a"}


def test_text_and_bytes_are_taken_alike():
    headers = [("a", "é"), ("b-bin", b"\xff\x00"), (b"c", "é".encode()), (b"d", b" \xe9 ")]

    assert forwarded(".", headers) == {"a": "é", "b-bin": "ÿ\0", "c": "é", "d": "é"}


def test_a_header_goes_before_a_parameter_of_its_name():
    assert forwarded("a", [("a", "header")], {"a": "parameter", "b": 1}) == {"a": "header", "b": 1}


@pytest.mark.parametrize("name", ["sequence_id", "priority", "timeout", "headers", "triton_final_response"])
def test_a_reserved_name_is_refused(name):
    with pytest.raises(InferError, match=f"'{name}'") as caught:
        forwarded(".*", [(name, "1")])
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_no_more_than_128_headers_are_forwarded():
    assert len(forwarded("x", [(f"x{n}", "") for n in range(128)])) == 128
    with pytest.raises(InferError, match="more than 128"):
        forwarded("x", [(f"x{n}", "") for n in range(129)])


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_a_pattern_is_checked_at_start(door, tmp_path):
    with pytest.raises(UsageError, match="regular expression"):
        load_config([f"--model-repository={tmp_path}", f"--{door}-header-forward-pattern=("], {})
    config = load_config([f"--model-repository={tmp_path}", f"--{door}-header-forward-pattern=(?-i)X-"], {})
    assert getattr(config, door).header_forward_pattern == "(?-i)X-"
