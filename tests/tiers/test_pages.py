"""The page allocator: pages are conserved, adjacent where possible, scattered within a bound.

Mutants that must fail here (each was tried): no merge with the extent before; no merge with the one after; first fit
instead of best fit; a bound on extents that is off by one; `free_pages` that forgets scattered allocations.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.core import Extent, Extents
from kvstore.tiers import PageAllocator


def test_an_empty_tier_gives_adjacent_pages_in_one_extent() -> None:
    assert PageAllocator(8).allocate(8) == (Extent(0, 8),)


def test_more_than_is_free_is_not_given_and_takes_nothing() -> None:
    pages = PageAllocator(8)
    assert pages.allocate(9) is None
    assert pages.free_pages == 8


def holes(sizes: list[int], extents_max: int = 64) -> PageAllocator:
    """An allocator whose free extents have these sizes, in order, one taken page between them."""
    pages = PageAllocator(sum(sizes) + len(sizes), extents_max)
    freed: list[Extents] = []
    for size in sizes:
        extents = pages.allocate(size)
        assert extents is not None
        freed.append(extents)
        assert pages.allocate(1) is not None
    for extents in freed:
        pages.free(extents)
    return pages


def test_the_smallest_hole_that_fits_is_taken() -> None:
    pages = holes([5, 3, 4])
    assert pages.allocate(3) == (Extent(6, 3),)
    assert pages.allocate(3) == (Extent(10, 3),)


def test_scattered_pages_are_given_in_the_fewest_extents() -> None:
    pages = holes([1, 2, 4, 1])
    extents = pages.allocate(6)
    assert extents == (Extent(5, 4), Extent(2, 2))
    assert pages.free_pages == 2


def test_too_scattered_is_refused_and_takes_nothing() -> None:
    assert holes([1] * 4, extents_max=4).allocate(4) is not None
    pages = holes([1] * 5, extents_max=4)
    assert pages.allocate(5) is None
    assert pages.free_pages == 5


def test_pages_given_back_twice_are_our_bug() -> None:
    pages = PageAllocator(8)
    extents = pages.allocate(2)
    assert extents is not None
    pages.free(extents)
    with pytest.raises(AssertionError, match="page 0 is free already"):
        pages.free(extents)


class Pages(RuleBasedStateMachine):
    """Against a set of page numbers; sizes from the edges of what is free."""

    @initialize(count=st.sampled_from([1, 2, 7, 64]))
    def start(self, count: int) -> None:
        self.extents_max = 4
        self.pages = PageAllocator(count, self.extents_max)
        self.free = set(range(count))
        self.given: list[Extents] = []

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        edges = {
            1,
            2,
            len(self.free) - 1,
            len(self.free),
            len(self.free) + 1,
            self.longest(),
            self.longest() + 1,
        }
        count = data.draw(st.sampled_from(sorted(edge for edge in edges if edge > 0)))
        before = self.runs()
        extents = self.pages.allocate(count)
        largest = sorted(before, reverse=True)[: self.extents_max]
        assert (extents is not None) == (sum(largest) >= count), "given exactly if it can be had"
        if extents is None:
            return
        numbers = [page for start, size in extents for page in range(start, start + size)]
        assert len(numbers) == len(set(numbers)) == count
        assert set(numbers) <= self.free
        assert len(extents) <= self.extents_max
        if max(before) >= count:
            assert len(extents) == 1, "adjacent where possible"
        self.free -= set(numbers)
        self.given.append(extents)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.given:
            extents = self.given.pop(data.draw(st.integers(0, len(self.given) - 1)))
            self.pages.free(extents)
            self.free |= {page for start, size in extents for page in range(start, start + size)}

    @invariant()
    def agrees(self) -> None:
        self.pages.audit()
        assert self.pages.free_pages == len(self.free)
        listed = {page for start, size in self.pages.free_extents() for page in range(start, start + size)}
        assert listed == self.free

    def longest(self) -> int:
        return max(self.runs(), default=0)

    def runs(self) -> list[int]:
        """Sizes of the maximal runs of free pages."""
        runs: list[int] = []
        before = -2
        for page in sorted(self.free):
            if page == before + 1:
                runs[-1] += 1
            else:
                runs.append(1)
            before = page
        return runs


TestPages = Pages.TestCase
TestPages.settings = settings(stateful_step_count=60)
