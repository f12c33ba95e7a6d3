"""The DRAM tier: its pages, and the life of the copies in them.

Every page is in exactly one place:

    free | held | of a copy: filling (reserved), ready, bad

* free: the allocator's.
* held: a writer left without saying that nothing of its transfers can land any more; free later.
* of a copy: until the copy is gone. A pinned copy (leased, being verified, reserved) never goes by
  itself; a *retired* one (dropped, or bad) goes as soon as nothing pins it.

Room is made in this order: free pages, then what the policy plans to give up. A plan that is not enough
is not carried out: it would cost hits and win nothing.
"""

from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable
from typing import NamedTuple

from kvstore.core import Event, Extents, State, Tier, limits
from kvstore.policy import Policy
from kvstore.store.clients import Client
from kvstore.store.objects import Copy, Object
from kvstore.tiers import PageAllocator


class _Held(NamedTuple):
    until_s: float
    extents: Extents
    pages: int
    client: Client


class Dram:
    """Copies in pages of DRAM. Knows nothing of keys, clients' rights or time but `until_s`."""

    def __init__(self, page_count: int, policy: Policy, on_evicted: Callable[[Object], None]) -> None:
        self.page_count = page_count
        self.held_pages = 0
        self.reserved_pages = 0
        self.ready_objects = 0
        self.ready_bytes = 0
        self._allocator = PageAllocator(page_count)
        self._policy = policy
        self._on_evicted = on_evicted
        self._listed: dict[Hashable, Object] = {}  # by name in the policy, which knows exactly these
        self._retired: dict[Object, None] = {}
        self._held: deque[_Held] = deque()
        self._low_water_pages = int(page_count * limits.LOW_WATER_SHARE)

    @property
    def free_pages(self) -> int:
        """Pages that can be given out at once."""
        return self._allocator.free_pages

    def fill(self, filling: Object, pages: int, spared: Container[Hashable], young_s: float) -> bool:
        """Gives an object a copy to be filled; False when there is no room. The object must be reserved.

        `spared` are not evicted for it; when that ends, tell `unspare`. Nor is what was committed after `young_s`.
        """
        extents = self._make_room(pages, spared, young_s)
        if extents is None:
            return False
        filling.pages = pages
        filling.copies[Tier.DRAM] = Copy(extents)
        self.reserved_pages += pages
        self._listed[filling.entry] = filling
        self._policy.insert(filling.entry, filling.parent_entry, pages, cold=filling.cold)
        return True

    def commit(self, filling: Object) -> None:
        """The copy is full: it is ready, and may be evicted."""
        filling.copies[Tier.DRAM].advance(Event.COMMIT)
        self.reserved_pages -= filling.pages
        self.ready_objects += 1
        self.ready_bytes += filling.size_bytes
        self.unpinned(filling)

    def abandon(self, filling: Object, event: Event) -> None:
        """The copy will not be filled, and nothing can land in its pages any more: they are free."""
        self._allocator.free(self._leave_unfilled(filling, event))

    def hold(self, filling: Object, event: Event, client: Client, until_s: float) -> None:
        """The copy will not be filled, but something may still land in its pages until `until_s`."""
        extents = self._leave_unfilled(filling, event)
        self.held_pages += filling.pages
        client.held_pages += filling.pages
        self._held.append(_Held(until_s, extents, filling.pages, client))

    def touch(self, used: Object) -> None:
        """The object was useful; `used.cold` says whether it still is first to go."""
        self._policy.touch(used.entry, cold=used.cold)

    def unspare(self, spared: Iterable[Hashable]) -> None:
        """These were offered, which is a use; they may be evicted again, and the policy hears of it."""
        for entry in spared:
            listed = self._listed.get(entry)
            if listed is not None:
                self.touch(listed)

    def unpinned(self, loose: Object) -> None:
        """Nothing pins the object any more: it may be evicted, and goes at once if it was retired."""
        assert not loose.pinned, "something still pins it"
        if loose.listed:
            self.touch(loose)
        elif loose in self._retired:
            del self._retired[loose]
            self._give_back(loose, Event.DROP)

    def spoil(self, bad: Object) -> None:
        """The copy's bytes did not verify."""
        bad.copies[Tier.DRAM].advance(Event.SPOIL)
        bad.resident = None
        if bad not in self._retired:
            self.ready_objects -= 1
            self.ready_bytes -= bad.size_bytes

    def retire(self, unlisted: Object) -> None:
        """The object is not listed any more: it goes as soon as nothing pins it."""
        self._forget(unlisted)
        self._retired[unlisted] = None
        if unlisted.copies[Tier.DRAM].state is State.READY:
            self.ready_objects -= 1
            self.ready_bytes -= unlisted.size_bytes
        if not unlisted.pinned:
            self.unpinned(unlisted)

    def tick(self, now_s: float, young_s: float) -> None:
        """Frees what was held long enough, and evicts, a slice at a time, up to the low-water mark. See `fill`."""
        self._free_held(now_s)
        shortfall = min(self._low_water_pages - self.free_pages, limits.EVICTED_PAGES_PER_TICK_MAX)
        if shortfall > 0:
            victims = self._policy.plan(shortfall, self._is_evictable).victims
            if not self._any_young(victims, young_s):
                self._evict(victims)

    def _free_held(self, now_s: float) -> None:
        while self._held and self._held[0].until_s <= now_s:
            held = self._held.popleft()
            self.held_pages -= held.pages
            held.client.held_pages -= held.pages
            self._allocator.free(held.extents)

    def audit(self) -> None:
        """Asserts that every page is in exactly one place, and that counts say what is there."""
        self._allocator.audit()
        copies = [*self._listed.values(), *self._retired]
        taken = [extent for owner in copies for extent in owner.copies[Tier.DRAM].extents]
        held = [extent for record in self._held for extent in record.extents]
        end = 0
        for start, count in sorted([*taken, *held, *self._allocator.free_extents()]):
            assert start == end, f"page {min(start, end)} is lost or in two places"
            end = start + count
        assert end == self.page_count, "pages are lost at the end"
        filling = [owner for owner in copies if owner.copies[Tier.DRAM].state is State.FILLING]
        ready = [owner for owner in self._listed.values() if owner.copies[Tier.DRAM].state is State.READY]
        assert len(filling) + len(ready) == len(self._listed), "a listed copy is neither filling nor ready"
        assert sum(owner.pages for owner in filling) == self.reserved_pages, "reserved pages are miscounted"
        assert sum(record.pages for record in self._held) == self.held_pages, "held pages are miscounted"
        assert len(ready) == self.ready_objects, "ready objects are miscounted"
        assert sum(owner.size_bytes for owner in ready) == self.ready_bytes, "ready bytes are miscounted"
        assert all(owner.pinned for owner in self._retired), "a retired copy that nothing pins is still there"

    def _make_room(self, pages: int, spared: Container[Hashable], young_s: float) -> Extents | None:
        """Free pages, evicting if need be."""
        while (extents := self._allocator.allocate(pages)) is None:
            shortfall = max(1, pages - self.free_pages)  # 1: there are enough, but too scattered
            plan = self._policy.plan(
                shortfall, lambda entry: entry not in spared and self._is_evictable(entry)
            )
            if not plan.enough or self._any_young(plan.victims, young_s):
                return None
            self._evict(plan.victims)
        return extents

    def _any_young(self, entries: Iterable[Hashable], young_s: float) -> bool:
        return any(self._listed[entry].ready_s > young_s for entry in entries)

    def _is_evictable(self, entry: Hashable) -> bool:
        return not self._listed[entry].pinned

    def _evict(self, victims: Iterable[Hashable]) -> None:
        for entry in victims:
            victim = self._listed[entry]
            self._forget(victim)
            self.ready_objects -= 1
            self.ready_bytes -= victim.size_bytes
            self._give_back(victim, Event.EVICT)
            self._on_evicted(victim)

    def _leave_unfilled(self, filling: Object, event: Event) -> Extents:
        copy = filling.copies.pop(Tier.DRAM)
        copy.advance(event)
        self.reserved_pages -= filling.pages
        self._forget(filling)
        return copy.extents

    def _give_back(self, owner: Object, event: Event) -> None:
        copy = owner.copies.pop(Tier.DRAM)
        copy.advance(event)
        owner.resident = None
        self._allocator.free(copy.extents)

    def _forget(self, owner: Object) -> None:
        del self._listed[owner.entry]
        self._policy.remove(owner.entry)
