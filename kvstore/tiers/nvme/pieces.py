"""From an object to I/O: which memory goes where on a device, and the hash of runs in scattered memory."""

import threading
from collections.abc import Iterable, Iterator, Sequence

from xxhash import xxh3_64, xxh3_64_digest

from kvstore.core import Extents, Run, Span, limits, locate
from kvstore.tiers.nvme.device import BLOCK_BYTES, Pieces

_STRAND_PIECES_MAX = 8
_LOCKED_BYTES_MAX = 64 * limits.KIB  # xxhash keeps the interpreter's lock while it hashes so much or less
_LET_GO_BYTES = limits.MIB
_LET_GO_S = 1e-6  # the shortest sleep there is, long enough for a thread that waits to wake up
_NEVER = threading.Event()


def io_bytes(size_bytes: int) -> int:
    """Bytes that are read and written for an object of this size: whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def pieces(extents: Extents, page_bytes: int, size_bytes: int, memory: Sequence[memoryview]) -> Pieces:
    """The I/O that moves an object between `memory`, in object order, and its pages; offsets count from page 0.

    The memory may be longer than the object; sizes of all but its last view are multiples of a block.
    """
    moved: Pieces = []
    source = _Cutter(memory)
    for offset, size in locate(extents, page_bytes, (Span(0, io_bytes(size_bytes)),)):
        for start in range(offset, offset + size, limits.NVME_IO_BYTES):
            take = min(limits.NVME_IO_BYTES, offset + size - start)
            moved.append((start, source.take(take)))
    return moved


def strands(moved: Pieces, width: int) -> list[Pieces]:
    """The pieces in parts of about equal size for `width` threads; none is long, so that its time means something."""
    length = max(1, min(-(-len(moved) // width), _STRAND_PIECES_MAX))
    return [moved[start : start + length] for start in range(0, len(moved), length)]


def table_of(memory: Sequence[memoryview], runs: Iterable[Run]) -> bytes:
    """The checksums of an object's runs; the object lies in `memory`, in order.

    Whoever needs the interpreter meanwhile, such as the control loop, gets it after a MiB at the latest.
    """
    source = _Cutter(memory)
    table = []
    at = locked_bytes = 0
    for _, offset, size in runs:
        assert offset == at, "the runs of an object follow each other"
        table.append(_digest(source.take(size)))
        at += size
        if size <= _LOCKED_BYTES_MAX:
            locked_bytes += size
        if locked_bytes >= _LET_GO_BYTES:
            _NEVER.wait(_LET_GO_S)
            locked_bytes = 0
    return b"".join(table)


def _digest(parts: Sequence[memoryview]) -> bytes:
    if len(parts) == 1:  # the rule, and half as fast again
        return xxh3_64_digest(parts[0])
    digest = xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.digest()


class _Cutter:
    """Memory in several views, taken from its beginning on."""

    def __init__(self, memory: Sequence[memoryview]) -> None:
        self._views = iter(memory)
        self._left = memoryview(b"")

    def take(self, size_bytes: int) -> list[memoryview]:
        return list(self._parts(size_bytes))

    def _parts(self, size_bytes: int) -> Iterator[memoryview]:
        while size_bytes:
            if not self._left:
                self._left = next(self._views)
            part, self._left = self._left[:size_bytes], self._left[size_bytes:]
            size_bytes -= len(part)
            yield part
