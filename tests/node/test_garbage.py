"""Collections are short and by the clock."""

import asyncio
import gc
import weakref

import pytest

from kvstore.node import garbage
from tests.support import wait_until_async


class Cell:
    """Something that can refer to itself."""

    def __init__(self) -> None:
        self.cell = self


@pytest.fixture
async def collecting():
    task = asyncio.create_task(garbage.collect_the_young())
    await wait_until_async(lambda: gc.get_freeze_count() > 0)
    yield
    task.cancel()
    await asyncio.wait([task])
    assert gc.isenabled()
    gc.unfreeze()


async def gone(cell: "weakref.ref[Cell]") -> None:
    await wait_until_async(lambda: cell() is None)


async def in_generation(cell: object, generation: int) -> None:
    await wait_until_async(lambda: any(each is cell for each in gc.get_objects(generation)))


async def test_young_cycles_are_found_however_much_is_freed(collecting) -> None:
    """Mutant: only when so many more containers were made than freed."""
    assert not gc.isenabled()
    for _ in range(3):
        await gone(weakref.ref(Cell()))


async def test_cycles_that_survive_their_youth_are_found_later(collecting, monkeypatch) -> None:
    """A connection lives for seconds. Mutant: only the youngest are ever looked at."""
    cells = [Cell()]
    await in_generation(cells[0], 1)
    monkeypatch.setattr(garbage, "MIDDLE_ROUNDS", 2)
    await gone(weakref.ref(cells.pop()))


async def test_many_survivors_are_left_alone_soon(collecting) -> None:
    """Else one collection would have seconds of them before it. Mutant: they wait for the clock."""
    before = gc.get_freeze_count()
    cells = [Cell() for _ in range(garbage.MIDDLE_CONTAINERS + 1)]
    await wait_until_async(lambda: gc.get_freeze_count() > before + len(cells))


async def test_what_is_old_is_never_looked_at(collecting) -> None:
    """A collection is as short as little was made since the last one. Mutant: all generations take turns."""
    full = gc.get_stats()[2]["collections"]
    for _ in range(3):
        await gone(weakref.ref(Cell()))
    assert gc.get_stats()[2]["collections"] == full
