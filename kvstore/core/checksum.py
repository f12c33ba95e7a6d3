"""Tables: one xxh3-64 per run of an object (8 bytes each, big-endian, in run order).

A table travels in control messages and in the catalog, never with the object, so bytes and proof cannot
be damaged together. It guards against accidents (bit flips, reused pages, cut transfers), not against
an adversary who may write to the arena.
"""

from collections.abc import Iterable, Sequence

from xxhash import xxh3_64_digest

from kvstore.core.geometry import Run
from kvstore.core.limits import CHECKSUM_BYTES


def checksums(data: memoryview, runs: Iterable[Run]) -> bytes:
    """The checksums of `runs` in `data`, concatenated; the runs' offsets count within `data`."""
    return b"".join(xxh3_64_digest(data[offset : offset + size]) for _, offset, size in runs)


def select(table: bytes, runs: Sequence[Run]) -> bytes:
    """The entries of an object's table that belong to these runs, each named once and in order."""
    if len(table) == CHECKSUM_BYTES * len(runs):
        return table
    return b"".join(table[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES] for index, _, _ in runs)
