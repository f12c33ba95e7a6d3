"""Whether a device can be used: up, or down for a reason. What opens it are errors and calls that hang.

Everybody who waits for a device waits for `failure` as well, so that a call that hangs in the kernel keeps a
thread, and never a caller.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvstore.tiers.nvme.device import DeviceDown

T = TypeVar("T")


class Health:
    """The breaker of one device. It starts down. On the event loop only."""

    def __init__(self, on_trip: Callable[[DeviceDown], None]) -> None:
        self.trips = 0
        self._on_trip = on_trip
        self.reason: DeviceDown | None = DeviceDown("it was not mounted yet")
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fail()

    @property
    def up(self) -> bool:
        """Whether it may be used."""
        return self.reason is None

    def check(self) -> None:
        """Raises `DeviceDown` when it may not be used."""
        if self.reason is not None:
            raise DeviceDown(str(self.reason))

    def trip(self, error: DeviceDown) -> None:
        """It failed: whoever waits for it fails."""
        if self.reason is not None:
            return
        self.reason = error
        self.trips += 1
        self._fail()
        self._on_trip(error)

    def close(self, error: DeviceDown) -> None:
        """It is not to be used any more; no trouble."""
        if self.reason is None:
            self.reason = error
            self._fail()

    def recover(self) -> None:
        """It answers again. What began before stays failed."""
        self.reason = None
        self.failure = asyncio.get_running_loop().create_future()

    async def unless_down(self, work: asyncio.Future[T]) -> T:
        """What `work` comes to, or `DeviceDown` as soon as the device is; the work goes on then."""
        failure = self.failure
        work.add_done_callback(_looked_at)
        waited: set[asyncio.Future[T] | asyncio.Future[None]] = {work, failure}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            failure.result()
        return work.result()

    def _fail(self) -> None:
        self.failure.set_exception(DeviceDown(str(self.reason)))
        _looked_at(self.failure)


def _looked_at(done: asyncio.Future[T]) -> None:
    """Its error reaches those who wait for it; that nobody did is no fault."""
    if not done.cancelled():
        done.exception()
