"""Objects, small devices, and what must be true of them, for the tests of the NVMe tier."""

import hashlib
import random
from pathlib import Path

from kvstore.core import Extent, Key, Manifest, Namespace
from kvstore.tiers.nvme.base import NewObject
from kvstore.tiers.nvme.catalog import Catalog
from kvstore.tiers.nvme.device import aligned
from kvstore.tiers.nvme.label import RECORDS_OFFSET, SPARE_SLOTS
from kvstore.tiers.nvme.mounting import Mounted, format_device, mount
from kvstore.tiers.nvme.pieces import io_bytes, pieces, table_of
from kvstore.tiers.nvme.records import SLOT_BYTES, Kind, Record
from kvstore.tiers.nvme.space import Space
from kvstore.tiers.nvme.volume import Put, Volume
from kvstore.wire import Generation
from tests.crash.devices import CrashDevice, Power

PAGE_BYTES = 4_096
NODE = "node-a"

MANIFEST = Manifest(
    weights="w",
    model={},
    kv_dtype="bf16",
    tile_format="t",
    chunk_tokens=16,
    unit_tokens=1,
    lanes=((4, 2, 96),),
)
NAMESPACE = MANIFEST.namespace
TOKEN_BYTES = MANIFEST.geometry.bytes_per_unit  # 768
CHUNK_BYTES = 16 * TOKEN_BYTES  # 12,288: three pages


def key_of(name: object) -> Key:
    return Key(hashlib.sha256(repr(name).encode()).digest())


def memory_of(data: bytes) -> memoryview:
    """Aligned memory that holds these bytes, in whole blocks."""
    memory = aligned(io_bytes(len(data)))
    memory[: len(data)] = data
    return memory


def new_object(name: object, data: bytes, *, manifest: Manifest = MANIFEST) -> NewObject:
    return NewObject(
        key=key_of(name),
        namespace=manifest.namespace,
        parent=key_of("parent"),
        depth=7,
        generation=Generation(key_of((name, "generation"))[:8]),
        size_bytes=len(data),
        cold=False,
        table=table_of([memoryview(data)], manifest.geometry.runs(len(data))),
    )


def some_bytes(seed: object, size: int = CHUNK_BYTES) -> bytes:
    return random.Random(repr(seed)).randbytes(size)


def formatted_image(pages: int = 24, power: Power | None = None, seed: int = 1) -> bytes:
    """The image of a small formatted device."""
    size = RECORDS_OFFSET + SPARE_SLOTS * SLOT_BYTES + PAGE_BYTES + pages * (PAGE_BYTES + SLOT_BYTES)
    device = CrashDevice(bytes(size), power or Power())
    format_device(device, NODE, PAGE_BYTES, random_bytes=random.Random(seed).randbytes)
    return bytes(device.live)


class Driver:
    """A mounted volume driven by hand: places objects as `Objects` does, without loop or threads."""

    def __init__(self, mounted: Mounted) -> None:
        self.volume: Volume = mounted.volume
        self.notes = mounted.notes
        self.namespaces = {record.namespace: record for record in mounted.namespaces}
        self.records = {record.key: record for record in mounted.objects}
        self.space = Space(
            self.volume.page_count, self.volume.label.slot_count, (*mounted.objects, *mounted.namespaces)
        )

    def manifest(self) -> list[Put]:
        """What has to be put before the first object."""
        if NAMESPACE in self.namespaces:
            return []
        manifest = MANIFEST.encode()
        room = self.space.allocate(0, len(manifest))
        assert room is not None
        record = record_of(
            new_object("x", some_bytes(0)),
            self.volume.next_sequence(),
            room[1],
            (),
            Kind.NAMESPACE,
            len(manifest),
        )
        self.namespaces[NAMESPACE] = record
        return [(record, manifest)]

    def write(self, name: object, data: bytes) -> Put:
        """Places an object and writes its data."""
        new = new_object(name, data)
        room = self.space.allocate(-(-len(data) // PAGE_BYTES), len(new.table))
        assert room is not None, "the test's device is full"
        record = record_of(new, self.volume.next_sequence(), room[1], room[0])
        self.volume.write(pieces(record.extents, PAGE_BYTES, len(data), [memory_of(data)]))
        return record, new.table

    def commit(self, puts: list[Put], freed: list[Record]) -> None:
        self.volume.commit([*self.manifest(), *puts], freed)
        for record in freed:
            del self.records[record.key]
            self.space.free(record)
        self.records |= {record.key: record for record, _ in puts}

    def read(self, record: Record) -> bytes | None:
        """The object's bytes if they match its table, read as the tier does."""
        memory = aligned(io_bytes(record.size_bytes))
        self.volume.read(pieces(record.extents, PAGE_BYTES, record.size_bytes, [memory]))
        table = table_of([memory], MANIFEST.geometry.runs(record.size_bytes))
        return bytes(memory[: record.size_bytes]) if table == self.volume.payload(record) else None


def record_of(
    new: NewObject,
    sequence: int,
    slots: Extent,
    extents: tuple[Extent, ...],
    kind: Kind = Kind.OBJECT,
    size_bytes: int = 0,
) -> Record:
    return Record(
        kind=kind,
        key=new.key if kind is Kind.OBJECT else Key(new.namespace),
        namespace=Namespace(new.namespace),
        parent=new.parent,
        depth=new.depth,
        generation=new.generation,
        size_bytes=size_bytes or new.size_bytes,
        cold=new.cold,
        sequence=sequence,
        slots=slots,
        extents=extents,
    )


class CuttingCatalog(Catalog):
    """A catalog on real LMDB whose power goes before or after a transaction: LMDB's own atomicity is trusted."""

    power = Power()

    def _commit(self, change, map_bytes_max: int) -> None:
        self.power.moment()
        super()._commit(change, map_bytes_max)
        self.power.moment()


def mounted_on(device: CrashDevice, catalogs: Path, *, anew: bool = False) -> Driver:
    """Mounts a device whose catalog shares its power."""

    class Cutting(CuttingCatalog):
        power = device.power

    return Driver(mount(device, NODE, catalogs, anew=anew, open_catalog=Cutting))
