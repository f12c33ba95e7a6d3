"""The node's clock: seconds that it was awake for.

A process that is stopped (SIGSTOP, a paused virtual machine, a debugger) would find every reservation
and lease expired when it is continued. This clock advances at most `CLOCK_STEP_S_MAX` from one reading to
the next, so a sleep of any length costs at most one step; the node reads it several times a second.
"""

from collections.abc import Callable
from time import monotonic

from kvstore.core.limits import CLOCK_STEP_S_MAX


class LoopClock:
    """A monotonic clock in seconds, from 0. Belongs to the control loop: one thread."""

    def __init__(self, source: Callable[[], float] = monotonic) -> None:
        self._source = source
        self._last = source()
        self._now = 0.0
        self.skipped_s = 0.0

    def __call__(self) -> float:
        """Seconds awake so far. `skipped_s` counts what was slept through."""
        reading = self._source()
        passed = reading - self._last
        self._last = reading
        step = min(passed, CLOCK_STEP_S_MAX)
        self._now += step
        self.skipped_s += passed - step
        return self._now
