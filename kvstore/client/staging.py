"""Staging: the client's own memory between engine tensors and a node's arena.

One registered region, page-aligned and touched once so that no transfer waits for the kernel. Slots are cut
from it and come back; nobody waits for ever, and the region never grows. A slot whose transfer had not
ended when its user gave up is *retired*: bytes may still land in it or be read from it, so it stays out of
use until the transfer's status says that it has ended.
"""

import ctypes
import mmap
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.transfer import Handle, Status, Transfer

ALIGNMENT_BYTES = 4096
_RETIRED_POLL_S = 0.01


class Slot(NamedTuple):
    """A piece of staging in somebody's hands: where it is, and its bytes."""

    offset_bytes: int
    size_bytes: int
    address: int
    view: memoryview


class StagingStats(NamedTuple):
    """Bytes of staging by use now, and how often slots have been retired so far."""

    size_bytes: int
    free_bytes: int
    retired_bytes: int
    retirements: int


class Staging:
    """A bounded pool of registered host memory. All methods may be called from any thread.

    Args:
        transfer: what the memory is registered with.
        size_bytes: of the region; rounded up to whole kernel pages.

    Raises:
        TransferFailed: the memory cannot be registered.
    """

    def __init__(self, transfer: Transfer, size_bytes: int) -> None:
        self._transfer = transfer
        self._size_bytes = _rounded(size_bytes)
        self._memory = mmap.mmap(-1, self._size_bytes)
        self._view = memoryview(self._memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(self._address, 0, self._size_bytes)  # first touches are slow: now, not in a transfer
        self._changed = threading.Condition()
        self._free: dict[int, int] = {0: self._size_bytes}  # offset -> bytes, never two that touch
        self._retired: dict[int, tuple[Slot, list[Handle]]] = {}  # by offset
        self._retirements = 0
        transfer.register(self._address, self._size_bytes)

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<Staging {stats.free_bytes}/{stats.size_bytes} bytes free, {stats.retired_bytes} retired>"

    @property
    def address(self) -> int:
        """Where the region begins."""
        return self._address

    @property
    def size_bytes(self) -> int:
        """Of the whole region: no slot can be larger."""
        return self._size_bytes

    def take(self, size_bytes: int, timeout_s: float) -> Slot | None:
        """A slot of this size; None if there is none within `timeout_s`, at once if there never can be."""
        needed = _rounded(size_bytes)
        if needed > self._size_bytes:
            return None
        end = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._reap()
                offset = next((o for o, free in sorted(self._free.items()) if free >= needed), None)
                if offset is not None:
                    return self._cut(offset, needed, size_bytes)
                left_s = end - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(min(left_s, _RETIRED_POLL_S) if self._retired else left_s)

    def give_back(self, slot: Slot) -> None:
        """The slot's bytes are no longer needed, and no transfer moves them."""
        with self._changed:
            self._restore(slot)
            self._changed.notify_all()

    def retire(self, slot: Slot, handles: Sequence[Handle]) -> None:
        """Transfers of the slot have not ended: out of use until they have. Polled here from now on."""
        with self._changed:
            self._retired[slot.offset_bytes] = (slot, list(handles))
            self._retirements += 1

    def stats(self) -> StagingStats:
        """How the memory is used now."""
        with self._changed:
            self._reap()
            return StagingStats(
                self._size_bytes,
                sum(self._free.values()),
                sum(_rounded(slot.size_bytes) for slot, _ in self._retired.values()),
                self._retirements,
            )

    def close(self) -> None:
        """Ends the registration; no slot may be in use. The memory goes when the last view of it does.

        Raises:
            TransferFailed: a transfer still moves bytes here; the memory stays.
        """
        self._transfer.unregister(self._address)

    def _reap(self) -> None:
        for offset, (slot, handles) in list(self._retired.items()):
            while handles and self._transfer.poll(handles[-1]) is not Status.PENDING:
                handles.pop()
            if not handles:
                del self._retired[offset]
                self._restore(slot)

    def _cut(self, offset: int, needed: int, size_bytes: int) -> Slot:
        free = self._free.pop(offset)
        if free > needed:
            self._free[offset + needed] = free - needed
        return Slot(offset, size_bytes, self._address + offset, self._view[offset : offset + size_bytes])

    def _restore(self, slot: Slot) -> None:
        offset, size = slot.offset_bytes, _rounded(slot.size_bytes)
        assert all(o + free <= offset or offset + size <= o for o, free in self._free.items()), (
            f"slot at {offset} of {size} bytes is given back twice"
        )
        for o, free in list(self._free.items()):
            if o + free == offset:
                offset, size = o, size + self._free.pop(o)
            elif o == offset + size:
                size += self._free.pop(o)
        self._free[offset] = size


def _rounded(size_bytes: int) -> int:
    return max(1, -(-size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
