"""A circuit breaker: after trouble, answers at once instead of waiting for another time-out.

    closed --(failures in a row)--> open --(probe is due)--> half-open --(probe succeeds)--> closed
                                     ^------------(probe fails, wait twice as long)------|

Plain and pure: no clock, no timer, no I/O of its own. The probe is made by whoever uses the breaker, apart
from real calls, so that no caller pays for it.
"""

import random
from collections.abc import Callable
from enum import StrEnum

from kvstore.core import PeerLost


class BreakerOpen(PeerLost):
    """The node has been in trouble and is not asked again yet."""


class BreakerState(StrEnum):
    """What a breaker does with a call."""

    CLOSED = "closed"  # goes through
    OPEN = "open"  # is refused
    HALF_OPEN = "half_open"  # is refused while a probe is under way


class Breaker:
    """The breaker of one node.

    Args:
        clock: seconds, only growing.
        rng: spreads the probes of many clients.
        failures_max: failures in a row that open it.
        probe_s: wait before the first probe, doubled with every failed one up to `probe_s_max`.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        rng: random.Random,
        *,
        failures_max: int = 3,
        probe_s: float = 0.25,
        probe_s_max: float = 10.0,
    ) -> None:
        assert failures_max > 0 and 0.0 < probe_s <= probe_s_max, (
            "a breaker must be able to open and to close"
        )
        self.state = BreakerState.CLOSED
        self.opened_total = 0
        self._clock = clock
        self._rng = rng
        self._failures_max = failures_max
        self._probe_s = probe_s
        self._probe_s_max = probe_s_max
        self._failures = 0
        self._wait_s = probe_s
        self._probe_at = 0.0

    def __repr__(self) -> str:
        return f"<Breaker {self.state}, {self._failures} failures, opened {self.opened_total} times>"

    @property
    def closed(self) -> bool:
        """Whether calls go through."""
        return self.state is BreakerState.CLOSED

    def begin_probe(self) -> bool:
        """True once when a probe is due: the caller makes it and reports success or failure."""
        if self.state is not BreakerState.OPEN or self._clock() < self._probe_at:
            return False
        self.state = BreakerState.HALF_OPEN
        return True

    def success(self) -> None:
        """A call or probe was answered. Late answers to calls from before count as well: the node lives."""
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._wait_s = self._probe_s

    def failure(self) -> None:
        """A call or probe was not answered."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._wait_s = min(2 * self._wait_s, self._probe_s_max)
            self._open()
        elif self.state is BreakerState.CLOSED and self._failures >= self._failures_max:
            self.opened_total += 1
            self._open()

    def _open(self) -> None:
        self.state = BreakerState.OPEN
        self._probe_at = self._clock() + self._wait_s * self._rng.uniform(0.75, 1.25)
