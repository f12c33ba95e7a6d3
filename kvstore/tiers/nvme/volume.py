"""A mounted device: label, records, data pages and catalog, changed in the order that makes them durable.

A put and a free share one group commit (`commit`), the data of the puts having been written before:

    1  sync             the data of the puts is durable
    2  catalog begin    the slots of puts and frees are doubtful, the freed keys are gone       (durable)
    3  records, sync    those of the puts are written, those of the frees are overwritten
    4  catalog finish   the keys of the puts are there, no slot is doubtful any more            (durable)
    5  only now: puts are reported, pages and slots of the frees may be used again

So a record on the device proves that its data is durable, a key in the catalog that its record is; and a page
is used again only when neither record nor catalog knows it. docs/FORMAT.md goes through every cut.

Blocking. `read`, `write` and `payload` may run in many threads at once, the rest in one.
"""

from collections.abc import Callable, Iterable, Sequence

from kvstore.core import Corrupt, Extent, KVStoreError, limits
from kvstore.tiers.nvme.catalog import Catalog
from kvstore.tiers.nvme.device import Device, DeviceDown, DeviceRefused, Pieces, aligned
from kvstore.tiers.nvme.label import Label, read_label
from kvstore.tiers.nvme.records import SLOT_BYTES, Record, decode, encode

EPOCH_SHIFT = 40  # a sequence is the epoch and a count within it

Put = tuple[Record, bytes]
"""A record and its payload."""


class PagesFailed(KVStoreError):
    """Some pages cannot be read or written, while the device answers otherwise."""


class Volume:
    """One device of this node, mounted. See `mounting.mount`."""

    def __init__(self, device: Device, label: Label, catalog: Catalog) -> None:
        self.device = device
        self.label = label
        self._catalog = catalog
        self._sequence = label.epoch << EPOCH_SHIFT

    @property
    def page_count(self) -> int:
        """Data pages that lie on the device: fewer than the label says if it has become smaller."""
        inside = (self.device.size_bytes - self.label.data_offset) // self.label.page_bytes
        return max(0, min(inside, self.label.page_count))

    def next_sequence(self) -> int:
        """For the next record; greater than that of every record this device ever had."""
        self._sequence += 1
        return self._sequence

    # --- data -----------------------------------------------------------------------------------------

    def read(self, moved: Pieces, stopped: Callable[[], bool] = lambda: False) -> None:
        """Reads data pages into memory, one I/O per piece, until `stopped`.

        Raises:
            PagesFailed, DeviceDown
        """
        self._move(self.device.read, moved, stopped)

    def write(self, moved: Pieces, stopped: Callable[[], bool] = lambda: False) -> None:
        """Writes data pages from memory; durable with the next `commit`.

        Raises:
            PagesFailed, DeviceDown
        """
        self._move(self.device.write, moved, stopped)

    def payload(self, record: Record) -> bytes:
        """What belongs to a record, from the catalog, else from the record.

        Raises:
            Corrupt: neither has it as it was written.
            DeviceDown
        """
        known = self._catalog.payload(record)
        if known is not None:
            return known
        found = self._read_record(record.slots)
        if found is None or found[0] != record:
            raise Corrupt(f"the record of {record.key.hex()[:16]} on {self.device.name} is damaged")
        return found[1]

    # --- records --------------------------------------------------------------------------------------

    def commit(self, puts: Sequence[Put], freed: Sequence[Record]) -> None:
        """Makes puts and frees durable, in the order above. All of it may be repeated.

        Raises:
            DeviceDown: which of it became durable is not known. To free puts and frees alike makes it known.
        """
        slots = [record.slots for record, _ in puts] + [record.slots for record in freed]
        if any(record.extents for record, _ in puts):
            self.device.sync()
        self._catalog.begin(slots, freed)
        self._write_records(puts)
        self._overwrite(record.slots for record in freed)
        self.device.sync()
        self._catalog.finish(puts, slots)

    def erase(self, slots: Sequence[Extent]) -> None:
        """Whatever record is in these doubtful slots is no more.

        Raises:
            DeviceDown
        """
        if slots:
            self._overwrite(slots)
            self.device.sync()
            self._catalog.finish((), slots)

    # --- the device itself ----------------------------------------------------------------------------

    def take_back(self, reopen: Callable[[], Device]) -> None:
        """Looks whether the device answers again, if need be through a new descriptor, and is the same.

        Raises:
            DeviceDown: not yet.
        """
        if self._answers():
            return
        self.device.close()
        device = reopen()
        try:
            label = read_label(device)
        except KVStoreError:
            device.close()
            raise
        if not self._is_mine(label):
            device.close()
            raise DeviceDown(
                f"{device.name} answers, but is another device than before, or was used meanwhile"
            )
        self.device = device

    def close(self) -> None:
        """Ends it; what was reported is durable already."""
        self._catalog.close()
        self.device.close()

    def _move(
        self,
        call: Callable[[int, Sequence[memoryview]], None],
        moved: Pieces,
        stopped: Callable[[], bool],
    ) -> None:
        try:
            for offset, buffers in moved:
                if stopped():
                    raise DeviceDown(f"{self.device.name} failed meanwhile")
                call(self.label.data_offset + offset, buffers)
        except DeviceDown as error:
            if stopped() or not self._answers():
                raise
            raise PagesFailed(str(error)) from error

    def _answers(self) -> bool:
        """Whether its label can be read now. Tells pages that fail from a device that does."""
        try:
            return self._is_mine(read_label(self.device))
        except (DeviceDown, DeviceRefused):
            return False

    def _is_mine(self, label: Label) -> bool:
        return (label.uuid, label.mount) == (self.label.uuid, self.label.mount)

    def _read_record(self, slots: Extent) -> Put | None:
        start, count = slots
        data = aligned(count * SLOT_BYTES)
        self.device.read(self.label.slot_offset(start), [data])
        return decode(data, self.label.uuid, start)

    def _write_records(self, puts: Sequence[Put]) -> None:
        """Those in adjacent slots, as most of one commit are, with one I/O."""
        written: list[tuple[int, bytearray]] = []  # the first slot of each I/O, and its bytes
        for slots, data in sorted((put[0].slots, encode(*put, self.label.uuid)) for put in puts):
            slot, before = written[-1] if written else (-1, bytearray())
            adjoins = slot + len(before) // SLOT_BYTES == slots.start_page
            if adjoins and len(before) < limits.NVME_IO_BYTES:
                before += data
            else:
                written.append((slots.start_page, bytearray(data)))
        for slot, adjacent in written:
            block = aligned(len(adjacent))
            block[:] = adjacent
            self.device.write(self.label.slot_offset(slot), [block])

    def _overwrite(self, slots: Iterable[Extent]) -> None:
        """The first slot is enough: without its head a record is none."""
        nothing = aligned(SLOT_BYTES)
        for start, _ in slots:
            self.device.write(self.label.slot_offset(start), [nothing])

    def __repr__(self) -> str:
        return f"<Volume {self.label.uuid_text} on {self.device!r}>"
