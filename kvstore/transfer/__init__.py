"""Bytes in motion: one short contract, several ways."""

from kvstore.transfer.base import Handle, Piece, Status, Transfer

__all__ = ["Handle", "Piece", "Status", "Transfer"]
