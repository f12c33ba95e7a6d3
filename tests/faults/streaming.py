"""An engine that reads what may be on NVMe: pulls what is there, gives it back, and takes the rest as it comes."""

from collections.abc import Sequence

import msgspec

from kvstore.client import Arrivals, Copy, Promise, Resident
from kvstore.core import Key, MissReason
from tests.faults.support import Engine

WAIT_S = 1.0


class Streamed(msgspec.Struct):
    """What came of a chain: how many objects were right, how many came from NVMe, and why there are no more."""

    got: int = 0
    from_nvme: int = 0
    reason: MissReason | None = None
    bad: int = 0


class StreamingEngine(Engine):
    """See the module."""

    def stream(self, keys: Sequence[Key], deadline_s: float = 30.0) -> Streamed:
        """Reads the longest prefix of a chain that can be had; every byte is compared."""
        promise = self.acquire(keys, 60.0)
        done = Streamed(reason=promise.reason)
        self._take(promise, [copy for copy in promise.copies if isinstance(copy.answer, Resident)], done)
        arrivals = Arrivals(self._loop, self.client, promise, deadline_s)
        while not arrivals.done:
            came = arrivals.take(WAIT_S)
            done.from_nvme += sum(one.copy is not None for one in came)
            self._take(promise, [one.copy for one in came if one.copy is not None], done)
            done.reason = next((one.reason for one in came if one.copy is None), done.reason)
        arrivals.close()
        self.release(promise)
        return done

    def _take(self, promise: Promise, copies: list[Copy], done: Streamed) -> None:
        ready = msgspec.structs.replace(promise, copies=tuple(copies))
        results = self.pull(ready)
        done.got += sum(result.ok for result in results)
        done.bad += sum(result.corrupt for result in results)
        if copies:
            self.run(self.client.release(ready, [copy.key for copy in copies]))
