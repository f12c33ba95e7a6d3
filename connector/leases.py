"""Leases that this engine holds, and their renewal while requests wait or load."""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass

from connector.control import Control, Promise
from kvstore.core import Key, limits

LEASE_S = 30.0
"""What is asked for at a time: long beside a step of the engine, short beside what a killed engine may leave."""
RENEW_S = LEASE_S * 2 / 3
"""With less than this left a lease is renewed: early, since with long steps the answer is read much later."""


@dataclass(slots=True, eq=False)
class Lease:
    """A promise and when it ends, counted from when it was asked for: never later than the node thinks."""

    promise: Promise
    taken_s: float
    ends_s: float
    renewal: "tuple[float, Future[float]] | None" = None


class Leases:
    """All leases of this engine. A lease is in `held` from `take` until `release`."""

    def __init__(self, control: Control, clock: Callable[[], float]) -> None:
        self.held: set[Lease] = set()
        self._control = control
        self._clock = clock

    def take(self, promise: Promise, asked_s: float) -> Lease:
        """Looks after a promise that was asked for at `asked_s` for `LEASE_S`."""
        lease = Lease(promise, asked_s, asked_s + LEASE_S)
        self.held.add(lease)
        return lease

    def release(self, lease: Lease, *, cold: bool = False) -> None:
        """Gives a lease back, once; more often does nothing. `cold`: as in `Control.release`."""
        if lease in self.held:
            self.held.remove(lease)
            self._control.release(lease.promise, cold=cold)

    def give_back(self, lease: Lease, keys: Collection[Key], *, cold: bool = False) -> None:
        """Of these keys nothing is read any more; the rest of the lease goes on. `cold` as for `release`."""
        if keys and lease in self.held:
            lease.promise = self._control.shorten(lease.promise, keys, cold=cold)

    def remaining_s(self, lease: Lease) -> float:
        """Seconds in which the promise still holds without another renewal."""
        self._collect(lease)
        return lease.ends_s - self._clock()

    def longest_s(self, lease: Lease) -> float:
        """Seconds in which the promise can still hold, renewals included."""
        return lease.taken_s + limits.LEASE_S_MAX - self._clock()

    def tick(self) -> None:
        """Renews what has less than `RENEW_S` left."""
        now = self._clock()
        for lease in self.held:
            due = 0 < self.remaining_s(lease) < RENEW_S and self.longest_s(lease) > LEASE_S / 2
            if due and lease.renewal is None:
                lease.renewal = (now, self._control.renew(lease.promise, LEASE_S))

    def _collect(self, lease: Lease) -> None:
        """Takes the answer to a renewal, if it is there."""
        if lease.renewal is None or not lease.renewal[1].done():
            return
        (asked_s, future), lease.renewal = lease.renewal, None
        if future.exception() is None:  # otherwise asked again, until the lease has run out
            lease.ends_s = asked_s + future.result()
