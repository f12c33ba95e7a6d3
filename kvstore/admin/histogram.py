"""A histogram that one thread fills and others read as frozen copies."""

from bisect import bisect_left
from typing import NamedTuple

LAG_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
MOTION_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class FrozenHistogram(NamedTuple):
    """`counts[i]` values were at most `bounds[i]` and above the bound before; the last count has no bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts of values between fixed bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds ascend"
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds one value, or the same some times over."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += times * value

    def freeze(self) -> FrozenHistogram:
        """A copy that does not change any more."""
        return FrozenHistogram(self._bounds, tuple(self._counts), self._total)
