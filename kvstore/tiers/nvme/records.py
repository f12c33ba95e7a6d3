"""Records: what a device knows of each object, in a form that proves itself. docs/FORMAT.md shows the bytes.

A record takes one or more adjacent slots of the record region: a head, the object's extents, and a payload
(the object's table; of a namespace, its manifest). One checksum covers all of its slots, padding included,
so a record that was written in part, or overwritten in part, is none. It names the device and the slot it
was written for, so neither a record from before the device was formatted nor a copy in another place counts.
"""

import struct
from enum import IntEnum

import msgspec
from xxhash import xxh3_64_intdigest

from kvstore.core import Extent, Extents, Key, Namespace, limits
from kvstore.tiers.nvme.device import BLOCK_BYTES
from kvstore.wire import Generation

SLOT_BYTES = BLOCK_BYTES
MAGIC = b"KVSREC\x00\x01"

_HEAD = struct.Struct("<8sQ16sQQBBHIIIQQ8s32s32s32s8x")
_EXTENT = struct.Struct("<QQ")
_CHECKED_FROM = 16  # the magic and the checksum itself are not covered
_COLD = 1

assert _HEAD.size == 192
assert limits.EXTENTS_PER_OBJECT_MAX * _EXTENT.size + _HEAD.size < SLOT_BYTES, "extents lie in the first slot"


class Kind(IntEnum):
    """What a record is of."""

    OBJECT = 1
    NAMESPACE = 2  # its key is the namespace, its payload the manifest, it has no extents


class Record(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An object on a device: what it is, and where. `slots` are those of the record, `extents` data pages.

    `sequence` grows with every record written to the device, over restarts too. As a msgpack array of these
    fields, in this order, it is also the value of a key in the catalog.
    """

    kind: Kind
    key: Key
    namespace: Namespace
    parent: Key
    depth: int
    generation: Generation
    size_bytes: int
    cold: bool
    sequence: int
    slots: Extent
    extents: Extents


def slots_for(num_extents: int, payload_bytes: int) -> int:
    """Slots that a record takes."""
    return -(-(_HEAD.size + num_extents * _EXTENT.size + payload_bytes) // SLOT_BYTES)


def encode(record: Record, payload: bytes, device: bytes) -> bytes:
    """The bytes of a record's slots, on the device of this uuid."""
    assert record.slots.page_count == slots_for(len(record.extents), len(payload)), "the slots do not fit"
    head = _HEAD.pack(
        MAGIC,
        0,
        device,
        record.sequence,
        record.slots.start_page,
        record.kind,
        _COLD if record.cold else 0,
        len(record.extents),
        record.slots.page_count,
        len(payload),
        0,
        record.size_bytes,
        record.depth,
        record.generation,
        record.key,
        record.namespace,
        record.parent,
    )
    extents = b"".join(_EXTENT.pack(*extent) for extent in record.extents)
    data = bytearray((head + extents + payload).ljust(record.slots.page_count * SLOT_BYTES, b"\0"))
    struct.pack_into("<Q", data, 8, xxh3_64_intdigest(memoryview(data)[_CHECKED_FROM:]))
    return bytes(data)


def slots_claimed(data: memoryview) -> int:
    """How many slots the record would have whose first slot this is; 0 when it is none. Proves nothing."""
    if data[: len(MAGIC)] != MAGIC:
        return 0
    return int(_HEAD.unpack_from(data)[8])


def decode(data: memoryview, device: bytes, slot: int) -> tuple[Record, bytes] | None:
    """The record and its payload in these slots, the first of which is `slot`; None when there is none.

    None is also said of a record of another device, another place, or with a wrong checksum.
    """
    if len(data) < SLOT_BYTES or data[: len(MAGIC)] != MAGIC:
        return None
    (_, checksum, uuid, sequence, own_slot, kind, flags, num_extents, num_slots, payload_bytes, _, *rest) = (
        _HEAD.unpack_from(data)
    )
    if uuid != device or own_slot != slot or num_slots * SLOT_BYTES != len(data):
        return None
    if xxh3_64_intdigest(data[_CHECKED_FROM:]) != checksum:
        return None
    size_bytes, depth, generation, key, namespace, parent = rest
    payload_at = _HEAD.size + num_extents * _EXTENT.size
    record = Record(
        kind=Kind(kind),
        key=Key(key),
        namespace=Namespace(namespace),
        parent=Key(parent),
        depth=depth,
        generation=Generation(generation),
        size_bytes=size_bytes,
        cold=bool(flags & _COLD),
        sequence=sequence,
        slots=Extent(slot, num_slots),
        extents=tuple(Extent(*pair) for pair in _EXTENT.iter_unpack(data[_HEAD.size : payload_at])),
    )
    return record, bytes(data[payload_at : payload_at + payload_bytes])
