"""Requests whose reply comes later: bounded per client, and never forgotten.

Every parked request is one task that somebody owns: it ends by itself at its deadline, early when its
lease is released, and with an answer when the server stops.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine

from kvstore.core import limits
from kvstore.wire import ClientId, LeaseId, ReplyBody

Watch = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a callback for "something changed", gives back a way to cancel it."""


class Parking:
    """The parked requests of all clients."""

    def __init__(self) -> None:
        self.total = 0
        self.refused = 0
        self.closing = False
        self._tasks: dict[asyncio.Task[ReplyBody], tuple[ClientId, LeaseId]] = {}
        self._per_client: Counter[ClientId] = Counter()
        self._alarms: set[asyncio.Event] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def has_room(self, client: ClientId) -> bool:
        """Whether this client may park one more; counts a refusal."""
        if self.closing or self._per_client[client] >= limits.PARKED_PER_CLIENT_MAX:
            self.refused += 1
            return False
        return True

    def park(
        self,
        client: ClientId,
        lease: LeaseId,
        work: Coroutine[None, None, ReplyBody],
        ended: Callable[["asyncio.Task[ReplyBody]"], None],
    ) -> None:
        """Runs `work` until it ends, or until `release` of its lease; then calls `ended`, however it ended: a task
        that is cancelled before its first step runs nothing of its own any more."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = client, lease
        self._per_client[client] += 1
        self.total += 1
        task.add_done_callback(self._leave)
        task.add_done_callback(ended)

    def release(self, client: ClientId, lease: LeaseId) -> None:
        """The lease has ended: whatever waits to add to it must not take it again."""
        for task, owner in self._tasks.items():
            if owner == (client, lease):
                task.cancel()

    async def changed(self, watch: Watch, timeout_s: float) -> bool:
        """Waits until `watch` tells of a change. False: the time was up, or the server stops, first."""
        alarm = asyncio.Event()
        fired = False

        def on_change() -> None:
            nonlocal fired
            fired = True
            alarm.set()

        cancel = watch(on_change)
        timer = asyncio.get_running_loop().call_later(timeout_s, alarm.set)
        self._alarms.add(alarm)
        try:
            if not self.closing:
                await alarm.wait()
        finally:
            self._alarms.discard(alarm)
            timer.cancel()
            cancel()
        return fired

    async def close(self) -> None:
        """Ends every wait early and returns when each has been answered."""
        self.closing = True
        for alarm in self._alarms:
            alarm.set()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def _leave(self, task: asyncio.Task[ReplyBody]) -> None:
        client, _ = self._tasks.pop(task)
        self._per_client[client] -= 1
        if not self._per_client[client]:
            del self._per_client[client]
