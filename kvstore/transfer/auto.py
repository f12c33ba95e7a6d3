"""The arena's own memory where a node is on this host, else another transfer: chosen node by node."""

import itertools
import threading
from collections.abc import Mapping, Sequence

from kvstore.core import TransferFailed
from kvstore.transfer.base import HandCopy, Handle, Piece, Status, Transfer


class AutoTransfer:
    """Two transfers as one. A segment that is a path is `near`'s.

    Args:
        near: reaches nodes on this host; closed with this one.
        far: reaches all nodes; closed with this one. None: it could not be had.
        without_far: why not, as half a sentence.
    """

    protocol = "auto"

    def __init__(self, near: Transfer, far: Transfer | None, without_far: str = "") -> None:
        self._near = near
        self._far = far
        self._without_far = without_far
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._moving: dict[Handle, tuple[Transfer, Handle]] = {}

    def __repr__(self) -> str:
        return f"<AutoTransfer {self._near!r} or {self._far!r}>"

    @property
    def segment(self) -> str:
        """Where peers reach memory that is registered here, if anywhere."""
        return self._far.segment if self._far else ""

    def reach(self, segments: Mapping[str, str]) -> str:
        """See `Transfer.reach`."""
        if near := self._near.reach(segments):
            return near
        if self._far is None:
            raise TransferFailed(
                f"the node's memory cannot be had on this host, and the other way is closed: {self._without_far}"
            )
        return self._far.reach(segments)

    def register(self, address: int, size_bytes: int) -> None:
        """See `Transfer.register`."""
        self._near.register(address, size_bytes)
        if self._far:
            try:
                self._far.register(address, size_bytes)
            except TransferFailed:
                self._near.unregister(address)
                raise

    def unregister(self, address: int) -> None:
        """See `Transfer.unregister`."""
        self._near.unregister(address)
        if self._far:
            self._far.unregister(address)

    def submit_read(self, segment: str, pieces: Sequence[Piece]) -> Handle:
        """See `Transfer.submit_read`."""
        transfer = self._of(segment)
        return self._entered(transfer, transfer.submit_read(segment, pieces))

    def submit_write(self, segment: str, pieces: Sequence[Piece]) -> Handle:
        """See `Transfer.submit_write`."""
        transfer = self._of(segment)
        return self._entered(transfer, transfer.submit_write(segment, pieces))

    def by_hand(self, segment: str, pieces: Sequence[Piece], *, writing: bool) -> HandCopy | None:
        """See `Transfer.by_hand`."""
        return self._of(segment).by_hand(segment, pieces, writing=writing)

    def poll(self, handle: Handle) -> Status:
        """See `Transfer.poll`."""
        transfer, its = self._moving[handle]
        return self._told(handle, transfer.poll(its))

    def wait(self, handle: Handle, timeout_s: float) -> Status:
        """See `Transfer.wait`."""
        transfer, its = self._moving[handle]
        return self._told(handle, transfer.wait(its, timeout_s))

    def close(self) -> None:
        """See `Transfer.close`."""
        try:
            self._near.close()
        finally:
            if self._far:
                self._far.close()

    def _of(self, segment: str) -> Transfer:
        if segment.startswith("/"):
            return self._near
        if self._far is None:
            raise TransferFailed(f"the segment {segment} cannot be reached: {self._without_far}")
        return self._far

    def _entered(self, transfer: Transfer, its: Handle) -> Handle:
        with self._lock:
            handle = Handle(next(self._numbers))
            self._moving[handle] = transfer, its
            return handle

    def _told(self, handle: Handle, status: Status) -> Status:
        if status is not Status.PENDING:
            with self._lock:
                del self._moving[handle]
        return status
