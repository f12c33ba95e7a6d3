"""What moves between DRAM and NVMe, and when. State only: `on_job` is told what is to be carried, and whoever
carries it says what came of it. So a test can carry in virtual time what a node carries in threads.

    spill:     ready --move--> moving ... spilled(job, where) --moved--> ready, and on NVMe; gone from DRAM
               if it was moved to make room, and not used meanwhile
    promotion: (on NVMe) --fill--> filling ... promoted(job, table) --commit--> ready
                                           ... failed(job, why) --abort--> landing ... ended(job) -> free

One job at a time for an object: whoever else wants it waits for that one. Promotions start in the order in which
they were asked for, as room comes; one that a client's share does not allow is passed by until it does.
"""

from collections.abc import Callable
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from kvstore.core import Key, MissReason, State, limits
from kvstore.store.clients import Client
from kvstore.store.dram import Fate
from kvstore.store.leases import Leases
from kvstore.store.listing import Listing
from kvstore.store.nvme import Disks
from kvstore.store.objects import Job, Object, OnDevice, Promotion, Spill
from kvstore.tiers import Refusal


class SpillMode(StrEnum):
    """When objects are written to NVMe."""

    EVICT = "evict"
    EAGER = "eager"
    NEVER = "never"


class Tiering(NamedTuple):
    """The NVMe tier, and how it is used. `promote_deadline_s`: how long a promotion may wait for room."""

    disks: Disks
    spill: SpillMode = SpillMode.EVICT
    promote_deadline_s: float = limits.PROMOTE_DEADLINE_S_DEFAULT


class _Want(NamedTuple):
    """Somebody waits for a promotion. Without a client it is a hint: it is dropped when there is no room."""

    client: Client | None
    since_s: float


def _ignore(_: Job) -> None:
    pass


