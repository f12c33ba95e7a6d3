"""The NVMe tier as the store sees it: which objects have a copy on which device, and which of them go.

What is used is derived from the objects that are here, so it cannot be counted twice, and a restart forgets
nothing. Pages of a copy that goes are free on the device one commit later; here they count as free at once,
so that nothing more is given up for the same need.

One policy orders the copies of all devices. A copy goes only while nothing pins its object, and the node keeps no
child of it out of reach: children on NVMe go before it by policy, and while one is in DRAM it stays, unless it is in
DRAM itself. A device that is down keeps its pages; what the policy gives up there is freed when it is back.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from kvstore.core import Namespace, limits, pages_for
from kvstore.policy import Policy
from kvstore.store.objects import Disk, Object, OnDevice
from kvstore.tiers import Refusal


class Disks(Protocol):
    """The devices, and whether one of them would take an object."""

    @property
    def devices(self) -> Sequence[Disk]:
        """All of them."""

    def refuses(self, size_bytes: int) -> Refusal | None:
        """Why an object of this size would not be taken now."""


class NoDisks:
    """There is no NVMe tier."""

    devices: Sequence[Disk] = ()

    def refuses(self, size_bytes: int) -> Refusal | None:
        """Always."""
        return Refusal.DEVICE_DOWN


class Use:
    """What the objects here take of one device."""

    __slots__ = ("object_bytes", "objects", "pages")

    def __init__(self) -> None:
        self.objects = 0
        self.object_bytes = 0
        self.pages = 0


class Nvme:
    """Copies on devices."""

    def __init__(
        self,
        disks: Disks,
        policy: Policy,
        in_dram: Callable[[Hashable], int],
        on_evicted: Callable[[Object], None],
    ) -> None:
        """Nothing is known to be on them yet.

        Args:
            disks: the devices.
            policy: what to give up; knows nothing yet.
            in_dram: how many copies in DRAM have this parent.
            on_evicted: is told of an object whose copy here was given up.
        """
        self.disks = disks
        self.use: dict[Disk, Use] = {disk: Use() for disk in disks.devices}
        self.spared: Collection[Hashable] = ()  # are not given up now; at the end, tell `unspare`
        self.coming_bytes = 0  # of objects that are being spilled
        self.strange: dict[Namespace, list[OnDevice]] = {}  # of namespaces whose manifest is lost
        self._strange_pages: dict[Disk, int] = dict.fromkeys(disks.devices, 0)
        self._policy = policy
        self._in_dram = in_dram
        self._on_evicted = on_evicted
        self._listed: dict[Hashable, Object] = {}
        self._retired: dict[Object, None] = {}

    @property
    def pages(self) -> int:
        """Pages of the devices that are up."""
        return sum(disk.usable_pages for disk in self.use if disk.up)

    @property
    def free_pages(self) -> int:
        """Of those, what no object here has: free now, or about to be."""
        return sum(
            disk.usable_pages - use.pages - self._strange_pages[disk]
            for disk, use in self.use.items()
            if disk.up
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of pages of the devices that are up."""
        return sum(disk.usable_pages * disk.page_bytes for disk in self.use if disk.up)

    def children(self, entry: Hashable) -> int:
        """How many copies here have that parent."""
        return self._policy.children(entry)

    def add(self, stored: Object, placed: OnDevice) -> None:
        """The object has a copy here, from now on."""
        assert stored.nvme is None, "an object has one copy in a tier"
        stored.nvme = placed
        pages = self._count(stored, placed, 1)
        if stored.listed:
            self._listed[stored.entry] = stored
            self._policy.insert(stored.entry, stored.parent_entry, pages, cold=stored.cold)
        else:
            self._retired[stored] = None

    def touch(self, used: Object) -> None:
        """The object was useful."""
        self._policy.touch(used.entry, cold=used.cold)

    def unpinned(self, loose: Object) -> None:
        """Nothing pins the object any more: it may be evicted, and goes at once if it was retired."""
        if loose.listed:
            self.touch(loose)
        elif loose in self._retired:
            self.remove(loose)

    def unspare(self, spared: Iterable[Hashable]) -> None:
        """These were offered, which is a use; they may be given up again, and the policy hears of it."""
        for entry in spared:
            listed = self._listed.get(entry)
            if listed is not None:
                self.touch(listed)

    def child_left(self, parent_entry: Hashable) -> None:
        """A child of this entry is not in DRAM any more: it may perhaps be evicted now."""
        if parent_entry in self._listed:
            self._policy.touch(parent_entry)

    def retire(self, unlisted: Object) -> None:
        """The object is not listed any more: its copy goes as soon as nothing pins it."""
        self._forget(unlisted)
        self._retired[unlisted] = None
        if not unlisted.pinned:
            self.remove(unlisted)

    def remove(self, gone: Object) -> None:
        """The copy is no more."""
        placed = gone.nvme
        assert placed is not None, "it has no copy here"
        if gone in self._retired:
            del self._retired[gone]
        else:
            self._forget(gone)
        gone.nvme = None
        self._count(gone, placed, -1)
        placed.disk.delete(placed.record)

    def detach(self, giver: Object) -> OnDevice:
        """The copy of a listed object, which has none here any more; the device keeps it."""
        placed = giver.nvme
        assert placed is not None, "it has no copy here"
        self._forget(giver)
        giver.nvme = None
        self._count(giver, placed, -1)
        return placed

    # --- room -----------------------------------------------------------------------------------------

    def make_room(self, size_bytes: int) -> bool:
        """Whether an object of this size will find room, beside those that are coming; evicts if need be."""
        need_pages = self._most_pages(size_bytes + self.coming_bytes)
        while self.free_pages < need_pages:  # again when some of it was on a device that is down
            if not self._evict(need_pages - self.free_pages):
                return False
        return True

    def tick(self) -> None:
        """Evicts, a slice at a time, up to the low-water mark."""
        low_water_pages = int(self.pages * limits.NVME_LOW_WATER_SHARE)
        missing_pages = low_water_pages + self._most_pages(self.coming_bytes) - self.free_pages
        if missing_pages > 0 and self.pages:
            self._evict(min(missing_pages, limits.EVICTED_PAGES_PER_TICK_MAX))

    def _evict(self, pages: int) -> bool:
        """Gives up so many pages, of whatever devices; whether there was anything to give up."""
        dropped = self._drop_strange(pages)
        some = dropped > 0
        if dropped >= pages:
            return some
        pages -= dropped
        for entry in self._policy.plan(pages, self._is_evictable).victims:
            victim = self._listed[entry]
            if self._may_go(victim):  # not when a child stayed
                self.remove(victim)
                self._on_evicted(victim)
                some = True
        return some

    def _is_evictable(self, entry: Hashable) -> bool:
        victim = self._listed[entry]
        if victim.pinned or entry in self.spared:
            return False
        return victim.is_readable or not self._in_dram(entry)

    def _may_go(self, victim: Object) -> bool:
        return victim.is_readable or not (self._in_dram(victim.entry) or self._policy.children(victim.entry))

    # --- what nobody can ask for yet --------------------------------------------------------------------

    def set_aside(self, placed: OnDevice) -> None:
        """Keeps a copy whose namespace is not known, until an engine brings its manifest, or room is needed."""
        self.strange.setdefault(placed.record.namespace, []).append(placed)
        self._strange_pages[placed.disk] += self._pages(placed)

    def take_out(self, namespace: Namespace) -> Iterator[OnDevice]:
        """What was set aside for a namespace."""
        for placed in self.strange.pop(namespace, ()):
            self._strange_pages[placed.disk] -= self._pages(placed)
            yield placed

    def _drop_strange(self, pages: int) -> int:
        """Deletes copies of unknown namespaces; how many pages they had."""
        freed = 0
        while freed < pages and self.strange:
            namespace = next(iter(self.strange))
            placed = self.strange[namespace].pop()
            if not self.strange[namespace]:
                del self.strange[namespace]
            self._strange_pages[placed.disk] -= self._pages(placed)
            freed += self._pages(placed)
            placed.disk.delete(placed.record)
        return freed

    # --- books ----------------------------------------------------------------------------------------

    def _pages(self, placed: OnDevice) -> int:
        return pages_for(placed.record.size_bytes, placed.disk.page_bytes)

    def _most_pages(self, size_bytes: int) -> int:
        """Pages that this would take, on the device where it takes most."""
        return max((pages_for(size_bytes, disk.page_bytes) for disk in self.use if disk.up), default=0)

    def _count(self, owner: Object, placed: OnDevice, sign: int) -> int:
        """Notes that the device has it, or has it no more; its pages there."""
        use, pages = self.use[placed.disk], self._pages(placed)
        use.objects += sign
        use.object_bytes += sign * owner.size_bytes
        use.pages += sign * pages
        return pages

    def _forget(self, owner: Object) -> None:
        del self._listed[owner.entry]
        self._policy.remove(owner.entry)

    def audit(self) -> None:
        """Asserts that what is here is what the devices have, and that use is what is here."""
        copies = [*self._listed.values(), *self._retired]
        for disk, use in self.use.items():
            own = [owner.nvme for owner in copies if owner.nvme is not None and owner.nvme.disk is disk]
            assert len(own) == use.objects, "objects on a device are miscounted"
            assert sum(map(self._pages, own)) == use.pages, "pages on a device are miscounted"
            assert all(disk.records.get(placed.record.key) is placed.record for placed in own), (
                "the device does not have what is here"
            )
        assert all(owner.nvme is not None for owner in copies), "a copy on NVMe is nowhere"
        assert all(owner.pinned for owner in self._retired), "a retired copy that nothing pins is still there"
