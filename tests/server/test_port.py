"""Who holds a port."""

import os
import socket

import pytest

from kvstore.server import port_holder
from tests.support import free_port


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_listening_process_is_named(family, host) -> None:
    with socket.socket(family) as holder:
        holder.bind((host, 0))
        holder.listen()
        assert port_holder(holder.getsockname()[1]).startswith(f"process {os.getpid()} (")


def test_a_connected_socket_is_not_a_holder() -> None:
    """Mutant: take any socket with that local port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname()) as client:
            assert "cannot be seen" in port_holder(client.getsockname()[1])


def test_a_free_port_has_no_holder() -> None:
    assert "cannot be seen" in port_holder(free_port())
