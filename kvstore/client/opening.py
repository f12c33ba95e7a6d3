"""A mover with everything it needs, for those who move bytes and never talk to a node: an engine's workers."""

import asyncio
import logging
import socket
import threading

from kvstore.client.address import NodeAddress
from kvstore.client.config import new_client_id
from kvstore.client.control import TROUBLE, ControlClient
from kvstore.client.mover import Mover
from kvstore.client.staging import Staging
from kvstore.core import BadConfiguration, TransferFailed
from kvstore.transfer import AutoTransfer, MooncakeTransfer, SharedMemoryTransfer, Transfer

log = logging.getLogger(__name__)

TRANSFERS = ("auto", "mooncake", "shm")
_HELLO_S = 2.0


def open_mover(
    node: str,
    *,
    transfer: str = "auto",
    host: str = "",
    protocol: str = "tcp",
    devices: str = "",
    token: bytes = b"",
    staging_bytes: int,
) -> Mover:
    """A mover with `staging_bytes` of registered memory, which must hold the largest object.

    If `node` answers, it is met in the background, so that the first object costs no more than the tenth.

    Args:
        node: control endpoint of a node, "host:port".
        transfer: how bytes move, see `open_transfer`.
        host: see `open_transfer`.
        protocol: see `open_transfer`.
        devices: see `open_transfer`.
        token: see `open_transfer`.
        staging_bytes: memory through which bytes pass.

    Raises:
        TransferFailed: Mooncake is missing or does not start, or the memory cannot be registered.
    """
    opened = open_transfer(transfer, node, host=host, protocol=protocol, devices=devices, token=token)
    mover = Mover(opened, Staging(opened, staging_bytes))
    threading.Thread(target=_introduce, args=(mover, node, token), name="kvstore-meet", daemon=True).start()
    return mover


def open_transfer(
    transfer: str, node: str, *, host: str = "", protocol: str = "tcp", devices: str = "", token: bytes = b""
) -> Transfer:
    """A way to move bytes.

    Args:
        transfer: "mooncake"; "shm" for nodes on this host only; "auto" for shared memory where a node gives its
            arena to this process, else Mooncake.
        node: control endpoint of a node, "host:port".
        host: address of this process for nodes; empty: that of this machine on the way to `node`.
        protocol: of Mooncake, "tcp" or "rdma".
        devices: for rdma, comma-separated device names; empty for any active one.
        token: the shared secret of the fleet; empty: none.

    Raises:
        BadConfiguration: there is no such transfer.
        TransferFailed: Mooncake is missing or does not start. With "auto" and tcp that is a warning.
    """
    if transfer not in TRANSFERS:
        raise BadConfiguration(f"transfer {transfer!r} is not known; take one of {', '.join(TRANSFERS)}")
    if transfer == "shm":
        return SharedMemoryTransfer(token)
    try:
        far = MooncakeTransfer(host or _host_towards(node), protocol, devices)
    except TransferFailed as error:
        if transfer == "mooncake" or protocol != "tcp":
            raise
        log.warning("only nodes on this host that share their memory can be used: %s", error)
        return AutoTransfer(SharedMemoryTransfer(token), None, str(error))
    return far if transfer == "mooncake" else AutoTransfer(SharedMemoryTransfer(token), far)


def _introduce(mover: Mover, node: str, token: bytes) -> None:
    """Meets the node, if it is there by now; the first object meets others."""
    try:
        mover.meet(asyncio.run(_address_of(node, token)))
    except (*TROUBLE, BadConfiguration, TransferFailed) as error:
        log.debug("node %s is met later: %s", node, error)


async def _address_of(node: str, token: bytes) -> NodeAddress:
    control = ControlClient(node, new_client_id(), token)
    try:
        await control.hello(_HELLO_S)
        assert control.address is not None, "who has been greeted has an address"
        return control.address
    finally:
        control.close()


def _host_towards(node: str) -> str:
    """The address of this machine on the way to a node; no packet is sent.

    Raises:
        TransferFailed: it is not known.
    """
    host, _, port = node.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise TransferFailed(f"the way to node {node} is not known: {error}") from error
