"""The catalog anew, from the records: the whole record region is read once, in large pieces.

Every record that is whole is taken, unless its pages do not lie on the device, or a newer record has the same
key or one of its pages: then it is stale, and its slots are to be erased. That cannot come from a crash (see
docs/FORMAT.md); it is what damage looks like.
"""

from collections.abc import Generator, Iterator
from typing import NamedTuple

from kvstore.core import Extent, pages_for
from kvstore.tiers.nvme.catalog import Catalog
from kvstore.tiers.nvme.device import Device, DeviceDown, aligned
from kvstore.tiers.nvme.label import Label, read_label
from kvstore.tiers.nvme.records import SLOT_BYTES, Kind, Record, decode, slots_claimed

_SLOTS_READ = 256  # 1 MiB
_FILLED_AT_ONCE = 4_096


class Rebuilt(NamedTuple):
    """What the records say. `unreadable_slots` may have held records that are lost now."""

    records: list[Record]
    stale: list[Record]
    unreadable_slots: int


def rebuild(device: Device, label: Label, catalog: Catalog) -> Rebuilt:
    """Fills an empty catalog.

    Raises:
        DeviceDown: the device, or the catalog's folder, fails.
    """
    region = _Region(device, label)
    newest: dict[tuple[Kind, bytes], Record] = {}
    stale: list[Record] = []
    batch: list[tuple[Record, bytes]] = []
    for record, payload in region:
        known = newest.get((record.kind, record.key))
        if not _is_possible(record, label) or (known is not None and known.sequence > record.sequence):
            stale.append(record)
            continue
        if known is not None:
            stale.append(known)
        newest[record.kind, record.key] = record
        batch.append((record, payload))
        if len(batch) == _FILLED_AT_ONCE:
            catalog.finish(batch, ())
            batch = []
    catalog.finish(batch, ())
    stale += _overlapped(newest, label.page_count)
    catalog.begin((), stale)
    return Rebuilt(list(newest.values()), stale, region.unreadable_slots)


def _is_possible(record: Record, label: Label) -> bool:
    """Whether what a record says can be: its checksum is right, so only a bug of ours would say no."""
    if record.kind is Kind.NAMESPACE:
        return not record.extents
    pages = sum(count for _, count in record.extents)
    inside = all(
        start >= 0 and count > 0 and start + count <= label.page_count for start, count in record.extents
    )
    return inside and pages == pages_for(record.size_bytes, label.page_bytes)


def _overlapped(newest: dict[tuple[Kind, bytes], Record], page_count: int) -> list[Record]:
    """Takes those out that have a page which a newer record has, too."""
    taken = bytearray(page_count)
    stale = []
    for record in sorted(newest.values(), key=lambda record: record.sequence, reverse=True):
        if any(taken.find(1, start, start + count) >= 0 for start, count in record.extents):
            stale.append(newest.pop((record.kind, record.key)))
            continue
        for start, count in record.extents:
            taken[start : start + count] = b"\1" * count
    return stale


class _Region:
    """The record region, as the records in it."""

    def __init__(self, device: Device, label: Label) -> None:
        self.unreadable_slots = 0
        self._device = device
        self._label = label

    def __iter__(self) -> Iterator[tuple[Record, bytes]]:
        slot = 0
        buffer = aligned(_SLOTS_READ * SLOT_BYTES)
        while slot < self._label.slot_count:
            count = min(_SLOTS_READ, self._label.slot_count - slot)
            if not self._read(slot, buffer[: count * SLOT_BYTES]):
                count = 1  # slowly over what cannot be read
                if not self._read(slot, buffer[:SLOT_BYTES]):
                    self.unreadable_slots += 1
                    slot += 1
                    continue
            slot = yield from self._records(slot, count, buffer)

    def _records(
        self, first: int, count: int, buffer: memoryview
    ) -> Generator[tuple[Record, bytes], None, int]:
        """Those that begin in `count` slots from `first` on; returns where to go on."""
        slot = first
        while slot < first + count:
            at = (slot - first) * SLOT_BYTES
            claimed = slots_claimed(buffer[at : at + SLOT_BYTES])
            found = self._record(Extent(slot, claimed), buffer[at : count * SLOT_BYTES]) if claimed else None
            if found is not None:
                yield found
            slot += found[0].slots.page_count if found is not None else 1
        return slot

    def _record(self, slots: Extent, read: memoryview) -> tuple[Record, bytes] | None:
        start, count = slots
        size = count * SLOT_BYTES
        if start + count > self._label.slot_count:
            return None
        if size > len(read):  # it goes on behind what was read
            read = aligned(size)
            if not self._read(start, read):
                return None
        return decode(read[:size], self._label.uuid, start)

    def _read(self, slot: int, buffer: memoryview) -> bool:
        try:
            self._device.read(self._label.slot_offset(slot), [buffer])
        except DeviceDown:
            read_label(self._device)  # fails when all of the device does
            return False
        return True
