"""Where a door listens."""

import pytest

from headrace.config import load_config
from headrace.gateway.address import host, unix_path, where
from headrace.options import UsageError


def test_an_address_is_a_path_or_a_host():
    assert unix_path("unix:/run/x") == unix_path("unix:///run/x") == "/run/x"
    assert unix_path("unix:x") == "x"
    assert unix_path("127.0.0.1") is unix_path("::") is unix_path("unixes") is None


def test_an_ipv6_address_may_stand_in_brackets():
    assert host("[::1]") == host("::1") == "::1"
    assert host("localhost") == "localhost"


@pytest.mark.parametrize(
    ("address", "written"),
    [
        ("0.0.0.0", "0.0.0.0:80"),
        ("::", "[::]:80"),
        ("[::1]", "[::1]:80"),
        ("localhost", "localhost:80"),
        ("unix:/x", "unix:/x"),
    ],
)
def test_an_address_is_written_with_its_port(address, written):
    assert where(address, 80) == written


def config_of(tmp_path, *flags: str):
    return load_config([f"--model-repository={tmp_path}", *flags], {})


def test_metrics_are_served_as_http_but_never_on_a_unix_socket(tmp_path):
    assert config_of(tmp_path, "--http-address=::1").metrics.address == "::1"
    assert config_of(tmp_path, "--http-address=unix:/x").metrics.address == "127.0.0.1"
    assert config_of(tmp_path, "--http-address=unix:/x", "--metrics-address=::1").metrics.address == "::1"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--metrics-address=unix:/x",), "--metrics-address: expected a host"),
        (("--http-address=unix:",), "--http-address: expected a host or unix:<path>, got 'unix:'"),
        (("--http-address=unix:/x", "--grpc-address=unix:///x"), "--grpc-address: grpc cannot listen at /x"),
        (("--http-port=8001",), "--grpc-port: grpc cannot listen on port 8001"),
    ],
)
def test_an_address_that_cannot_be_had_is_a_problem_at_start(tmp_path, flags, said):
    with pytest.raises(UsageError, match=said):
        config_of(tmp_path, *flags)


def test_doors_on_unix_sockets_do_not_share_a_port(tmp_path):
    flags = ("--http-address=unix:/x", "--grpc-address=unix:/y", "--http-port=8001", "--metrics-port=8001")
    assert config_of(tmp_path, *flags).http.address == "unix:/x"
