"""Listening addresses: whether one can be taken, and if not, who holds it."""

import errno
import socket

from kvstore.core import KVStoreError
from kvstore.node.settings import join_address, split_address
from kvstore.server import port_holder


def claimable(address: str, flag: str) -> str:
    """The numeric form of an address that this process can listen on now.

    Args:
        address: "host:port".
        flag: the flag that sets it, for the remedy.

    Raises:
        KVStoreError: it is taken (names the holder), not allowed, or not an address of this machine.
    """
    host, port = split_address(address)
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:  # a label that is empty or too long is no name at all
        raise KVStoreError(f"{address}: {host!r} is not a known host: {error}; see {flag}") from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(resolved)
            probe.listen()
        except OSError as error:
            raise KVStoreError(f"{address} {_reason(error, port)} with {flag}") from None
    return join_address(str(resolved[0]), port)


def resolves(host: str) -> bool:
    """Whether a host name or address means anything on this machine."""
    try:
        socket.getaddrinfo(host, None)
    except (socket.gaierror, UnicodeError):
        return False
    return True


def _reason(error: OSError, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"is taken by {port_holder(port)}: stop it, or choose another port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "is not an address of this machine: choose one that is (`ip address` lists them)"
    if error.errno == errno.EACCES:
        return "needs privileges that this process lacks: choose a port above 1023"
    return f"cannot be listened on ({error.strerror}): choose another address"
