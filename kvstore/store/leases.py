"""Leases: who may rely on which objects, and for how long.

Lease ids are chosen by clients, so a lease is found by client *and* id. A lease has at most one object
per key: what was promised stays what it was, even if the key is dropped and stored anew meanwhile.
Pages in DRAM count once for everybody and once for each client, however many leases have them. An object that is
only on NVMe takes none there until it is promoted; all leased objects together have their share of NVMe, too.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from kvstore.core import Key, limits
from kvstore.store.clients import Client, Clients, within_share
from kvstore.store.deadlines import Deadlines
from kvstore.store.objects import Lease, Object
from kvstore.wire import ClientId, LeaseId


class Leases:
    """All leases of a node."""

    def __init__(
        self, clients: Clients, on_unpinned: Callable[[Object], None], disk_bytes: Callable[[], int]
    ) -> None:
        self.leased_pages = 0  # in DRAM, of leased objects, each counted once
        self.disk_bytes = 0  # of leased objects that were not in DRAM when they were first leased
        self._disk_bytes = disk_bytes
        self._clients = clients
        self._on_unpinned = on_unpinned
        self._leases: dict[tuple[ClientId, LeaseId], Lease] = {}
        self._deadlines: Deadlines[Lease] = Deadlines()

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def full(self) -> bool:
        """Whether leases have their whole share of the arena: a full house."""
        return self.leased_pages >= self._clients.leased_pages_max

    def young_s(self, now_s: float) -> float:
        """What was committed after this is not evicted. With all that is older leased, room for something new could
        only come from what was acknowledged a moment ago, and so for ever: then new things are refused."""
        return now_s - limits.YOUNG_S if self.full else math.inf

    def get(self, client: ClientId, lease_id: LeaseId, now_s: float) -> Lease | None:
        """The client's lease of this name, if it lives."""
        lease = self._leases.get((client, lease_id))
        return None if lease is None or lease.deadline_s <= now_s else lease

    def open(self, client: Client, lease_id: LeaseId, now_s: float, duration_s: float) -> Lease | None:
        """The lease of this name, new or prolonged; None when the client has too many. See `settle`."""
        lease = self._leases.get((client.id, lease_id))
        if lease is not None and lease.deadline_s <= now_s:
            self.end(lease)
            lease = None
        if lease is not None:
            self.prolong(lease, now_s, duration_s)
            return lease
        if client.num_leases >= limits.LEASES_PER_CLIENT_MAX:
            return None
        lease = Lease(client, lease_id, now_s, now_s + min(duration_s, limits.LEASE_S_MAX))
        client.num_leases += 1
        self._leases[client.id, lease_id] = lease
        self._deadlines.add(lease)
        return lease

    def settle(self, lease: Lease) -> None:
        """Ends the lease if it has no objects."""
        if not lease.objects:
            self.end(lease)

    def prolong(self, lease: Lease, now_s: float, duration_s: float) -> float:
        """Prolongs a lease within its whole life, never shortens it; seconds left."""
        end_s = min(now_s + duration_s, lease.started_s + limits.LEASE_S_MAX)
        lease.deadline_s = max(lease.deadline_s, end_s)
        return lease.deadline_s - now_s

    def may_take(self, client: Client, wanted: Object, floor_pages: int, *, alone: bool) -> bool:
        """Whether the client's share allows it to lease this object, where it is."""
        if wanted in client.leased:
            return True
        if wanted.dram is None:
            share_bytes = int(self._disk_bytes() * limits.LEASED_SHARE_MAX)
            if wanted.leases or self.disk_bytes + wanted.size_bytes <= share_bytes:
                return True
            own_pages = sum(own.pages for own in client.leased if isinstance(own, Object))
            return own_pages + wanted.pages <= floor_pages
        client_pages = client.leased_pages + wanted.pages
        all_pages = self.leased_pages + (0 if wanted.leases else wanted.pages)
        share_pages = self._clients.leased_pages_max
        return within_share(client_pages, all_pages, share_pages, floor_pages, alone=alone)

    def may_gain(self, client: Client, wanted: Object, now_s: float) -> bool:
        """Whether the client's share allows a leased object to be promoted.

        Beyond its share of leases it may have a few objects promoted at a time: the end of its prompt, leased in
        DRAM, must not keep the beginning out.
        """
        if client.promoted_pages + wanted.pages <= wanted.namespace.floor_pages:
            return True
        client_pages, all_pages = client.leased_pages + wanted.pages, self.leased_pages + wanted.pages
        alone = not self._clients.others_active(client, now_s)
        return within_share(client_pages, all_pages, self._clients.promoted_pages_max, 0, alone=alone)

    def fits(self, pages: int, *, alone: bool) -> bool:
        """Whether a client that has no other leases could have so many pages at once."""
        return within_share(pages, pages, self._clients.leased_pages_max, 0, alone=alone)

    def gained(self, moved: Object, client: Client | None) -> None:
        """An object, perhaps leased, has pages in DRAM now, on behalf of a client."""
        self._count_in_dram(moved, moved.pages)
        if client is not None and moved in client.leased:
            moved.promoted_for = client
            client.promoted_pages += moved.pages

    def lost(self, moved: Object) -> None:
        """It has none any more."""
        self._count_in_dram(moved, -moved.pages)
        self._forget_promotion(moved)

    def _forget_promotion(self, moved: Object) -> None:
        if moved.promoted_for is not None:
            moved.promoted_for.promoted_pages -= moved.pages
            moved.promoted_for = None

    def _count_in_dram(self, moved: Object, pages: int) -> None:
        if not moved.leases:
            return
        self.leased_pages += pages
        for client in self._clients:
            if moved in client.leased:
                client.leased_pages += pages

    def may_take_all(self, client: Client, pages: int, *, alone: bool) -> bool:
        """Whether the client's share allows it to lease any objects of so many pages together."""
        client_pages, all_pages = client.leased_pages + pages, self.leased_pages + pages
        return within_share(client_pages, all_pages, self._clients.leased_pages_max, 0, alone=alone)

    def take(self, lease: Lease, wanted: Object, *, alone: bool, sure: bool) -> bool:
        """Adds an object to a lease that does not have its key yet, if the client's share allows it.

        `sure`: it does, that is known already.
        """
        assert wanted.key not in lease.objects, "a lease has one object per key"
        client = lease.client
        on_disk = wanted.dram is None
        pages = 0 if on_disk else wanted.pages
        own = client.leased.get(wanted, 0)
        if not own:
            floor_pages = wanted.namespace.floor_pages
            if not ((sure and not on_disk) or self.may_take(client, wanted, floor_pages, alone=alone)):
                return False
            client.leased_pages += pages
        client.leased[wanted] = own + 1
        if not wanted.leases:
            self.leased_pages += pages
            wanted.leased_on_disk = on_disk
            self.disk_bytes += wanted.size_bytes if on_disk else 0
        wanted.leases += 1
        lease.objects[wanted.key] = wanted
        return True

    def take_all(self, lease: Lease, wanted: Mapping[Key, Object]) -> None:
        """Adds objects in DRAM to a lease that has none of these keys; the client's share allows all of it."""
        leased = lease.client.leased
        own_pages = new_pages = 0
        for each in wanted.values():
            own = leased.get(each, 0)
            leased[each] = own + 1
            pages = each.pages
            if not own:
                own_pages += pages
            if not each.leases:
                new_pages += pages
                each.leased_on_disk = False
            each.leases += 1
        lease.client.leased_pages += own_pages
        self.leased_pages += new_pages
        lease.objects.update(wanted)

    def release(self, lease: Lease, keys: Iterable[Key]) -> list[int]:
        """Gives these keys back, the last first, so that parents are more recently used than children.

        Returns the sizes of their objects.
        """
        sizes_bytes = []
        for key in reversed(list(keys)):
            released = lease.objects.pop(key, None)
            if released is not None:
                self._untake(lease.client, released)
                sizes_bytes.append(released.size_bytes)
        return sizes_bytes

    def end(self, lease: Lease) -> None:
        """Gives all back."""
        self.release(lease, list(lease.objects))
        self._deadlines.discard(lease)
        lease.client.num_leases -= 1
        del self._leases[lease.client.id, lease.id]

    def expire(self, now_s: float) -> int:
        """Ends what is over, a slice at a time; how many that were."""
        for ended in range(limits.EXPIRIES_PER_TICK_MAX):
            lease = self._deadlines.due(now_s)
            if lease is None:
                return ended
            self.end(lease)
        return limits.EXPIRIES_PER_TICK_MAX

    def audit(self) -> None:
        """Asserts that objects, clients and totals agree with the leases."""
        of_object: dict[Object, int] = {}
        of_client: dict[Client, dict[object, int]] = {}
        for lease in self._leases.values():
            assert lease.objects, "an empty lease is kept"
            assert lease.deadline_s <= lease.started_s + limits.LEASE_S_MAX, "a lease lives too long"
            leased = of_client.setdefault(lease.client, {})
            for key, owner in lease.objects.items():
                assert owner.key == key, "an object is leased under another key"
                has_copy = owner.dram is not None or owner.nvme is not None
                assert has_copy or owner.failure is not None, "a leased object has no copy"
                of_object[owner] = of_object.get(owner, 0) + 1
                leased[owner] = leased.get(owner, 0) + 1
        assert all(owner.leases == count for owner, count in of_object.items()), "leases are miscounted"
        in_dram = [owner for owner in of_object if owner.dram is not None]
        assert self.leased_pages == sum(owner.pages for owner in in_dram), "leased pages are miscounted"
        on_disk = sum(owner.size_bytes for owner in of_object if owner.leased_on_disk)
        assert on_disk == self.disk_bytes, "leased bytes on NVMe are miscounted"
        assert len(self._deadlines) == len(self._leases), "a lease has no deadline"
        for client in self._clients:
            leased = of_client.pop(client, {})
            assert client.leased == leased, "what a client leases is miscounted"
            pages = sum(owner.pages for owner in in_dram if owner in leased)
            assert client.leased_pages == pages, "a client's leased pages are miscounted"
            promoted = sum(owner.pages for owner in in_dram if owner.promoted_for is client)
            assert client.promoted_pages == promoted, "a client's promoted pages are miscounted"
        assert not of_client, "a client with leases was forgotten"

    def _untake(self, client: Client, released: Object) -> None:
        own = client.leased[released] - 1
        pages = released.pages if released.dram is not None else 0
        if own:
            client.leased[released] = own
        else:
            del client.leased[released]
            client.leased_pages -= pages
            if released.promoted_for is client:
                self._forget_promotion(released)
        released.leases -= 1
        if not released.leases:
            self.leased_pages -= pages
            self.disk_bytes -= released.size_bytes if released.leased_on_disk else 0
            if not released.pinned:
                self._on_unpinned(released)
