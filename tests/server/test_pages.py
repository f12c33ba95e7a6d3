"""Pages that wait: the reply comes when the first key that is not in DRAM yet has changed."""

import asyncio

import pytest

from kvstore.core import MissReason
from kvstore.server.parking import Parking
from kvstore.server.waiting import first_to_come, pages_waiting
from kvstore.store import SpillMode
from kvstore.wire import AcquireAnswer, Miss, OnDisk, Pages, Resident, SentAnswer
from tests.store.test_tiers import Tiers
from tests.store.world import BOB, key_of, lease_of
from tests.support.answers import received


def asked(world: Tiers, names: str, wait_s: float) -> tuple[Pages, tuple[AcquireAnswer, ...]]:
    request = Pages(lease_of("lease"), tuple(map(key_of, names)), wait_s)
    return request, received(world.store.pages(BOB, request))


def waiting(
    world: Tiers, parking: Parking, names: str, wait_s: float
) -> "asyncio.Task[tuple[SentAnswer, ...]]":
    request, answers = asked(world, names, wait_s)
    work = pages_waiting(world.store, parking, lambda: world.now_s, BOB, request, answers)
    return asyncio.get_running_loop().create_task(work)


@pytest.fixture
def world() -> Tiers:
    made = Tiers(chunks=12, disk_chunks=40, spill=SpillMode.EAGER)
    made.put_all("abcdefghijklmnopqrst")
    made.carry()
    names = [name for name in "abcdefghijklmnopqrst" if made.where(name) == "n"]
    made.names = "".join(names[:4])  # type: ignore[attr-defined]
    made.acquire(BOB, made.names)  # type: ignore[attr-defined]
    return made


async def test_the_reply_comes_with_the_first_key_not_with_all(world) -> None:
    parking = Parking()
    task = waiting(world, parking, world.names, 20.0)
    await asyncio.sleep(0)
    assert len(world.carrier.jobs) >= 2
    world.carrier.carry(1)  # not the first one
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    world.carrier.carry(0)
    answers = await asyncio.wait_for(task, 5.0)
    assert isinstance(answers[0], Resident)
    assert len(answers) == len(world.names)


async def test_what_comes_before_the_wait_has_begun_is_not_waited_for(world) -> None:
    """Mutant: look before the wait has begun, and watch the key from then on."""
    task = waiting(world, Parking(), world.names, 20.0)
    world.carrier.carry(0)  # the task starts in the next turn of the loop
    assert isinstance((await asyncio.wait_for(task, 5.0))[0], Resident)


async def test_a_failure_of_the_first_key_ends_the_wait(world) -> None:
    task = waiting(world, Parking(), world.names, 20.0)
    await asyncio.sleep(0)
    world.carrier.carry(0, MissReason.DEVICE_DOWN)
    assert (await asyncio.wait_for(task, 5.0))[0] == Miss(MissReason.DEVICE_DOWN)


async def test_when_the_time_is_over_the_answer_is_what_is_true(world) -> None:
    task = waiting(world, Parking(), world.names, 0.05)
    await asyncio.sleep(0)
    world.now_s += 1.0
    answers = await asyncio.wait_for(task, 5.0)
    assert isinstance(answers[0], OnDisk)


def test_nothing_is_waited_for_behind_a_miss() -> None:
    disk, miss = OnDisk(b"g" * 8, 1, 0.0), Miss(MissReason.EXPIRED)  # type: ignore[arg-type]
    resident = Resident(b"g" * 8, (), 1, b"")  # type: ignore[arg-type]
    assert first_to_come((resident, disk, miss)) == 1
    assert first_to_come((resident, miss, disk)) is None
    assert first_to_come((resident, resident)) is None
