"""The mover where the node's memory is here: objects are carried by hand, by two threads.

Mutants that must fail here: a portion that is not looked at, or looked at before it was copied; a copy that goes on
behind the deadline, or when the node is gone; a slot that is not given back; sums in another order than the runs.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from kvstore import tiers
from kvstore.client import Mover, PullResult, PushResult, Staging, flight
from kvstore.core import Extent, MissReason, Part, Run, Span, checksums, pages_for
from kvstore.transfer import ArenaSocket, SharedMemoryTransfer
from tests.client.moving import PAGE, Arena, Got, Object, node_at, whole
from tests.contracts.transfer_memory import Memory
from tests.support import wait_until

MIB = 1 << 20
PAGES = 4096
LONG_S = 60.0


class Counting(SharedMemoryTransfer):
    """Counts submissions and pieces; something may happen before the second piece."""

    def __init__(self) -> None:
        self.submitted = 0
        self.pieces = 0
        self.before_second: Callable[[], object] = lambda: None
        super().__init__()

    def submit_read(self, segment, pieces):
        self.submitted += 1
        return super().submit_read(segment, pieces)

    def submit_write(self, segment, pieces):
        self.submitted += 1
        return super().submit_write(segment, pieces)

    def _before_piece(self) -> None:
        self.pieces += 1
        if self.pieces == 2:
            self.before_second()


class World:
    """A client with staging, and an arena that this process offers."""

    def __init__(self, folder: Path) -> None:
        self.offered = tiers.Arena.create(PAGES * PAGE, lock=False)
        self.path = folder / "near.sock"
        self.is_offered = True
        self.socket = ArenaSocket(self.path, self.offered.fd, self.offered.address, b"", [])
        memory = Memory(PAGES * PAGE, Path(f"/proc/self/fd/{self.offered.fd}"))
        self.arena = Arena(memory, node_at("shm", str(self.path), self.offered.address))
        self.node = self.arena.address
        self.transfer = Counting()
        self.staging = Staging(self.transfer, 8 * MIB)
        self.mover = Mover(self.transfer, self.staging)
        self.mover.meet(self.node)
        self.transfer.submitted = self.transfer.pieces = 0

    def all_staging_is_free(self) -> bool:
        return self.staging.stats().free_bytes == self.staging.size_bytes

    def go(self) -> None:
        """The node ends; its memory is unmapped here."""
        self.socket.close()
        self.is_offered = False
        wait_until(lambda: "0 mappings" in repr(self.transfer), 10, "the arena has been unmapped")

    def close(self) -> None:
        self.transfer.close()
        if self.is_offered:
            self.socket.close()
        self.offered.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def ranks_part(size: int) -> Part:
    """Two spans of an object, with runs of many sizes."""
    spans = (Span(PAGE + 3, size // 3), Span(size // 2, size // 4))
    total = sum(span.size_bytes for span in spans)
    bounds = sorted({0, total, *(Random(5).randrange(total) for _ in range(40))})
    cut = tuple(Run(n, a, b - a) for n, (a, b) in enumerate(itertools.pairwise(bounds)))
    return Part(spans, cut, total)


def objects(world: World, *, stored: bool = False) -> list[Object]:
    """Sizes around those of pages and portions; runs of a few bytes, and of more than a portion."""
    portion = flight.PORTION_BYTES
    shapes = [(1, 1), (PAGE + 1, 3), (portion, 7), (portion + 1, 1), (3 * portion - 5, 2), (2 * portion, 500)]
    return [world.arena.object(size, whole(size, runs=runs), stored=stored) for size, runs in shapes]


def in_one_piece(world: World, size: int, *, stored: bool = False) -> Object:
    """An object of runs of a portion each, in neighbouring pages: a portion is a piece."""
    made = world.arena.object(PAGE)
    made.data = world.arena.random.randbytes(size)
    made.part = whole(size, runs=size // flight.PORTION_BYTES)
    made.table = checksums(memoryview(made.data), made.part.runs)
    made.extents = (Extent(0, pages_for(size, PAGE)),)
    if stored:
        world.arena.put(made)
    return made


def test_objects_go_there_and_come_back_and_nothing_was_submitted(world: World) -> None:
    made, got = objects(world), [Got() for _ in range(6)]
    pushed = world.mover.push(world.node, [one.push() for one in made], LONG_S)
    assert pushed == [PushResult(ok=True, checksums=one.table) for one in made]
    assert [world.arena.get(one) for one in made] == [one.data for one in made]
    wanted = [one.pull(sink) for one, sink in zip(made, got, strict=True)]
    assert world.mover.pull(world.node, wanted, LONG_S) == [PullResult(ok=True)] * 6
    assert [sink.seen for sink in got] == [[one.data] for one in made]
    assert world.transfer.submitted == 0
    assert world.all_staging_is_free()


def test_a_part_in_registered_memory(world: World) -> None:
    made = world.arena.object(5 * MIB)
    part = ranks_part(5 * MIB)
    data = b"".join(made.data[offset : offset + size] for offset, size in part.spans)
    memory = Memory(2 * part.size_bytes)
    world.transfer.register(memory.address, memory.size_bytes)
    memory[: len(data)] = data
    (pushed,) = world.mover.push(world.node, [made.of(part).push(memory.address)], LONG_S)
    assert pushed.ok and pushed.checksums is not None
    there = world.arena.get(made)
    assert b"".join(there[offset : offset + size] for offset, size in part.spans) == data
    table = made.of(part)
    table.table = pushed.checksums
    (pulled,) = world.mover.pull(world.node, [table.pull(memory.address + part.size_bytes)], LONG_S)
    assert pulled == PullResult(ok=True)
    assert memory[part.size_bytes :] == data


@pytest.mark.parametrize("at_byte", [0, flight.PORTION_BYTES - 1, flight.PORTION_BYTES, 3 * MIB - 6])
def test_a_flipped_bit_is_found_in_whatever_portion_it_is(world: World, at_byte: int) -> None:
    made = world.arena.object(3 * MIB - 5, whole(3 * MIB - 5, runs=100), stored=True)
    page = world.arena.pages(made.extents)[at_byte // PAGE]
    world.arena.flip(page * PAGE + at_byte % PAGE)
    got = Got()
    (pulled,) = world.mover.pull(world.node, [made.pull(got)], LONG_S)
    assert (pulled.ok, pulled.corrupt, pulled.reason) == (False, True, MissReason.BAD_COPY)
    assert not got.seen
    assert world.all_staging_is_free()


def test_at_the_deadline_the_copy_ends_and_nothing_is_late(world: World, monkeypatch) -> None:
    """Time is up behind the second of five portions."""
    made = in_one_piece(world, 5 * MIB)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now if world.transfer.pieces < 2 else now + 9)
    (pushed,) = world.mover.push(world.node, [made.push()], 5.0)
    assert (pushed.ok, pushed.quiet, pushed.reason) == (False, True, MissReason.TOO_SLOW)
    assert world.transfer.pieces == 2
    assert world.mover.settled(0)
    assert world.all_staging_is_free()


def test_when_the_node_goes_the_copy_ends_before_its_memory_is_unmapped(world: World) -> None:
    """Between the first and the second portion; nothing of what follows is begun."""
    world.transfer.before_second = world.go
    made = in_one_piece(world, 5 * MIB)
    (pushed,) = world.mover.push(world.node, [made.push()], LONG_S)
    assert (pushed.ok, pushed.reason) == (False, MissReason.NODE_DOWN)
    assert world.transfer.pieces == 2 and world.transfer.copied_bytes < 2 * MIB
    assert world.all_staging_is_free()


def test_what_is_unregistered_is_not_touched_any_more(world: World) -> None:
    memory = Memory(4 * MIB)
    world.transfer.register(memory.address, memory.size_bytes)
    world.transfer.before_second = lambda: world.transfer.unregister(memory.address)
    made = in_one_piece(world, 4 * MIB, stored=True)
    (pulled,) = world.mover.pull(world.node, [made.pull(memory.address)], LONG_S)
    assert (pulled.ok, pulled.quiet, pulled.reason) == (False, True, MissReason.NODE_DOWN)
    begun_bytes = world.transfer.copied_bytes - 1  # `meet` has read one
    assert not any(memory[begun_bytes:])


def test_sources_and_sinks_that_fail_are_their_objects_results(world: World) -> None:
    made = [world.arena.object(MIB) for _ in range(3)]

    def fail(view: memoryview) -> None:
        raise ValueError("not this one")

    pushed = world.mover.push(world.node, [made[0].push(), made[1].push(fail), made[2].push()], LONG_S)
    assert [result.ok for result in pushed] == [True, False, True]
    assert "not this one" in pushed[1].error
    pulled = world.mover.pull(world.node, [made[0].pull(fail), made[2].pull(Got())], LONG_S)
    assert [result.ok for result in pulled] == [False, True]
    assert world.all_staging_is_free()


def test_more_than_staging_holds_goes_through_it(world: World) -> None:
    """Objects of 3 MiB, and 8 of staging: both threads have a slot, and nobody waits for ever."""
    made = [world.arena.object(3 * MIB, stored=True) for _ in range(4)]
    got = [Got() for _ in made]
    wanted = [one.pull(sink) for one, sink in zip(made, got, strict=True)]
    assert [n for n, result in world.mover.pull_each(world.node, wanted, LONG_S) if result.ok] == [0, 1, 2, 3]
    assert [sink.seen for sink in got] == [[one.data] for one in made]


def test_who_stops_asking_has_nothing_under_way(world: World) -> None:
    made = [world.arena.object(MIB, stored=True) for _ in range(8)]
    going = world.mover.pull_each(world.node, [one.pull(Got()) for one in made], LONG_S)
    assert next(going)[1].ok
    going.close()
    pieces = world.transfer.pieces
    assert world.all_staging_is_free()
    assert world.mover.pull(world.node, [], LONG_S) == []
    assert world.transfer.pieces == pieces
