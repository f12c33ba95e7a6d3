"""Pages of a tier: which are free, and which to give for an object.

Free pages are kept as maximal extents, found three ways: by their start and by their end (so that a
freed extent merges with its neighbours in O(1)) and by their size (so that an object gets an extent of
exactly its size, else the smallest that is larger, else several, the largest first). Objects of one
namespace have one size, so what one of them gives back fits the next.

An allocation has at most `extents_max` extents: few, large segments are what transfers are fast with.
Every call takes O(extents it handles + distinct sizes of free extents).
"""

from collections.abc import Iterator
from itertools import islice

from kvstore.core import Extent, Extents, limits


class PageAllocator:
    """Gives out the pages of a tier. All of them are free at first."""

    def __init__(self, page_count: int, extents_max: int = limits.EXTENTS_PER_OBJECT_MAX) -> None:
        assert page_count > 0, "a tier has at least one page"
        self.page_count = page_count
        self.free_pages = 0
        self._extents_max = extents_max
        self._count_of: dict[int, int] = {}  # start of a free extent -> its pages
        self._start_of: dict[int, int] = {}  # first page after a free extent -> its start
        self._starts: dict[int, dict[int, None]] = {}  # pages -> starts of the free extents of that size
        self._insert(0, page_count)

    def allocate(self, count: int) -> Extents | None:
        """`count` pages in few extents, in object order; None when there are too few, or too scattered."""
        assert count > 0, "an object has at least one page"
        if count > self.free_pages:
            return None
        start = self._best_fit(count)
        if start is not None:
            return (self._take(start, count),)
        return self._scattered(count)

    def free(self, extents: Extents) -> None:
        """Takes pages back that `allocate` gave. Pages given back twice are our bug."""
        for start, count in extents:
            assert start >= 0 and start + count <= self.page_count, f"no such pages: {start}+{count}"
            assert start not in self._count_of, f"page {start} is free already"
            end = start + count
            assert end not in self._start_of, f"page {end - 1} is free already"
            after = self._count_of.get(end)
            if after is not None:
                self._remove(end, after)
                count += after
            before = self._start_of.get(start)
            if before is not None:
                self._remove(before, start - before)
                start, count = before, count + start - before
            self._insert(start, count)

    def free_extents(self) -> Iterator[Extent]:
        """The free extents, in no order."""
        return (Extent(start, count) for start, count in self._count_of.items())

    def audit(self) -> None:
        """Asserts that free extents are disjoint, merged, and add up."""
        end_before = -1
        total = 0
        for start, count in sorted(self._count_of.items()):
            assert start > end_before, f"free extents overlap or touch at page {start}"
            assert self._start_of.get(start + count) == start, f"the end of the extent at {start} is lost"
            assert start in self._starts.get(count, ()), f"the size of the extent at {start} is lost"
            end_before = start + count
            total += count
        assert end_before <= self.page_count, f"free pages beyond {self.page_count}"
        assert total == self.free_pages, f"{total} pages are free, {self.free_pages} are counted"
        assert len(self._start_of) == len(self._count_of), "an end without an extent"
        assert sum(map(len, self._starts.values())) == len(self._count_of), "a size without an extent"

    def __repr__(self) -> str:
        return f"<PageAllocator {self.free_pages}/{self.page_count} free in {len(self._count_of)} extents>"

    def _best_fit(self, count: int) -> int | None:
        if count in self._starts:
            return next(reversed(self._starts[count]))
        size = min((size for size in self._starts if size > count), default=None)
        return None if size is None else next(reversed(self._starts[size]))

    def _scattered(self, count: int) -> Extents | None:
        """Several extents, the largest first, the last one cut from the best fit."""
        sizes = sorted(self._starts, reverse=True)
        descending = ((start, size) for size in sizes for start in self._starts[size])
        largest = list(islice(descending, self._extents_max))
        if sum(size for _, size in largest) < count:
            return None
        taken: list[Extent] = []
        for start, size in largest:
            rest = self._best_fit(count)
            if rest is not None:
                taken.append(self._take(rest, count))
                break
            taken.append(self._take(start, size))
            count -= size
        return tuple(taken)

    def _take(self, start: int, count: int) -> Extent:
        size = self._count_of[start]
        self._remove(start, size)
        if size > count:
            self._insert(start + count, size - count)
        return Extent(start, count)

    def _insert(self, start: int, count: int) -> None:
        self._count_of[start] = count
        self._start_of[start + count] = start
        self._starts.setdefault(count, {})[start] = None
        self.free_pages += count

    def _remove(self, start: int, count: int) -> None:
        del self._count_of[start]
        del self._start_of[start + count]
        same_size = self._starts[count]
        del same_size[start]
        if not same_size:
            del self._starts[count]
        self.free_pages -= count
