"""Readers: acquire, pages, release, and doubts about what was read."""

from typing import NamedTuple

from kvstore.core import Extents, Key, MissReason, Run, State, Tier
from kvstore.store.clients import Client, Clients
from kvstore.store.leases import Leases
from kvstore.store.listing import Listing
from kvstore.store.namespaces import OpenNamespace
from kvstore.store.objects import Lease, Object
from kvstore.wire import (
    Acquire,
    AcquireAnswer,
    Filling,
    LeaseId,
    Miss,
    Pages,
    Prefetch,
    Release,
    Resident,
    Suspect,
)


class Check(NamedTuple):
    """A copy that is to be verified; pinned until `settle`."""

    suspect: Object
    extents: Extents
    runs: tuple[Run, ...]
    table: bytes


class Reading:
    """Leases of objects, and their verification."""

    def __init__(self, listing: Listing, clients: Clients, leases: Leases) -> None:
        self._listing = listing
        self._clients = clients
        self._leases = leases

    def acquire(
        self, client: Client, namespace: OpenNamespace, request: Acquire, now_s: float
    ) -> tuple[AcquireAnswer, ...]:
        """Leases what can be had. See `Store.acquire`."""
        alone = not self._clients.others_active(client, now_s)
        pages_max = len(request.keys) * namespace.chunk_pages
        sure = self._leases.may_take_all(client, pages_max, alone=alone)
        lease = self._leases.open(client, request.lease, now_s, request.duration_s)
        answers: list[AcquireAnswer] = []
        for key in request.keys:
            answer = self._acquire(client, namespace, lease, key, alone=alone, sure=sure)
            answers.append(answer)
            if request.prefix and not isinstance(answer, Resident):
                break
        if lease is not None:
            self._leases.settle(lease)
        return tuple(answers)

    def _acquire(
        self,
        client: Client,
        namespace: OpenNamespace,
        lease: Lease | None,
        key: Key,
        *,
        alone: bool,
        sure: bool,
    ) -> AcquireAnswer:
        promised = lease.objects.get(key) if lease is not None else None
        if promised is not None:
            return self._resident(promised)
        listed = self._listing.objects.get(key)
        if listed is None or listed.namespace is not namespace:
            self._listing.on_dirty(key)
            return self._miss(self._listing.lost.get(key, MissReason.NEVER_STORED))
        if listed.reservation is not None:
            self._listing.totals.miss(MissReason.FILLING)
            return Filling()
        floor_pages = namespace.floor_pages
        if lease is None or not self._leases.take(lease, listed, floor_pages, alone=alone, sure=sure):
            return self._miss(MissReason.LEASE_LIMIT)
        listed.used_by(client.id)
        self._listing.totals.acquired_keys += 1
        return self._resident(listed)

    def pages(self, client: Client, request: Pages, now_s: float) -> tuple[AcquireAnswer, ...]:
        """Where leased copies are. See `Store.pages`."""
        lease = self._leases.get(client.id, request.lease, now_s)
        objects = {} if lease is None else lease.objects
        return tuple(
            self._resident(objects[key]) if key in objects else self._miss(MissReason.EXPIRED)
            for key in request.keys
        )

    def renew(self, client: Client, lease_id: LeaseId, now_s: float, duration_s: float) -> float:
        """Prolongs a lease. See `Store.renew`."""
        lease = self._leases.get(client.id, lease_id, now_s)
        return 0.0 if lease is None else self._leases.prolong(lease, now_s, duration_s)

    def release(self, client: Client, request: Release, now_s: float) -> None:
        """Gives leased objects back. See `Store.release`."""
        lease = self._leases.get(client.id, request.lease, now_s)
        if lease is None:
            return
        keys = request.keys or tuple(lease.objects)
        if request.cold:
            for key in keys:
                if key in lease.objects:
                    lease.objects[key].cool(client.id)
        self._leases.release(lease, keys)
        self._leases.settle(lease)

    def prefetch(self, namespace: OpenNamespace, request: Prefetch) -> None:
        """What will be asked for is not the next to be evicted."""
        for key in reversed(request.keys):
            listed = self._listing.find(namespace.id, key)
            if listed is not None and not listed.pinned:
                self._listing.dram.touch(listed)

    def expire(self, now_s: float) -> None:
        """Ends leases that are over, a slice at a time."""
        self._listing.totals.expired_leases += self._leases.expire(now_s)

    def check(self, client: Client, request: Suspect, now_s: float) -> Check | None:
        """Pins a leased copy for verification; None when this lease has no such copy that could be read."""
        lease = self._leases.get(client.id, request.lease, now_s)
        suspect = lease.objects.get(request.key) if lease is not None else None
        if suspect is None or suspect.generation != request.generation:
            return None
        if suspect.copies[Tier.DRAM].state is not State.READY:
            return None
        suspect.checks += 1
        runs = suspect.namespace.kinds.whole(suspect.size_bytes, len(suspect.table)).runs
        return Check(suspect, suspect.copies[Tier.DRAM].extents, runs, suspect.table)

    def settle(self, check: Check, *, sound: bool) -> None:
        """Unpins a copy; one that is not sound is not to be had any more."""
        suspect = check.suspect
        suspect.checks -= 1
        self._listing.totals.verified += 1
        if not sound and suspect.copies[Tier.DRAM].state is State.READY:
            self._listing.totals.bad_copies += 1
            self._listing.dram.spoil(suspect)
            if suspect.listed:
                self._listing.retire(suspect, MissReason.BAD_COPY)
                return
        if not suspect.pinned:
            self._listing.dram.unpinned(suspect)

    def _resident(self, leased: Object) -> AcquireAnswer:
        return leased.resident or self._miss(MissReason.BAD_COPY)

    def _miss(self, reason: MissReason) -> Miss:
        self._listing.totals.miss(reason)
        return Miss(reason)
