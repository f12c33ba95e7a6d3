"""What a voyage carries: jobs, their flights, and how their bytes are cut.

A *parcel* is submitted and waited for as one: what has come is looked at while the rest is under way. A *portion*
is copied and looked at by turns, where the node's memory is here.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from kvstore.client.staging import Slot
from kvstore.core import Extents, MissReason, Part, Run, limits
from kvstore.transfer import Handle, Piece

R = TypeVar("R")

READ_PARCEL_BYTES = 4 * limits.MIB
PORTION_BYTES = limits.MIB  # source and target are in the caches together


class Job(ABC, Generic[R]):
    """An object to be moved, and what to do with its bytes before and after.

    `address` is registered memory that the caller gave for the part's bytes, or None to use staging.
    """

    extents: Extents
    size_bytes: int
    part: Part
    address: int | None

    @abstractmethod
    def before(self, view: memoryview) -> None:
        """Called with the part's memory before it moves."""

    @abstractmethod
    def look(self, view: memoryview, runs: Sequence[Run]) -> None:
        """Called with the part's memory and all its runs, in order, in one call or in several: when they have come,
        or when they are being sent."""

    @abstractmethod
    def after(self, view: memoryview) -> R:
        """Called with the part's memory when all of it has moved: the result."""

    @abstractmethod
    def missed(self, reason: MissReason | None, error: str, moving: bool, failed: bool) -> R:
        """The result when it has not: whether bytes may still move, whether a transfer ended as failed."""


class Parcel(NamedTuple):
    """Some of a part's bytes, in the order of the part, that are submitted together. `end`: of them, in the part."""

    pieces: list[Piece]
    end: int


@dataclass(slots=True)
class Flight(Generic[R]):
    """A job that has begun: its memory, the parcels to come and under way, or its result already."""

    index: int
    job: Job[R]
    slot: Slot | None = None
    view: memoryview = field(default_factory=lambda: memoryview(b""))
    to_come: deque[Parcel] = field(default_factory=deque)
    under_way: deque[tuple[Handle, Parcel]] = field(default_factory=deque)
    looked_at: int = 0  # of its runs
    result: R | None = None

    def look(self, end: int) -> None:
        """Has the job look at the runs before `end` that it has not looked at."""
        runs = self.job.part.runs
        after = bisect_right(runs, end, lo=self.looked_at, key=_end)
        if after > self.looked_at:
            self.job.look(self.view, runs[self.looked_at : after])
            self.looked_at = after


def parcels(pieces: Sequence[Piece], most_bytes: int) -> Iterator[Parcel]:
    """The pieces in order, cut into parcels of so many bytes; one parcel if there are no pieces."""
    some: list[Piece] = []
    end, room = 0, most_bytes
    for local, remote, size in pieces:
        done = 0
        while done < size:
            if not room:
                yield Parcel(some, end)
                some, room = [], most_bytes
            take = min(size - done, room)
            some.append(Piece(local + done, remote + done, take))
            done += take
            end += take
            room -= take
    yield Parcel(some, end)


def portions(part: Part) -> Iterator[tuple[Sequence[Run], int]]:
    """The part's runs in groups of about `PORTION_BYTES`, each with where its bytes end in the part."""
    runs, first = part.runs, 0
    while first < len(runs):
        room_ends = runs[first].offset_bytes + PORTION_BYTES
        after = bisect_right(runs, room_ends, lo=first + 1, key=_end)
        yield runs[first:after], runs[after].offset_bytes if after < len(runs) else part.size_bytes
        first = after
    if not runs:
        yield (), part.size_bytes


def _end(run: Run) -> int:
    return run.offset_bytes + run.size_bytes
