"""Listening addresses: whether one can be taken, and if not, who holds it."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from kvstore.core import KVStoreError
from kvstore.node.settings import join_address, split_address

_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp


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
    except socket.gaierror as error:
        raise KVStoreError(f"{address}: {host!r} is not a known host: {error.strerror}; see {flag}") from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(resolved)
            probe.listen()
        except OSError as error:
            raise KVStoreError(f"{address} {_reason(error, port)} with {flag}") from None
    return join_address(str(resolved[0]), port)


def _reason(error: OSError, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"is taken by {holder(port) or 'a process of another user'}: stop it, or choose another port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "is not an address of this machine: choose one that is (`ip address` lists them)"
    if error.errno == errno.EACCES:
        return "needs privileges that this process lacks: choose a port above 1023"
    return f"cannot be listened on ({error.strerror}): choose another address"


def holder(port: int) -> str:
    """Who listens on a TCP port: "pid 123 (command line)"; empty when this process may not know."""
    inodes = {f"socket:[{inode}]" for inode in _listeners(port)}
    for process in Path("/proc").glob("[0-9]*"):
        if inodes & set(_open_files(process)):
            return f"pid {process.name} ({_command(process)})"
    return ""


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it just ended
        return "which has just ended"
    return " ".join(" ".join(words).split())[:120]


def _listeners(port: int) -> Iterator[str]:
    """Inodes of the sockets that listen on a port, from /proc/net/tcp and tcp6."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _open_files(process: Path) -> Iterator[str]:
    try:
        for descriptor in (process / "fd").iterdir():
            yield os.readlink(descriptor)
    except OSError:  # another user's process, or one that just ended
        return
