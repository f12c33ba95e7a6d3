"""LRU that keeps parents, for a tier of a hundred thousand objects.

Plans what the plain twin plans: of all *leaves* (entries without a held child) the cold ones first, then
the least recently used; a parent is a leaf as soon as its children are gone or planned away.

Only leaves can go, so only leaves are kept in order, by when they were used:

* A leaf that is used goes to the end of a queue (one for cold leaves, one for warm ones): O(1).
* A parent that becomes a leaf belongs somewhere in the middle, by its own last use: a heap holds those.
  A use moves it to the end of the queue and leaves its record in the heap behind, which is dropped when
  it comes to the top.

A plan merges queue, heap, and the parents that its own victims expose. Leaves that may not go (leased)
are taken out of the order when a plan meets them; the touch that ends their lease puts them back.
"""

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, merge
from itertools import chain

from kvstore.core import Link, Queue, unlink
from kvstore.policy.base import Plan

_Rank = tuple[bool, int, Hashable]
"""(is warm, when it was used, entry): ascending is the order in which leaves go. No two uses are equal."""


_STALE_RECORDS_MIN = 1_024  # so many the heap may hold before it is cleaned


class _Entry(Link, eq=False, gc=False):
    name: Hashable
    parent: Hashable
    pages: int
    used: int
    cold: bool
    children: int = 0
    exposed: int = 0  # the `used` of this entry's record in the heap, 0 when there is none


class PrefixLru:
    """Least recently used leaf first, cold before warm."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self._orphans: dict[Hashable, int] = {}  # parent that is not held -> its held children
        self._uses = 0
        self._cold: Queue[_Entry] = Queue()  # leaves, in order of use
        self._warm: Queue[_Entry] = Queue()
        self._exposed: list[_Rank] = []  # heap of leaves that were parents, and of stale records

    def insert(self, entry: Hashable, parent: Hashable, pages: int, *, cold: bool) -> None:
        """See `Policy`."""
        assert entry not in self._entries, f"{entry!r} is held already"
        self._uses += 1
        held = self._entries[entry] = _Entry(entry, parent, pages, self._uses, cold=cold)
        held.children = self._orphans.pop(entry, 0)
        above = self._entries.get(parent)
        if above is None:
            self._orphans[parent] = self._orphans.get(parent, 0) + 1
        else:
            above.children += 1
            unlink(above)
        if not held.children:
            self._queue(cold=cold).append(held)

    def touch(self, entry: Hashable, *, cold: bool | None = None) -> None:
        """See `Policy`."""
        held = self._entries[entry]
        self._uses += 1
        held.used = self._uses
        if held.children:
            held.cold = held.cold if cold is None else cold
            return
        unlink(held)
        held.cold = held.cold if cold is None else cold
        self._queue(cold=held.cold).append(held)

    def remove(self, entry: Hashable) -> None:
        """See `Policy`."""
        held = self._entries.pop(entry)
        unlink(held)
        if held.children:
            self._orphans[entry] = held.children
        above = self._entries.get(held.parent)
        if above is not None:
            above.children -= 1
            if not above.children:
                self._expose(held.parent, above)
            return
        orphans = self._orphans.pop(held.parent) - 1
        if orphans:
            self._orphans[held.parent] = orphans

    def children(self, entry: Hashable) -> int:
        """See `Policy`."""
        held = self._entries.get(entry)
        return held.children if held is not None else self._orphans.get(entry, 0)

    def plan(self, need_pages: int, evictable: Callable[[Hashable], bool]) -> Plan:
        """See `Policy`."""
        victims: list[Hashable] = []
        forbidden: set[Hashable] = set()
        taken: list[_Rank] = []  # off the heap of exposed leaves
        bared: list[_Rank] = []  # heap of parents whose children are all planned
        planned_children: dict[Hashable, int] = {}
        leaves = merge(self._queued(), self._take_exposed(taken))
        leaf = next(leaves, None)
        pages = 0
        while pages < need_pages and (leaf or bared):
            if leaf and not (bared and bared[0] < leaf):
                rank, leaf = leaf, next(leaves, None)
            else:
                rank = heappop(bared)
            entry = rank[2]
            if not evictable(entry):
                forbidden.add(entry)
                continue
            held = self._entries[entry]
            victims.append(entry)
            pages += held.pages
            above = self._entries.get(held.parent)
            if above is not None:
                planned_children[held.parent] = planned = planned_children.get(held.parent, 0) + 1
                if planned == above.children:
                    heappush(bared, (not above.cold, above.used, held.parent))
        self._put_back(taken, forbidden)
        return Plan(tuple(victims), pages >= need_pages)

    def _queued(self) -> Iterator[_Rank]:
        for held in chain(self._cold, self._warm):
            yield not held.cold, held.used, held.name

    def _take_exposed(self, taken: list[_Rank]) -> Iterator[_Rank]:
        """Live records from the top of the heap on; what is taken off is noted in `taken`."""
        while self._exposed:
            rank = heappop(self._exposed)
            if self._is_live(rank):
                taken.append(rank)
                yield rank

    def _is_live(self, rank: _Rank) -> bool:
        """Whether a record taken off the heap still says where its entry belongs; the entry has none now."""
        held = self._entries.get(rank[2])
        if held is None or held.exposed != rank[1]:
            return False
        held.exposed = 0
        return held.used == rank[1] and not held.children

    def _put_back(self, taken: list[_Rank], forbidden: set[Hashable]) -> None:
        for rank in taken:
            if rank[2] not in forbidden:
                self._entries[rank[2]].exposed = rank[1]
                heappush(self._exposed, rank)
        for entry in forbidden:
            unlink(self._entries[entry])

    def _expose(self, entry: Hashable, held: _Entry) -> None:
        held.exposed = held.used
        heappush(self._exposed, (not held.cold, held.used, entry))
        if len(self._exposed) > 2 * len(self._entries) + _STALE_RECORDS_MIN:
            live = [rank for rank in self._exposed if self._is_live(rank)]
            for rank in live:
                self._entries[rank[2]].exposed = rank[1]
            heapify(live)
            self._exposed = live

    def _queue(self, *, cold: bool) -> Queue[_Entry]:
        return self._cold if cold else self._warm
