"""The label: whose device this is, in which format, and where things lie on it. docs/FORMAT.md shows the bytes.

    | label | ... | label copy | ... | records: slot 0, 1, ... | data: page 0, 1, ... |
    0             64 KiB             records_offset            data_offset

Written twice, one after the other with a sync between, so one copy is whole at any moment; the newer of the
whole ones counts. Every mount writes a new epoch and a new random mount id: the catalog remembers that id, so
it is known at the next mount whether catalog and device belong together.
"""

import struct

import msgspec
from xxhash import xxh3_64_intdigest

from kvstore.core import BadConfiguration, limits
from kvstore.tiers.nvme.device import BLOCK_BYTES, Device, DeviceRefused, aligned
from kvstore.tiers.nvme.records import SLOT_BYTES

MAGIC = b"KVSTORE\n"
FORMAT_VERSION = 1
LABEL_OFFSETS = (0, 64 * limits.KIB)
RECORDS_OFFSET = 128 * limits.KIB
UUID_BYTES = 16
MOUNT_BYTES = 8
NODE_BYTES_MAX = 256
PAGES_MIN = 8
SPARE_SLOTS = 128  # beside one for each page: for manifests, and tables that are larger than a slot

_FIXED = struct.Struct("<8sQII16sQ8sQQQQQQQ")
_CHECKED_FROM = 16
_VERSION_AT = 16
_NODE_AT = 512


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """What is on a label. `node` is the name of the node that the device belongs to."""

    uuid: bytes
    node: str
    epoch: int
    mount: bytes
    created_s: int
    size_bytes: int
    page_bytes: int
    page_count: int
    slot_count: int
    records_offset: int
    data_offset: int

    @property
    def uuid_text(self) -> str:
        """The uuid as people read it."""
        return self.uuid.hex()

    def slot_offset(self, slot: int) -> int:
        """Where a slot lies on the device."""
        return self.records_offset + slot * SLOT_BYTES


def new_label(size_bytes: int, page_bytes: int, node: str, uuid: bytes, created_s: int) -> Label:
    """The label of a device of this size: slots enough for objects of one page each.

    Raises:
        BadConfiguration: the device is too small, or the node's name too long.
    """
    if page_bytes < BLOCK_BYTES or page_bytes & (page_bytes - 1):
        raise BadConfiguration(
            f"a page has a power of two of bytes, at least {BLOCK_BYTES}, not {page_bytes}"
        )
    if not node or len(node.encode()) > NODE_BYTES_MAX:
        raise BadConfiguration(f"a node's name has 1 to {NODE_BYTES_MAX} bytes")
    fixed_bytes = RECORDS_OFFSET + SPARE_SLOTS * SLOT_BYTES + page_bytes  # a page for the alignment of data
    count = (size_bytes - fixed_bytes) // (page_bytes + SLOT_BYTES)
    if count < PAGES_MIN:
        raise BadConfiguration(
            f"{size_bytes} bytes are too few: with pages of {page_bytes} bytes a device needs at least "
            f"{fixed_bytes + PAGES_MIN * (page_bytes + SLOT_BYTES)}"
        )
    slot_count = count + SPARE_SLOTS
    data_offset = -(-(RECORDS_OFFSET + slot_count * SLOT_BYTES) // page_bytes) * page_bytes
    return Label(
        uuid=uuid,
        node=node,
        epoch=0,
        mount=bytes(MOUNT_BYTES),
        created_s=created_s,
        size_bytes=size_bytes,
        page_bytes=page_bytes,
        page_count=count,
        slot_count=slot_count,
        records_offset=RECORDS_OFFSET,
        data_offset=data_offset,
    )


def encode_label(label: Label) -> bytes:
    """One copy of a label."""
    fixed = _FIXED.pack(
        MAGIC,
        0,
        FORMAT_VERSION,
        SLOT_BYTES,
        label.uuid,
        label.epoch,
        label.mount,
        label.created_s,
        label.size_bytes,
        label.page_bytes,
        label.page_count,
        label.slot_count,
        label.records_offset,
        label.data_offset,
    )
    node = label.node.encode()
    data = bytearray(fixed.ljust(_NODE_AT, b"\0") + struct.pack("<H", len(node)) + node).ljust(
        BLOCK_BYTES, b"\0"
    )
    struct.pack_into("<Q", data, 8, xxh3_64_intdigest(memoryview(data)[_CHECKED_FROM:]))
    return bytes(data)


def decode_label(data: bytes | memoryview) -> Label | None:
    """The label in a block; None when there is no whole one of this format."""
    view = memoryview(data)
    if view[: len(MAGIC)] != MAGIC:
        return None
    (_, checksum, version, slot_bytes, uuid, epoch, mount, created_s, size_bytes, *layout) = (
        _FIXED.unpack_from(view)
    )
    if version != FORMAT_VERSION or slot_bytes != SLOT_BYTES:
        return None
    if xxh3_64_intdigest(view[_CHECKED_FROM:]) != checksum:
        return None
    page_bytes, page_count, slot_count, records_offset, data_offset = layout
    (node_bytes,) = struct.unpack_from("<H", view, _NODE_AT)
    return Label(
        uuid=uuid,
        node=bytes(view[_NODE_AT + 2 : _NODE_AT + 2 + node_bytes]).decode(),
        epoch=epoch,
        mount=mount,
        created_s=created_s,
        size_bytes=size_bytes,
        page_bytes=page_bytes,
        page_count=page_count,
        slot_count=slot_count,
        records_offset=records_offset,
        data_offset=data_offset,
    )


def read_label(device: Device) -> Label:
    """The newest whole copy of a device's label.

    Raises:
        DeviceRefused: there is none of this format; says what is there instead.
        DeviceDown
    """
    blocks = []
    for offset in LABEL_OFFSETS:
        if offset + BLOCK_BYTES <= device.size_bytes:
            block = aligned(BLOCK_BYTES)
            device.read(offset, [block])
            blocks.append(block)
    labels = [label for label in map(decode_label, blocks) if label is not None]
    if not labels:
        raise DeviceRefused(_what_is_there(device.name, blocks))
    return max(labels, key=lambda label: label.epoch)


def write_label(device: Device, label: Label) -> None:
    """Writes both copies, the second only when the first is durable.

    Raises:
        DeviceDown
    """
    block = aligned(BLOCK_BYTES)
    block[:] = encode_label(label)
    for offset in LABEL_OFFSETS:
        device.write(offset, [block])
        device.sync()


def _what_is_there(name: str, blocks: list[memoryview]) -> str:
    remedy = f"`kvstore format {name}` makes it one, and destroys what it holds"
    ours = [block for block in blocks if block[: len(MAGIC)] == MAGIC]
    if ours:
        version = int.from_bytes(ours[0][_VERSION_AT : _VERSION_AT + 4], "little")
        if version != FORMAT_VERSION:
            return (
                f"{name} has format {version} of a kvstore device, this version reads format {FORMAT_VERSION}: "
                f"run the version of kvstore that wrote it, or give it up: {remedy}"
            )
        return f"{name} is a kvstore device, but both copies of its label are damaged: {remedy}"
    if not any(any(block) for block in blocks):
        return f"{name} is blank, not a kvstore device: {remedy}"
    return f"{name} holds something that is not ours and is left alone: if it may go, {remedy}"
