"""Copies under way between this process and arenas that it has mapped, and how they are cut."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvstore.core import limits
from kvstore.transfer.base import Piece, Status
from kvstore.transfer.mapped_arena import MappedArena

PIECE_BYTES_MAX = 4 * limits.MIB


@dataclass(eq=False, slots=True)
class Peer:
    """A node's arena, for reading or for writing: being asked for, mapped, or refused."""

    segment: str
    writing: bool
    arena: MappedArena | None = None
    error: str = ""
    busy: int = 0  # pieces being copied
    waiting: list["Moving"] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Moving:
    """A transfer that nobody has been told the end of."""

    peer: Peer
    pieces: list[Piece]
    begun_s: float
    status: Status = Status.PENDING
    busy: bool = False  # a piece is being copied
    cancelled: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self, status: Status) -> None:
        """It is done or has failed; whoever waits for it is told."""
        self.status = status
        self.ended.set()

    def touches(self, address: int, size_bytes: int) -> bool:
        """Whether it moves bytes from or to this memory here."""
        return any(
            piece.local_address < address + size_bytes and address < piece.local_address + piece.size_bytes
            for piece in self.pieces
        )


class ByHand:
    """A `HandCopy`.

    Args:
        pieces: what to copy.
        copy: copies a piece of at most `PIECE_BYTES_MAX`; False: the transfer has ended.
        end: forgets the transfer.
    """

    def __init__(self, pieces: list[Piece], copy: Callable[[Piece], bool], end: Callable[[], None]) -> None:
        self._pieces = pieces
        self._copy = copy
        self.close = end
        self._at, self._done_bytes = 0, 0  # a piece, and bytes of it

    def move(self, size_bytes: int) -> bool:
        """See `HandCopy.move`."""
        while size_bytes:
            local, remote, whole_bytes = self._pieces[self._at]
            take = min(size_bytes, PIECE_BYTES_MAX, whole_bytes - self._done_bytes)
            if not self._copy(Piece(local + self._done_bytes, remote + self._done_bytes, take)):
                return False
            size_bytes -= take
            self._done_bytes += take
            if self._done_bytes == whole_bytes:
                self._at, self._done_bytes = self._at + 1, 0
        return True


def inside(arena: MappedArena, pieces: list[Piece]) -> bool:
    """Whether the arena holds them all."""
    return all(arena.local(remote, size_bytes) is not None for _, remote, size_bytes in pieces)


def cut(pieces: list[Piece]) -> Iterator[Piece]:
    """The same copies in pieces that do not take long."""
    for local, remote, size_bytes in pieces:
        for done in range(0, size_bytes, PIECE_BYTES_MAX):
            yield Piece(local + done, remote + done, min(PIECE_BYTES_MAX, size_bytes - done))
