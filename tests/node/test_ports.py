"""Addresses that cannot be listened on are refused before anything is started, with the reason."""

import os
import socket

import pytest

from kvstore.core import KVStoreError
from kvstore.node.ports import claimable


def test_a_free_address_becomes_numeric() -> None:
    assert claimable("localhost:0", "--x") in ("127.0.0.1:0", "[::1]:0")
    assert claimable("127.0.0.1:0", "--x") == "127.0.0.1:0"


def test_a_taken_port_names_its_holder_and_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(KVStoreError) as refused:
            claimable(f"127.0.0.1:{port}", "--control-listen")
    text = str(refused.value)
    assert f"127.0.0.1:{port} is taken by" in text
    assert str(os.getpid()) in text
    assert "pytest" in text
    assert "--control-listen" in text


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("192.0.2.1:7400", "not an address of this machine"),
        ("no-such-host.invalid:7400", "not a known host"),
        ("a..b:7400", "not a known host"),  # mutant: the resolver's UnicodeError is "a bug of its own"
        ("a" * 64 + ":7400", "not a known host"),
    ],
)
def test_an_address_of_somebody_else_is_refused(address, says) -> None:
    with pytest.raises(KVStoreError, match=says):
        claimable(address, "--control-listen")
