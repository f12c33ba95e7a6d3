"""Objects in several parcels: what is under way at once, what is looked at when, who waits for what still moves."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import Mover, PullResult, PushResult, Staging, mover, voyage
from kvstore.core import MissReason, Part, Run, Span, TransferFailed, checksums
from kvstore.transfer import Handle, InProcessNetwork, InProcessTransfer, Piece, Status
from tests.client.moving import PAGE, Arena, Got, whole
from tests.contracts.transfer_memory import Memory

LONG_S = 60.0
PARCEL = 2 * PAGE
THREE = 3 * PARCEL


class Controlled:
    """A transfer whose submissions move and end when the test says so; `ends`: by themselves, when waited for."""

    protocol = "in_process"

    def __init__(self, inner: InProcessTransfer, *, ends: bool) -> None:
        self.inner = inner
        self.log: list[tuple[str, int]] = []
        self.refuses_from = 1_000
        self.outcomes: dict[int, Status] = {}  # of submissions that end at once
        self._ends = ends
        self._status: dict[Handle, Status] = {}
        self._waiting: dict[Handle, tuple[bool, str, list[Piece]]] = {}

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def submit_read(self, segment: str, pieces: list[Piece]) -> Handle:
        return self._submit(True, segment, pieces)

    def submit_write(self, segment: str, pieces: list[Piece]) -> Handle:
        return self._submit(False, segment, pieces)

    def _submit(self, reading: bool, segment: str, pieces: list[Piece]) -> Handle:
        handle = Handle(len(self._status))
        if handle >= self.refuses_from:
            raise TransferFailed("the segment is gone")
        self.log.append(("submit", handle))
        self._status[handle] = self.outcomes.get(handle, Status.PENDING)
        self._waiting[handle] = (reading, segment, pieces)
        return handle

    def land(self, number: int) -> None:
        """It moves, and has ended."""
        handle = Handle(number)
        reading, segment, pieces = self._waiting.pop(handle)
        submit = self.inner.submit_read if reading else self.inner.submit_write
        self._status[handle] = self.inner.wait(submit(segment, pieces), LONG_S)

    def poll(self, handle: Handle) -> Status:
        return self._status[handle]

    def wait(self, handle: Handle, timeout_s: float) -> Status:
        self.log.append(("wait", handle))
        if self._ends and self._status[handle] is Status.PENDING:
            self.land(handle)
        return self._status[handle]


class World:
    def __init__(self, *, ends: bool) -> None:
        network = InProcessNetwork()
        self.arena = Arena.in_process(network)
        self.node = self.arena.address
        self.transfer = Controlled(InProcessTransfer(network), ends=ends)
        self.staging = Staging(self.transfer, 64 * PAGE)  # type: ignore[arg-type]
        self.mover = Mover(self.transfer, self.staging)  # type: ignore[arg-type]
        self.transfer.log.clear()

    def registered(self, size_bytes: int) -> Memory:
        memory = Memory(size_bytes)
        self.transfer.inner.register(memory.address, size_bytes)
        return memory

    @property
    def retired_bytes(self) -> int:
        return self.staging.stats().retired_bytes


@pytest.fixture(autouse=True)
def small_parcels(monkeypatch) -> None:
    monkeypatch.setattr(voyage, "READ_PARCEL_BYTES", PARCEL)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_slot_is_out_of_use_until_all_of_its_parcels_have_ended(order) -> None:
    """Mutants: it waits for the first of them, or for the last; it is given back when any has ended."""
    world = World(ends=False)
    made, sink = world.arena.object(THREE, stored=True), Got()
    (pulled,) = world.mover.pull(world.node, [made.pull(sink)], LONG_S)
    assert (pulled.ok, pulled.reason, pulled.quiet) == (False, MissReason.TOO_SLOW, True)
    for number in order:
        assert world.retired_bytes == THREE
        world.transfer.land(number)
    assert world.retired_bytes == 0
    assert world.staging.stats().free_bytes == world.staging.size_bytes
    assert sink.seen == []


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_memory_of_the_caller_is_settled_when_all_of_its_parcels_have_ended(failed) -> None:
    """Mutants: one that failed is all that there is to know; only one of the others is waited for."""
    world = World(ends=False)
    made, memory = world.arena.object(THREE, stored=True), world.registered(THREE)
    world.transfer.outcomes = {**dict.fromkeys(range(failed), Status.DONE), failed: Status.FAILED}
    (pulled,) = world.mover.pull(world.node, [made.pull(memory.address)], LONG_S)
    moving = range(failed + 1, 3)
    assert (pulled.ok, pulled.reason, pulled.quiet) == (False, MissReason.NODE_DOWN, not moving)
    for number in moving:
        assert not world.mover.settled(0)
        world.transfer.land(number)
    assert world.mover.settled(0)


@pytest.mark.parametrize("own_memory", [False, True])
def test_a_parcel_that_is_refused_leaves_those_before_it_moving(own_memory) -> None:
    """Mutant: nothing moves when a submission raises."""
    world = World(ends=False)
    made, memory = world.arena.object(THREE, stored=True), world.registered(THREE)
    world.transfer.refuses_from = 2
    (pulled,) = world.mover.pull(world.node, [made.pull(memory.address if own_memory else Got())], LONG_S)
    assert (pulled.ok, pulled.reason, pulled.quiet) == (False, MissReason.NODE_DOWN, not own_memory)
    for number in (1, 0):
        assert world.retired_bytes == (0 if own_memory else THREE)
        assert world.mover.settled(0) is not own_memory
        world.transfer.land(number)
    assert world.retired_bytes == 0
    assert world.mover.settled(0)


def looks(world: World, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The transfer's log, with the runs that are hashed."""
    plain = checksums

    def noted(view: memoryview, runs: Sequence[Run]) -> bytes:
        world.transfer.log.extend(("look", run.index) for run in runs)
        return plain(view, runs)

    monkeypatch.setattr(mover, "checksums", noted)
    return world.transfer.log


