"""Where a door listens."""

import pytest

from headrace.gateway.address import host, unix_path, where


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
