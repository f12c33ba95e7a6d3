"""The DRAM tier: its pages, and the life of the copies in them.

Every page is in exactly one place:

    free | held | landing | of a copy: filling (reserved, or promoted), ready, moving, bad

* free: the allocator's.
* held: a writer left without saying that nothing of its transfers can land any more; free later.
* landing: a promotion was given up, and the device may still write there; free when it has ended.
* of a copy: until the copy is gone. A pinned copy (leased, being verified, reserved, on its way) never goes by
  itself; a *retired* one (dropped, or bad) goes as soon as nothing pins it.

Room is made in this order: free pages, then what the policy plans to give up. A plan that is not enough
is not carried out: it would cost hits and win nothing. What a plan gives up goes at once if it is on NVMe, too, or
if NVMe does not want it; else it is spilled first, and its pages are free some time later.
"""

from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable
from enum import Enum
from typing import NamedTuple, Protocol

from kvstore.core import Event, Extents, State, limits
from kvstore.policy import Policy
from kvstore.store.clients import Client
from kvstore.store.objects import Copy, Job, Object
from kvstore.tiers import PageAllocator


class Fate(Enum):
    """What becomes of a copy that is to be given up."""

    GO = "go"
    SPILL = "spill"
    STAY = "stay"  # too much is being spilled already


class Outlet(Protocol):
    """Where copies go that leave DRAM."""

    leaving_pages: int
    """Of copies that are being spilled, and go then."""

    def keeps(self, victim: Object) -> bool:
        """Whether the node would still have it, as far as can be said."""

    def fate(self, victim: Object) -> Fate:
        """Whether it may go at once. It is about to be given up: room is made for it."""

    def spill(self, victim: Object) -> None:
        """It goes when it is on NVMe."""


