"""The mover, over the in-process transfer: right bytes to right places, and what it does when things fail.

Mutants that must fail here: a pull that does not compare; a sink called before the comparison; checksums of what the
source had instead of what was sent; a part's spans read in the wrong order; a slot not given back on some way out, or
given back while its transfer is under way; a deadline that is not looked at between batches.
"""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import Mover, PullResult, PushItem, PushResult, Staging, voyage
from kvstore.core import Geometry, LaneGroup, MissReason, Part, Span, limits, seal
from kvstore.transfer import Fault, InProcessNetwork, InProcessTransfer, Piece, Status
from tests.client.moving import PAGE, Arena, Got, whole
from tests.contracts.transfer_memory import Memory

LONG_S = 60.0
EDGES = [1, 17, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 5 * PAGE + 123]


class World:
    """A client with staging, and an arena."""

    def __init__(self, staging_pages: int = 64) -> None:
        self.network = InProcessNetwork()
        self.arena = Arena.in_process(self.network)
        self.node = self.arena.address
        self.transfer = InProcessTransfer(self.network)
        self.staging = Staging(self.transfer, staging_pages * PAGE)
        self.mover = Mover(self.transfer, self.staging)

    def all_staging_is_free(self) -> bool:
        return self.staging.stats().free_bytes == self.staging.size_bytes

    def registered(self, size_bytes: int) -> Memory:
        memory = Memory(size_bytes)
        self.transfer.register(memory.address, size_bytes)
        return memory


@pytest.fixture
def world() -> World:
    return World()


lanes = st.builds(LaneGroup, st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 700))


@given(st.lists(lanes, min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 2**32))
def test_ranks_of_one_parallelism_write_what_ranks_of_another_read(groups, units, seed) -> None:
    """TP x PP writes, other TP x PP reads, pages anywhere; the ranks' checksums together are the object's table."""
    world = World()
    geometry = Geometry(1, tuple(groups))
    size = geometry.object_bytes(units)
    made = world.arena.object(size, geometry.whole(size))
    table = [b""] * geometry.num_runs
    for part in parts_of(geometry, units, stages=min(2, geometry.num_layers), shards=2):
        data = b"".join(made.data[offset : offset + length] for offset, length in part.spans)
        item = PushItem(made.extents, size, part, partial(put, data))
        (pushed,) = world.mover.push(world.node, [item], LONG_S)
        assert pushed.ok
        assert pushed.checksums is not None
        for n, run in enumerate(part.runs):
            table[run.index] = pushed.checksums[8 * n : 8 * n + 8]
    assert b"".join(table) == made.table
    assert world.arena.get(made) == made.data
    for part in parts_of(geometry, units, stages=1, shards=4):
        got = Got()
        (pulled,) = world.mover.pull(world.node, [made.of(part).pull(got)], LONG_S)
        assert pulled == PullResult(ok=True)
        assert got.seen == [b"".join(made.data[offset : offset + length] for offset, length in part.spans)]
    assert world.all_staging_is_free()


