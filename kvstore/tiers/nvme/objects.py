"""The objects of a mounted device: put, get, delete. On the event loop only; bytes move in threads.

    put:   write data, verify memory ....... | group commit | Record, or an error
    get:   read data, find the table ....... | verify       | table, or an error
           threads of the device, reads first  a thread of its own for commits

A call whose caller was told `DeviceDown` goes on until its threads are done: only then are its pages free.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiofiles.os import wrap

from kvstore.core import Corrupt, Key, Namespace, ObjectKinds, decode_manifest, limits, pages_for
from kvstore.tiers.nvme.base import Counts, Get, NewObject, Refusal
from kvstore.tiers.nvme.committer import Committer
from kvstore.tiers.nvme.device import DeviceDown, Pieces
from kvstore.tiers.nvme.health import Health
from kvstore.tiers.nvme.mounting import Mounted
from kvstore.tiers.nvme.pieces import pieces, strands, table_of
from kvstore.tiers.nvme.pool import IoPool, Lane
from kvstore.tiers.nvme.records import Kind, Record
from kvstore.tiers.nvme.space import Space
from kvstore.tiers.nvme.volume import PagesFailed, Volume
from kvstore.tiers.nvme.wear import WearBudget
from kvstore.wire import Generation

_T = TypeVar("_T")
_Move = Callable[[Pieces, Callable[[], bool]], None]
_NOTHING = Key(bytes(limits.KEY_BYTES))


class Found(NamedTuple):
    """What a mount found, in the form that `Objects` keeps it. Made in a thread: there may be millions."""

    volume: Volume
    records: dict[Key, Record]
    object_bytes: int
    namespaces: list[Record]
    manifests: dict[Namespace, bytes]
    space: Space

    @classmethod
    def of(cls, mounted: Mounted) -> "Found":
        """Reads the manifests, too; those that cannot be read are missing, and noted.

        Raises:
            DeviceDown
        """
        volume, objects, namespaces, notes = mounted
        manifests = {}
        for record in namespaces:
            try:
                manifests[record.namespace] = volume.payload(record)
            except Corrupt as error:
                notes.append(f"{error}: its objects are found when an engine brings the manifest again")
        records = {record.key: record for record in objects}
        _share_names(records, namespaces)
        return cls(
            volume,
            records,
            sum(record.size_bytes for record in objects),
            namespaces,
            manifests,
            Space(volume.page_count, volume.label.slot_count, (*objects, *namespaces)),
        )


def _share_names(records: dict[Key, Record], namespaces: Iterable[Record]) -> None:
    """One copy of each name in memory: each record was decoded with its own of its namespace and its parent."""
    names = {record.namespace: record.namespace for record in namespaces}
    for record in records.values():
        msgspec.structs.force_setattr(record, "namespace", names.get(record.namespace, record.namespace))
        above = records.get(record.parent)
        if above is not None:
            msgspec.structs.force_setattr(record, "parent", above.key)


class Objects:
    """What a mounted device holds."""

    def __init__(
        self,
        found: Found,
        *,
        health: Health,
        io: IoPool,
        hashing: IoPool,
        commits: IoPool,
        wear: WearBudget,
        counts: Counts,
    ) -> None:
        """Takes over what was found, and changes it from now on."""
        self.volume = found.volume
        self.records = found.records
        self.object_bytes = found.object_bytes
        self.space = found.space
        self.manifests: dict[Namespace, bytes] = {}
        self.committer = Committer(
            self.volume,
            health,
            commits,
            being_written=lambda: len(self._writing),
            on_stored=self._stored,
            on_gone=self._gone,
        )
        self.writing_bytes = 0
        self.counts = counts
        self._health = health
        self._reads, self._writes, self._background = io.lanes
        self._verifying = dict(zip(io.lanes, hashing.lanes, strict=True))
        self._wear = wear
        self._kinds: dict[Namespace, ObjectKinds] = {}
        self._namespaces: dict[Namespace, Record] = {}  # their manifests are on the device, or in the queue
        self._work: set[asyncio.Task[Any]] = set()  # puts and gets
        self._writing: dict[Record, None] = {}  # their data is being written
        self._reading: dict[Record, int] = {}  # how many gets read them
        self._leaving: dict[Record, None] = {}  # deleted, but still being read
        for namespace, manifest in found.manifests.items():
            self.open_namespace(namespace, manifest)
        for record in found.namespaces:
            if record.namespace in found.manifests:
                self._namespaces[record.namespace] = record
            else:
                self.committer.free(record)

    def open_namespace(self, namespace: Namespace, manifest: bytes) -> None:
        """Makes a namespace known; its manifest is kept with its objects.

        Raises:
            BadRequest: it is not a manifest.
        """
        if namespace not in self._kinds:
            self._kinds[namespace] = decode_manifest(manifest).object_kinds
            self.manifests[namespace] = manifest

    def pages_of(self, size_bytes: int) -> int:
        """Pages of an object of this size."""
        return pages_for(size_bytes, self.volume.label.page_bytes)

    def refuses(self, size_bytes: int) -> Refusal | None:
        """Whether, and why, an object of this size would not be taken now."""
        if not self._health.up:
            return Refusal.DEVICE_DOWN
        if self.writing_bytes and self.writing_bytes + size_bytes > limits.NVME_WRITING_BYTES_MAX:
            return Refusal.BUSY
        if self.pages_of(size_bytes) > self.space.free_pages or not self.space.free_slots:
            return Refusal.NO_ROOM
        return Refusal.WORN if self._wear.spent else None

    # --- put ----------------------------------------------------------------------------------------

    async def put(self, new: NewObject, memory: Sequence[memoryview]) -> Record | Refusal:
        """See `NvmeDevice.put`."""
        refusal = self.refuses(new.size_bytes)
        if refusal is not None:
            return refusal
        record = self._place(new)
        if record is None:
            return Refusal.NO_ROOM
        if not self._wear.take(new.size_bytes):
            self.space.free(record)
            return Refusal.WORN
        self._writing[record] = None
        self.writing_bytes += new.size_bytes
        work = self._run(self._put(record, new.table, memory))
        try:
            return await self._health.unless_down(work)
        except (Corrupt, PagesFailed, DeviceDown):
            self.counts.failed_puts += 1
            raise

    async def _put(self, record: Record, table: bytes, memory: Sequence[memoryview]) -> Record:
        try:
            await self._write(record, table, memory)
            await self.committer.put(record, table)
        finally:
            self.writing_bytes -= record.size_bytes
        return record

    def _stored(self, record: Record) -> None:
        """A record is durable."""
        if record.kind is Kind.NAMESPACE:
            return
        self.records[record.key] = record
        self.object_bytes += record.size_bytes
        self.counts.puts += 1
        self.counts.put_bytes += record.size_bytes

    async def _write(self, record: Record, table: bytes, memory: Sequence[memoryview]) -> None:
        """Writes memory to the record's pages and verifies it meanwhile; frees the pages when that fails."""
        failure = self._health.failure
        moved = self._pieces(record, memory)
        writing = self._start(self.volume.write, moved, 1, self._writes, failure)  # many are put at once
        verifying = asyncio.ensure_future(self._verify(record, len(table), memory, self._writes))
        try:
            await self._ended([*writing, verifying])
            if failure.done():
                failure.result()
            if verifying.result() != table:
                self.counts.bad_copies += 1
                raise Corrupt(f"the copy of {record.key.hex()[:16]} in memory does not match its table")
        except PagesFailed:
            self.space.fail(record)
            raise
        except DeviceDown as error:
            self.space.free(record)
            self._trip(error, failure)
            raise
        except BaseException:
            self.space.free(record)
            raise
        finally:
            del self._writing[record]

    def _place(self, new: NewObject) -> Record | None:
        """A record with pages and slots for a new object, after one for its manifest if need be."""
        assert new.key not in self.records, "a key has one copy in a tier"
        if not self._place_manifest(new.namespace):
            return None
        room = self.space.allocate(self.pages_of(new.size_bytes), len(new.table))
        if room is None:
            return None
        return Record(
            kind=Kind.OBJECT,
            key=new.key,
            namespace=new.namespace,
            parent=new.parent,
            depth=new.depth,
            generation=new.generation,
            size_bytes=new.size_bytes,
            cold=new.cold,
            sequence=self.volume.next_sequence(),
            extents=room[0],
            slots=room[1],
        )

    def _place_manifest(self, namespace: Namespace) -> bool:
        """Whether the namespace's manifest is on the device, or in the queue before what is put next."""
        if namespace in self._namespaces:
            return True
        manifest = self.manifests[namespace]
        room = self.space.allocate(0, len(manifest))
        if room is None:
            return False
        record = Record(
            kind=Kind.NAMESPACE,
            key=Key(namespace),
            namespace=namespace,
            parent=_NOTHING,
            depth=0,
            generation=Generation(bytes(limits.GENERATION_BYTES)),
            size_bytes=len(manifest),
            cold=False,
            sequence=self.volume.next_sequence(),
            extents=(),
            slots=room[1],
        )
        self._namespaces[namespace] = record
        self.committer.put(record, manifest)
        return True

    # --- get ----------------------------------------------------------------------------------------

    def get(self, record: Record, memory: Sequence[memoryview], *, background: bool) -> Get:
        """See `NvmeDevice.get`."""
        self._health.check()
        work = self._run(self._get(record, memory, self._background if background else self._reads))
        return Get(asyncio.ensure_future(self._health.unless_down(work)), work)

    async def _get(self, record: Record, memory: Sequence[memoryview], lane: Lane) -> bytes:
        failure = self._health.failure
        self._reading[record] = self._reading.get(record, 0) + 1
        try:
            table = await self._read(record, memory, lane, failure)
        except Corrupt:
            self.counts.bad_copies += 1
            raise
        except DeviceDown as error:
            self.counts.failed_gets += 1
            self._trip(error, failure)
            raise
        finally:
            self._read_ended(record)
        self.counts.gets += 1
        self.counts.get_bytes += record.size_bytes
        return table

    async def _read(
        self, record: Record, memory: Sequence[memoryview], lane: Lane, failure: asyncio.Future[None]
    ) -> bytes:
        """Reads and verifies; returns the table."""
        finding = asyncio.ensure_future(wrap(self.volume.payload)(record, executor=lane))
        reading = self._start(self.volume.read, self._pieces(record, memory), lane.running_max, lane, failure)
        try:
            await self._ended([*reading, finding])
        except PagesFailed as error:
            raise Corrupt(f"{record.key.hex()[:16]} cannot be read: {error}") from error
        table = finding.result()
        if await self._verify(record, len(table), memory, lane) != table:
            raise Corrupt(f"the copy of {record.key.hex()[:16]} on {self.volume.device.name} is damaged")
        return table

    def _read_ended(self, record: Record) -> None:
        self._reading[record] -= 1
        if self._reading[record]:
            return
        del self._reading[record]
        if record in self._leaving:
            del self._leaving[record]
            self.committer.free(record)

    # --- delete -------------------------------------------------------------------------------------

    def delete(self, record: Record) -> None:
        """See `NvmeDevice.delete`."""
        assert self.records.get(record.key) is record, "another object has this key, or none"
        del self.records[record.key]
        self.object_bytes -= record.size_bytes
        self.counts.deletes += 1
        if record in self._reading:
            self._leaving[record] = None
        else:
            self.committer.free(record)

    def _gone(self, record: Record) -> None:
        """Nothing on the device knows the record any more."""
        if self._namespaces.get(record.namespace) is record:
            del self._namespaces[record.namespace]
        self.space.free(record)

    # --- all ----------------------------------------------------------------------------------------

    async def drain(self, deadline_s: float) -> None:
        """Returns when no put, get or commit runs any more, or time is up."""
        end_s = asyncio.get_running_loop().time() + deadline_s
        if self._work:
            await asyncio.wait(self._work, timeout=deadline_s)
        await self.committer.drain(end_s - asyncio.get_running_loop().time())

    def audit(self) -> None:
        """Asserts that bytes, pages and slots add up. Slow: it looks at all."""
        kept = self.records.values()
        assert self.object_bytes == sum(record.size_bytes for record in kept), "object bytes are miscounted"
        elsewhere = (*self._namespaces.values(), *self._writing, *self._leaving, *self.committer.records())
        self.space.audit({*kept, *elsewhere})

    def _run(self, work: Coroutine[None, None, _T]) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def _verify(
        self, record: Record, table_bytes: int, memory: Sequence[memoryview], lane: Lane
    ) -> bytes:
        """The table of what is in memory, as urgent as I/O of this lane; nothing where none can be so long."""
        geometry = self._kinds[record.namespace].geometry_of(record.size_bytes, table_bytes)
        if geometry is None:
            return b""
        runs = geometry.runs(record.size_bytes)
        return await wrap(table_of)(memory, runs, executor=self._verifying[lane])

    def _pieces(self, record: Record, memory: Sequence[memoryview]) -> Pieces:
        return pieces(record.extents, self.volume.label.page_bytes, record.size_bytes, memory)

    def _start(
        self, call: _Move, moved: Pieces, width: int, lane: Lane, failure: asyncio.Future[None]
    ) -> list[asyncio.Future[None]]:
        """Moves pieces in several threads, until the device fails."""
        moving = wrap(call)
        parts = strands(moved, width)
        return [asyncio.ensure_future(moving(part, failure.done, executor=lane)) for part in parts]

    async def _ended(self, work: Sequence[asyncio.Future[Any]]) -> None:
        """Returns, or raises, when all of it has ended: a device that is down rather than pages that failed."""
        await asyncio.wait(work)
        errors = [error for error in (each.exception() for each in work) if error is not None]
        for error in sorted(errors, key=lambda error: not isinstance(error, DeviceDown)):
            raise error

    def _trip(self, error: DeviceDown, failure: asyncio.Future[None]) -> None:
        """The device failed; not so when that error belongs to an earlier time."""
        if not failure.done():
            self._health.trip(error)
