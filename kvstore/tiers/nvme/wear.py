"""The wear budget: how much may be written to a device, so that it lives as long as it was bought for."""

from collections.abc import Callable

_DAY_S = 86_400.0
_BURST_S = 3_600.0


class WearBudget:
    """Bytes per day, as a steady rate with bursts of up to an hour's share; 0: no bound."""

    def __init__(self, bytes_per_day: int, clock: Callable[[], float]) -> None:
        self._rate = bytes_per_day / _DAY_S
        self._clock = clock
        self._level = self._rate * _BURST_S
        self._seen_s = clock()

    @property
    def spent(self) -> bool:
        """Whether nothing may be written now."""
        return bool(self._rate) and self._now() <= 0

    @property
    def left_bytes(self) -> int:
        """What may be written now; -1: no bound."""
        return max(0, int(self._now())) if self._rate else -1

    def _now(self) -> float:
        earned = self._rate * (self._clock() - self._seen_s)
        return min(self._level + earned, self._rate * _BURST_S)

    def take(self, size_bytes: int) -> bool:
        """Whether this may be written now. What is larger than what is left is allowed, and owed."""
        if not self._rate:
            return True
        self._level, self._seen_s = self._now(), self._clock()
        if self._level <= 0:
            return False
        self._level -= size_bytes
        return True
