"""A device that can lose its power at any moment, and comes back with what a real one could have kept.

`live` is what reads see; `durable` is what the last sync left. A cut keeps every byte that was synced, and of
what was written after that any part: whole writes, some sectors of a write, in any order, or nothing.
"""

import random
from collections.abc import Sequence

from kvstore.tiers import DeviceDown

SECTOR_BYTES = 512


class PowerCut(BaseException):
    """The machine stops here. No handler of ours may go on."""


class Power:
    """Counts the moments at which it can go; goes at the n-th."""

    def __init__(self, cut_at: int | None = None) -> None:
        self.moments = 0
        self.off = False
        self._cut_at = cut_at

    def moment(self) -> None:
        """Something is about to become durable, or just has."""
        if self.off:
            raise PowerCut
        if self.moments == self._cut_at:
            self.off = True
            raise PowerCut
        self.moments += 1


class CrashDevice:
    """A device in memory."""

    def __init__(self, image: bytes, power: Power, name: str = "crash") -> None:
        self.name = name
        self.size_bytes = len(image)
        self.warnings: Sequence[str] = ()
        self.power = power
        self.live = bytearray(image)
        self.durable = bytearray(image)
        self.unsynced: list[tuple[int, bytes]] = []
        self.closed = False

    def read(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        self._check()
        for buffer in buffers:
            if offset_bytes + len(buffer) > self.size_bytes:
                raise DeviceDown("short read")
            buffer[:] = self.live[offset_bytes : offset_bytes + len(buffer)]
            offset_bytes += len(buffer)

    def write(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        self._check()
        for buffer in buffers:
            assert offset_bytes % SECTOR_BYTES == 0
            assert len(buffer) % SECTOR_BYTES == 0
            if offset_bytes + len(buffer) > self.size_bytes:
                raise DeviceDown("short write")
            self.live[offset_bytes : offset_bytes + len(buffer)] = buffer
            self.unsynced.append((offset_bytes, bytes(buffer)))
            offset_bytes += len(buffer)

    def sync(self) -> None:
        self._check()
        self.power.moment()
        self.durable[:] = self.live
        self.unsynced.clear()
        self.power.moment()

    def close(self) -> None:
        self.closed = True

    def after_cut(self, rng: random.Random | None, share: float = 0.5) -> bytes:
        """What is there when power returns; `rng` decides which unsynced sectors are. None: nothing of them."""
        image = bytearray(self.durable)
        writes = list(self.unsynced)
        if rng is not None:
            rng.shuffle(writes)  # a disk need not keep the order
            for offset, data in writes:
                for at in range(0, len(data), SECTOR_BYTES):
                    if rng.random() < share:
                        image[offset + at : offset + at + SECTOR_BYTES] = data[at : at + SECTOR_BYTES]
        return bytes(image)

    def _check(self) -> None:
        if self.power.off:
            raise PowerCut
        if self.closed:
            raise DeviceDown("closed")
