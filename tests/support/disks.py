"""Devices without I/O or time, and a twin of the porter that carries a job when it is told to.

What is written is kept as bytes, so that what comes back can be compared. Pages that are freed are free at the next
`commit`, as on a real device.
"""

import random
from collections.abc import Callable

from kvstore.core import Extent, Extents, Key, MissReason, Namespace, checksums, decode_manifest, pages_for
from kvstore.store import Job, OnDevice, Promotion, Spill, Store
from kvstore.tiers import Arena, Kind, NewObject, Record, Refusal


class MemoryDisk:
    """One device."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.up = True
        self.page_bytes = page_bytes
        self.records: dict[Key, Record] = {}
        self.manifests: dict[Namespace, bytes] = {}
        self.data: dict[Record, bytes] = {}
        self.worn = False
        self._pages = pages
        self._leaving: list[Record] = []
        self._sequence = 0

    @property
    def usable_pages(self) -> int:
        return self._pages

    @property
    def free_pages(self) -> int:
        used = sum(self.pages_of(record.size_bytes) for record in (*self.records.values(), *self._leaving))
        return self._pages - used if self.up else 0

    def pages_of(self, size_bytes: int) -> int:
        return pages_for(size_bytes, self.page_bytes)

    def open_namespace(self, namespace: Namespace, manifest: bytes) -> None:
        self.manifests[namespace] = manifest

    def refuses(self, size_bytes: int) -> Refusal | None:
        if not self.up:
            return Refusal.DEVICE_DOWN
        if self.pages_of(size_bytes) > self.free_pages:
            return Refusal.NO_ROOM
        return Refusal.WORN if self.worn else None

    def put(self, new: NewObject, data: bytes) -> Record | Refusal | None:
        """As `NvmeDevice.put`, with bytes; None: they do not match the table."""
        refusal = self.refuses(new.size_bytes)
        if refusal is not None:
            return refusal
        assert new.key not in self.records, "a key is put twice"
        geometry = decode_manifest(self.manifests[new.namespace]).geometry
        if checksums(memoryview(data), geometry.runs(len(data))) != new.table:
            return None
        self._sequence += 1
        record = Record(
            kind=Kind.OBJECT,
            key=new.key,
            namespace=new.namespace,
            parent=new.parent,
            depth=new.depth,
            generation=new.generation,
            size_bytes=new.size_bytes,
            cold=new.cold,
            sequence=self._sequence,
            slots=Extent(self._sequence, 1),
            extents=(),
        )
        self.records[new.key] = record
        self.data[record] = data
        return record

    def get(self, record: Record) -> tuple[bytes, bytes]:
        """(bytes, table), read although the object was deleted meanwhile, as a real one would."""
        data = self.data[record]
        geometry = decode_manifest(self.manifests[record.namespace]).geometry
        return data, checksums(memoryview(data), geometry.runs(len(data)))

    def delete(self, record: Record) -> None:
        assert self.records.get(record.key) is record, "another object has this key, or none"
        del self.records[record.key]
        self._leaving.append(record)

    def commit(self) -> None:
        """What was deleted is gone."""
        if self.up:
            self._leaving.clear()


class MemoryDisks:
    """A tier of them."""

    def __init__(self, *devices: MemoryDisk) -> None:
        self.devices = devices

    def refuses(self, size_bytes: int) -> Refusal | None:
        refusals = [device.refuses(size_bytes) for device in self.devices]
        if None in refusals:
            return None
        return Refusal.NO_ROOM if Refusal.NO_ROOM in refusals else next(iter(refusals), Refusal.NO_ROOM)


class Carrier:
    """The store's jobs, carried one at a time, in any order; `sound` tells of bytes that were damaged on a device."""

    def __init__(self, store: Store, disks: MemoryDisks, arena: Arena | None = None) -> None:
        self.jobs: list[Job] = []
        self.landing: list[Promotion] = []
        self.carried = 0
        self.sound: Callable[[Record], bool] = lambda _: True
        self._store = store
        self._disks = disks
        self._arena = arena
        store.on_job = self.jobs.append

    def carry(self, which: int = 0, failure: MissReason | None = None) -> None:
        """Ends one job; a promotion may fail, and then its pages are written to until `land`."""
        job = self.jobs.pop(which % len(self.jobs))
        self.carried += 1
        if isinstance(job, Spill):
            self._store.moving.spilled(job, self._put(job))
        else:
            assert isinstance(job, Promotion)
            self._promote(job, failure)

    def land(self) -> None:
        """What was given up has ended; until then anything may have been written to its pages."""
        for job in self.landing:
            self._write(job.extents, random.Random(self.carried).randbytes(job.object.size_bytes))
            self._store.moving.ended(job)
        self.landing.clear()

    def all(self) -> None:
        """Carries until nothing is left; devices commit in between."""
        while self.jobs or self.landing:
            self.land()
            if self.jobs:
                self.carry()
            self.commit()

    def commit(self) -> None:
        for disk in self._disks.devices:
            disk.commit()

    def _put(self, job: Spill) -> OnDevice | Refusal | None:
        new = self._store.contents(job)
        data = self._read(job.extents, new.size_bytes)
        if self._disks.refuses(new.size_bytes) is Refusal.NO_ROOM and self._store.make_disk_room(0):
            self.commit()  # the porter waits for that
        refusal: Refusal | None = Refusal.NO_ROOM
        for disk in self._disks.devices:
            stored = disk.put(new, data)
            if isinstance(stored, Record):
                return OnDevice(disk, stored)
            refusal = stored
            if refusal is None:
                break
        return refusal

    def _promote(self, job: Promotion, failure: MissReason | None) -> None:
        disk = job.source.disk
        assert isinstance(disk, MemoryDisk)
        if failure is None and not disk.up:
            failure = MissReason.DEVICE_DOWN
        if failure is None and not self.sound(job.source.record):
            failure = MissReason.BAD_COPY
        if failure is not None:
            self.landing.append(job)
            self._store.moving.failed(job, failure)
            return
        data, table = disk.get(job.source.record)
        self._write(job.extents, data)
        self._store.moving.promoted(job, table)
        self._store.moving.ended(job)

    def _read(self, extents: Extents, size_bytes: int) -> bytes:
        if self._arena is None:
            return bytes(size_bytes)
        page_bytes = self._arena.page_bytes
        parts = [bytes(self._arena.view(at * page_bytes, n * page_bytes)) for at, n in extents]
        return b"".join(parts)[:size_bytes]

    def _write(self, extents: Extents, data: bytes) -> None:
        if self._arena is None:
            return
        left = memoryview(data)
        for start, count in extents:
            part = left[: count * self._arena.page_bytes]
            self._arena.view(start * self._arena.page_bytes, len(part))[:] = part
            left = left[len(part) :]
