"""Arrivals: copies of a promise as they come into DRAM, for a thread that is not the client's loop."""

import logging
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from kvstore.client.client import Client
from kvstore.client.loop_thread import LoopThread
from kvstore.client.promise import Promise
from kvstore.client.promoting import Arrival
from kvstore.core import MissReason
from kvstore.wire import OnDisk

log = logging.getLogger(__name__)


class Arrivals:
    """Begins to promote what of a promise is on NVMe. Used by one thread.

    Args:
        loop: where the client lives.
        client: asks the nodes.
        promise: in DRAM or on NVMe.
        timeout_s: how long it may take; then the chain ends with `promote_deadline`.
    """

    def __init__(self, loop: LoopThread, client: Client, promise: Promise, timeout_s: float) -> None:
        self._missing = {
            index for index, copy in enumerate(promise.copies) if isinstance(copy.answer, OnDisk)
        }
        self._queue: SimpleQueue[Arrival | None] = SimpleQueue()
        self._work = loop.submit(client.promote(promise, timeout_s, self._queue.put))
        self._work.add_done_callback(self._ended)

    @property
    def done(self) -> bool:
        """Whether everything has been taken that will ever come."""
        return not self._missing

    def take(self, wait_s: float = 0.0) -> list[Arrival]:
        """What has come since the last call; waits so long for something. In no particular order.

        One without a copy says that nothing from its index on will come; a later one may name an earlier index.
        """
        came: list[Arrival] = []
        while not self.done:
            try:
                patient = wait_s > 0 and not came
                arrival = self._queue.get(patient, wait_s)
            except Empty:
                break
            if arrival is None:  # it has ended, and says no more of what is missing
                arrival = Arrival(min(self._missing), reason=MissReason.PROMOTE_DEADLINE)
            if arrival.copy is None:
                self._missing = {index for index in self._missing if index < arrival.position}
                came = [one for one in came if one.position < arrival.position]
            elif arrival.position not in self._missing:
                continue
            else:
                self._missing.remove(arrival.position)
            came.append(arrival)
        return came

    def close(self) -> None:
        """Nothing more is wanted. What is leased stays leased."""
        self._missing.clear()
        self._work.cancel()

    def _ended(self, work: "Future[None]") -> None:
        error = None if work.cancelled() else work.exception()
        if error is not None:
            log.error("internal error while copies were waited for: %r", error)
        self._queue.put(None)
