"""The plain twin: least recently used goes first, children before parents.

It looks at every entry for every victim, so it is right at a glance and slow: O(n) per victim. It says
what `PrefixLru` must plan, and it will do for a tier of a few hundred objects.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvstore.policy.base import Plan


@dataclass(slots=True)
class _Entry:
    parent: Hashable
    pages: int
    cold: bool
    used: int  # when, in uses of anything


class Lru:
    """Least recently used first, cold before warm, never a parent before its children."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self._uses = 0

    def insert(self, entry: Hashable, parent: Hashable, pages: int, *, cold: bool) -> None:
        """See `Policy`."""
        assert entry not in self._entries, f"{entry!r} is held already"
        self._uses += 1
        self._entries[entry] = _Entry(parent, pages, cold, self._uses)

    def touch(self, entry: Hashable, *, cold: bool | None = None) -> None:
        """See `Policy`."""
        held = self._entries[entry]
        self._uses += 1
        held.used = self._uses
        if cold is not None:
            held.cold = cold

    def remove(self, entry: Hashable) -> None:
        """See `Policy`."""
        del self._entries[entry]

    def children(self, entry: Hashable) -> int:
        """See `Policy`."""
        return sum(held.parent == entry for held in self._entries.values())

    def plan(self, need_pages: int, evictable: Callable[[Hashable], bool]) -> Plan:
        """See `Policy`."""
        left = dict(self._entries)
        victims: list[Hashable] = []
        pages = 0
        while pages < need_pages:
            parents = {held.parent for held in left.values()}
            leaves = [entry for entry in left if entry not in parents and evictable(entry)]
            if not leaves:
                return Plan(tuple(victims), enough=False)
            victim = min(leaves, key=lambda entry: (not left[entry].cold, left[entry].used))
            victims.append(victim)
            pages += left.pop(victim).pages
        return Plan(tuple(victims), enough=True)