def test_what_has_come_is_looked_at_while_the_rest_is_under_way(monkeypatch) -> None:
    """Mutants: all is waited for first; the parcels go one after the other."""
    world = World(ends=True)
    log = looks(world, monkeypatch)
    made, got = world.arena.object(THREE, whole(THREE, runs=6), stored=True), Got()
    assert world.mover.pull(world.node, [made.pull(got)], LONG_S) == [PullResult(ok=True)]
    submitted = [("submit", number) for number in range(3)]
    seen = [("wait", 0), ("look", 0), ("look", 1), ("wait", 1), ("look", 2), ("look", 3)]
    assert log == [*submitted, *seen, ("wait", 2), ("look", 4), ("look", 5)]
    assert got.seen == [made.data]


def test_what_the_callers_memory_sends_is_looked_at_when_all_is_under_way(monkeypatch) -> None:
    """What was gathered is looked at at once. Mutants: before the next is submitted; when it has ended."""
    world = World(ends=True)
    log = looks(world, monkeypatch)
    made = [world.arena.object(PAGE, whole(PAGE, runs=1)) for _ in range(3)]
    memory = world.registered(3 * PAGE)
    for number, one in enumerate(made):
        memory[number * PAGE : (number + 1) * PAGE] = one.data
    own = [one.push(memory.address + number * PAGE) for number, one in enumerate(made)]
    done = [PushResult(ok=True, checksums=one.table) for one in made]
    assert world.mover.push(world.node, own, LONG_S) == done
    assert [what for what, _ in log] == ["submit"] * 3 + ["look"] * 3 + ["wait"] * 3
    log.clear()
    assert world.mover.push(world.node, [one.push() for one in made], LONG_S) == done
    assert [what for what, _ in log] == ["submit", "look"] * 3 + ["wait"] * 3


@given(st.integers(1, 4), st.sampled_from([-1, 0, 1]), st.lists(st.integers(1, 3 * PAGE), min_size=1))
def test_runs_that_lie_across_parcels_are_each_looked_at_once_and_in_order(parcels, more, sizes) -> None:
    """Mutants: a run is looked at when its beginning has come; again with the next parcel; the last is left out."""
    world = World(ends=True)
    size = parcels * PARCEL + more
    ends = sorted({min(size, sum(sizes[: n + 1])) for n in range(len(sizes))} | {size})
    starts = [0, *ends[:-1]]
    runs = tuple(Run(n, start, end - start) for n, (start, end) in enumerate(zip(starts, ends, strict=True)))
    made, got = world.arena.object(size, Part((Span(0, size),), runs, size), stored=True), Got()
    assert world.mover.pull(world.node, [made.pull(got)], LONG_S) == [PullResult(ok=True)]
    assert got.seen == [made.data]
