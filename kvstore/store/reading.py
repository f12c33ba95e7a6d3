"""Readers: acquire, pages, release, and doubts about what was read.

What is on NVMe only is leased as it is. `Pages` has it promoted, in the order asked, as far as room allows; so
a prompt larger than DRAM goes through it: pull, release, ask for what follows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.core import Extents, Key, MissReason, Run
from kvstore.store.clients import Client, Clients
from kvstore.store.leases import Leases
from kvstore.store.listing import Listing
from kvstore.store.moving import Moving
from kvstore.store.namespaces import OpenNamespace
from kvstore.store.objects import Lease, Object
from kvstore.wire import (
    Acquire,
    Filling,
    LeaseId,
    Miss,
    OnDisk,
    Pages,
    Prefetch,
    Prepared,
    Release,
    Resident,
    SentAnswer,
    Suspect,
)


class Check(NamedTuple):
    """A copy that is to be verified; pinned until `settle`."""

    suspect: Object
    extents: Extents
    runs: tuple[Run, ...]
    table: bytes


class GivenBack(NamedTuple):
    """What was leased and is not any more: the sizes of objects, and for how long their lease had lived."""

    sizes_bytes: Sequence[int]
    leased_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What the keys of one Acquire have in common."""

    client: Client
    namespace: OpenNamespace
    lease: Lease | None
    alone: bool
    sure: bool  # the client's share allows all of it
    streams: bool  # it is more than any share allows
    sealed: bool


