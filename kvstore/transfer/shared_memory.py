"""Transfers on one host: copies between this process's memory and a node's arena, which it has mapped.

How this becomes the contract of `base.py`:

* A segment is the path of a node's `ArenaSocket`. The first transfer that names one asks for the arena there, in
  a thread, which from then on waits for the node's end and unmaps: the memory of a node that is gone is not
  kept. Reading and writing use a mapping each, so that no mistake of a reader can change the arena.
* `submit_*` queues; a few threads copy, reads first, piece by piece of at most `PIECE_BYTES_MAX`, without the
  GIL. With `by_hand` the caller's thread copies instead, and has the bytes in its caches when it hashes them
  (docs/decisions/0325). Before each piece it is looked whether to go on: what is unregistered, closed, or
  over `LIVES_S` (a process that was stopped and continued) moves nothing more. So what lands late of a writer
  that was stopped is at most the piece it was stopped in (docs/decisions/0260), and no piece begins after the
  pages it is for have been held (`limits.HOLD_S`).
"""

import ctypes
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from socket import SHUT_RDWR

from kvstore.core import TransferFailed, limits
from kvstore.transfer.arena_socket import ArenaRefused, ask_for_arena, has_ended
from kvstore.transfer.base import HandCopy, Handle, Piece, Status
from kvstore.transfer.copying import ByHand, Moving, Peer, cut, inside
from kvstore.transfer.mapped_arena import MappedArena
from kvstore.transfer.pieces import merge

log = logging.getLogger(__name__)

LIVES_S = 10.0
REACH_S = 1.0
TRY_AGAIN_S = 10.0
THREADS = 2
_CLOSE_S = 10.0
_YIELD_S = 0.005

assert LIVES_S < limits.HOLD_S, "a copy that goes on late must find its pages held"


