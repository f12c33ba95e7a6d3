"""Group commit: puts and frees of one device, in the order they came, many at a time.

What is in the queue when a commit ends is the next one; and as long as more objects are being written than wait for
their commit, it waits a moment for them. So under load a commit serves about half of what is under way, while the
device writes the other half; otherwise it is at once. One commit at a time, in a thread of its own.

A commit that failed leaves its records *unsettled*: it is not known which of them became durable. Their pages
stay taken until a later commit has freed them all (`settle`), before the device is used again.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from aiofiles.os import wrap

from kvstore.core import limits
from kvstore.tiers.nvme.device import DeviceDown
from kvstore.tiers.nvme.health import Health
from kvstore.tiers.nvme.pool import IoPool
from kvstore.tiers.nvme.records import Record
from kvstore.tiers.nvme.volume import Volume

_LINGER_S = 0.05


class _Change(NamedTuple):
    """A put; or a free, which has no payload. `done` is told what became of it."""

    record: Record
    payload: bytes | None
    done: asyncio.Future[None]


class Committer:
    """The commits of a mounted volume.

    Args:
        volume: what to commit to.
        health: stops it, and is told when a commit fails.
        pool: one thread.
        on_stored: a record is durable.
        being_written: of how many more puts data is being written.
        on_gone: nothing on the device knows a record any more; its pages and slots are free.
    """

    def __init__(
        self,
        volume: Volume,
        health: Health,
        pool: IoPool,
        *,
        being_written: Callable[[], int],
        on_stored: Callable[[Record], None],
        on_gone: Callable[[Record], None],
    ) -> None:
        self._volume = volume
        self._health = health
        self._lane = pool.lanes[0]
        self._being_written = being_written
        self._on_stored = on_stored
        self._on_gone = on_gone
        self._queue: deque[_Change] = deque()
        self._came = asyncio.Event()
        self._unsettled: list[Record] = []
        self._running: list[_Change] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether no commit is running."""
        return self._task is None

    def records(self) -> Iterable[Record]:
        """Records whose pages are taken here: being put, being freed, or unsettled."""
        yield from (change.record for change in (*self._running, *self._queue))
        yield from self._unsettled

    def put(self, record: Record, payload: bytes) -> "asyncio.Future[None]":
        """The result is there when the record is durable; its data was written before."""
        return self._enqueue(record, payload)

    def free(self, record: Record) -> None:
        """The record goes: now, or when the device is back."""
        self._enqueue(record, None)

    def tripped(self, error: DeviceDown) -> None:
        """The device is down: puts that were not begun fail, frees wait."""
        puts = [change for change in self._queue if change.payload is not None]
        self._queue = deque(change for change in self._queue if change.payload is None)
        for change in puts:
            self._on_gone(change.record)
            _fail(change, error)

    async def settle(self) -> None:
        """Frees what is unsettled; the first thing to be done with a device that came back.

        Raises:
            DeviceDown
        """
        assert self.idle, "a commit still runs"
        unsettled = self._unsettled
        await wrap(self._volume.commit)((), unsettled, executor=self._lane)
        self._unsettled = []
        for record in unsettled:
            self._on_gone(record)

    def resume(self) -> None:
        """The device is up: what waits is committed."""
        if self._queue and self._task is None and self._health.up:
            self._task = asyncio.get_running_loop().create_task(self._commit_all())
            self._task.add_done_callback(self._ended)

    async def drain(self, deadline_s: float) -> None:
        """Returns when no commit runs or waits any more, or time is up."""
        end_s = asyncio.get_running_loop().time() + deadline_s
        while self._task is not None and (left_s := end_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait({self._task}, timeout=left_s)

    def _enqueue(self, record: Record, payload: bytes | None) -> "asyncio.Future[None]":
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(_Change(record, payload, done))
        self._came.set()
        self.resume()
        return done

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        task.result()
        self.resume()

    async def _commit_all(self) -> None:
        while self._queue and self._health.up:
            await self._linger()
            failure = self._health.failure
            if failure.done():
                return
            count = min(len(self._queue), limits.NVME_COMMIT_RECORDS_MAX)
            self._running = [self._queue.popleft() for _ in range(count)]
            try:
                await self._commit(self._running)
                failed = failure.exception() if failure.done() else None
            except DeviceDown as error:
                failed = error
                self._health.trip(error)
            self._settled(failed)

    async def _linger(self) -> None:
        """Returns when enough wait to be worth a commit, or have waited long enough."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while len(self._queue) < min(self._being_written(), limits.NVME_COMMIT_RECORDS_MAX):
                    self._came.clear()
                    await self._came.wait()

    async def _commit(self, changes: list[_Change]) -> None:
        puts = [(change.record, change.payload) for change in changes if change.payload is not None]
        freed = [change.record for change in changes if change.payload is None]
        await wrap(self._volume.commit)(puts, freed, executor=self._lane)

    def _settled(self, failed: BaseException | None) -> None:
        """A commit ended, perhaps after it was given up by those who waited for it."""
        changes, self._running = self._running, []
        for change in changes:
            if failed is not None:
                self._unsettled.append(change.record)
                _fail(change, failed)
                continue
            told = self._on_gone if change.payload is None else self._on_stored
            told(change.record)
            if not change.done.done():  # who waited may have been cancelled
                change.done.set_result(None)


def _fail(change: _Change, error: BaseException) -> None:
    if not change.done.done():
        change.done.set_exception(error)
        change.done.exception()  # whoever waits is told; perhaps nobody does any more
