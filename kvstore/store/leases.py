"""Leases: who may rely on which objects, and for how long.

Lease ids are chosen by clients, so a lease is found by client *and* id. A lease has at most one object
per key: what was promised stays what it was, even if the key is dropped and stored anew meanwhile.
Pages count once for everybody and once for each client, however many leases have them.
"""

from collections.abc import Callable, Iterable

from kvstore.core import Key, limits
from kvstore.store.clients import Client, Clients, within_share
from kvstore.store.deadlines import Deadlines
from kvstore.store.objects import Lease, Object
from kvstore.wire import ClientId, LeaseId


class Leases:
    """All leases of a node."""

    def __init__(self, clients: Clients, on_unpinned: Callable[[Object], None]) -> None:
        self.leased_pages = 0  # of leased objects, each counted once
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
        """Whether the client's share allows it to lease this object."""
        if wanted in client.leased:
            return True
        client_pages = client.leased_pages + wanted.pages
        all_pages = self.leased_pages + (0 if wanted.leases else wanted.pages)
        share_pages = self._clients.leased_pages_max
        return within_share(client_pages, all_pages, share_pages, floor_pages, alone=alone)

    def may_take_all(self, client: Client, pages: int, *, alone: bool) -> bool:
        """Whether the client's share allows it to lease any objects of so many pages together."""
        client_pages, all_pages = client.leased_pages + pages, self.leased_pages + pages
        return within_share(client_pages, all_pages, self._clients.leased_pages_max, 0, alone=alone)

    def take(self, lease: Lease, wanted: Object, floor_pages: int, *, alone: bool, sure: bool) -> bool:
        """Adds an object to a lease that does not have its key yet, if the client's share allows it.

        `sure`: it does, that is known already.
        """
        assert wanted.key not in lease.objects, "a lease has one object per key"
        client = lease.client
        own = client.leased.get(wanted, 0)
        if not own:
            if not (sure or self.may_take(client, wanted, floor_pages, alone=alone)):
                return False
            client.leased_pages += wanted.pages
        client.leased[wanted] = own + 1
        if not wanted.leases:
            self.leased_pages += wanted.pages
        wanted.leases += 1
        lease.objects[wanted.key] = wanted
        return True

    def release(self, lease: Lease, keys: Iterable[Key]) -> None:
        """Gives these keys back, the last first, so that parents are more recently used than children."""
        for key in reversed(list(keys)):
            released = lease.objects.pop(key, None)
            if released is not None:
                self._untake(lease.client, released)

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
                assert owner.copies, "a leased object has no copy"
                of_object[owner] = of_object.get(owner, 0) + 1
                leased[owner] = leased.get(owner, 0) + 1
        assert all(owner.leases == count for owner, count in of_object.items()), "leases are miscounted"
        assert self.leased_pages == sum(owner.pages for owner in of_object), "leased pages are miscounted"
        assert len(self._deadlines) == len(self._leases), "a lease has no deadline"
        for client in self._clients:
            leased = of_client.pop(client, {})
            assert client.leased == leased, "what a client leases is miscounted"
            pages = sum(owner.pages for owner in of_object if owner in leased)
            assert client.leased_pages == pages, "a client's leased pages are miscounted"
        assert not of_client, "a client with leases was forgotten"

    def _untake(self, client: Client, released: Object) -> None:
        own = client.leased[released] - 1
        if own:
            client.leased[released] = own
        else:
            del client.leased[released]
            client.leased_pages -= released.pages
        released.leases -= 1
        if not released.leases:
            self.leased_pages -= released.pages
            if not released.pinned:
                self._on_unpinned(released)