class SharedMemoryTransfer:
    """Copies to and from the arenas of nodes on this host.

    Args:
        token: the fleet's shared secret, where nodes ask for one.
        lives_s: a transfer that has not ended so long after it was submitted goes no further.

    `copied_bytes` counts what has moved, both ways.
    """

    protocol = "shm"

    def __init__(self, token: bytes = b"", lives_s: float = LIVES_S) -> None:
        self._token = token
        self._lives_s = lives_s
        self._changed = threading.Condition()  # guards all below
        self._handles = itertools.count(1)
        self._moving: dict[Handle, Moving] = {}
        self._reads: deque[Moving] = deque()
        self._writes: deque[Moving] = deque()
        self._regions: dict[int, int] = {}
        self._peers: dict[tuple[str, bool], Peer] = {}
        self._failed: dict[str, float] = {}  # segment -> when it could not be had
        self._mapped = 0
        self.copied_bytes = 0
        self._closed = False
        for number in range(THREADS):
            threading.Thread(target=self._run, name=f"shm-copy-{number}", daemon=True).start()

    def __repr__(self) -> str:
        return f"<SharedMemoryTransfer {self._mapped} mappings, {len(self._moving)} moving>"

    @property
    def segment(self) -> str:
        """Empty: nobody reaches memory that is registered here. A node has an `ArenaSocket`."""
        return ""

    def reach(self, segments: Mapping[str, str]) -> str:
        """See `Transfer.reach`. The proof that a node is on this host is that its arena is here."""
        segment = segments.get(self.protocol, "")
        if not segment:
            return ""
        with self._changed:
            if self._closed or time.monotonic() < self._failed.get(segment, 0.0) + TRY_AGAIN_S:
                return ""
            peer = self._peer(segment, writing=False)
            self._changed.wait_for(lambda: peer.arena or peer.error, REACH_S)
            return segment if peer.arena else ""

    def register(self, address: int, size_bytes: int) -> None:
        """See `Transfer.register`."""
        with self._changed:
            if any(
                start < address + size_bytes and address < start + n for start, n in self._regions.items()
            ):
                raise TransferFailed(f"memory at {address:#x} is registered already")
            self._regions[address] = size_bytes

    def unregister(self, address: int) -> None:
        """See `Transfer.unregister`. Waits for the piece that is being copied there, if any."""
        with self._changed:
            size_bytes = self._regions.pop(address)
            touching = [moving for moving in self._moving.values() if moving.touches(address, size_bytes)]
            for moving in touching:
                self._cancel(moving)
            self._changed.wait_for(lambda: not any(moving.busy for moving in touching))

    def submit_read(self, segment: str, pieces: Sequence[Piece]) -> Handle:
        """See `Transfer.submit_read`."""
        return self._submit(segment, merge(pieces), writing=False)

    def submit_write(self, segment: str, pieces: Sequence[Piece]) -> Handle:
        """See `Transfer.submit_write`."""
        return self._submit(segment, merge(pieces), writing=True)

    def by_hand(self, segment: str, pieces: Sequence[Piece], *, writing: bool) -> HandCopy | None:
        """See `Transfer.by_hand`. None while the arena is being asked for, and where it does not hold the pieces."""
        merged = merge(pieces)
        with self._changed:
            self._check(merged)
            arena = (peer := self._peer(segment, writing)).arena
            if arena is None or not inside(arena, merged):
                return None
            moving = Moving(peer, merged, time.monotonic())
            self._moving[handle := Handle(next(self._handles))] = moving
        return ByHand(moving.pieces, partial(self._copy_piece, moving), partial(self._forget_by_hand, handle))

    def poll(self, handle: Handle) -> Status:
        """See `Transfer.poll`."""
        with self._changed:
            status = self._moving[handle].status
            if status is not Status.PENDING:
                del self._moving[handle]
            return status

    def wait(self, handle: Handle, timeout_s: float) -> Status:
        """See `Transfer.wait`."""
        with self._changed:
            moving = self._moving[handle]
        moving.ended.wait(timeout_s)
        return self.poll(handle)

    def close(self) -> None:
        """See `Transfer.close`."""
        with self._changed:
            self._closed = True
            for moving in self._moving.values():
                self._cancel(moving)
            for peer in self._peers.values():
                if peer.arena is not None:
                    with suppress(OSError):
                        peer.arena.connection.shutdown(SHUT_RDWR)  # wakes its thread, which unmaps
            self._regions.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._mapped == 0, _CLOSE_S)

    # --- under the lock -------------------------------------------------------------------------------

    def _submit(self, segment: str, pieces: list[Piece], *, writing: bool) -> Handle:
        with self._changed:
            self._check(pieces)
            peer = self._peer(segment, writing)
            moving = Moving(peer, pieces, time.monotonic())
            handle = Handle(next(self._handles))
            self._moving[handle] = moving
            if peer.arena is None:
                peer.waiting.append(moving)
            else:
                self._enqueue(peer.arena, moving)
            return handle

    def _check(self, pieces: list[Piece]) -> None:
        if self._closed:
            raise TransferFailed("This transfer has been closed.")
        for local, _, size_bytes in pieces:
            if not any(
                start <= local and local + size_bytes <= start + n for start, n in self._regions.items()
            ):
                raise TransferFailed(
                    f"{size_bytes} bytes at {local:#x} lie outside the memory registered here"
                )

    def _peer(self, segment: str, writing: bool) -> Peer:
        """The arena behind a segment; it is being asked for if it is not here."""
        peer = self._peers.get((segment, writing))
        if peer is not None and self._is_gone(peer):
            self._forget(peer)
            peer = None
        if peer is None:
            peer = self._peers[segment, writing] = Peer(segment, writing)
            threading.Thread(target=self._attend, args=(peer,), name="shm-arena", daemon=True).start()
        return peer

    def _is_gone(self, peer: Peer) -> bool:
        """Whether its node has ended and its thread does not know yet. While copies are under way nobody is asked."""
        idle = not (peer.busy or self._reads or self._writes)
        return idle and peer.arena is not None and has_ended(peer.arena.connection)

    def _forget(self, peer: Peer) -> None:
        """Nothing moves there any more, but for the pieces under way."""
        if self._peers.get((peer.segment, peer.writing)) is peer:
            del self._peers[peer.segment, peer.writing]
        for moving in self._moving.values():
            if moving.peer is peer:
                self._cancel(moving)
        peer.waiting.clear()
        self._changed.notify_all()

    def _enqueue(self, arena: MappedArena, moving: Moving) -> None:
        if not inside(arena, moving.pieces):
            moving.end(Status.FAILED)
        elif not moving.pieces:
            moving.end(Status.DONE)
        elif moving.status is Status.PENDING:
            (self._writes if moving.peer.writing else self._reads).append(moving)
            self._changed.notify_all()

    def _cancel(self, moving: Moving) -> None:
        if moving.status is Status.PENDING:
            moving.cancelled = True
            if not moving.busy:
                moving.end(Status.FAILED)

    def _forget_by_hand(self, handle: Handle) -> None:
        with self._changed:
            moving = self._moving.pop(handle)
            if moving.status is Status.PENDING:
                moving.end(Status.FAILED)

    # --- the life of a mapping: a thread each -----------------------------------------------------------

    def _attend(self, peer: Peer) -> None:
        """Asks for the arena, lets transfers go on, and unmaps it when its node has ended or this is closed."""
        try:
            handed = ask_for_arena(peer.segment, self._token, writing=peer.writing)
            arena = MappedArena(handed, writing=peer.writing)
        except (TransferFailed, OSError) as error:
            self._could_not(peer, error)
            return
        with self._changed:
            self._mapped += 1
            if not self._closed:
                peer.arena = arena
                for moving in peer.waiting:
                    self._enqueue(arena, moving)
                peer.waiting.clear()
            self._changed.notify_all()
        if peer.arena is not None:
            self._keep(arena)
        with self._changed:
            self._forget(peer)
            self._changed.wait_for(lambda: peer.busy == 0)
        arena.close()
        with self._changed:
            self._mapped -= 1
            self._changed.notify_all()

    def _keep(self, arena: MappedArena) -> None:
        """Until the connection ends. While nothing is copied, the page faults of later copies are taken away."""
        for number in arena.slices():
            with self._changed:
                while any(moving.status is Status.PENDING for moving in self._moving.values()):
                    self._changed.wait(_YIELD_S)
            if has_ended(arena.connection):
                return
            arena.populate(number)
        with suppress(OSError):
            arena.connection.recv(1)

    def _could_not(self, peer: Peer, error: Exception) -> None:
        if isinstance(error, ArenaRefused):
            log.warning(
                "a node on this host does not share its memory, so bytes take the slower way: %s", error
            )
        with self._changed:
            peer.error = str(error)
            if len(self._failed) >= limits.CLIENTS_MAX:
                self._failed.clear()
            self._failed[peer.segment] = time.monotonic()
            self._forget(peer)

    # --- copying: a few threads, or a caller's --------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._reads or self._writes)
                if self._closed:
                    return
                moving = (self._reads or self._writes).popleft()
            self._copy(moving)

    def _copy(self, moving: Moving) -> None:
        for piece in cut(moving.pieces):
            if not self._copy_piece(moving, piece):
                return
        with self._changed:
            if moving.status is Status.PENDING:
                moving.end(Status.DONE)

    def _copy_piece(self, moving: Moving, piece: Piece) -> bool:
        """Copies one piece, unless the transfer has ended."""
        self._before_piece()
        addresses = self._begin(moving, piece)
        if addresses is None:
            return False
        arena = moving.peer.arena
        assert arena is not None, "it stays as long as a piece is being copied"
        arena.populate_for(piece)
        self._move(*addresses, piece.size_bytes)
        self._end(moving, piece.size_bytes)
        return True

    def _before_piece(self) -> None:
        """A place for tests to stand in the way."""

    def _move(self, target: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(target, source, size_bytes)

    def _begin(self, moving: Moving, piece: Piece) -> tuple[int, int] | None:
        """(target, source) of a piece that may be copied now."""
        with self._changed:
            if time.monotonic() > moving.begun_s + self._lives_s:
                self._cancel(moving)
            peer = moving.peer
            if moving.status is not Status.PENDING or peer.arena is None:
                return None
            remote = peer.arena.local(piece.remote_address, piece.size_bytes)
            assert remote is not None, "a piece outside the arena was queued"
            moving.busy = True
            peer.busy += 1
            return (remote, piece.local_address) if peer.writing else (piece.local_address, remote)

    def _end(self, moving: Moving, size_bytes: int) -> None:
        with self._changed:
            self.copied_bytes += size_bytes
            moving.busy = False
            moving.peer.busy -= 1
            if moving.cancelled:
                moving.end(Status.FAILED)
                self._changed.notify_all()  # who cancelled it may wait for this