class Moving:
    """Spills and promotions of a node.

    Args:
        listing: the objects.
        leases: who pays for pages.
        clock: seconds.
        tiering: the tier, and when to spill.
    """

    def __init__(
        self, listing: Listing, leases: Leases, clock: Callable[[], float], tiering: Tiering
    ) -> None:
        self.on_job: Callable[[Job], None] = _ignore
        self.leaving_pages = 0
        self._listing = listing
        self._leases = leases
        self._clock = clock
        self._mode = tiering.spill
        self._deadline_s = tiering.promote_deadline_s
        self._spilling: set[Key] = set()
        self._moving_pages = 0  # of spills
        self._jobs: dict[Job, None] = {}
        self._eager: dict[Object, None] = {}
        self._wanted: dict[Object, _Want] = {}
        pages = listing.dram.page_count
        self._moving_pages_max = int(pages * limits.SPILLING_SHARE_MAX)
        self._promoted_pages_max = int(pages * limits.PROMOTING_SHARE_MAX)
        self._bytes_per_s = limits.PROMOTE_BYTES_PER_S_FIRST

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Promotions that wait for room."""
        return len(self._wanted)

    # --- spills -------------------------------------------------------------------------------------

    def keeps(self, victim: Object) -> bool:
        """Whether an object is on NVMe, or would be taken there. See `dram.Outlet`."""
        if victim.nvme is not None:
            return victim.nvme.disk.up
        if self._mode is SpillMode.NEVER or self._is_worthless(victim) or self._is_taken(victim.key):
            return False
        return self._listing.nvme.disks.refuses(victim.size_bytes) not in (Refusal.DEVICE_DOWN, Refusal.WORN)

    def fate(self, victim: Object) -> Fate:
        """What becomes of a copy in DRAM that is to be given up. See `dram.Outlet`."""
        if victim.nvme is not None or not self.keeps(
            victim
        ):  # of a device that is down: it comes back with it
            return Fate.GO
        if not self._may_spill(victim):
            return Fate.STAY
        return Fate.SPILL if self._listing.nvme.make_room(victim.size_bytes) else Fate.GO

    def spill(self, victim: Object) -> None:
        """It leaves DRAM when it is on NVMe. See `dram.Outlet`."""
        self._spill(victim, leaving=True)

    def committed(self, ready: Object) -> None:
        """An object is new."""
        if self._mode is SpillMode.EAGER:
            self._eager[ready] = None
            self._spill_eagerly()

    def used(self, useful: Object) -> None:
        """An object that is being spilled was used: it stays in DRAM."""
        if isinstance(useful.job, Spill) and useful.job.leaving:
            useful.job.leaving = False
            self.leaving_pages -= useful.pages

    def unsaved(self) -> list[Object]:
        """What is only in DRAM and should be on NVMe, the hottest first."""
        if self._mode is SpillMode.NEVER or not self._listing.nvme.disks.devices:
            return []
        hottest = self._listing.dram.hottest()
        return [each for each in hottest if each.nvme is None and not self._is_worthless(each)]

    def flush(self) -> None:
        """Spills what is unsaved as fast as jobs may be begun; what is refused may be tried again. For a node that
        stops: whatever fails stays in DRAM."""
        for job in self._jobs:
            self.used(job.object)
        self._eager = dict.fromkeys(self.unsaved())
        self._spill_eagerly()

    @property
    def flushing(self) -> int:
        """Objects that wait for their spill."""
        return len(self._eager)

    def spilled(self, job: Spill, outcome: OnDevice | Refusal | None) -> None:
        """A spill has ended: with a copy, without one, or (None) because the copy in DRAM is bad."""
        moved = job.object
        self._end_spill(job)
        self._listing.dram.moved(moved)
        totals = self._listing.totals
        if isinstance(outcome, OnDevice):
            totals.spilled += 1
            totals.spilled_bytes += moved.size_bytes
            self._listing.stored(moved, outcome)
        elif outcome is None:
            totals.failed_spills[MissReason.BAD_COPY] = totals.failed_spills.get(MissReason.BAD_COPY, 0) + 1
            self._spoil(moved)
        else:
            totals.failed_spills[outcome.value] = totals.failed_spills.get(outcome.value, 0) + 1
        self._after_spill(job)
        self.advance()

    def _spoil(self, moved: Object) -> None:
        if moved.is_readable:  # else a reader's doubt was quicker
            self._listing.spoil(moved)

    def _after_spill(self, job: Spill) -> None:
        """The copy in DRAM goes, if it was to leave and may."""
        moved = job.object
        if moved.pinned:
            return
        goes = job.leaving and moved.listed and moved.is_readable
        if goes and (moved.nvme is not None or self._listing.dram.may_leave_the_node(moved)):
            self._listing.dram.evict(moved)
        else:
            self._listing.unpinned(moved)

    def _is_worthless(self, victim: Object) -> bool:
        """Whether nobody will want it again, and nothing on NVMe needs it."""
        return victim.is_consumed and not self._listing.nvme.children(victim.entry)

    def _is_taken(self, key: Key) -> bool:
        """Whether an earlier object of this key, dropped since, is still on a device or on its way to one."""
        on_disk = any(key in disk.records for disk in self._listing.nvme.disks.devices)
        return on_disk or key in self._spilling

    def _may_spill(self, victim: Object) -> bool:
        return not self._moving_pages or self._moving_pages + victim.pages <= self._moving_pages_max

    def _spill(self, victim: Object, *, leaving: bool) -> None:
        assert victim.nvme is None and victim.job is None, "it is there, or on its way"
        job = Spill(victim, victim.in_dram.extents, self._clock(), leaving=leaving)
        self._listing.dram.move(victim)
        victim.job = job
        self._jobs[job] = None
        self._spilling.add(victim.key)
        self._moving_pages += victim.pages
        self._listing.nvme.coming_bytes += victim.size_bytes
        self.leaving_pages += victim.pages if leaving else 0
        self.on_job(job)

    def _end_spill(self, job: Spill) -> None:
        moved = job.object
        del self._jobs[job]
        moved.job = None
        self._spilling.discard(moved.key)
        self._moving_pages -= moved.pages
        self._listing.nvme.coming_bytes -= moved.size_bytes
        self.leaving_pages -= moved.pages if job.leaving else 0

    def _spill_eagerly(self) -> None:
        nvme = self._listing.nvme
        for ready in list(self._eager):
            is_clean = ready.nvme is not None or ready.job is not None or self._is_taken(ready.key)
            if is_clean or not ready.listed or not ready.is_readable:
                del self._eager[ready]
                continue
            refusal = nvme.disks.refuses(ready.size_bytes)
            if refusal in (Refusal.DEVICE_DOWN, Refusal.WORN) or not nvme.make_room(ready.size_bytes):
                self._eager.clear()  # what is to be evicted later is asked for again then
                return
            if not self._may_spill(ready):
                return
            del self._eager[ready]
            self._spill(ready, leaving=False)

    # --- promotions ---------------------------------------------------------------------------------

    def want(self, wanted: Object, client: Client | None, now_s: float) -> None:
        """Promotes an object when there is room; a hint without a client."""
        if wanted.job is not None or wanted.dram is not None or not wanted.is_on_disk:
            return
        known = self._wanted.get(wanted)
        is_new = known is None and len(self._wanted) < limits.PROMOTIONS_WAITING_MAX
        was_hint = known is not None and known.client is None
        if is_new or (was_hint and client is not None):
            self._wanted[wanted] = _Want(client, now_s)

    def eta_s(self, ahead_bytes: int) -> float:
        """When about so many bytes more, behind those on their way, will be in DRAM."""
        return (self._listing.dram.promoted_pages * self._page_bytes + ahead_bytes) / self._bytes_per_s

    @property
    def _page_bytes(self) -> int:
        return self._listing.page_bytes

    def advance(self) -> None:
        """Begins what there is room for."""
        self._spill_eagerly()
        now_s = self._clock()
        for wanted, want in list(islice(self._wanted.items(), limits.PROMOTIONS_LOOKED_AT_MAX)):
            if not self._begin(wanted, want, now_s):
                break

    def _begin(self, wanted: Object, want: _Want, now_s: float) -> bool:
        """Begins a promotion, drops what is not wanted any more; False when nobody can be served now."""
        needed = wanted.leases > 0 or (want.client is None and wanted.listed)
        if wanted.dram is not None or wanted.job is not None or wanted.nvme is None or not needed:
            del self._wanted[wanted]
        elif not wanted.nvme.disk.up:
            self._give_up(wanted, MissReason.DEVICE_DOWN, now_s)
        elif now_s - want.since_s > self._deadline_s:
            self._give_up(wanted, MissReason.NO_ROOM, now_s)
        elif want.client is not None and not self._leases.may_gain(want.client, wanted, now_s):
            return True  # others may be served
        elif self._promote(wanted, wanted.nvme, want.client, now_s):
            self._wanted.pop(wanted, None)
        elif want.client is None:
            del self._wanted[wanted]
        else:
            return False
        return True

    def _give_up(self, wanted: Object, reason: MissReason, now_s: float) -> None:
        self._wanted.pop(wanted, None)
        self._note(wanted, reason, now_s)

    def _note(self, wanted: Object, reason: MissReason, now_s: float) -> None:
        """Whoever waits for the object is told."""
        wanted.failure, wanted.failed_s = reason, now_s
        counts = self._listing.totals.failed_promotions
        counts[reason] = counts.get(reason, 0) + 1
        self._listing.watches.fire(wanted.key)

    def _promote(self, wanted: Object, source: OnDevice, client: Client | None, now_s: float) -> bool:
        dram = self._listing.dram
        if dram.promoted_pages and dram.promoted_pages + wanted.pages > self._promoted_pages_max:
            return False
        job = Promotion(wanted, (), now_s, source)
        wanted.job = job  # from now on: making room must not cost the source
        parent = (wanted.parent_entry,)
        filled = dram.fill(wanted, parent, self._leases.young_s(now_s))
        dram.unspare(parent)
        if not filled:
            wanted.job = None
            if not wanted.pinned:
                self._listing.touch(wanted)
            return False
        job.extents = wanted.in_dram.extents
        self._jobs[job] = None
        self._leases.gained(wanted, client)
        self.on_job(job)
        return True

    def promoted(self, job: Promotion, table: bytes) -> None:
        """The object's bytes are in DRAM, and match this table."""
        moved = job.object
        if moved.namespace.kinds.geometry_of(moved.size_bytes, len(table)) is None:
            # A table of another geometry proves nothing.
            self.failed(job, MissReason.BAD_COPY)
            return
        self._end_promotion(job)
        took_s = max(self._clock() - job.began_s, 1e-6)
        self._bytes_per_s += limits.PROMOTE_RATE_WEIGHT * (
            self._concurrent_bytes(moved) / took_s - self._bytes_per_s
        )
        moved.failure = None
        moved.readable_from_now_on(table)
        self._listing.totals.promoted += 1
        self._listing.totals.promoted_bytes += moved.size_bytes
        self._listing.promoted(moved)
        self.advance()

    def failed(self, job: Promotion, reason: MissReason) -> None:
        """It did not come to DRAM. The device may still write to its pages there, until `ended`."""
        moved = job.object
        self._listing.dram.land(moved, job)
        self._leases.lost(moved)
        self._end_promotion(job)
        if reason is MissReason.BAD_COPY:
            self._listing.spoil_on_disk(moved)
        self._note(moved, reason, self._clock())
        if not moved.pinned:
            self._listing.unpinned(moved)
        self.advance()

    def ended(self, job: Promotion) -> None:
        """Nothing touches the job's pages any more. To be said of every promotion, last."""
        self._listing.dram.landed(job)
        self.advance()

    def _end_promotion(self, job: Promotion) -> None:
        del self._jobs[job]
        job.object.job = None

    def _concurrent_bytes(self, moved: Object) -> int:
        """Bytes that were on their way with this object, itself included: what the devices did meanwhile."""
        return self._listing.dram.promoted_pages * self._page_bytes or moved.size_bytes

    def audit(self) -> None:
        """Asserts that jobs and objects agree, and that pages are those of jobs."""
        spills = [job for job in self._jobs if isinstance(job, Spill)]
        assert all(job.object.job is job for job in self._jobs), "an object does not know its job"
        assert sum(job.object.pages for job in spills) == self._moving_pages, "moving pages are miscounted"
        leaving = sum(job.object.pages for job in spills if job.leaving)
        assert leaving == self.leaving_pages, "leaving pages are miscounted"
        coming = sum(job.object.size_bytes for job in spills)
        assert coming == self._listing.nvme.coming_bytes, "coming bytes are miscounted"
        for job in self._jobs:
            states = (State.MOVING, State.BAD) if isinstance(job, Spill) else (State.FILLING,)
            assert job.object.in_dram.state in states, "a copy on its way is in no such state"
