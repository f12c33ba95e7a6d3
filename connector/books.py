"""The worker half's books on its jobs. They change under its lock only; what they hold says who may do what."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from connector.copies import Fence
from connector.metadata import LoadJob, LoadMore, LoadObject, LoadReport, Rank, Reports, SaveJob, SaveReport
from kvstore.client import PullResult, PushItem, PushResult
from kvstore.core import MissReason, limits

LINE_EVERY_S = 60.0


@dataclass(slots=True)
class Load:
    """One load job. Fields change under the lock of its `WorkerHalf`.

    `ends_s[i]`: seconds after which object i was verified and in its blocks; None: it is not. Objects from
    `lost_from` on are given up. `reading` counts transfers that have not ended, `writing` scatters under way.
    """

    job: LoadJob
    after: Fence
    began: float
    objects: list[LoadObject] = field(init=False)
    ends_s: list[float | None] = field(init=False)
    lost_from: int = field(init=False)
    streams: bool = field(init=False)
    reading: int = 0
    writing: int = 0
    reason: MissReason | None = None
    suspect: int | None = None
    error: str = ""
    moved_bytes: int = 0
    last_read: float = 0.0

    def __post_init__(self) -> None:
        self.objects = list(self.job.objects)
        self.ends_s = [None] * len(self.objects)
        self.lost_from = len(self.objects)
        self.streams = not all(wanted.placed for wanted in self.objects)

    @property
    def valid(self) -> int:
        """Length of the prefix that is loaded."""
        prefix = self.ends_s.index(None) if None in self.ends_s else len(self.ends_s)
        return min(prefix, self.lost_from)

    @property
    def over(self) -> bool:
        """Whether nothing more can be gained."""
        if self.valid == self.lost_from:
            return True
        return self.reading == 0 and all(wanted.placed for wanted in self.objects[: self.lost_from])

    def go_on(self, more: LoadMore) -> None:
        """Some objects can be read now, or will never come."""
        for index, place in more.places.items():
            generation, extents, table = place.generation, place.extents, place.table
            self.objects[index] = replace(
                self.objects[index], generation=generation, extents=extents, table=table, placed=True
            )
        if more.lost_from is not None:
            self.lose(more.lost_from, more.reason, "they did not come from NVMe")

    def by_node(self, indices: Iterable[int]) -> dict[int, list[int]]:
        """Those of these objects that can be read now, by node; each of the lists is one transfer."""
        groups: dict[int, list[int]] = {}
        for index in indices:
            if self.objects[index].placed:
                groups.setdefault(self.objects[index].node, []).append(index)
        return groups

    def report(self, now: float) -> LoadReport:
        """What is said of it when it is over."""
        valid = self.valid
        return LoadReport(
            valid,
            self.reason if valid < len(self.objects) else None,
            self.suspect,
            self.moved_bytes,
            max(0.0, self.last_read - self.began),
            now - self.began,
            tuple(end for end in self.ends_s[:valid] if end is not None),
        )

    @property
    def obituary(self) -> str:
        """A line on what of it could not be loaded, if there is anything to say."""
        lost, count = len(self.objects) - self.valid, len(self.objects)
        if not lost or not self.error:
            return ""
        line = f"request {self.job.request}: {lost} of {count} stored pieces could not be loaded"
        return f"{line} and are computed instead: {self.error}"

    def first_missing(self, indices: Sequence[int]) -> int:
        """The first of these objects that is not loaded; if all are, an index behind every object."""
        return next((index for index in indices if self.ends_s[index] is None), len(self.objects))

    def failed(self, index: int, result: PullResult) -> None:
        """The mover could not bring this object."""
        if self.lose(index, result.reason, result.error) and result.corrupt:
            self.suspect = index

    def out_of_time(self) -> None:
        """What is not there by now is given up."""
        reason = MissReason.TOO_SLOW if self.objects[self.valid].placed else MissReason.PROMOTE_DEADLINE
        self.lose(self.valid, reason, f"not done within {self.job.deadline_s:.1f} s")

    def lose(self, index: int, reason: MissReason | None, error: str) -> bool:
        """Gives up objects from `index` on, unless that was known. True: it is the first bad object so far."""
        if index >= self.lost_from:
            return False
        self.lost_from, self.reason, self.error, self.suspect = index, reason, error, None
        return True


@dataclass(slots=True)
class Save:
    """One save job. `began_writing`: bytes of it may be on their way."""

    job: SaveJob
    after: Fence
    began: float
    began_writing: bool = False

    def report(self, items: Sequence[PushItem], results: Sequence[PushResult], now: float) -> SaveReport:
        """What is said of it when the mover has tried everything."""
        pairs = list(zip(items, results, strict=True))
        return SaveReport(
            tuple(_sums_by_run(item, result) for item, result in pairs),
            all(result.quiet for result in results),
            sum(item.part.size_bytes for item, result in pairs if result.ok),
            now - self.began,
            next((result.reason for result in results if not result.ok), None),
        )


@dataclass(slots=True)
class Ended:
    """What the next step's hooks report."""

    requests: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)
    reports: Reports = field(default_factory=Reports)
    lines: list[str] = field(default_factory=list)

    def load(self, load: Load, rank: Rank, now: float) -> None:
        """A load is over on this rank: its request, and every block from the first object on that is not valid; if it
        is of no use in part, that the request has none of it."""
        lost = load.objects[load.valid :]
        self.requests.add(load.job.request)
        if not load.job.all_or_nothing:
            self.invalid.update(block for wanted in lost for block in wanted.blocks if block is not None)
        elif lost or not load.objects:
            self.failed.add(load.job.request)
        self.reports.loads[load.job.job] = {rank: load.report(now)}


def nothing_saved(job: SaveJob, *, quiet: bool, reason: MissReason | None = None) -> SaveReport:
    """The report of a save of which nothing may be committed."""
    return SaveReport((None,) * len(job.objects), quiet, reason=reason)


def _sums_by_run(item: PushItem, result: PushResult) -> dict[int, bytes] | None:
    """The checksums of the runs that were written, by their index in the table."""
    if not result.ok:
        return None
    assert result.checksums is not None, "what was written has checksums"
    size = limits.CHECKSUM_BYTES
    assert len(result.checksums) == size * len(item.part.runs), "one checksum for each run"
    return {run.index: result.checksums[at * size : (at + 1) * size] for at, run in enumerate(item.part.runs)}


class Lines:
    """Lines for the log, one per kind and minute; those left out are counted and told with the next one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said: dict[object, tuple[float, int]] = {}

    def pick(self, kind: object, line: str) -> list[str]:
        """The line, or nothing if one of its kind was said within the last minute."""
        now = self._clock()
        when, left_out = self._said.get(kind, (-math.inf, 0))
        if now - when < LINE_EVERY_S:
            self._said[kind] = (when, left_out + 1)
            return []
        self._said[kind] = (now, 0)
        return [f"{line} (and {left_out} times before)" if left_out else line]
