"""Bytes in motion: one short contract, several ways."""

from kvstore.transfer.arena_socket import ArenaSocket
from kvstore.transfer.auto import AutoTransfer
from kvstore.transfer.base import HandCopy, Handle, Piece, Status, Transfer
from kvstore.transfer.environment import own_port_window
from kvstore.transfer.in_process import Fault, InProcessNetwork, InProcessTransfer, Plan
from kvstore.transfer.mooncake import MooncakeTransfer
from kvstore.transfer.self_transfer import RDMA_PACKET_BYTES_MAX, SelfTransfer, self_transfer
from kvstore.transfer.shared_memory import SharedMemoryTransfer

__all__ = [
    "RDMA_PACKET_BYTES_MAX",
    "ArenaSocket",
    "AutoTransfer",
    "Fault",
    "HandCopy",
    "Handle",
    "InProcessNetwork",
    "InProcessTransfer",
    "MooncakeTransfer",
    "Piece",
    "Plan",
    "SharedMemoryTransfer",
    "SelfTransfer",
    "Status",
    "Transfer",
    "own_port_window",
    "self_transfer",
]
