"""Bytes in motion: one short contract, several ways."""

from kvstore.transfer.base import Handle, Piece, Status, Transfer
from kvstore.transfer.in_process import Fault, InProcessNetwork, InProcessTransfer, Plan
from kvstore.transfer.mooncake import MooncakeTransfer

__all__ = [
    "Fault",
    "Handle",
    "InProcessNetwork",
    "InProcessTransfer",
    "MooncakeTransfer",
    "Piece",
    "Plan",
    "Status",
    "Transfer",
]
