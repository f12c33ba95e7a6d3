"""The store: the only room that changes state.

Synchronous and single-threaded: every call is made on the control loop, takes microseconds per key, does
no I/O, hashes nothing and waits for nothing. Time is the `clock` it is given, so tests run in virtual time.

A key's life here:

    Reserve            Commit                     Acquire ... Release / lease over
  ----------> FILLING ---------> READY (listed) ------------------> READY, evictable
                 |                  |  Drop, Suspect (bad), eviction
       Abort, reservation over      v
                 |               unlisted: not to be had any more; its pages go
                 v               when no lease, verification or job has it
        pages free (quiet)
        or held, then free

With an NVMe tier what DRAM gives up is spilled, and promoted again when it is asked for (moving.py). The store
says what is to be carried (`on_job`) and is told what came of it; it does no I/O itself.

What has a duration (reservations, leases, held pages) is ended by `tick`, in bounded slices; until then
it is treated as ended wherever it is met. To end something late is always safe.

Why a key is not there is remembered for the keys lost last, to tell a reader `evicted`, `expired` or
`bad_copy` from `never_stored`.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from kvstore.core import BadRequest, Key, MissReason, Namespace, Tier, limits
from kvstore.policy import Policy
from kvstore.store.adopting import Adopting
from kvstore.store.clients import Clients
from kvstore.store.leases import Leases
from kvstore.store.listing import Listing
from kvstore.store.moving import Moving, Tiering
from kvstore.store.namespaces import Namespaces
from kvstore.store.nvme import NoDisks
from kvstore.store.objects import Disk, Job, Spill
from kvstore.store.reading import Check, GivenBack, Reading
from kvstore.store.reports import ReportLog, Reports
from kvstore.store.snapshot import ObjectView, Snapshot
from kvstore.store.steps import Steps, in_one_go
from kvstore.store.usage import tiers_in_use
from kvstore.store.writing import Asking, Writing
from kvstore.tiers import NewObject, Record
from kvstore.wire import (
    Acquire,
    ClientId,
    CommitAnswer,
    CommitItem,
    Drop,
    Generation,
    Pages,
    Prefetch,
    Release,
    Renew,
    Report,
    ReserveAnswer,
    ReserveItem,
    SentAnswer,
    Suspect,
)


class Store:
    """Objects of one node: who may fill them, who may read them, which go."""

    def __init__(
        self,
        page_count: int,
        page_bytes: int,
        policy: Policy,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes] = os.urandom,
        hold_s: float = limits.HOLD_S,
        *,
        tiering: Tiering | None = None,
    ) -> None:
        """An empty store. It counts pages and never touches their bytes, so it needs no arena.

        Args:
            page_count: pages of the arena.
            page_bytes: bytes of a page.
            policy: what to evict; knows nothing yet.
            clock: seconds, never going back.
            random_bytes: that many bytes, for generations.
            hold_s: how long pages stay held when a late write could still land in them.
            tiering: the NVMe tier, and its use; what is on its devices already is told by `adopt`.
        """
        self.page_bytes = page_bytes
        self._clock = clock
        self._namespaces = Namespaces(page_count, page_bytes)
        self._clients = Clients(page_count)
        self._listing = Listing(page_count, page_bytes, policy, tiering.disks if tiering else NoDisks())
        self._leases = Leases(self._clients, self._listing.unpinned, lambda: self._listing.nvme.size_bytes)
        self._moving = Moving(self._listing, self._leases, clock, tiering or Tiering(NoDisks()))
        if tiering is not None:
            self._listing.dram.outlet = self._moving
        self._writing = Writing(
            self._listing, self._clients, self._leases, random_bytes, hold_s, self._moving.committed
        )
        self._reading = Reading(self._listing, self._clients, self._leases, self._moving)
        self._adopting = Adopting(self._namespaces, self._listing)
        self._reports = Reports(self._listing.totals, clock)

    # --- writers ------------------------------------------------------------------------------------

    def open_namespace(self, namespace: Namespace, manifest_bytes: bytes) -> str:
        """Makes a namespace known to this boot. Returns one line of advice when the arena is too small for it.

        Raises:
            BadRequest: the manifest cannot be read, or hashes to another digest.
            Overloaded: too many namespaces hold objects.
        """
        advice = self._namespaces.open(namespace, manifest_bytes)
        self._adopting.namespace_opened(namespace, manifest_bytes)
        return advice

    def reserve(
        self, client: ClientId, namespace: Namespace, items: Sequence[ReserveItem], duration_s: float
    ) -> tuple[ReserveAnswer, ...]:
        """`reserving`, in one go."""
        return in_one_go(self.reserving(client, namespace, items, duration_s))

    def reserving(
        self, client: ClientId, namespace: Namespace, items: Sequence[ReserveItem], duration_s: float
    ) -> Steps[tuple[ReserveAnswer, ...]]:
        """Asks for the right to fill copies, a slice of them a step; answers in the order asked, never waits.

        Granted again (the same) while the same client's reservation lives. Busy: another writer has it.
        Exists: an Acquire by this client would be promised now. Refused: no room, or over a share.

        Raises:
            BadRequest: a size that no object of the namespace has; nothing was reserved. In a later step: a key was
                taken by another namespace meanwhile; what was granted stays until its duration is over.
            NamespaceUnknown, Overloaded
        """

        def look_up() -> Asking:
            opened = self._namespaces.get(namespace)
            now_s = self._clock()
            return Asking(self._clients.spoke(client, now_s), opened, now_s)

        return self._writing.reserving(look_up, items, _duration(duration_s))

    def commit(
        self, client: ClientId, namespace: Namespace, items: Sequence[CommitItem]
    ) -> tuple[CommitAnswer, ...]:
        """Publishes objects: the first commit of a key wins, a repeated one is answered alike.

        Stale: the reservation is not this client's, or not any more; nothing became visible.

        Raises:
            BadRequest: a table of the wrong length; nothing was committed.
            NamespaceUnknown, Overloaded
        """
        opened = self._namespaces.get(namespace)
        now_s = self._clock()
        return self._writing.commit(self._clients.spoke(client, now_s), opened, items, now_s)

    def abort(
        self,
        client: ClientId,
        namespace: Namespace,
        items: Sequence[tuple[Key, Generation]],
        quiet: bool,
    ) -> None:
        """Gives reservations back: `quiet`, and their pages are free at once; else held for `hold_s`.

        Raises:
            NamespaceUnknown, Overloaded
        """
        opened = self._namespaces.get(namespace)
        now_s = self._clock()
        self._writing.abort(self._clients.spoke(client, now_s), opened, items, now_s, quiet=quiet)

    # --- readers ------------------------------------------------------------------------------------

    def acquire(self, client: ClientId, request: Acquire) -> tuple[SentAnswer, ...]:
        """Leases the copies of a chain's keys. Never parks: `wait_s` is the caller's business, see `watch`.

        A lease that exists is added to and prolonged. With `prefix` the answers end with the first key
        that is not promised.

        Raises:
            NamespaceUnknown, Overloaded
        """
        opened = self._namespaces.get(request.namespace)
        _duration(request.duration_s)
        now_s = self._clock()
        return self._reading.acquire(self._clients.spoke(client, now_s), opened, request, now_s)

    def pages(self, client: ClientId, request: Pages, since_s: float | None = None) -> tuple[SentAnswer, ...]:
        """Where the leased copies are now; Miss(expired) for what this lease does not have (any more).

        What is on NVMe only is promoted, in the order asked, as room allows: OnDisk until it is there, or a
        miss that says why it will not be. Never parks: `wait_s` is the caller's business, see `watch_leased`.

        Args:
            client: whose lease it is.
            request: its keys are answered in order.
            since_s: when this was first asked: what failed before that is tried again.

        Raises:
            Overloaded
        """
        now_s = self._clock()
        since_s = now_s if since_s is None else since_s
        return self._reading.pages(self._clients.spoke(client, now_s), request, now_s, since_s)

    def renew(self, client: ClientId, request: Renew) -> float:
        """Prolongs a lease; seconds left, 0 when it is not known (any more).

        Raises:
            Overloaded
        """
        now_s = self._clock()
        duration_s = _duration(request.duration_s)
        return self._reading.renew(self._clients.spoke(client, now_s), request.lease, now_s, duration_s)

    def release(self, client: ClientId, request: Release) -> GivenBack:
        """Ends a lease for these keys, or for all. `cold`: first to be evicted unless others use them.

        Raises:
            Overloaded
        """
        now_s = self._clock()
        return self._reading.release(self._clients.spoke(client, now_s), request, now_s)

    def prefetch(self, client: ClientId, request: Prefetch) -> None:
        """A hint: these keys are not the next to be evicted, and are promoted if there is room.

        Raises:
            NamespaceUnknown, Overloaded
        """
        opened = self._namespaces.get(request.namespace)
        now_s = self._clock()
        self._clients.spoke(client, now_s)
        self._reading.prefetch(opened, request, now_s)

    def watch(
        self, namespace: Namespace, keys: Sequence[Key], callback: Callable[[], None]
    ) -> Callable[[], None]:
        """Calls back once when one of the keys is committed, aborted, expired or refused.

        Returns what cancels that; calling it afterwards does no harm. When too many keys are watched
        nothing is: the caller's own deadline ends its wait.

        Raises:
            NamespaceUnknown
        """
        self._namespaces.get(namespace)
        return self._listing.watches.add(keys, callback)

    def watch_leased(self, keys: Sequence[Key], callback: Callable[[], None]) -> Callable[[], None]:
        """As `watch`, for leased keys: calls back once when one of them was promoted, or will not be."""
        return self._listing.watches.add(keys, callback)

    def check(self, client: ClientId, request: Suspect) -> Check | None:
        """Pins a leased copy that a reader doubts; the mover verifies it and calls `settle`."""
        now_s = self._clock()
        return self._reading.check(self._clients.spoke(client, now_s), request, now_s)

    def settle(self, check: Check, *, sound: bool) -> None:
        """The verdict on a copy. One that is not sound is not to be had any more."""
        self._reading.settle(check, sound=sound)

    # --- between tiers --------------------------------------------------------------------------------

    @property
    def on_job(self) -> Callable[[Job], None]:
        """Called with a `Spill` or `Promotion` that is to be carried out; must not call the store back at once."""
        return self._moving.on_job

    @on_job.setter
    def on_job(self, callback: Callable[[Job], None]) -> None:
        self._moving.on_job = callback

    @property
    def moving(self) -> Moving:
        """Where whoever carries says what came of a job."""
        return self._moving

    def contents(self, job: Spill) -> NewObject:
        """What is to be put on a device."""
        return self._listing.contents(job.object)

    def make_disk_room(self, size_bytes: int) -> bool:
        """Whether a device will have room for an object of this size, perhaps a moment later; evicts if need be."""
        return self._listing.nvme.make_room(size_bytes)

    def adopt(self, disk: Disk, records: Iterable[Record]) -> None:
        """These were on a device when it was mounted. They may be had, those of unknown namespaces later."""
        self._adopting.adopt(disk, records)

    def damaged(self, record: Record) -> None:
        """A copy on a device was found to be bad: it goes. One that is leased or on its way goes when it is read."""
        self._listing.damaged(record)

    # --- administration -----------------------------------------------------------------------------

    def report(self, client: ClientId, request: Report) -> None:
        """See `Reports.take`."""
        self._reports.take(client, request)

    def reports(self) -> ReportLog:
        """What engines have reported of their last requests, the oldest first."""
        return self._reports.log()

    def drop(self, client: ClientId, request: Drop) -> None:
        """Forgets stored objects; a leased copy goes when its lease ends. What is being filled is left alone.

        Raises:
            NamespaceUnknown, Overloaded
        """
        opened = self._namespaces.get(request.namespace)
        self._clients.spoke(client, self._clock())
        for key in request.keys:
            listed = self._listing.find(opened.id, key)
            if listed is not None and listed.reservation is None:
                self._listing.totals.dropped += 1
                self._listing.retire(listed, MissReason.EVICTED)

    def tick(self) -> None:
        """Ends what is over and keeps some pages free, in slices. To be called a few times a second."""
        now_s = self._clock()
        self._writing.expire(now_s)
        self._reading.expire(now_s)
        self._listing.nvme.tick()
        self._listing.dram.tick(now_s, self._leases.young_s(now_s))
        self._moving.advance()

    # --- what it tells ------------------------------------------------------------------------------

    @property
    def on_dirty(self) -> Callable[[Key], None]:
        """Called with a key whose state the index may not know; may look at the store."""
        return self._listing.on_dirty

    @on_dirty.setter
    def on_dirty(self, callback: Callable[[Key], None]) -> None:
        self._listing.on_dirty = callback

    def tier_of(self, key: Key) -> Tier | None:
        """Where a key may be had, None when it may not."""
        return self._listing.tier_of(key)

    def keys(self) -> Iterator[Key]:
        """The keys that there are now, those being filled, too; the store may change while they are gone through."""
        return iter(list(self._listing.objects))

    def objects(self, limit: int, cursor: int = 0) -> tuple[tuple[ObjectView, ...], int | None]:
        """A page of the listed objects, and the next page's cursor; what changes between pages may be missed."""
        listed = list(islice(self._listing.objects.values(), cursor, cursor + limit + 1))
        views = tuple(
            ObjectView(
                key=shown.key.hex(),
                namespace=shown.namespace.id.hex(),
                depth=shown.depth,
                size_bytes=shown.size_bytes,
                tiers=shown.tiers,
                leases=shown.leases,
                cold=shown.cold,
            )
            for shown in listed[:limit]
        )
        return views, cursor + limit if len(listed) > limit else None

    def snapshot(self) -> Snapshot:
        """What it holds and has counted; for any thread."""
        return Snapshot(
            tiers=tiers_in_use(self._listing, self._leases, self.page_bytes),
            totals=self._listing.totals.copy(),
            namespaces=len(self._namespaces),
            clients=len(self._clients),
            leases=len(self._leases),
            reservations=len(self._writing),
            watched_keys=len(self._listing.watches),
            moving=len(self._moving),
            waiting=self._moving.waiting,
        )

    def audit(self) -> None:
        """Asserts that the books agree: pages, copies, leases, reservations, clients. Slow: it looks at all."""
        self._listing.audit()
        self._leases.audit()
        self._writing.audit()
        self._moving.audit()

    def __repr__(self) -> str:
        dram = self._listing.dram
        return f"<Store {dram.ready_objects} objects, {dram.free_pages}/{dram.page_count} pages free>"


def _duration(duration_s: float) -> float:
    if not duration_s > 0:  # NaN is not, either
        raise BadRequest(f"a duration is a positive number of seconds, not {duration_s}")
    return duration_s
