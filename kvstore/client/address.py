"""What a client needs to know of a node to move bytes, as plain data that travels to other processes."""

import msgspec

from kvstore.wire import BootId, NodeId


class NodeAddress(msgspec.Struct, frozen=True):
    """One boot of one node: where its control endpoint and its arena are.

    `segments` names the arena per transfer protocol, as in `Welcome.transfer`.
    """

    node: NodeId
    boot: BootId
    control: str
    segments: dict[str, str]
    arena_base: int
    page_bytes: int
    memfd_socket: str = ""
