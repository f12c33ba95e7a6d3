"""A mover with everything it needs, for those who move bytes and never talk to a node: an engine's workers."""

import socket

from kvstore.client.mover import Mover
from kvstore.client.staging import Staging
from kvstore.core import TransferFailed
from kvstore.transfer import MooncakeTransfer


def open_mover(
    node: str, *, host: str = "", protocol: str = "tcp", devices: str = "", staging_bytes: int
) -> Mover:
    """A mover over Mooncake with `staging_bytes` of registered memory, which must hold the largest object.

    Args:
        node: control endpoint of a node, "host:port".
        host: address of this process for nodes; empty: that of this machine on the way to `node`.
        protocol: "tcp" or "rdma".
        devices: for rdma, comma-separated device names; empty for any active one.
        staging_bytes: memory through which bytes pass.

    Raises:
        TransferFailed: Mooncake is missing or does not start, or the memory cannot be registered.
    """
    try:
        own_host = host or host_towards(node)
    except (OSError, ValueError) as error:
        raise TransferFailed(f"the way to node {node} is not known: {error}") from error
    transfer = MooncakeTransfer(own_host, protocol, devices)
    return Mover(transfer, Staging(transfer, staging_bytes))


def host_towards(node: str) -> str:
    """The address of this machine on the way to a node; no packet is sent."""
    host, _, port = node.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