class NoOutlet:
    """There is no NVMe."""

    leaving_pages = 0

    def keeps(self, victim: Object) -> bool:
        """It would be lost."""
        return False

    def fate(self, victim: Object) -> Fate:
        """It goes."""
        return Fate.GO

    def spill(self, victim: Object) -> None:
        """Is not asked for."""
        raise AssertionError("there is nowhere to spill to")


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
        self.promoted_pages = 0  # of copies being filled by promotions
        self.ready_objects = 0
        self.ready_bytes = 0
        self.outlet: Outlet = NoOutlet()
        self._allocator = PageAllocator(page_count)
        self._policy = policy
        self._on_evicted = on_evicted
        self._listed: dict[Hashable, Object] = {}  # by name in the policy, which knows exactly these
        self._retired: dict[Object, None] = {}
        self._held: deque[_Held] = deque()
        self._landing: dict[Job, Extents] = {}
        self._low_water_pages = int(page_count * limits.LOW_WATER_SHARE)

    @property
    def free_pages(self) -> int:
        """Pages that can be given out at once."""
        return self._allocator.free_pages

    @property
    def landing_pages(self) -> int:
        """Pages that a device may still write to, for nobody."""
        return sum(count for extents in self._landing.values() for _, count in extents)

    def children(self, entry: Hashable) -> int:
        """How many copies here have that parent."""
        return self._policy.children(entry)

    # --- copies come --------------------------------------------------------------------------------

    def fill(self, filling: Object, spared: Container[Hashable], young_s: float) -> bool:
        """Gives an object a copy to be filled, by its reservation or by a promotion; False when there is no room.

        `spared` are not lost for it; when that ends, tell `unspare`. Nor is what was committed after `young_s`.
        """
        extents = self._make_room(filling.pages, spared, young_s)
        if extents is None:
            return False
        filling.dram = Copy(extents)
        if filling.reservation is not None:
            self.reserved_pages += filling.pages
        else:
            self.promoted_pages += filling.pages
        if filling.listed:
            self._listed[filling.entry] = filling
            self._policy.insert(filling.entry, filling.parent_entry, filling.pages, cold=filling.cold)
        else:  # a lease keeps it, and what was promised
            self._retired[filling] = None
        return True

    def commit(self, filling: Object, *, promoted: bool = False) -> None:
        """The copy is full: it is ready, and may be evicted when nothing pins it."""
        filling.in_dram.advance(Event.COMMIT)
        if promoted:
            self.promoted_pages -= filling.pages
        else:
            self.reserved_pages -= filling.pages
        if filling.listed:
            self.ready_objects += 1
            self.ready_bytes += filling.size_bytes
        if not filling.pinned:
            self.unpinned(filling)

    def abandon(self, filling: Object, event: Event) -> None:
        """The copy will not be filled, and nothing can land in its pages any more: they are free."""
        self.reserved_pages -= filling.pages
        self._allocator.free(self._leave_unfilled(filling, event))

    def hold(self, filling: Object, event: Event, client: Client, until_s: float) -> None:
        """The copy will not be filled, but something may still land in its pages until `until_s`."""
        self.reserved_pages -= filling.pages
        extents = self._leave_unfilled(filling, event)
        self.held_pages += filling.pages
        client.held_pages += filling.pages
        self._held.append(_Held(until_s, extents, filling.pages, client))

    def land(self, filling: Object, job: Job) -> None:
        """The copy will not be filled, but a device may still write to its pages until `landed`."""
        self.promoted_pages -= filling.pages
        self._landing[job] = self._leave_unfilled(filling, Event.ABORT)

    def landed(self, job: Job) -> None:
        """No device writes there any more. Says nothing new of a promotion that succeeded."""
        extents = self._landing.pop(job, None)
        if extents is not None:
            self._allocator.free(extents)

    # --- copies stay --------------------------------------------------------------------------------

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

    def move(self, moving: Object) -> None:
        """The copy is read, to be spilled."""
        moving.in_dram.advance(Event.MOVE)

    def moved(self, moving: Object) -> None:
        """It is not read any more."""
        if moving.in_dram.state is State.MOVING:
            moving.in_dram.advance(Event.MOVED)

    # --- copies go ----------------------------------------------------------------------------------

    def spoil(self, bad: Object) -> None:
        """The copy's bytes did not verify."""
        bad.in_dram.advance(Event.SPOIL)
        bad.resident = None
        if bad not in self._retired:
            self.ready_objects -= 1
            self.ready_bytes -= bad.size_bytes

    def retire(self, unlisted: Object) -> None:
        """The object is not listed any more: it goes as soon as nothing pins it."""
        self._forget(unlisted)
        self._retired[unlisted] = None
        if unlisted.is_readable:
            self.ready_objects -= 1
            self.ready_bytes -= unlisted.size_bytes
        if not unlisted.pinned:
            self.unpinned(unlisted)

    def evict(self, victim: Object) -> None:
        """The copy goes now; nothing pins it."""
        assert not victim.pinned, "a pinned copy stays"
        self._forget(victim)
        self.ready_objects -= 1
        self.ready_bytes -= victim.size_bytes
        self._give_back(victim, Event.EVICT)
        self._on_evicted(victim)

    def may_leave_the_node(self, victim: Object) -> bool:
        """Whether no child of it is here: one that stays would be out of reach."""
        return not self._policy.children(victim.entry)

    def tick(self, now_s: float, young_s: float) -> None:
        """Frees what was held long enough, and evicts, a slice at a time, up to the low-water mark. See `fill`."""
        self._free_held(now_s)
        missing_pages = self._low_water_pages - self.free_pages - self.outlet.leaving_pages
        shortfall = min(missing_pages, limits.EVICTED_PAGES_PER_TICK_MAX)
        if shortfall > 0:
            victims = self._policy.plan(shortfall, self._is_evictable).victims
            if not self._any_young(victims, young_s):
                self._give_up(victims)

    def hottest(self) -> list[Object]:
        """What is ready, the most useful first and parents before children.

        First comes what no plan names: leaves that a plan met while they were pinned, and all that is above them.
        """
        planned = [
            self._listed[entry] for entry in self._policy.plan(self.page_count, lambda _: True).victims
        ]
        unplanned = set(self._listed.values()).difference(planned)
        ordered = [*sorted(unplanned, key=lambda each: each.depth), *reversed(planned)]
        return [each for each in ordered if each.is_readable]

    def _free_held(self, now_s: float) -> None:
        while self._held and self._held[0].until_s <= now_s:
            held = self._held.popleft()
            self.held_pages -= held.pages
            held.client.held_pages -= held.pages
            self._allocator.free(held.extents)

    def _make_room(self, pages: int, spared: Container[Hashable], young_s: float) -> Extents | None:
        """Free pages, evicting if need be."""
        while (extents := self._allocator.allocate(pages)) is None:
            shortfall = max(1, pages - self.free_pages)  # 1: there are enough, but too scattered
            plan = self._policy.plan(shortfall, lambda entry: self._is_evictable(entry, spared))
            if not plan.enough or self._any_young(plan.victims, young_s):
                return None
            if not self._give_up(plan.victims, spared):
                return None
        return extents

    def _any_young(self, entries: Iterable[Hashable], young_s: float) -> bool:
        """Whether one of them would be lost that was committed after `young_s`."""
        return any(
            victim.ready_s > young_s and victim.nvme is None and self.outlet.fate(victim) is Fate.GO
            for victim in map(self._listed.__getitem__, entries)
        )

    def _is_evictable(self, entry: Hashable, spared: Container[Hashable] = ()) -> bool:
        victim = self._listed[entry]
        return not victim.pinned and (entry not in spared or self.outlet.keeps(victim))

    def _give_up(self, victims: Iterable[Hashable], spared: Container[Hashable] = ()) -> bool:
        """Evicts or spills; whether any of them goes, now or later."""
        some = False
        for entry in victims:
            victim = self._listed[entry]
            fate = self.outlet.fate(victim)
            if fate is Fate.STAY:
                break
            if fate is Fate.SPILL:
                self.outlet.spill(victim)
            elif self._may_go(victim, spared):
                self.evict(victim)
            else:
                continue
            some = True
        return some

    def _may_go(self, victim: Object, spared: Container[Hashable]) -> bool:
        if victim.entry in spared and not victim.is_on_disk:
            return False
        return victim.nvme is not None or self.may_leave_the_node(victim)

    def _leave_unfilled(self, filling: Object, event: Event) -> Extents:
        copy = filling.in_dram
        copy.advance(event)
        filling.dram = None
        if filling in self._retired:
            del self._retired[filling]
        else:
            self._forget(filling)
        return copy.extents

    def _give_back(self, owner: Object, event: Event) -> None:
        copy = owner.in_dram
        copy.advance(event)
        owner.dram = None
        owner.resident = None
        self._allocator.free(copy.extents)

    def _forget(self, owner: Object) -> None:
        del self._listed[owner.entry]
        self._policy.remove(owner.entry)

    def audit(self) -> None:
        """Asserts that every page is in exactly one place, and that counts say what is there."""
        self._allocator.audit()
        copies = [*self._listed.values(), *self._retired]
        taken = [extent for owner in copies for extent in owner.in_dram.extents]
        held = [extent for record in self._held for extent in record.extents]
        landing = [extent for extents in self._landing.values() for extent in extents]
        end = 0
        for start, count in sorted([*taken, *held, *landing, *self._allocator.free_extents()]):
            assert start == end, f"page {min(start, end)} is lost or in two places"
            end = start + count
        assert end == self.page_count, "pages are lost at the end"
        filling = [owner for owner in copies if owner.in_dram.state is State.FILLING]
        ready = [owner for owner in self._listed.values() if owner.is_readable]
        assert all(
            owner.is_readable or owner.in_dram.state is State.FILLING for owner in self._listed.values()
        ), "a listed copy is neither filling nor ready"
        reserved = sum(owner.pages for owner in filling if owner.reservation is not None)
        promoted = sum(owner.pages for owner in filling if owner.reservation is None)
        assert reserved == self.reserved_pages, "reserved pages are miscounted"
        assert promoted == self.promoted_pages, "pages of promotions are miscounted"
        assert sum(record.pages for record in self._held) == self.held_pages, "held pages are miscounted"
        assert len(ready) == self.ready_objects, "ready objects are miscounted"
        assert sum(owner.size_bytes for owner in ready) == self.ready_bytes, "ready bytes are miscounted"
        assert all(owner.pinned for owner in self._retired), "a retired copy that nothing pins is still there"
