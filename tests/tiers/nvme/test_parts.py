"""The small parts: pieces of objects, threads, space, wear, the choice of a device."""

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import Extent, Run, checksums, limits
from kvstore.tiers.nvme.base import Refusal
from kvstore.tiers.nvme.device import BLOCK_BYTES, aligned
from kvstore.tiers.nvme.nvme_device import NvmeDevice
from kvstore.tiers.nvme.pieces import io_bytes, pieces, strands, table_of
from kvstore.tiers.nvme.pool import IoPool
from kvstore.tiers.nvme.records import Record
from kvstore.tiers.nvme.space import Space
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.nvme.wear import WearBudget
from tests.support import wait_until
from tests.tiers.nvme.test_records import record
from tests.tiers.nvme.things import MANIFEST, TOKEN_BYTES

# --- pieces -----------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[int], tuple[Extent, ...]]:
    """Size of an object, sizes of the memory it lies in, and extents of 4 KiB pages."""
    size = draw(st.integers(1, 40)) * TOKEN_BYTES
    left = io_bytes(size) // BLOCK_BYTES
    extra = draw(st.integers(0, 3))
    memory: list[int] = []
    while sum(memory) < left + extra:
        memory.append(draw(st.integers(1, left + extra - sum(memory))))
    start, extents = 0, []
    while left:
        count = draw(st.integers(1, left))
        start += draw(st.integers(0, 3))
        extents.append(Extent(start, count))
        start += count
        left -= count
    return size, memory, tuple(draw(st.permutations(extents)))


@given(layouts(), st.sampled_from([BLOCK_BYTES, 3 * BLOCK_BYTES, limits.MIB]))
def test_pieces_move_every_byte_to_its_place(layout, io_max) -> None:
    size, memory, extents = layout
    data = random.Random(size).randbytes(io_bytes(size)).ljust(sum(memory) * BLOCK_BYTES, b"\0")
    views, at = [], 0
    for blocks in memory:
        views.append(memoryview(data)[at : at + blocks * BLOCK_BYTES])
        at += blocks * BLOCK_BYTES
    device = bytearray(200 * BLOCK_BYTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "NVME_IO_BYTES", io_max)
        moved = pieces(extents, BLOCK_BYTES, size, views)
    for offset, buffers in moved:
        assert offset % BLOCK_BYTES == 0
        assert 0 < sum(map(len, buffers)) <= io_max
        for buffer in buffers:
            assert len(buffer) % BLOCK_BYTES == 0
            device[offset : offset + len(buffer)] = buffer
            offset += len(buffer)
    on_device = b"".join(
        device[start * BLOCK_BYTES : (start + count) * BLOCK_BYTES] for start, count in extents
    )
    assert on_device == data[: io_bytes(size)]


@given(layouts(), st.integers(1, 8))
def test_strands_are_all_the_pieces_once_and_none_is_long(layout, width) -> None:
    size, memory, extents = layout
    moved = pieces(extents, BLOCK_BYTES, size, [aligned(sum(memory) * BLOCK_BYTES)])
    parts = strands(moved, width)
    assert [piece for part in parts for piece in part] == moved
    assert all(0 < len(part) <= 8 for part in parts)


@given(st.integers(1, 16), st.lists(st.integers(1, 5_000), max_size=5))
def test_a_table_does_not_depend_on_how_memory_is_cut(tokens, cuts) -> None:
    size = tokens * TOKEN_BYTES
    data = random.Random(tokens).randbytes(size + 100)
    runs = MANIFEST.geometry.runs(size)
    views, at = [], 0
    for cut in cuts:
        views.append(memoryview(data)[at : at + cut])
        at += cut
    views.append(memoryview(data)[at:])
    assert table_of(views, runs) == checksums(memoryview(data), runs)