def parts_of(geometry: Geometry, units: int, stages: int, shards: int) -> list[Part]:
    """One part per rank. Heads fewer than shards are replicated, so ranks may overlap."""
    bounds = [geometry.num_layers * n // stages for n in range(stages + 1)]
    return [
        geometry.part(units, range(bounds[n], bounds[n + 1]), shard, shards)
        for n in range(stages)
        for shard in range(shards)
    ]


def put(data: bytes, view: memoryview) -> None:
    view[:] = data


@pytest.mark.parametrize("size", EDGES)
def test_what_was_pushed_is_pulled_at_every_size(world: World, size: int) -> None:
    made = [world.arena.object(size, whole(size, runs=1)) for _ in range(5)]
    pushed = world.mover.push(world.node, [one.push() for one in made], LONG_S)
    assert pushed == [PushResult(ok=True, checksums=one.table) for one in made]
    assert [world.arena.get(one) for one in made] == [one.data for one in made]
    got = [Got() for _ in made]
    pulled = world.mover.pull(
        world.node, [one.pull(sink) for one, sink in zip(made, got, strict=True)], LONG_S
    )
    assert pulled == [PullResult(ok=True)] * 5
    assert [sink.seen for sink in got] == [[one.data] for one in made]
    assert world.all_staging_is_free()


def test_nothing_asked_is_nothing_done(world: World) -> None:
    assert world.mover.push(world.node, [], LONG_S) == []
    assert world.mover.pull(world.node, [], LONG_S) == []


def test_a_part_without_bytes_is_moved(world: World) -> None:
    """A rank may own nothing of an object."""
    made = world.arena.object(PAGE)
    empty, got = Part((), (), 0), Got()
    item = PushItem(made.extents, PAGE, empty, lambda view: None)
    assert world.mover.push(world.node, [item], LONG_S) == [PushResult(ok=True, checksums=b"")]
    assert world.mover.pull(world.node, [made.of(empty).pull(got)], LONG_S) == [PullResult(ok=True)]
    assert got.seen == [b""]


@pytest.mark.parametrize("at_byte", [0, PAGE - 1, PAGE, 2 * PAGE + 5, 3 * PAGE - 1])
def test_a_bit_flipped_on_the_wire_fails_exactly_that_object(world: World, at_byte: int) -> None:
    made = [world.arena.object(3 * PAGE, stored=True) for _ in range(4)]
    got = [Got() for _ in made]
    first = world.mover.pull(world.node, [made[0].pull(got[0])], LONG_S)
    plan = world.network.plan(Fault.FLIP, at_byte=at_byte)
    rest = world.mover.pull(
        world.node, [one.pull(sink) for one, sink in zip(made, got, strict=True)][1:], LONG_S
    )
    assert plan.hits == 1
    assert [(r.ok, r.corrupt, r.reason) for r in first + rest] == [
        (True, False, None),
        (False, True, MissReason.BAD_COPY),
        (True, False, None),
        (True, False, None),
    ]
    assert [sink.seen for sink in got] == [[made[0].data], [], [made[2].data], [made[3].data]]
    assert world.all_staging_is_free()


def test_bytes_damaged_in_the_arena_or_a_table_that_is_short_reach_no_sink(world: World) -> None:
    made = [world.arena.object(3 * PAGE, stored=True) for _ in range(4)]
    last = world.arena.pages(made[1].extents)[-1]
    world.arena.flip(last * PAGE + PAGE - 1)
    made[2].table = made[2].table[:-8]
    made[3].table = b""
    got = [Got() for _ in made]
    pulled = world.mover.pull(
        world.node, [one.pull(sink) for one, sink in zip(made, got, strict=True)], LONG_S
    )
    assert [r.corrupt for r in pulled] == [False, True, True, True]
    assert [len(sink.seen) for sink in got] == [1, 0, 0, 0]


def test_a_seal_proves_a_whole_object_and_no_part_of_one(world: World) -> None:
    made = [world.arena.object(3 * PAGE, stored=True) for _ in range(3)]
    for one in made:
        one.table = seal(one.table)
    world.arena.flip(world.arena.pages(made[1].extents)[0] * PAGE)
    runs = made[2].part.runs[:2]
    size_bytes = sum(run.size_bytes for run in runs)
    made[2] = made[2].of(Part((Span(0, size_bytes),), runs, size_bytes))
    got = [Got() for _ in made]
    pulled = world.mover.pull(
        world.node, [one.pull(sink) for one, sink in zip(made, got, strict=True)], LONG_S
    )
    assert [(r.ok, r.corrupt) for r in pulled] == [(True, False), (False, True), (False, True)]
    assert [sink.seen for sink in got] == [[made[0].data], [], []]


def test_a_write_damaged_on_its_way_has_the_checksums_of_what_was_meant(world: World) -> None:
    """So whoever reads it notices."""
    made, got = world.arena.object(2 * PAGE), Got()
    plan = world.network.plan(Fault.FLIP, at_byte=PAGE, reads=False)
    assert world.mover.push(world.node, [made.push()], LONG_S) == [PushResult(ok=True, checksums=made.table)]
    assert plan.hits == 1
    (pulled,) = world.mover.pull(world.node, [made.pull(got)], LONG_S)
    assert pulled.corrupt
    assert got.seen == []


@pytest.mark.parametrize("at_byte", [0, 1, 2 * PAGE])
def test_a_failed_read_is_a_miss_and_so_is_what_follows(world: World, at_byte: int) -> None:
    made = [world.arena.object(3 * PAGE, stored=True) for _ in range(30)]
    got = [Got() for _ in made]
    plan = world.network.plan(Fault.FAIL, at_byte=at_byte)
    pulled = world.mover.pull(
        world.node, [one.pull(sink) for one, sink in zip(made, got, strict=True)], LONG_S
    )
    assert plan.hits == 1
    assert pulled[0].reason is MissReason.NODE_DOWN
    assert pulled[-1].reason is MissReason.NODE_DOWN, "a node that fails is not asked again"
    for result, sink, one in zip(pulled, got, made, strict=True):
        assert sink.seen == ([one.data] if result.ok else [])
    assert world.all_staging_is_free()


def test_a_failed_write_is_not_quiet_and_one_that_never_began_is(world: World) -> None:
    made = [world.arena.object(3 * PAGE) for _ in range(2)]
    failing = world.network.plan(Fault.FAIL, at_byte=PAGE)
    (failed,) = world.mover.push(world.node, [made[0].push()], LONG_S)
    refusing = world.network.plan(Fault.REFUSE)
    (refused,) = world.mover.push(world.node, [made[1].push()], LONG_S)
    assert (failing.hits, refusing.hits) == (1, 1)
    assert (failed.ok, failed.quiet, failed.reason) == (False, False, MissReason.NODE_DOWN)
    assert (refused.ok, refused.quiet, refused.reason) == (False, True, MissReason.NODE_DOWN)
    assert failed.checksums is refused.checksums is None
    assert world.all_staging_is_free()


def test_a_node_that_is_gone_is_a_miss(world: World) -> None:
    made = world.arena.object(PAGE, stored=True)
    world.network.endpoints[world.node.segments["in_process"]].close()
    for result in (
        world.mover.push(world.node, [made.push()], LONG_S)[0],
        world.mover.pull(world.node, [made.pull(Got())], LONG_S)[0],
    ):
        assert (result.ok, result.quiet, result.reason) == (False, True, MissReason.NODE_DOWN)
        assert "segment" in result.error


def test_late_bytes_of_a_pull_damage_nobody(world: World) -> None:
    """Its slot is retired: while it is, later pulls use other memory; when the bytes have landed it comes back."""
    late = world.arena.object(20 * PAGE, stored=True)
    plan, sink = world.network.plan(Fault.HOLD), Got()
    (pulled,) = world.mover.pull(world.node, [late.pull(sink)], LONG_S)
    assert plan.hits == 1
    assert (pulled.ok, pulled.reason, pulled.quiet) == (False, MissReason.TOO_SLOW, True)
    assert world.staging.stats().retired_bytes == 20 * PAGE

    others = [world.arena.object(20 * PAGE, stored=True) for _ in range(4)]

    def look_and_release(view: memoryview) -> None:
        before = bytes(view)
        world.network.release()
        assert bytes(view) == before, "late bytes landed in memory in use"

    results = world.mover.pull(world.node, [one.pull(look_and_release) for one in others], LONG_S)
    assert results == [PullResult(ok=True)] * 4
    assert world.network.late_bytes == 20 * PAGE
    assert sink.seen == []
    assert world.all_staging_is_free()


def test_late_bytes_of_a_push_carry_what_was_pushed(world: World) -> None:
    """Its slot is not filled with another object while the transfer may still read it."""
    late = world.arena.object(40 * PAGE)
    plan = world.network.plan(Fault.HOLD)
    (pushed,) = world.mover.push(world.node, [late.push()], LONG_S)
    assert plan.hits == 1
    assert (pushed.ok, pushed.quiet, pushed.reason) == (False, False, MissReason.TOO_SLOW)
    others = [world.arena.object(20 * PAGE) for _ in range(4)]
    assert all(r.ok for r in world.mover.push(world.node, [one.push() for one in others], LONG_S))
    assert world.network.release() == 1
    assert world.arena.get(late) == late.data
    assert [world.arena.get(one) for one in others] == [one.data for one in others]
    assert world.all_staging_is_free()


def test_objects_stream_through_staging_that_holds_two(world: World) -> None:
    world = World(staging_pages=8)
    made = [world.arena.object(4 * PAGE) for _ in range(12)]
    assert all(r.ok for r in world.mover.push(world.node, [one.push() for one in made], LONG_S))
    got = [Got() for _ in made]
    world.mover.pull(world.node, [one.pull(sink) for one, sink in zip(made, got, strict=True)], LONG_S)
    assert [sink.seen for sink in got] == [[one.data] for one in made]
    assert world.all_staging_is_free()


def test_what_staging_cannot_hold_is_a_miss_that_says_so(world: World) -> None:
    world = World(staging_pages=4)
    large, small = world.arena.object(5 * PAGE, stored=True), world.arena.object(4 * PAGE, stored=True)
    pulled = world.mover.pull(world.node, [large.pull(Got()), small.pull(Got())], LONG_S)
    assert [r.reason for r in pulled] == [MissReason.NO_ROOM, None]
    assert "staging" in pulled[0].error


def test_staging_that_others_hold_until_the_deadline_is_a_miss(world: World) -> None:
    held = world.staging.take(world.staging.size_bytes, 0)
    made = [world.arena.object(PAGE, stored=True) for _ in range(3)]
    results = world.mover.pull(world.node, [one.pull(Got()) for one in made], 0.05)
    assert [r.reason for r in results] == [MissReason.TOO_SLOW] * 3
    assert held
    world.staging.give_back(held)
    assert world.all_staging_is_free()


def test_a_source_or_sink_that_raises_fails_its_own_object(world: World) -> None:
    def broken(_: memoryview) -> None:
        raise RuntimeError("tensor is gone")

    made = [world.arena.object(2 * PAGE) for _ in range(3)]
    pushed = world.mover.push(world.node, [made[0].push(), made[1].push(broken), made[2].push()], LONG_S)
    assert [(r.ok, r.quiet) for r in pushed] == [(True, True), (False, True), (True, True)]
    assert "tensor is gone" in pushed[1].error
    world.arena.put(made[1])
    pulled = world.mover.pull(
        world.node, [made[0].pull(Got()), made[1].pull(broken), made[2].pull(Got())], LONG_S
    )
    assert [r.ok for r in pulled] == [True, False, True]
    assert not pulled[1].corrupt
    assert "tensor is gone" in pulled[1].error
    assert world.all_staging_is_free()


def test_registered_memory_needs_no_staging_and_is_verified_in_place(world: World) -> None:
    world = World(staging_pages=1)
    made, memory = world.arena.object(9 * PAGE + 1), world.registered(30 * PAGE)
    memory[5 : 5 + len(made.data)] = made.data
    assert world.mover.push(world.node, [made.push(memory.address + 5)], LONG_S) == [
        PushResult(ok=True, checksums=made.table)
    ]
    assert world.mover.pull(world.node, [made.pull(memory.address + 15 * PAGE)], LONG_S) == [
        PullResult(ok=True)
    ]
    assert memory[15 * PAGE : 15 * PAGE + len(made.data)] == made.data
    world.network.plan(Fault.FLIP, at_byte=9 * PAGE)
    assert world.mover.pull(world.node, [made.pull(memory.address)], LONG_S)[0].corrupt


@pytest.mark.parametrize("reading", [False, True])
def test_memory_of_the_caller_is_settled_when_late_bytes_have_landed(world: World, reading: bool) -> None:
    made, memory = world.arena.object(PAGE, stored=True), world.registered(PAGE)
    plan = world.network.plan(Fault.HOLD)
    if reading:
        result: PullResult | PushResult = world.mover.pull(world.node, [made.pull(memory.address)], LONG_S)[0]
    else:
        (result,) = world.mover.push(world.node, [made.push(memory.address)], LONG_S)
    assert plan.hits == 1
    assert (result.ok, result.quiet) == (False, False)
    assert not world.mover.settled(0)
    world.network.release()
    assert world.mover.settled(0)


class Watching:
    """A transfer that notes the bytes of each submission, and how many are under way at most."""

    protocol = "in_process"

    def __init__(self, inner: InProcessTransfer) -> None:
        self.inner = inner
        self.sizes: list[int] = []
        self.under_way: dict[int, int] = {}
        self.under_way_max = 0

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def submit_read(self, segment: str, pieces: list[Piece]):
        return self._note(self.inner.submit_read(segment, pieces), pieces)

    def submit_write(self, segment: str, pieces: list[Piece]):
        return self._note(self.inner.submit_write(segment, pieces), pieces)

    def _note(self, handle, pieces: list[Piece]):
        self.sizes.append(sum(piece.size_bytes for piece in pieces))
        self.under_way[handle] = self.sizes[-1]
        self.under_way_max = max(self.under_way_max, sum(self.under_way.values()))
        return handle

    def wait(self, handle, timeout_s: float) -> Status:
        del self.under_way[handle]
        return self.inner.wait(handle, timeout_s)


@pytest.mark.parametrize("size", [PAGE, 3 * PAGE + 1, 11 * PAGE])
def test_no_batch_and_no_window_is_larger_than_allowed(world: World, monkeypatch, size: int) -> None:
    monkeypatch.setattr(limits, "TRANSFER_BATCH_BYTES_MAX", 4 * PAGE)
    watching = Watching(world.transfer)
    mover = Mover(watching, world.staging)  # type: ignore[arg-type]
    made, got = [world.arena.object(size) for _ in range(6)], [Got() for _ in range(6)]
    assert all(r.ok for r in mover.push(world.node, [one.push() for one in made], LONG_S))
    mover.pull(world.node, [one.pull(sink) for one, sink in zip(made, got, strict=True)], LONG_S)
    assert [sink.seen for sink in got] == [[one.data] for one in made]
    assert sum(watching.sizes) == 2 * 6 * size
    assert watching.under_way_max <= 4 * PAGE
    assert size != PAGE or watching.under_way_max == 4 * PAGE, "small objects overlap"


def test_time_is_looked_at_before_each_batch(world: World, monkeypatch) -> None:
    """Every look at the clock takes a second: of an object of many batches some are moved, the rest never begun."""
    monkeypatch.setattr(limits, "TRANSFER_BATCH_BYTES_MAX", PAGE)
    clock = SimpleNamespace(now=0.0)

    def monotonic() -> float:
        clock.now += 1
        return clock.now

    monkeypatch.setattr(voyage, "time", SimpleNamespace(monotonic=monotonic))
    made = [world.arena.object(40 * PAGE), world.arena.object(PAGE)]
    pushed = world.mover.push(world.node, [one.push() for one in made], deadline_s=30)
    assert [r.reason for r in pushed] == [MissReason.TOO_SLOW] * 2
    assert [r.quiet for r in pushed] == [True, True], "what was begun has ended"
    assert 0 < world.network.writes < 40
    assert world.all_staging_is_free()


def test_after_the_deadline_no_source_is_asked(world: World) -> None:
    made, asked = world.arena.object(PAGE), Got()
    (pushed,) = world.mover.push(world.node, [made.push(asked)], deadline_s=0)
    assert (pushed.ok, pushed.quiet, pushed.reason) == (False, True, MissReason.TOO_SLOW)
    assert asked.seen == []


def test_a_source_that_uses_up_the_time_is_not_sent(world: World) -> None:
    event = threading.Event()
    made = world.arena.object(PAGE)
    (pushed,) = world.mover.push(world.node, [made.push(lambda view: (event.wait(0.06), None)[1])], 0.05)
    assert (pushed.ok, pushed.quiet, pushed.reason) == (False, True, MissReason.TOO_SLOW)
    assert world.network.writes == 0


def test_extents_that_cannot_hold_the_object_are_a_miss(world: World) -> None:
    made = world.arena.object(5 * PAGE, stored=True)
    made.extents = made.extents[:-1]
    (pulled,) = world.mover.pull(world.node, [made.pull(Got())], LONG_S)
    assert pulled.reason is MissReason.BAD_COPY
    assert world.network.reads == 0


def test_a_node_without_this_transport_is_a_miss(world: World) -> None:
    made = world.arena.object(PAGE, stored=True)
    node = type(world.node)(world.node.node, world.node.boot, "", {"mooncake": "somewhere:1"}, 0, PAGE)
    (pulled,) = world.mover.pull(node, [made.pull(Got())], LONG_S)
    assert pulled.reason is MissReason.NODE_DOWN
    assert "in_process" in pulled.error


def test_objects_are_handed_over_while_later_ones_are_read(world: World) -> None:
    made = [world.arena.object(PAGE, stored=True) for _ in range(3)]
    results = world.mover.pull_each(world.node, [one.pull(Got()) for one in made], LONG_S)
    plan = world.network.plan(Fault.HOLD)
    assert plan.hits == 0
    index, first = next(results)
    assert (index, first.ok) == (0, False)
    assert world.network.reads == 3
    results.close()
    world.network.release()
    assert world.all_staging_is_free(), "a caller that stops listening leaves nothing behind"


def test_many_threads_share_little_staging(world: World) -> None:
    world = World(staging_pages=6)
    made = [[world.arena.object(2 * PAGE + 7) for _ in range(8)] for _ in range(6)]
    wrong: list[object] = []

    def work(mine) -> None:
        for _ in range(5):
            got = [Got() for _ in mine]
            wrong.extend(
                r for r in world.mover.push(world.node, [o.push() for o in mine], LONG_S) if not r.ok
            )
            items = [one.pull(sink) for one, sink in zip(mine, got, strict=True)]
            wrong.extend(r for r in world.mover.pull(world.node, items, LONG_S) if not r.ok)
            wrong.extend(o for o, sink in zip(mine, got, strict=True) if sink.seen != [o.data])

    threads = [threading.Thread(target=work, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert world.all_staging_is_free()


def test_a_part_that_cannot_be_verified_is_our_bug(world: World) -> None:
    made = world.arena.object(2 * PAGE)
    made.part = made.part._replace(runs=made.part.runs[:-1])
    with pytest.raises(AssertionError, match="verified"):
        world.mover.pull(world.node, [made.pull(Got())], LONG_S)
