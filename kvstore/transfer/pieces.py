"""Pieces before they are submitted."""

from collections.abc import Iterable

from kvstore.transfer.base import Piece


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """The same copies in as few pieces as possible: neighbours on both sides become one, empty ones go."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and _follows(merged[-1], piece):
            merged[-1] = merged[-1]._replace(size_bytes=merged[-1].size_bytes + piece.size_bytes)
        elif piece.size_bytes:
            merged.append(piece)
    return merged


def _follows(last: Piece, piece: Piece) -> bool:
    return (last.local_address + last.size_bytes, last.remote_address + last.size_bytes) == piece[:2]