@pytest.mark.parametrize("run_bytes", [8 * limits.KIB, 64 * limits.KIB, 65 * limits.KIB])
def test_who_hashes_does_not_keep_the_interpreter(run_bytes) -> None:
    """Mutants: never let go of it; let go only for long runs, which is what the hash does by itself."""
    memory = [memoryview(bytes(65 * limits.MIB // 8))] * 64
    num_runs = sum(map(len, memory)) // run_bytes
    runs = [Run(index, index * run_bytes, run_bytes) for index in range(num_runs)]
    began, interval_s = threading.Event(), sys.getswitchinterval()

    def hash_them() -> bytes:
        began.set()
        return table_of(memory, runs)

    with ThreadPoolExecutor(1) as pool:
        sys.setswitchinterval(100.0)  # nobody takes it away from a thread
        try:
            table = pool.submit(hash_them)
            began.wait()
            assert not table.done(), "this thread went on when all had been hashed"
        finally:
            sys.setswitchinterval(interval_s)
        assert len(table.result()) == limits.CHECKSUM_BYTES * num_runs


# --- threads ----------------------------------------------------------------------------------------


class Gate:
    """Calls that end when they are told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.entered: list[str] = []

    def call(self, name: str) -> str:
        self.entered.append(name)
        assert self.go_on.wait(10)
        return name


def test_the_first_lane_goes_first_and_no_lane_has_more_than_it_may() -> None:
    pool = IoPool("t", 3, (3, 2, 1), lambda: 0.0)
    reads, writes, background = pool.lanes
    gate = Gate()
    futures = [writes.submit(gate.call, f"w{n}") for n in range(4)]
    wait_until(lambda: len(gate.entered) == 2)
    futures += [background.submit(gate.call, f"b{n}") for n in range(2)]
    wait_until(lambda: len(gate.entered) == 3)
    futures += [reads.submit(gate.call, f"r{n}") for n in range(3)]
    assert sorted(gate.entered) == ["b0", "w0", "w1"]
    assert pool.oldest_s() == 0.0
    gate.go_on.set()
    assert [future.result(10) for future in futures] == ["w0", "w1", "w2", "w3", "b0", "b1", "r0", "r1", "r2"]
    assert gate.entered[3] == "r0", "a read goes before what waited longer"
    pool.close()


def test_what_waits_can_be_failed_what_runs_cannot() -> None:
    now_s = [5.0]
    pool = IoPool("t", 1, (1,), lambda: now_s[0])
    (lane,) = pool.lanes
    gate = Gate()
    running, waiting = lane.submit(gate.call, "a"), lane.submit(gate.call, "b")
    wait_until(lambda: gate.entered)
    now_s[0] = 7.5
    assert pool.oldest_s() == 2.5
    pool.fail_waiting(ValueError("down"))
    with pytest.raises(ValueError, match="down"):
        waiting.result(10)
    assert not running.done()
    gate.go_on.set()
    assert running.result(10) == "a"
    wait_until(lambda: pool.oldest_s() == 0.0)
    assert gate.entered == ["a"]
    pool.close()


def test_an_error_is_the_callers() -> None:
    pool = IoPool("t", 1, (1,), lambda: 0.0)

    def fail() -> None:
        raise AssertionError("ours")

    with pytest.raises(AssertionError, match="ours"):
        pool.lanes[0].submit(fail).result(10)
    assert pool.lanes[0].submit(int, "3").result(10) == 3
    pool.close()


# --- space ------------------------------------------------------------------------------------------


@given(st.data())
def test_pages_and_slots_are_in_one_place_whatever_happens(data) -> None:
    """Mutants: a failed allocation that keeps pages, or slots; `fail` that frees pages."""
    space = Space(40, 30, ())
    kept: dict[int, Record] = {}
    failed = 0
    for number in range(data.draw(st.integers(0, 40))):
        if kept and data.draw(st.booleans()):
            _, gone = kept.popitem()
            if data.draw(st.integers(0, 9)) == 0:
                space.fail(gone)
                failed += sum(count for _, count in gone.extents)
            else:
                space.free(gone)
        else:
            pages = data.draw(st.integers(0, 6))
            free = space.free_pages, space.free_slots
            room = space.allocate(pages, data.draw(st.sampled_from([0, 3_000, 9_000])))
            if room is None:
                assert (space.free_pages, space.free_slots) == free
            else:
                kept[number] = record(extents=room[0], slots=room[1], sequence=number)
        space.audit(kept.values())
    assert space.failed_pages == failed
    again = Space(40, 30, kept.values())  # as a mount derives it: what failed is tried again
    again.audit(kept.values())
    assert again.free_pages == space.free_pages + failed
    assert again.free_slots == space.free_slots


def test_what_is_used_twice_is_found_out() -> None:
    one = record(slots=Extent(0, 1), extents=(Extent(0, 2),))
    other = record(slots=Extent(1, 1), extents=(Extent(1, 2),), sequence=2)
    with pytest.raises(AssertionError, match="used twice"):
        Space(10, 10, [one, other])
    space = Space(10, 10, [one])
    with pytest.raises(AssertionError, match="lost or in two places"):
        space.audit([])


# --- wear -------------------------------------------------------------------------------------------


def test_a_wear_budget_allows_its_rate_and_an_hours_burst() -> None:
    now_s = [0.0]
    wear = WearBudget(24 * 1_000, lambda: now_s[0])
    written = 0
    while wear.take(100):
        written += 100
    assert written == 1_000
    for hour in range(1, 49):
        now_s[0] = hour * 3_600.0
        while wear.take(100):
            written += 100
    assert written == 49 * 1_000
    now_s[0] += 864_000  # what was not used for days is not saved up
    assert sum(wear.take(100) for _ in range(100)) == 10


def test_an_object_larger_than_the_budget_goes_once_and_is_owed() -> None:
    now_s = [0.0]
    wear = WearBudget(24 * 1_000, lambda: now_s[0])
    assert wear.take(5_000)
    now_s[0] = 3 * 3_600.0
    assert not wear.take(1)
    now_s[0] = 5 * 3_600.0
    assert wear.take(1)


def test_without_a_budget_nothing_is_counted() -> None:
    wear = WearBudget(0, lambda: 0.0)
    assert all(wear.take(1 << 40) for _ in range(10))


# --- the choice of a device ---------------------------------------------------------------------------


class Stand:
    """A device as far as the choice goes."""

    def __init__(self, refusal: Refusal | None = None) -> None:
        self.refusal = refusal

    def refuses(self, size_bytes: int) -> Refusal | None:
        return self.refusal


def tier_of(*stands: Stand) -> NvmeTier:
    return NvmeTier(cast("list[NvmeDevice]", list(stands)))


def test_successive_objects_go_to_successive_devices_that_take_them() -> None:
    a, b, c = Stand(), Stand(Refusal.DEVICE_DOWN), Stand()
    tier = tier_of(a, b, c)
    assert [cast(Stand, tier.choose(1)) for _ in range(4)] == [a, c, a, c]
    b.refusal = None
    assert [cast(Stand, tier.choose(1)) for _ in range(3)] == [a, b, c]


@pytest.mark.parametrize(
    ("refusals", "expected"),
    [
        ([], Refusal.NO_ROOM),
        ([Refusal.DEVICE_DOWN, Refusal.NO_ROOM], Refusal.NO_ROOM),
        ([Refusal.DEVICE_DOWN, Refusal.BUSY], Refusal.BUSY),
        ([Refusal.DEVICE_DOWN], Refusal.DEVICE_DOWN),
    ],
)
def test_when_none_takes_it_the_reason_that_can_be_helped_is_said(refusals, expected) -> None:
    assert tier_of(*map(Stand, refusals)).choose(1) is expected
