"""The listed objects, and what is told when a key's state changes.

A key gets here by a reservation and leaves by being evicted, given up, dropped, or found bad. Whoever
changes that calls this: it keeps the map, remembers why a key is gone, marks keys dirty for the index and
tells those who watch. Calls that tell are the last thing of a change, so callbacks may look at the store.
"""

from collections import Counter
from collections.abc import Callable, Container, Hashable

from kvstore.core import Event, Key, MissReason, Namespace, State, Tier, limits
from kvstore.policy import Policy, PrefixLru
from kvstore.store.clients import Client
from kvstore.store.dram import Dram
from kvstore.store.nvme import Disks, Nvme
from kvstore.store.objects import Object, OnDevice
from kvstore.store.recent import Recent
from kvstore.store.snapshot import Totals
from kvstore.store.watches import Watches
from kvstore.tiers import NewObject, Record


def _ignore(_: Key) -> None:
    pass


class Listing:
    """Objects by key."""

    def __init__(self, page_count: int, page_bytes: int, policy: Policy, disks: Disks) -> None:
        self.page_bytes = page_bytes  # in DRAM
        self.objects: dict[Key, Object] = {}
        self.lost: Recent[Key, MissReason] = Recent(limits.LOST_KEYS_MAX)
        self.dram = Dram(page_count, policy, self._left_dram)
        self.nvme = Nvme(disks, PrefixLru(), self.dram.children, self._left_nvme)
        self.watches = Watches()
        self.totals = Totals()
        self.on_dirty: Callable[[Key], None] = _ignore

    def find(self, namespace: Namespace, key: Key) -> Object | None:
        """The listed object of a key, filling or ready."""
        listed = self.objects.get(key)
        return listed if listed is not None and listed.namespace.id == namespace else None

    def add(self, filling: Object, spared: Container[Hashable], young_s: float) -> bool:
        """Lists an object that is to be filled; False when there is no room for it. See `Dram.fill`.

        It takes the place of one that can be had nowhere, because its device is down.
        """
        old = self.objects.get(filling.key)
        assert old is None or old.is_unreachable, "a key has one listed object"
        if not self.dram.fill(filling, spared, young_s):
            return False
        if old is not None:
            self.totals.evicted += 1
            self.totals.evicted_bytes += old.size_bytes
            self.retire(old, MissReason.DEVICE_DOWN)
        self._list(filling)
        return True

    def add_on_disk(self, found: Object, placed: OnDevice) -> None:
        """Lists an object that has a copy on NVMe only."""
        assert found.key not in self.objects, "a key has one listed object"
        self._list(found)
        self.nvme.add(found, placed)
        self.lost.discard(found.key)
        self.on_dirty(found.key)

    def publish(self, filled: Object, table: bytes) -> None:
        """The object may be read from now on."""
        filled.readable_from_now_on(table)
        self.dram.commit(filled)
        self.lost.discard(filled.key)
        self.on_dirty(filled.key)
        self.watches.fire(filled.key)

    def give_up(self, filling: Object, event: Event) -> None:
        """The object will not be filled; nothing can land in its pages any more."""
        self._unlist(filling)
        self.dram.abandon(filling, event)
        self._left(filling)

    def give_up_held(self, filling: Object, event: Event, client: Client, until_s: float) -> None:
        """The object will not be filled; something may land in its pages until `until_s`."""
        self._unlist(filling)
        self.dram.hold(filling, event, client, until_s)
        self._left(filling)

    def retire(self, ready: Object, reason: MissReason) -> None:
        """Nobody gets the object any more; those who have it keep it."""
        self._unlist(ready)
        if ready.nvme is not None:
            self.nvme.retire(ready)
        if ready.dram is not None:
            self.dram.retire(ready)
        self._gone(ready, reason)

    def unpinned(self, loose: Object) -> None:
        """Nothing pins the object any more."""
        if loose.nvme is not None:
            self.nvme.unpinned(loose)
        if loose.dram is not None:
            self.dram.unpinned(loose)

    def touch(self, used: Object) -> None:
        """The object was useful, wherever it is."""
        if used.nvme is not None:
            self.nvme.touch(used)
        if used.dram is not None:
            self.dram.touch(used)

    def contents(self, ready: Object) -> NewObject:
        """What a device is to store."""
        return NewObject(
            key=ready.key,
            namespace=ready.namespace.id,
            parent=ready.parent,
            depth=ready.depth,
            generation=ready.generation,
            size_bytes=ready.size_bytes,
            cold=ready.cold,
            table=ready.table,
        )

    # --- between tiers ------------------------------------------------------------------------------

    def stored(self, moved: Object, placed: OnDevice) -> None:
        """The object has a durable copy on NVMe, too."""
        self.nvme.add(moved, placed)
        self.on_dirty(moved.key)

    def promoted(self, moved: Object) -> None:
        """The object has a copy in DRAM, too, and may be read there."""
        self.dram.commit(moved, promoted=True)
        if not moved.pinned:
            self.unpinned(moved)
        self.on_dirty(moved.key)
        self.watches.fire(moved.key)

    def spoil(self, bad: Object) -> None:
        """The copy in DRAM did not verify: its readers are told. If there is one on NVMe, the key is found there."""
        self.totals.bad_copies += 1
        self.dram.spoil(bad)
        if not bad.listed:
            if not bad.pinned:
                self.unpinned(bad)
            return
        placed = self.nvme.detach(bad) if bad.nvme is not None else None
        self.retire(bad, MissReason.BAD_COPY)
        if placed is not None:
            self.add_on_disk(bad.heir(), placed)

    def spoil_on_disk(self, bad: Object) -> None:
        """The copy on NVMe did not verify; there is no other."""
        self.totals.bad_copies += 1
        self.nvme.remove(bad)
        if bad.listed:
            self._unlist(bad)
            self._gone(bad, MissReason.BAD_COPY)

    def damaged(self, record: Record) -> None:
        """The copy on NVMe does not verify, and nobody had asked for it. Who leases or moves it finds out."""
        owner = self.objects.get(record.key)
        if owner is None or owner.nvme is None or owner.nvme.record is not record or owner.pinned:
            return
        if owner.dram is None:
            self.spoil_on_disk(owner)
            return
        self.totals.bad_copies += 1
        self.nvme.remove(owner)

    def tier_of(self, key: Key) -> Tier | None:
        """Where a key may be had, None when it may not."""
        listed = self.objects.get(key)
        if listed is None:
            return None
        if listed.is_readable:
            return Tier.DRAM
        return Tier.NVME if listed.is_on_disk else None

    def audit(self) -> None:
        """Asserts that what is listed here is what has pages there, and the books of both."""
        self.dram.audit()
        self.nvme.audit()
        self.watches.audit()
        for key, listed in self.objects.items():
            assert listed.key == key, "an object is listed under another key"
            assert listed.listed, "an object does not know that it is listed"
            filling = listed.dram is not None and listed.dram.state is State.FILLING and listed.job is None
            assert filling == (listed.reservation is not None), "an object is filling without a reservation"
            assert listed.dram is not None or listed.nvme is not None, "a listed object is nowhere"
            assert (listed.resident is not None) == listed.is_readable, (
                "readers are told of what is not to be read"
            )
        per_namespace = Counter(listed.namespace for listed in self.objects.values())
        assert all(opened.num_objects == count for opened, count in per_namespace.items()), (
            "the objects of a namespace are miscounted"
        )

    def _list(self, new: Object) -> None:
        self.objects[new.key] = new
        new.namespace.num_objects += 1

    def _unlist(self, listed: Object) -> None:
        del self.objects[listed.key]
        listed.listed = False
        listed.namespace.num_objects -= 1

    def _left_dram(self, victim: Object) -> None:
        """Evicted from DRAM."""
        if victim.nvme is None:
            self._evicted(victim)
            return
        victim.table = b""  # the device knows it
        self.totals.demoted += 1
        self.on_dirty(victim.key)

    def _left_nvme(self, victim: Object) -> None:
        """Evicted from NVMe."""
        if victim.dram is None:
            self._evicted(victim)
        else:
            self.totals.trimmed += 1

    def _evicted(self, victim: Object) -> None:
        self._unlist(victim)
        self.totals.evicted += 1
        self.totals.evicted_bytes += victim.size_bytes
        self.totals.orphaning += self.nvme.children(victim.entry) > 0
        self._gone(victim, MissReason.EVICTED)

    def _gone(self, gone: Object, reason: MissReason) -> None:
        self.lost.set(gone.key, reason)
        self.on_dirty(gone.key)
        self._left(gone)

    def _left(self, gone: Object) -> None:
        self.nvme.child_left(gone.parent_entry)
        self.watches.fire(gone.key)
