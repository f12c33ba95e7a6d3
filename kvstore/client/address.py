"""What a client needs to know of a node to move bytes, as plain data that travels to other processes."""

import re

import msgspec

from kvstore.wire import BootId, NodeId

_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]+):([0-9]{1,5})")
_PORT_MAX = 65_535


def is_address(control: str) -> bool:
    """Whether this can be a control endpoint, "host:port"; IPv6 stands in brackets."""
    address = _ADDRESS.fullmatch(control)
    return address is not None and 0 < int(address[1]) <= _PORT_MAX


class NodeAddress(msgspec.Struct, frozen=True):
    """One boot of one node: where its control endpoint and its arena are.

    `segments` names the arena per transfer protocol, as in `Welcome.transfer`; "shm" is `Welcome.memfd_socket`.
    """

    node: NodeId
    boot: BootId
    control: str
    segments: dict[str, str]
    arena_base: int
    page_bytes: int
