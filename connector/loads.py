"""Loads: from blocks being allocated for a promise to the reports of all ranks.

A job, once the scheduler waits for it, always goes to the worker half, whatever goes wrong here: the scheduler
has no deadline of its own, and tokens that nobody loads must be reported as failed, never pass for loaded.
A chunk that the engine has in part is read and verified whole, but only its missing blocks are written.
A load that failed is remembered: nothing is promised to that request again. A rank that does not report costs its
request, but neither the lease nor memory.

Objects on NVMe are promoted while the load is under way: the job names all of its objects, and where they are follows
in `LoadMore`, as they come into DRAM. What all ranks have read is given back, which makes room for the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from connector.compat import logger
from connector.control import Arrivals, Promised, ReportLine
from connector.keys import Link
from connector.leases import Lease
from connector.metadata import LoadJob, LoadMore, LoadObject, LoadReport, Place, Rank
from connector.offers import Tables
from connector.requests import Ask, RequestState
from connector.samples import samples_of
from connector.shared import Shared
from kvstore.core import Key, MissReason, Tier

log = logger(__name__)

LATE_S = 5.0  # behind a load's deadline every rank has reported, or reads nothing any more


@dataclass(slots=True)
class _Load:
    """A job at the workers: it brings the tokens [start, stop), until `ends_s`.

    `arrivals` is what of it comes from NVMe (`on_disk`); `coming` are those that have not come yet. `read` says how
    many objects each rank has read; those before `given_back` are not leased any more. `counts`: it does, as one load
    of each request does.
    """

    state: RequestState
    lease: Lease | None
    start: int
    stop: int
    reason: MissReason | None
    ends_s: float
    counts: bool
    links: tuple[Link, ...] = ()
    objects: list[Promised] = field(default_factory=list)
    reports: dict[Rank, LoadReport] = field(default_factory=dict)
    arrivals: Arrivals | None = None
    on_disk: frozenset[int] = frozenset()
    coming: set[int] = field(default_factory=set)
    read: dict[Rank, int] = field(default_factory=dict)
    given_back: int = 0

    def disk_tokens(self, valid: int) -> int:
        """How many of the tokens that the first `valid` objects bring come from NVMe."""
        from_disk = [self.links[at] for at in self.on_disk if at < valid and not self.links[at].kind]
        return sum(min(link.stop, self.stop) - max(link.start, self.start) for link in from_disk)

    def stop_coming(self) -> None:
        """Nothing more is wanted from NVMe."""
        if self.arrivals is not None:
            self.arrivals.close()
        self.arrivals = None


class Loads:
    """All loads of this engine."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._control = shared.control
        self._config = shared.config
        self._leases = shared.leases
        self._known = shared.known
        self._paths = shared.paths
        self._clock = shared.clock
        self._stats = shared.stats
        self._cost = shared.cost
        self._block_tokens = shared.block_tokens
        self._kinds = shared.kinds
        self._world_size = shared.world_size
        self._jobs: dict[int, _Load] = {}
        self._ready: list[LoadJob] = []
        self._more: list[LoadMore] = []
        self._next_job = 0

    @property
    def under_way(self) -> int:
        """Jobs that some rank has not reported yet."""
        return len(self._jobs)

    def start(self, state: RequestState, ask: Ask, tables: Tables, num_tokens: int) -> None:
        """The scheduler allocated blocks (all of the request's, by group) for `num_tokens` promised tokens."""
        job, self._next_job = self._next_job, self._next_job + 1
        start = ask.computed or 0
        counts = not state.was_preempted
        load = _Load(state, ask.lease, start, start + num_tokens, ask.reason, self._clock(), counts)
        self._jobs[job] = load
        state.load = job
        try:
            self._ready.append(self._job(job, load, ask, tables))
        except Exception:
            self._ready.append(self._failing(job, load, tables))
            raise

    def _job(self, job: int, load: _Load, ask: Ask, tables: Tables) -> LoadJob:
        assert ask.lease is not None, "a load without a promise"
        pairs = [
            (link, promised)
            for link, promised in zip(ask.wanted, ask.lease.promise.objects, strict=False)
            if link.start < load.stop
        ]
        assert pairs and pairs[0][0].start <= load.start, "a load that begins before what was promised"
        end = max(link.stop for link, _ in pairs)
        assert load.stop <= end, "a load of more than was promised"
        assert load.stop == end or not self._shared.whole_hits, (
            "a load of a part of what is of use as a whole"
        )
        load.links = tuple(link for link, _ in pairs)
        load.objects = [promised for _, promised in pairs]
        nodes = {(promised.node.node, promised.node.boot): promised.node for promised in load.objects}
        places = list(nodes)
        objects = tuple(
            LoadObject(
                key=promised.key,
                node=places.index((promised.node.node, promised.node.boot)),
                generation=promised.generation,
                extents=promised.extents,
                size_bytes=promised.size_bytes,
                table=promised.table,
                blocks=self._targets(link, load, tables),
                placed=promised.tier is Tier.DRAM,
                kind=link.kind,
            )
            for link, promised in pairs
        )
        deadline_s = min(self._config.load_timeout_s, self._leases.longest_s(ask.lease))
        load.ends_s = self._clock() + deadline_s
        self._promote(load, ask.lease, deadline_s)
        return LoadJob(
            job, load.state.request_id, tuple(nodes.values()), objects, deadline_s, self._shared.whole_hits
        )

    def _promote(self, load: _Load, lease: Lease, deadline_s: float) -> None:
        """Lets what is on NVMe come. What the job does not bring is not waited for."""
        load.coming = {n for n, promised in enumerate(load.objects) if promised.tier is Tier.NVME}
        load.on_disk = frozenset(load.coming)
        if load.coming:
            wanted = {promised.key for promised in load.objects}
            self._leases.give_back(lease, {one.key for one in lease.promise.objects} - wanted)
            load.arrivals = self._control.promote(lease.promise, deadline_s)

    def _targets(self, link: Link, load: _Load, tables: Tables) -> tuple[int | None, ...]:
        """The engine block of each block of this link, group by group; None where the engine has it, or does not want
        it."""
        size, kind = self._block_tokens, self._kinds[link.kind]
        first = max(load.start, kind.first_token(load.stop))
        targets = tuple(
            tables[group][at // size] if first <= at < load.stop else None
            for group in kind.groups
            for at in range(link.start, link.stop, size)
        )
        assert 0 not in targets, "the engine has no block where a hit needs one"
        return targets

    def _failing(self, job: int, load: _Load, tables: Tables) -> LoadJob:
        """A job that the worker half reports as failed at once, in all blocks behind the local hit."""
        targets = tuple(tables[0][load.start // self._block_tokens :])
        nothing = LoadObject(Key(bytes(32)), 0, b"", (), 0, b"", targets)
        return LoadJob(job, load.state.request_id, (), (nothing,), 0.0, self._shared.whole_hits)

    def disk_tokens(self, state: RequestState) -> int:
        """How many of the tokens that a load under way is to bring come from NVMe."""
        load = None if state.load is None else self._jobs.get(state.load)
        return 0 if load is None else load.disk_tokens(len(load.objects))

    def take_ready(self) -> list[LoadJob]:
        """The jobs that the worker half has not been given yet."""
        ready, self._ready = self._ready, []
        return ready

    def take_more(self) -> list[LoadMore]:
        """What has become known of jobs that the worker half has been given."""
        for job, load in self._jobs.items():
            if load.arrivals is not None and (more := self._arrived(job, load)):
                self._more.append(more)
        known, self._more = self._more, []
        return known

    def _arrived(self, job: int, load: _Load) -> LoadMore | None:
        """What has come of one load since the last step, and whether it ends early."""
        assert load.arrivals is not None
        places: dict[int, Place] = {}
        lost_from, reason = None, None
        for arrival in load.arrivals.take():
            load.coming.discard(arrival.position)
            if (promised := arrival.promised) is None:
                lost_from, reason = arrival.position, arrival.reason
            else:
                load.objects[arrival.position] = replace(promised, tier=Tier.NVME)  # whence it came
                places[arrival.position] = Place(promised.generation, promised.extents, promised.table)
        if load.arrivals.done:
            load.arrivals = None
        return LoadMore(job, places, lost_from, reason) if places or lost_from is not None else None

    def abandon(self, state: RequestState) -> None:
        """The request is gone: what has not come from NVMe for it is not waited for."""
        load = None if state.load is None else self._jobs.get(state.load)
        if load is not None and load.arrivals is not None and load.coming:
            assert state.load is not None
            load.stop_coming()
            self._more.append(LoadMore(state.load, {}, min(load.coming)))

    def progressed(self, job: int, read: Mapping[Rank, int]) -> None:
        """How many objects of a job ranks have read: those that all of them have are given back."""
        load = self._jobs.get(job)
        if load is None or load.lease is None:
            return
        load.read.update(read)
        done = min(load.read.values()) if len(load.read) == self._world_size else 0
        keys = [one.key for one in load.objects[load.given_back : done]]
        self._leases.give_back(load.lease, keys, cold=load.state.hints.release_cold)
        load.given_back = max(load.given_back, done)

    def tick(self) -> None:
        """Gives up loads that some rank does not report in time: as if nothing had come."""
        now = self._clock()
        for job in [job for job, load in self._jobs.items() if now > load.ends_s + LATE_S]:
            load = self._jobs.pop(job)
            line = f"request {load.state.request_id}: a worker does not report its load"
            self._stats.say_once("no report", f"{line}; its lease is given back")
            self._settle(load, [*load.reports.values(), LoadReport(0, MissReason.TOO_SLOW)])

    def reported(self, job: int, reports: Mapping[Rank, LoadReport]) -> None:
        """What ranks say of a job. Only the first report of every rank counts."""
        load = self._jobs.get(job)
        if load is None:
            self._stats.say_once("late load", f"load {job} was reported late or twice by a rank; ignored")
            return
        load.reports = {**reports, **load.reports}
        if len(load.reports) == self._world_size:
            del self._jobs[job]
            self._settle(load, list(load.reports.values()))

    def _settle(self, load: _Load, reports: Sequence[LoadReport]) -> None:
        load.state.load = None
        load.stop_coming()
        worst = min(reports, key=lambda report: report.valid)
        valid = worst.valid
        failed = valid < len(load.objects) or not load.objects
        if failed:
            load.state.no_load = MissReason.LOAD_FAILED_BEFORE
            self._known.forget(link.key for link in load.links[valid:])  # computed now, and offered again
        if load.lease is not None:
            for position in {r.suspect for r in reports if r.suspect is not None}:
                self._control.suspect(load.lease.promise, load.objects[position], load.state.request_id)
            self._leases.release(load.lease, cold=load.state.hints.release_cold and not failed)
        self._learn(load, worst)
        for sample in samples_of(load.objects, reports) if load.objects else ():
            self._cost.pulled(*sample)
        if self._shared.whole_hits and failed:
            valid = 0  # it was of no use in part
        end = max((link.stop for link in load.links[:valid]), default=0)
        pulled = max(0, min(end, load.stop) - load.start)
        if disk_tokens := load.disk_tokens(valid):
            log.info("request %s: %d tokens pulled: %d from NVMe", load.state.request_id, pulled, disk_tokens)
        reasons = [report.reason for report in reports if report.reason is not None]
        self._stats.loaded(reports)
        self._stats.loads += 1
        self._stats.loads_failed += failed
        if not load.counts:
            return
        self._stats.count(
            ReportLine(
                load.state.request_id,
                queried_tokens=load.state.prompt_tokens - load.start,
                promised_tokens=load.stop - load.start,
                pulled_tokens=pulled,
                reason=reasons[0] if reasons else load.reason,
                disk_tokens=disk_tokens,
            )
        )

    def _learn(self, load: _Load, worst: LoadReport) -> None:
        """Which nodes gave what was asked of them, and which one did not."""
        lost_at = load.objects[worst.valid].node if worst.valid < len(load.objects) else None
        for node in {promised.node.node: promised.node for promised in load.objects[: worst.valid]}.values():
            if lost_at is None or node.node != lost_at.node:
                self._paths.moved(node)
        if lost_at is not None:
            self._paths.failed(lost_at, worst.reason)
