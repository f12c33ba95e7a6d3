"""Pages and slots of a device: which are free. What is used is derived from the records, never kept beside them.

pages:  free | of a record: kept, being written, being freed | out of use (they failed)
"""

from collections.abc import Iterable

from kvstore.core import Extent, Extents
from kvstore.tiers.nvme.records import Record, slots_for
from kvstore.tiers.pages import PageAllocator


class Space:
    """The space of one device."""

    def __init__(self, page_count: int, slot_count: int, used: Iterable[Record]) -> None:
        used = list(used)
        self.page_count = page_count
        self.failed_pages = 0
        self._failed: list[Extent] = []
        self._pages = _allocator(page_count, (extent for record in used for extent in record.extents))
        self._slots = _allocator(slot_count, (record.slots for record in used), extents_max=1)

    @property
    def free_pages(self) -> int:
        """Pages that can be given out."""
        return self._pages.free_pages

    @property
    def free_slots(self) -> int:
        """Slots that can be given out."""
        return self._slots.free_pages

    def allocate(self, pages: int, payload_bytes: int) -> tuple[Extents, Extent] | None:
        """Pages (perhaps none) and adjacent slots for a record of them; None when there is no room for both."""
        extents = self._pages.allocate(pages) if pages else ()
        if extents is None:
            return None
        slots = self._slots.allocate(slots_for(len(extents), payload_bytes))
        if slots is None:
            self._pages.free(extents)
            return None
        return extents, slots[0]

    def free(self, record: Record) -> None:
        """Nothing knows of the record any more, and nothing is being written to its pages."""
        self._pages.free(record.extents)
        self._slots.free((record.slots,))

    def fail(self, record: Record) -> None:
        """As `free`, but its pages could not be written: they are out of use until the next mount."""
        self._slots.free((record.slots,))
        self._failed.extend(record.extents)
        self.failed_pages += sum(count for _, count in record.extents)

    def audit(self, used: Iterable[Record]) -> None:
        """Asserts that every page and every slot is in exactly one place."""
        self._pages.audit()
        self._slots.audit()
        used = list(used)
        extents = [extent for record in used for extent in record.extents]
        _cover("page", self.page_count, [*extents, *self._failed, *self._pages.free_extents()])
        slots = [record.slots for record in used]
        _cover("slot", self._slots.page_count, [*slots, *self._slots.free_extents()])


def _allocator(count: int, used: Iterable[Extent], extents_max: int | None = None) -> PageAllocator:
    """An allocator in which these are taken."""
    allocator = PageAllocator(count) if extents_max is None else PageAllocator(count, extents_max)
    allocator.allocate(count)
    taken = bytearray(count)
    for start, length in used:
        assert start + length <= count, f"page or slot {start} is not there"
        assert taken.find(1, start, start + length) < 0, f"page or slot {start} is used twice"
        taken[start : start + length] = b"\1" * length
    start = taken.find(0)
    while start >= 0:
        end = taken.find(1, start)
        end = count if end < 0 else end
        allocator.free((Extent(start, end - start),))
        start = taken.find(0, end)
    return allocator


def _cover(what: str, count: int, extents: list[Extent]) -> None:
    end = 0
    for start, length in sorted(extents):
        assert start == end, f"{what} {min(start, end)} is lost or in two places"
        end = start + length
    assert end == count, f"{what}s are lost at the end: {end} of {count}"
