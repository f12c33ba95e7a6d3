"""Power cuts at every moment at which something becomes durable, with every kind of remains.

One history puts, frees, reuses pages and slots, and mounts. It is cut at each moment; what comes back must be
exactly what had been reported, except for calls that were under way: those may have happened or not. Then the
story goes on with what was found, over the same pages, and the catalog is lost: the records alone must say
the same. So a record that was never reported, or was freed, must not come back later either.

Mutants that must die: no `begin`; `finish` before the records; frees not overwritten; a mount that leaves
doubtful slots; pages of frees reused before the commit.
"""

import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.core import Key
from kvstore.tiers.nvme.volume import Put
from tests.crash.devices import CrashDevice, Power, PowerCut
from tests.tiers.nvme.things import Driver, formatted_image, key_of, mounted_on, some_bytes

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
REMAINS = (None, 1, 2)  # seeds of what is left of unsynced writes


@dataclass
class Story:
    """What was reported, and what was under way when the power went."""

    reported: dict[Key, bytes] = field(default_factory=dict)
    putting: dict[Key, bytes] = field(default_factory=dict)
    freeing: dict[Key, bytes] = field(default_factory=dict)
    finished: bool = False

    def change(self, driver: Driver, puts: dict[str, bytes], frees: list[str]) -> None:
        """One group commit."""
        self.putting = {key_of(name): data for name, data in puts.items()}
        self.freeing = {key_of(name): self.reported.pop(key_of(name)) for name in frees}
        written: list[Put] = [driver.write(name, data) for name, data in puts.items()]
        driver.commit(written, [driver.records[key] for key in self.freeing])
        self.reported |= self.putting
        self.putting, self.freeing = {}, {}


def tell(story: Story, driver: Driver) -> Iterator[None]:
    """The history. 24 pages; an object takes three."""
    story.change(driver, {"a": some_bytes("a"), "b": some_bytes("b")}, [])
    yield
    story.change(driver, {"c": some_bytes("c")}, ["a"])
    yield
    story.change(driver, {f"d{n}": some_bytes(n) for n in range(4)}, [])
    yield
    story.change(driver, {}, ["b", "d1"])
    yield
    story.change(driver, {"a": some_bytes("a again"), "tail": some_bytes("tail", 768)}, [])
    yield
    story.change(driver, {}, ["c", "a"])
    story.finished = True


def run(image: bytes, catalogs: Path, cut_at: int | None) -> tuple[CrashDevice, Story]:
    device = CrashDevice(image, Power(cut_at))
    story = Story()
    driver = None
    try:
        driver = mounted_on(device, catalogs)
        for _ in tell(story, driver):
            pass
    except PowerCut:
        pass
    if driver is not None:
        driver.volume.close()
    return device, story


def check(driver: Driver, story: Story) -> dict[Key, bytes]:
    """What is there is right, and intact, and its space adds up; returns it."""
    found = {key: driver.read(record) for key, record in driver.records.items()}
    either = story.putting.items() | story.freeing.items()
    certain = set(story.reported.items()) - either
    assert certain <= found.items()
    assert found.items() <= certain | either
    used = [*driver.records.values(), *driver.namespaces.values()]
    driver.space.audit(used)
    return {key: data for key, data in found.items() if data is not None}


def go_on(driver: Driver, found: dict[Key, bytes]) -> dict[Key, bytes]:
    """More of the same on what is left: every free page is written, some objects are freed, then all reused."""
    story = Story(reported=dict(found))
    count = driver.space.free_pages // 3
    story.change(driver, {f"e{n}": some_bytes(("e", n)) for n in range(count)}, [])
    story.change(driver, {}, [f"e{n}" for n in range(0, count, 2)])
    story.change(driver, {"f": some_bytes("f")}, [])
    return story.reported


def moments(folder: Path) -> int:
    image = formatted_image()
    device, story = run(image, folder / "count", None)
    assert story.finished
    return device.power.moments


@pytest.fixture(scope="module")
def every_moment() -> Iterator[int]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield moments(Path(folder))


@pytest.fixture
def catalogs() -> Iterator[Path]:
    """A folder in memory: LMDB's transactions count here, not the time of the disk below it."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.mark.parametrize("catalog", ["kept", "lost"])
@pytest.mark.parametrize("remains", REMAINS)
def test_what_was_reported_is_there_after_a_cut_and_nothing_else(
    catalogs, every_moment, catalog, remains
) -> None:
    assert every_moment >= 50, "the history has become too short to say much"
    image = formatted_image()
    for cut_at in range(every_moment):
        folder = catalogs / str(cut_at)
        device, story = run(image, folder, cut_at)
        assert device.power.off
        rng = None if remains is None else random.Random(cut_at * 31 + remains)
        if catalog == "lost":
            shutil.rmtree(folder, ignore_errors=True)
        after = CrashDevice(device.after_cut(rng), Power())
        driver = mounted_on(after, folder)
        assert catalog == "lost" or not driver.notes, "a catalog that was kept need not be rebuilt"
        found = check(driver, story)
        records_alone_say(found, after.live, folder / "without")
        expected = go_on(driver, found)
        records_alone_say(expected, after.live, folder / "without")
        driver.volume.close()


def records_alone_say(expected: dict[Key, bytes], image: bytes | bytearray, catalogs: Path) -> None:
    """The catalog is lost later, when nothing is under way: exactly this must be found."""
    driver = mounted_on(CrashDevice(bytes(image), Power()), catalogs)
    assert {key: driver.read(record) for key, record in driver.records.items()} == expected
    driver.volume.close()
    shutil.rmtree(catalogs)


@pytest.mark.parametrize("remains", REMAINS)
def test_a_cut_while_mounting_or_rebuilding_loses_nothing(catalogs, every_moment, remains) -> None:
    """From a device that was cut in the middle of its history, with the catalog kept and lost."""
    image = formatted_image()
    for first_cut in range(10, every_moment, 7):
        device, story = run(image, catalogs / "kept", first_cut)
        left = device.after_cut(None if remains is None else random.Random(remains))
        for catalog in ("kept", "lost"):
            cut_at = 0
            while cut_mount(left, catalogs, catalog, cut_at, story, remains):
                cut_at += 1
            assert cut_at >= 6, "a mount has two moments for the catalog and four for the label"
        shutil.rmtree(catalogs / "kept")


def cut_mount(
    left: bytes, catalogs: Path, catalog: str, cut_at: int, story: Story, remains: int | None
) -> bool:
    """Cuts one mount, mounts again, checks; False when the mount ended before the cut."""
    folder = catalogs / "again"
    shutil.rmtree(folder, ignore_errors=True)
    if catalog == "kept":
        shutil.copytree(catalogs / "kept", folder)
    device = CrashDevice(left, Power(cut_at))
    with contextlib.suppress(PowerCut):
        mounted_on(device, folder).volume.close()
    rng = None if remains is None else random.Random(cut_at + remains)
    driver = mounted_on(CrashDevice(device.after_cut(rng), Power()), folder)
    assert catalog == "lost" or not driver.notes, "a catalog that was kept need not be rebuilt"
    check(driver, story)
    driver.volume.close()
    return device.power.off


def test_a_store_that_keeps_nothing_does_not_pass(catalogs, every_moment) -> None:
    """The check itself checks: an empty device is not what was reported."""
    _, story = run(formatted_image(), catalogs / "a", every_moment - 1)
    driver = mounted_on(CrashDevice(formatted_image(), Power()), catalogs / "b")
    with pytest.raises(AssertionError):
        check(driver, story)
    driver.volume.close()
