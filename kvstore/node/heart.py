"""The heartbeat of the control loop: drives the store's ticks, measures the loop, publishes what admin shows."""

import asyncio
from collections.abc import Callable

from kvstore.admin import LAG_BOUNDS_S, Histogram

TICK_S = 0.1
SLICES_PER_TICK = 8  # of the store's background work; requests come in between
TICKS_PER_VIEW = 5


class Heart:
    """Beats `TICK_S` apart, however long the beats themselves take.

    Args:
        tick: a slice of the store's background work.
        publish: puts a new view out for the admin thread.
    """

    def __init__(self, tick: Callable[[], None], publish: Callable[[], None]) -> None:
        self._tick = tick
        self._publish = publish
        self._lag = Histogram(LAG_BOUNDS_S)
        self.beats = 0

    @property
    def lag(self) -> Histogram:
        """How late the loop woke this task, in seconds: what every request waits in addition."""
        return self._lag

    async def run(self) -> None:
        """Beats until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lag.observe(max(0.0, clock() - due))
            for _ in range(SLICES_PER_TICK):
                self._tick()
                await asyncio.sleep(0)
            self.beats += 1
            if self.beats % TICKS_PER_VIEW == 0:
                self._publish()
