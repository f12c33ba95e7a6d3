"""The porter: carries copies between the arena and the devices, beside the control loop.

The store says what is to be carried and changes its state when it is told what came of it; bytes move, and are
verified, in the threads of each device. So a device that hangs costs its own jobs their deadline, and nobody else
anything.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kvstore.core import Corrupt, Extents, MissReason, limits
from kvstore.store.objects import Job, OnDevice, Promotion, Spill
from kvstore.store.store import Store
from kvstore.tiers import Arena, DeviceDown, Get, NvmeDevice, NvmeTier, PagesFailed, Placed, Refusal

log = logging.getLogger(__name__)

_ROOM_COMES_S = 2.0  # pages that were given up are free a commit later
_LOOK_AGAIN_S = 0.005
_TRY_AGAIN_S = 0.1
_BACK_S = 3.0  # within that, a device that is up again has told so


class Porter:
    """Carries out the jobs of a store.

    Args:
        store: whose jobs.
        arena: the memory that DRAM copies lie in.
        tier: the devices.
        promote_deadline_s: what a device may take for one object.
        on_done: is told of jobs that succeeded, and how long they took.
    """

    def __init__(
        self,
        store: Store,
        arena: Arena,
        tier: NvmeTier,
        promote_deadline_s: float,
        on_done: Callable[[Job, float], None] = lambda _job, _seconds: None,
    ) -> None:
        self._on_done = on_done
        self._store = store
        self._arena = arena
        self._tier = tier
        self._promote_deadline_s = promote_deadline_s
        self._spilling = asyncio.Semaphore(limits.SPILLS_AT_ONCE * max(1, len(tier.devices)))
        self._promoting = {device: asyncio.Semaphore(limits.PROMOTIONS_AT_ONCE) for device in tier.devices}
        self._tasks: set[asyncio.Task[None]] = set()
        store.on_job = self._take

    def found(self, device: NvmeDevice) -> None:
        """A device was mounted: what is on it is listed, a slice at a time."""
        self._run(self._adopt(device))

    async def settled(self) -> None:
        """Returns when nothing is being carried or listed."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self, flush_s: float) -> None:
        """Spills what is only in DRAM, the hottest first, for as long as there is time; closes the devices, and says
        what could not be kept."""
        unsaved = self._store.moving.unsaved()
        await self._flush(flush_s)
        refusal = self._tier.refuses(max((each.size_bytes for each in unsaved), default=0))
        await self._tier.stop()
        await self.settled()
        lost = sum(each.nvme is None for each in unsaved)
        if unsaved:
            log.info("flushed objects=%d lost=%d", len(unsaved) - lost, lost)
        if lost:
            why = (
                f"NVMe takes nothing ({refusal})" if refusal else f"tiers.flush_s = {flush_s:g} was too short"
            )
            log.warning("%d objects that were only in DRAM could not be flushed to NVMe: %s", lost, why)

    async def _flush(self, flush_s: float) -> None:
        """What was refused is offered again: a device that was slow rather than dead is back after its next probe."""
        loop, moving = asyncio.get_running_loop(), self._store.moving
        end_s = loop.time() + flush_s
        moving.flush()
        busy_s = loop.time()
        while moving.unsaved() and loop.time() < min(end_s, busy_s + _BACK_S):
            while (moving.flushing or len(moving)) and loop.time() < end_s:
                await asyncio.sleep(_LOOK_AGAIN_S)
                moving.advance()
                busy_s = loop.time()
            await asyncio.sleep(_TRY_AGAIN_S)
            moving.flush()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()  # a bug of ours is told by the loop's exception handler

    def _take(self, job: Job) -> None:
        if isinstance(job, Spill):
            self._run(self._spill(job))
        else:
            assert isinstance(job, Promotion), "there is no other job"
            self._run(self._promote(job))

    def _memory(self, extents: Extents) -> list[memoryview]:
        page_bytes = self._arena.page_bytes
        return [self._arena.view(start * page_bytes, count * page_bytes) for start, count in extents]

    # --- from a device that was found -------------------------------------------------------------------

    async def _adopt(self, device: NvmeDevice) -> None:
        """Oldest first, so that what was spilled last is given up last."""
        records = await asyncio.to_thread(sorted, device.records.values(), key=lambda record: record.sequence)
        for start in range(0, len(records), limits.ADOPTED_PER_SLICE):
            self._store.adopt(device, records[start : start + limits.ADOPTED_PER_SLICE])
            await asyncio.sleep(0)

    # --- to a device ------------------------------------------------------------------------------------

    async def _spill(self, job: Spill) -> None:
        began_s = asyncio.get_running_loop().time()
        async with self._spilling:
            outcome = await self._put(job)
        if isinstance(outcome, OnDevice):
            self._on_done(job, asyncio.get_running_loop().time() - began_s)
        self._store.moving.spilled(job, outcome)

    async def _put(self, job: Spill) -> OnDevice | Refusal | None:
        """Where it is now, or why it is nowhere; None: its bytes in DRAM do not match its table."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _ROOM_COMES_S
        new, memory = self._store.contents(job), self._memory(job.extents)
        while True:
            try:
                stored = await self._tier.put(new, memory)
            except Corrupt:
                return None
            except DeviceDown:
                return Refusal.DEVICE_DOWN
            except PagesFailed:  # they are out of use now: other pages, perhaps of another device
                stored = Refusal.BUSY
            if isinstance(stored, Placed):
                return OnDevice(stored.device, stored.record)
            may_come = stored is Refusal.BUSY or (stored is Refusal.NO_ROOM and self._store.make_disk_room(0))
            if not may_come or loop.time() > end_s:
                return stored
            await asyncio.sleep(_LOOK_AGAIN_S)

    # --- from a device ----------------------------------------------------------------------------------

    async def _promote(self, job: Promotion) -> None:
        device = next(each for each in self._tier.devices if each is job.source.disk)
        reading: Get | None = None
        began_s = asyncio.get_running_loop().time()
        async with self._promoting[device]:
            try:
                reading = device.get(job.source.record, self._memory(job.extents))
                table = await self._within_deadline(reading)
            except TimeoutError:
                self._store.moving.failed(job, MissReason.PROMOTE_DEADLINE)
            except Corrupt as error:
                log.warning("%s", error)
                self._store.moving.failed(job, MissReason.BAD_COPY)
            except DeviceDown:
                self._store.moving.failed(job, MissReason.DEVICE_DOWN)
            else:
                self._on_done(job, asyncio.get_running_loop().time() - began_s)
                self._store.moving.promoted(job, table)
        if reading is not None:
            await asyncio.wait({reading.ended})  # until then its pages are nobody's
        self._store.moving.ended(job)

    async def _within_deadline(self, reading: Get) -> bytes:
        """The object's table, once its bytes are in memory and match it.

        Raises:
            TimeoutError, Corrupt, DeviceDown
        """
        done, _ = await asyncio.wait({reading.table}, timeout=self._promote_deadline_s)
        if not done:
            reading.table.add_done_callback(_looked_at)
            raise TimeoutError
        return reading.table.result()


def _looked_at(done: asyncio.Future[bytes]) -> None:
    """It came too late for anybody to ask."""
    if not done.cancelled():
        done.exception()