class Reading:
    """Leases of objects, and their verification."""

    def __init__(self, listing: Listing, clients: Clients, leases: Leases, moving: Moving) -> None:
        self._listing = listing
        self._moving = moving
        self._clients = clients
        self._leases = leases

    def acquire(
        self, client: Client, namespace: OpenNamespace, request: Acquire, now_s: float
    ) -> tuple[SentAnswer, ...]:
        """Leases what can be had. See `Store.acquire`.

        Nearly always the batch begins with keys that need no thought. The others are looked at one by one.
        """
        alone = not self._clients.others_active(client, now_s)
        pages_max = len(request.keys) * namespace.chunk_pages
        sure = self._leases.may_take_all(client, pages_max, alone=alone)
        streams = not self._leases.fits(pages_max, alone=alone)
        lease = self._leases.open(client, request.lease, now_s, request.duration_s)
        asked = Asked(client, namespace, lease, alone, sure, streams, request.sealed)
        leased_before = 0 if lease is None else len(lease.objects)
        answers = self._plain(asked, request.keys) if sure and lease is not None and not lease.objects else []
        ahead_bytes = 0
        for key in request.keys[len(answers) :]:
            answer = self._acquire(asked, key)
            answers.append(answer)
            if isinstance(answer, Prepared | Resident):
                continue
            if isinstance(answer, OnDisk):
                ahead_bytes += answer.size_bytes
                eta_s = self._moving.eta_s(ahead_bytes)
                answers[-1] = OnDisk(answer.generation, answer.size_bytes, eta_s)
            elif request.prefix:
                break
        if lease is not None:
            self._listing.totals.acquired_keys += len(lease.objects) - leased_before
            self._leases.settle(lease)
        return tuple(answers)

    def _plain(self, asked: Asked, keys: Sequence[Key]) -> list[SentAnswer]:
        """Leases the keys with which a batch begins that are in DRAM and have no job, into a lease that is empty.

        As `_acquire` does it, without a call and a total for each key: a prompt has hundreds.
        """
        assert asked.lease is not None, "they are leased"
        namespace, reader, sealed = asked.namespace, asked.client.id, asked.sealed
        plain: dict[Key, Object] = {}
        answers: list[SentAnswer] = []
        for key, listed in zip(keys, map(self._listing.objects.get, keys), strict=True):
            if listed is None or listed.namespace is not namespace:
                break
            resident = listed.resident
            if resident is None or listed.job is not None or key in plain:
                break
            plain[key] = listed
            answers.append(resident if sealed else listed.told(listed.table))
            if listed.writer != reader:
                listed.used_by(reader)
        self._leases.take_all(asked.lease, plain)
        return answers

    def _acquire(self, asked: Asked, key: Key) -> SentAnswer:
        lease = asked.lease
        promised = lease.objects.get(key) if lease is not None else None
        if promised is not None:
            return self._where(promised, asked.sealed)
        listed = self._listing.objects.get(key)
        if listed is None or listed.namespace is not asked.namespace:
            self._listing.on_dirty(key)
            return self._miss(self._listing.lost.get(key, MissReason.NEVER_STORED))
        if listed.reservation is not None:
            self._listing.totals.miss(MissReason.FILLING)
            return Filling()
        if listed.resident is None and not (listed.is_readable or listed.is_on_disk):
            return self._miss(MissReason.DEVICE_DOWN)
        if lease is None or not self._take(asked, lease, listed):
            return self._miss(MissReason.LEASE_LIMIT)
        listed.used_by(asked.client.id)
        if listed.job is not None:
            self._moving.used(listed)
        return self._where(listed, asked.sealed)

    def _take(self, asked: Asked, lease: Lease, listed: Object) -> bool:
        """Leases an object, if the client's share allows it.

        A prompt that is larger than the share streams through DRAM: what of it is in DRAM now beyond the share is
        leased where it is on NVMe.
        """
        if self._leases.take(lease, listed, alone=asked.alone, sure=asked.sure):
            return True
        if not (asked.streams and listed.is_readable and listed.is_on_disk) or listed.pinned:
            return False
        self._listing.dram.evict(listed)
        return self._leases.take(lease, listed, alone=asked.alone, sure=asked.sure)

    def pages(self, client: Client, request: Pages, now_s: float, since_s: float) -> tuple[SentAnswer, ...]:
        """Where leased copies are; those on NVMe are wanted in DRAM from now on. See `Store.pages`."""
        lease = self._leases.get(client.id, request.lease, now_s)
        objects = {} if lease is None else lease.objects
        for key in request.keys:
            leased = objects.get(key)
            if leased is not None and not has_failed(leased, since_s):
                self._moving.want(leased, client, now_s)
        self._moving.advance()
        answers: list[SentAnswer] = []
        ahead_bytes = 0
        for key in request.keys:
            leased = objects.get(key)
            if leased is None:
                answers.append(self._miss(MissReason.EXPIRED))
                continue
            if leased.dram is None:
                ahead_bytes += leased.size_bytes
            answers.append(self._where(leased, request.sealed, since_s, ahead_bytes))
        return tuple(answers)

    def renew(self, client: Client, lease_id: LeaseId, now_s: float, duration_s: float) -> float:
        """Prolongs a lease. See `Store.renew`."""
        lease = self._leases.get(client.id, lease_id, now_s)
        return 0.0 if lease is None else self._leases.prolong(lease, now_s, duration_s)

    def release(self, client: Client, request: Release, now_s: float) -> GivenBack:
        """Gives leased objects back. See `Store.release`."""
        lease = self._leases.get(client.id, request.lease, now_s)
        if lease is None:
            return GivenBack((), 0.0)
        keys = request.keys or tuple(lease.objects)
        if request.cold:
            for key in keys:
                if key in lease.objects:
                    lease.objects[key].cool(client.id)
        sizes_bytes = self._leases.release(lease, keys)
        self._leases.settle(lease)
        self._moving.advance()
        return GivenBack(sizes_bytes, now_s - lease.started_s)

    def prefetch(self, namespace: OpenNamespace, request: Prefetch, now_s: float) -> None:
        """What will be asked for is not the next to be evicted, and is promoted if there is room."""
        found = [self._listing.find(namespace.id, key) for key in request.keys]
        for listed in reversed(found):
            if listed is not None:
                self._moving.used(listed)
                if not listed.pinned:
                    self._listing.touch(listed)
        for listed in found:
            if listed is not None:
                self._moving.want(listed, None, now_s)
        self._moving.advance()

    def expire(self, now_s: float) -> None:
        """Ends leases that are over, a slice at a time."""
        self._listing.totals.expired_leases += self._leases.expire(now_s)

    def check(self, client: Client, request: Suspect, now_s: float) -> Check | None:
        """Pins a leased copy for verification; None when this lease has no such copy that could be read."""
        lease = self._leases.get(client.id, request.lease, now_s)
        suspect = lease.objects.get(request.key) if lease is not None else None
        if suspect is None or suspect.generation != request.generation:
            return None
        if not suspect.is_readable:
            return None
        suspect.checks += 1
        runs = suspect.namespace.kinds.whole(suspect.size_bytes, len(suspect.table)).runs
        return Check(suspect, suspect.in_dram.extents, runs, suspect.table)

    def settle(self, check: Check, *, sound: bool) -> None:
        """Unpins a copy; one that is not sound is not to be had any more."""
        suspect = check.suspect
        suspect.checks -= 1
        self._listing.totals.verified += 1
        if not sound and suspect.is_readable:
            self._listing.spoil(suspect)
        elif not suspect.pinned:
            self._listing.unpinned(suspect)

    def _where(
        self, leased: Object, sealed: bool, since_s: float = math.inf, ahead_bytes: int = 0
    ) -> SentAnswer:
        """Where a leased copy can be read. `since_s`: a promotion that failed earlier does not count."""
        if (resident := leased.resident) is not None:
            return resident if sealed else leased.told(leased.table)
        if has_failed(leased, since_s):
            return self._miss(leased.failure or MissReason.BAD_COPY)
        if leased.nvme is None or (leased.dram is not None and leased.job is None):
            return self._miss(MissReason.BAD_COPY)
        if not leased.nvme.disk.up:
            return self._miss(MissReason.DEVICE_DOWN)
        return OnDisk(leased.generation, leased.size_bytes, self._moving.eta_s(ahead_bytes))

    def _miss(self, reason: MissReason) -> Miss:
        self._listing.totals.miss(reason)
        return Miss(reason)


def has_failed(leased: Object, since_s: float) -> bool:
    """Whether its promotion has failed since then."""
    return leased.failure is not None and leased.failed_s >= since_s
