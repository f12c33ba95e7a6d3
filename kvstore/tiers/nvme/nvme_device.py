"""One device of the NVMe tier, from its mounting to its end: watched, given up, looked for, taken back.

When it fails (an error, or a call that takes longer than `deadline_s`) everybody who waits for it gets
`DeviceDown` at once. A device that is down is looked at every second; if it answers, and is the same one as
before (uuid and mount id of its label), what was under way when it failed is freed first, and it is up again.
A device that could not be mounted at the start is mounted when it answers.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiofiles.os import wrap

from kvstore.core import Key, Namespace, limits
from kvstore.tiers.nvme.base import Counts, Get, NewObject, Refusal
from kvstore.tiers.nvme.device import Device, DeviceDown, DeviceRefused, FileDevice
from kvstore.tiers.nvme.health import Health
from kvstore.tiers.nvme.mounting import Mounted, mount
from kvstore.tiers.nvme.objects import Found, Objects
from kvstore.tiers.nvme.pool import IoPool
from kvstore.tiers.nvme.records import Record
from kvstore.tiers.nvme.wear import WearBudget

log = logging.getLogger(__name__)

_LAST_S = 0.5  # for calls that end by themselves once the device is closed


@dataclass(frozen=True, kw_only=True)
class NvmeConfig:
    """What a device is used with.

    Args:
        path: block device or file.
        node: the name of this node; a device of another one is refused.
        catalogs: the folder of the LMDB catalogs.
        threads: that read, and that write, at most; there is one more, so that neither keeps the other waiting.
        deadline_s: an I/O that takes longer means that the device is down.
        write_bytes_per_day: wear budget; 0: no bound.
        watch_s: between two looks at running I/O.
        probe_s: between two looks at a device that is down.
    """

    path: str
    node: str
    catalogs: Path
    threads: int = limits.NVME_THREADS_DEFAULT
    deadline_s: float = limits.NVME_DEADLINE_S_DEFAULT
    write_bytes_per_day: int = 0
    watch_s: float = limits.NVME_WATCH_S
    probe_s: float = limits.NVME_PROBE_S


class NvmeStats(msgspec.Struct, frozen=True, kw_only=True):
    """A device at one moment. Any thread may read it."""

    path: str
    up: bool
    reason: str
    trips: int
    objects: int
    object_bytes: int
    page_bytes: int
    pages: int
    free_pages: int
    failed_pages: int
    writing_bytes: int
    wear_left_bytes: int
    counts: Counts


class NvmeDevice:
    """A device of this node. Made, started and used on one event loop."""

    def __init__(
        self,
        config: NvmeConfig,
        *,
        open_device: Callable[[str], Device] = FileDevice.open,
        clock: Callable[[], float] = time.monotonic,
        random_bytes: Callable[[int], bytes] = os.urandom,
        on_found: Callable[["NvmeDevice"], None] = lambda _: None,
    ) -> None:
        """Nothing is opened yet, see `start`.

        Args:
            config: see there.
            open_device: the seam to the operating system.
            clock: seconds, only growing; called from any thread.
            random_bytes: for ids of mounts.
            on_found: called when the device was mounted, at the start or later: see `records`.
        """
        threads = config.threads
        self.config = config
        self.health = Health(self._tripped)
        self._open_device = open_device
        self._clock = clock
        self._random_bytes = random_bytes
        self._on_found = on_found
        self._io = IoPool("nvme", threads + 1, (threads, threads, 1), clock)
        self._hashing = IoPool("nvme-hash", 1, (1, 1, 1), clock)
        self._commits = IoPool("nvme-commit", 1, (1,), clock)
        self._wear = WearBudget(config.write_bytes_per_day, clock)
        self._counts = Counts()
        self._objects: Objects | None = None
        self._opened: dict[Namespace, bytes] = {}
        self._probe_at = 0.0
        self._watcher: asyncio.Task[None] | None = None
        self._stopped = False

    # --- life ---------------------------------------------------------------------------------------

    async def start(self, deadline_s: float = 60.0) -> None:
        """Mounts the device. One that does not answer, or takes longer than this, is taken in when it does.

        Raises:
            DeviceRefused: it is not this node's, or is in use: nothing was changed on it.
        """
        loop = asyncio.get_running_loop()
        looked: asyncio.Future[None] = loop.create_future()
        self._watcher = loop.create_task(self._watch(looked))
        self._watcher.add_done_callback(_must_not_fail)
        await asyncio.wait({looked}, timeout=deadline_s)
        if looked.done():
            looked.result()
        else:
            log.warning("%s does not answer yet; the node goes on without it until it does", self.config.path)

    async def stop(self, deadline_s: float = 10.0) -> None:
        """Lets what is under way end, within the deadline, and closes the device. Then nothing is under way.

        What was not stored by then fails with `DeviceDown`, as does every later call.
        """
        if self._stopped:
            return
        self._stopped = True
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        if self._objects is not None:
            await self._objects.drain(deadline_s)
        error = DeviceDown(f"{self.config.path} was closed")
        self.health.close(error)
        if self._objects is not None:
            await self._abandon(self._objects, error)
        for pool in (self._io, self._hashing, self._commits):
            pool.close()

    async def _abandon(self, objects: Objects, error: DeviceDown) -> None:
        """Fails what is left, and closes the volume unless a commit hangs in it."""
        self._io.fail_waiting(error)
        objects.committer.tripped(error)
        await objects.drain(_LAST_S)
        if objects.committer.idle:
            await wrap(objects.volume.close)(executor=self._commits.lanes[0])

    # --- objects ------------------------------------------------------------------------------------

    @property
    def records(self) -> dict[Key, Record]:
        """What is stored, by key; to be read only. Empty until the device was mounted."""
        return {} if self._objects is None else self._objects.records

    @property
    def manifests(self) -> dict[Namespace, bytes]:
        """The manifests of what is stored, and those that were opened."""
        return self._opened if self._objects is None else self._objects.manifests

    @property
    def up(self) -> bool:
        """Whether it can be read and written now."""
        return self.health.up

    @property
    def page_bytes(self) -> int:
        """Of its pages; 0 until it was mounted."""
        return 0 if self._objects is None else self._objects.volume.label.page_bytes

    @property
    def usable_pages(self) -> int:
        """Its pages but those that failed; 0 until it was mounted."""
        return (
            0 if self._objects is None else self._objects.space.page_count - self._objects.space.failed_pages
        )

    @property
    def free_pages(self) -> int:
        """Pages that a put can have now; 0 while the device is down."""
        return self._objects.space.free_pages if self._objects is not None and self.health.up else 0

    def open_namespace(self, namespace: Namespace, manifest: bytes) -> None:
        """Makes a namespace known before objects of it are put; its manifest is kept with them.

        Raises:
            BadRequest: it is not a manifest.
        """
        self._opened[namespace] = manifest
        if self._objects is not None:
            self._objects.open_namespace(namespace, manifest)

    def refuses(self, size_bytes: int) -> Refusal | None:
        """Whether, and why, an object of this size would not be taken now."""
        return Refusal.DEVICE_DOWN if self._objects is None else self._objects.refuses(size_bytes)

    async def put(self, new: NewObject, memory: Sequence[memoryview]) -> Record | Refusal:
        """Stores an object that lies in `memory`, in order, in whole blocks of 4 KiB; durable when it returns.

        The memory may be reused at any time: an object whose bytes changed meanwhile is never handed out.
        Its namespace must have been opened, and its key not be stored or on its way.

        Raises:
            Corrupt: the memory does not match the table; nothing was stored.
            PagesFailed: some pages cannot be written; nothing was stored.
            DeviceDown: the device failed; nothing was stored.
        """
        return Refusal.DEVICE_DOWN if self._objects is None else await self._objects.put(new, memory)

    def get(self, record: Record, memory: Sequence[memoryview], *, background: bool = False) -> Get:
        """Reads an object into `memory`, in order, in whole blocks of 4 KiB, and verifies it.

        In the background it waits for all else, and uses one thread.

        Raises:
            DeviceDown: at once; the memory will not be touched.
        """
        self.health.check()
        assert self._objects is not None, "it is up, so it is mounted"
        return self._objects.get(record, memory, background=background)

    def delete(self, record: Record) -> None:
        """The object is no more. Its pages are free when that is durable, so on a device that is up."""
        assert self._objects is not None, "it has a record, so it was mounted"
        self._objects.delete(record)

    # --- what it tells ------------------------------------------------------------------------------

    def stats(self) -> NvmeStats:
        """The device as it is now."""
        objects = self._objects
        return NvmeStats(
            path=self.config.path,
            up=self.health.up,
            reason="" if self.health.reason is None else str(self.health.reason),
            trips=self.health.trips,
            objects=len(self.records),
            object_bytes=objects.object_bytes if objects is not None else 0,
            page_bytes=objects.volume.label.page_bytes if objects is not None else 0,
            pages=objects.space.page_count if objects is not None else 0,
            free_pages=self.free_pages,
            failed_pages=objects.space.failed_pages if objects is not None else 0,
            writing_bytes=objects.writing_bytes if objects is not None else 0,
            wear_left_bytes=self._wear.left_bytes,
            counts=msgspec.structs.replace(self._counts),
        )

    def audit(self) -> None:
        """Asserts that the books agree. Slow: it looks at all."""
        if self._objects is not None:
            self._objects.audit()

    def __repr__(self) -> str:
        state = "up" if self.health.up else f"down: {self.health.reason}"
        return f"<NvmeDevice {self.config.path} {len(self.records)} objects, {state}>"

    # --- up and down --------------------------------------------------------------------------------

    async def _watch(self, looked: asyncio.Future[None]) -> None:
        try:
            await self._mount()
        except DeviceRefused as refusal:
            self.health.reason = DeviceDown(str(refusal))
            looked.set_exception(refusal)
            return
        except DeviceDown as error:
            self.health.reason = error
            log.warning(
                "%s; the node goes on without it and looks again every %g s", error, self.config.probe_s
            )
        looked.set_result(None)
        while True:
            await asyncio.sleep(self.config.watch_s)
            await self._look()

    async def _look(self) -> None:
        if self.health.up:
            oldest_s = max(self._io.oldest_s(), self._commits.oldest_s())
            if oldest_s > self.config.deadline_s:
                self.health.trip(DeviceDown(f"{self.config.path} did not answer for {oldest_s:.1f} s"))
        elif self._clock() >= self._probe_at and (self._objects is None or self._objects.committer.idle):
            await self._probe()

    def _tripped(self, error: DeviceDown) -> None:
        log.warning("%s: its objects are misses until it is back", error)
        self._probe_at = self._clock()
        self._io.fail_waiting(error)
        if self._objects is not None:
            self._objects.committer.tripped(error)

    async def _probe(self) -> None:
        try:
            if self._objects is None:
                await self._mount()
            else:
                await self._take_back(self._objects)
        except (DeviceDown, DeviceRefused) as error:
            self.health.reason = DeviceDown(str(error))
            self._probe_at = self._clock() + self.config.probe_s
        else:
            log.info("%s is back: %d objects", self.config.path, len(self.records))

    async def _take_back(self, objects: Objects) -> None:
        lane = self._commits.lanes[0]
        await wrap(objects.volume.take_back)(lambda: self._open_device(self.config.path), executor=lane)
        await objects.committer.settle()
        self.health.recover()
        objects.committer.resume()

    async def _mount(self) -> None:
        mounted, found = await wrap(self._find)(executor=self._commits.lanes[0])
        for note in (*mounted.volume.device.warnings, *mounted.notes):
            log.warning("%s", note)
        objects = Objects(
            found,
            health=self.health,
            io=self._io,
            hashing=self._hashing,
            commits=self._commits,
            wear=self._wear,
            counts=self._counts,
        )
        for namespace, manifest in self._opened.items():
            objects.open_namespace(namespace, manifest)
        self._objects = objects
        self.health.recover()
        objects.committer.resume()
        self._on_found(self)

    def _find(self) -> tuple[Mounted, Found]:
        device = self._open_device(self.config.path)
        mounted = mount(device, self.config.node, self.config.catalogs, self._random_bytes)
        return mounted, Found.of(mounted)


def _must_not_fail(watcher: asyncio.Task[None]) -> None:
    """A bug of ours is told by the loop's exception handler, not kept until the end."""
    if not watcher.cancelled():
        watcher.result()
