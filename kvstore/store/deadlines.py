"""What ends by itself, by when: a heap with lazy deletion.

An item may end earlier (it is discarded) or later (its `deadline_s` grew) than its record in the heap
says; the record is corrected when it comes to the top. Discarded records are swept out when they are the
majority, so the heap is never larger than about twice what is alive.
"""

from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar

_SWEPT_MIN = 1_024


class Ending(Protocol):
    """Something with an owner and a duration."""

    deadline_s: float
    ended: bool


_Item = TypeVar("_Item", bound=Ending)


class Deadlines(Generic[_Item]):
    """Items by deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Item]] = []
        self._order = count()
        self._alive = 0

    def __len__(self) -> int:
        return self._alive

    def add(self, item: _Item) -> None:
        """From now on `due` will say when it is over."""
        self._alive += 1
        heappush(self._heap, (item.deadline_s, next(self._order), item))

    def discard(self, item: _Item) -> None:
        """It has ended."""
        assert not item.ended, "something ends once"
        item.ended = True
        self._alive -= 1
        if len(self._heap) > 2 * self._alive + _SWEPT_MIN:
            self._heap = [record for record in self._heap if not record[2].ended]
            heapify(self._heap)

    def due(self, now_s: float) -> _Item | None:
        """An item whose deadline has passed, the earliest first; the caller discards it. None: there is none."""
        while self._heap and self._heap[0][0] <= now_s:
            _, order, item = self._heap[0]
            if item.ended:
                heappop(self._heap)
            elif item.deadline_s > now_s:
                heappop(self._heap)
                heappush(self._heap, (item.deadline_s, order, item))
            else:
                return item
        return None
