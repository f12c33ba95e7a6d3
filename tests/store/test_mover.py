"""Suspect: a doubted copy is verified beside the loop, pinned meanwhile, and dropped exactly if it is bad.

Mutants that must fail here: the verdict turned round; only the first run is looked at; only the first extent is; the
caller's cancellation ends the verification.
"""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvstore.core import MissReason, checksums, limits
from kvstore.store import Mover
from kvstore.store import mover as mover_module
from kvstore.store.reading import Check
from kvstore.tiers import Arena
from kvstore.wire import ClientId, Generation, Granted, Miss, Pages, Resident, Suspect
from tests.store.world import (
    ANN,
    BOB,
    CAT,
    CHUNK_BYTES,
    CHUNK_PAGES,
    MANIFEST,
    NAMESPACE,
    PAGE_BYTES,
    TOKEN_BYTES,
    World,
    key_of,
    lease_of,
)
from tests.support import wait_until_async

CONTENT = bytes(range(256)) * (CHUNK_BYTES // 256)
RUN_BYTES = CHUNK_BYTES // MANIFEST.geometry.num_runs


class Bytes(World):
    """A world with an arena, in which a chunk lies in scattered pages, so that runs go on in other extents."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena.page_count)
        self.arena = arena
        names = [f"hole{number}" for number in range(arena.page_count)]
        for name in names:
            self.put(ANN, [name], TOKEN_BYTES)
        self.drop(names[::2])

    def write(self, name: str) -> Resident:
        """Stores CONTENT, and leases it to Bob."""
        (grant,) = self.reserve(ANN, name)
        assert isinstance(grant, Granted)
        assert len(grant.extents) == CHUNK_PAGES, "scattered"
        left = memoryview(CONTENT)
        for start, count in grant.extents:
            part, left = left[: count * PAGE_BYTES], left[count * PAGE_BYTES :]
            self.arena.view(start * PAGE_BYTES, len(part))[:] = part
        table = checksums(memoryview(CONTENT), MANIFEST.geometry.runs(CHUNK_BYTES))
        self.commit(ANN, {name: grant}, table)
        (resident,) = self.acquire(BOB, name)
        assert isinstance(resident, Resident)
        return resident

    def flip(self, resident: Resident, at: int) -> None:
        start = [page for first, count in resident.extents for page in range(first, first + count)][
            at // PAGE_BYTES
        ]
        self.arena.buffer[start * PAGE_BYTES + at % PAGE_BYTES] ^= 1


@pytest.fixture
def world() -> Iterator[Bytes]:
    arena = Arena.create(24 * PAGE_BYTES, PAGE_BYTES, lock=False)
    yield Bytes(arena)
    arena.close()


@pytest.fixture
def mover(world: Bytes) -> Iterator[Mover]:
    made = Mover(world.store, world.arena)
    yield made
    made.close()


def doubt(resident: Resident, name: str = "a", lease: str = "lease") -> Suspect:
    return Suspect(NAMESPACE, key_of(name), resident.generation, lease_of(lease))


async def test_a_sound_copy_stays(world: Bytes, mover: Mover) -> None:
    resident = world.write("a")
    assert await mover.suspect(BOB, doubt(resident)) is False
    assert world.acquire(CAT, "a") == [resident]
    assert world.store.snapshot().totals.verified == 1
    assert world.store.snapshot().totals.bad_copies == 0


EDGES = sorted(
    {edge + by for edge in range(0, CHUNK_BYTES + 1, RUN_BYTES) for by in (-1, 0)}
    | {PAGE_BYTES - 1, PAGE_BYTES}
)


@pytest.mark.parametrize("at", [edge for edge in EDGES if 0 <= edge < CHUNK_BYTES])
async def test_a_bit_that_flipped_anywhere_is_found(world: Bytes, mover: Mover, at: int) -> None:
    resident = world.write("a")
    free_pages = world.free_pages
    world.flip(resident, at)
    world.dirty.clear()
    assert await mover.suspect(BOB, doubt(resident)) is True
    assert world.acquire(CAT, "a") == [Miss(MissReason.BAD_COPY)]
    assert world.store.pages(BOB, Pages(lease_of("lease"), (key_of("a"),))) == (Miss(MissReason.BAD_COPY),)
    assert world.dirty[0] == key_of("a")
    assert world.store.snapshot().totals.bad_copies == 1
    assert world.free_pages == free_pages, "leased pages stay until the lease ends"
    world.release(BOB)
    assert world.free_pages == free_pages + CHUNK_PAGES


async def test_a_lease_that_ends_in_the_next_message_does_not_save_a_bad_copy(
    world: Bytes, mover: Mover
) -> None:
    """Readers doubt a copy and give it back in one breath. Mutant: pin it when the verification begins."""
    resident = world.write("a")
    world.flip(resident, 0)
    verdict = mover.suspect(BOB, doubt(resident))
    world.release(BOB)
    assert await verdict is True
    assert world.acquire(CAT, "a") == [Miss(MissReason.BAD_COPY)]


async def test_a_bad_key_may_be_stored_anew_at_once(world: Bytes, mover: Mover) -> None:
    resident = world.write("a")
    world.flip(resident, 0)
    await mover.suspect(BOB, doubt(resident))
    (grant,) = world.reserve(CAT, "a")
    assert isinstance(grant, Granted)
    assert set(grant.extents).isdisjoint(resident.extents)


@pytest.mark.parametrize(
    ("client", "lease", "generation"), [(CAT, "lease", None), (BOB, "other", None), (BOB, "lease", bytes(8))]
)
async def test_only_a_leased_copy_is_verified(
    world: Bytes, mover: Mover, client: ClientId, lease: str, generation: bytes | None
) -> None:
    """Or anybody could keep the node busy hashing."""
    resident = world.write("a")
    world.flip(resident, 0)
    request = Suspect(NAMESPACE, key_of("a"), Generation(generation or resident.generation), lease_of(lease))
    assert await mover.suspect(client, request) is False
    assert world.store.snapshot().totals.verified == 0


class Gate:
    """Holds verifications back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = 0
        self.opened = threading.Event()
        self.is_sound = mover_module.is_sound
        monkeypatch.setattr(mover_module, "is_sound", self.wait)

    def wait(self, arena: Arena, check: Check) -> bool:
        self.entered += 1
        assert self.opened.wait(10)
        return self.is_sound(arena, check)


async def test_a_copy_being_verified_stays_although_its_lease_ends(
    world: Bytes, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    resident = world.write("a")
    verdict = asyncio.ensure_future(mover.suspect(BOB, doubt(resident)))
    await wait_until_async(lambda: gate.entered)
    world.release(BOB)
    world.drop("a")
    free_pages = world.free_pages
    gate.opened.set()
    assert await verdict is False
    world.store.audit()
    assert world.free_pages == free_pages + CHUNK_PAGES


async def test_a_verdict_counts_although_the_caller_has_gone(
    world: Bytes, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    resident = world.write("a")
    world.flip(resident, 0)
    verdict = asyncio.ensure_future(mover.suspect(BOB, doubt(resident)))
    await wait_until_async(lambda: gate.entered)
    verdict.cancel()
    with pytest.raises(asyncio.CancelledError):
        await verdict
    gate.opened.set()
    await wait_until_async(lambda: world.store.snapshot().totals.bad_copies)
    assert world.acquire(CAT, "a") == [Miss(MissReason.BAD_COPY)]


async def test_two_doubts_of_one_copy_drop_it_once(
    world: Bytes, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    resident = world.write("a")
    world.flip(resident, 0)
    verdicts = asyncio.gather(*[mover.suspect(BOB, doubt(resident)) for _ in range(2)])
    await wait_until_async(lambda: gate.entered == 2)
    gate.opened.set()
    assert await verdicts == [True, True]
    assert world.store.snapshot().totals.bad_copies == 1
    world.store.audit()


async def test_verifications_are_bounded(world: Bytes, mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SUSPECTS_MAX", 1)
    gate = Gate(monkeypatch)
    resident = world.write("a")
    world.flip(resident, 0)
    verdict = asyncio.ensure_future(mover.suspect(BOB, doubt(resident)))
    await wait_until_async(lambda: gate.entered)
    assert await mover.suspect(BOB, doubt(resident)) is False
    gate.opened.set()
    assert await verdict is True
