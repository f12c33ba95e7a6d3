"""Tables: one xxh3-64 per run of an object (8 bytes each, big-endian, in run order).

A table travels in control messages and in the catalog, never with the object, so bytes and proof cannot
be damaged together. It guards against accidents (bit flips, reused pages, cut transfers), not against
an adversary who may write to the arena.

Who reads whole objects compares all checksums or none, so the *seal* will do in place of the table: the number of
runs (u32, big-endian) and the xxh3-64 of the table. Its 12 bytes cannot be a table, whose length is a multiple of 8.
"""

from collections.abc import Iterable, Sequence

from xxhash import xxh3_64_digest

from kvstore.core.geometry import Run
from kvstore.core.limits import CHECKSUM_BYTES

_COUNT_BYTES = 4
SEAL_BYTES = _COUNT_BYTES + CHECKSUM_BYTES
assert SEAL_BYTES % CHECKSUM_BYTES, "a seal could be taken for a table"


def checksums(data: memoryview, runs: Iterable[Run]) -> bytes:
    """The checksums of `runs` in `data`, concatenated; the runs' offsets count within `data`."""
    return b"".join(xxh3_64_digest(data[offset : offset + size]) for _, offset, size in runs)


def select(table: bytes, runs: Sequence[Run]) -> bytes:
    """The entries of an object's table that belong to these runs, each named once and in order."""
    if len(table) == CHECKSUM_BYTES * len(runs):
        return table
    return b"".join(table[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES] for index, _, _ in runs)


def seal(table: bytes) -> bytes:
    """What stands for a table where whole objects are read."""
    return (len(table) // CHECKSUM_BYTES).to_bytes(_COUNT_BYTES, "big") + xxh3_64_digest(table)


def table_bytes_of(proof: bytes) -> int:
    """Length of a table, or of the table that has this seal."""
    if len(proof) == SEAL_BYTES:
        return CHECKSUM_BYTES * int.from_bytes(proof[:_COUNT_BYTES], "big")
    return len(proof)


def proves(proof: bytes, found: bytes, runs: Sequence[Run]) -> bool:
    """Whether the checksums that were `found` of these runs are a table's. Its seal proves whole objects only."""
    return seal(found) == proof if len(proof) == SEAL_BYTES else found == select(proof, runs)
