"""The porter with real devices' code on a device that fails: what a node does while its NVMe is in trouble.

Mutants that must fail here: pages of a promotion that was given up are free at once; a device that is down is asked
all the same; the deadline of a promotion is not kept; a bad copy is handed out.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.core import MissReason, checksums
from kvstore.policy import PrefixLru
from kvstore.store import Porter, SpillMode, Store, Tiering
from kvstore.tiers import Arena, FileDevice, NvmeConfig, NvmeDevice, NvmeTier, create_file, format_device
from kvstore.wire import Acquire, CommitItem, Granted, Miss, OnDisk, Pages, Release, Resident
from tests.store.world import ANN, BOB, CHUNK_BYTES, MANIFEST, NAMESPACE, PAGE_BYTES, items, key_of, lease_of
from tests.support import wait_until_async
from tests.tiers.nvme.faults import Faulty

DEADLINE_S = 0.3


class House:
    """A store with an arena, a porter, and one device on a real file, which may fail."""

    def __init__(
        self, folder: Path, pages: int, spill: SpillMode = SpillMode.EAGER, deadline_s: float = 20.0
    ) -> None:
        path = str(folder / "device")
        if not Path(path).exists():
            create_file(path, 2 << 20)
            device = FileDevice.open(path)
            format_device(device, "n", PAGE_BYTES)
            device.close()
        self.opened: list[Faulty] = []
        self.broken = False
        config = NvmeConfig(
            path=path,
            node="n",
            catalogs=folder / "catalogs",
            deadline_s=deadline_s,
            watch_s=0.01,
            probe_s=0.02,
        )
        self.device = NvmeDevice(config, open_device=self.open, on_found=self._found)
        tier = NvmeTier([self.device])
        self.tier = tier
        self.arena = Arena.create(pages * PAGE_BYTES, PAGE_BYTES, huge_pages=False, lock=False)
        tiering = Tiering(tier, spill)
        self.store = Store(self.arena.page_count, PAGE_BYTES, PrefixLru(), time.monotonic, tiering=tiering)
        self.porter = Porter(self.store, self.arena, tier, DEADLINE_S)

    def _found(self, device: NvmeDevice) -> None:
        self.porter.found(device)

    def open(self, path: str) -> Faulty:
        self.opened.append(Faulty(FileDevice.open(path)))
        if self.broken:
            self.opened[-1].down()
        return self.opened[-1]

    def break_down(self) -> None:
        """The device fails, however often it is opened anew."""
        self.broken = True
        self.faults.down()

    def mend(self) -> None:
        self.broken = False
        self.faults.heal()

    @property
    def faults(self) -> Faulty:
        return self.opened[-1]

    async def start(self) -> None:
        await self.tier.start()
        await self.porter.settled()
        self.store.open_namespace(NAMESPACE, MANIFEST.encode())

    async def stop(self) -> None:
        self.mend()
        await self.porter.stop(5.0)
        self.store.audit()
        self.arena.close()

    def put(self, name: str, seed: int) -> bytes:
        (grant,) = self.store.reserve(ANN, NAMESPACE, items(name), 30.0)
        assert isinstance(grant, Granted), grant
        content = bytes((seed + at) % 251 for at in range(CHUNK_BYTES))
        left = memoryview(content)
        for start, count in grant.extents:
            part, left = left[: count * PAGE_BYTES], left[count * PAGE_BYTES :]
            self.arena.view(start * PAGE_BYTES, len(part))[:] = part
        table = checksums(memoryview(content), MANIFEST.geometry.runs(CHUNK_BYTES))
        self.store.commit(ANN, NAMESPACE, [CommitItem(key_of(name), grant.generation, table)])
        return content

    def acquire(self, name: str) -> object:
        return self.store.acquire(BOB, Acquire(NAMESPACE, (key_of(name),), lease_of(name), 30.0))[0]

    def pages(self, name: str, since_s: float | None = None) -> object:
        return self.store.pages(BOB, Pages(lease_of(name), (key_of(name),)), since_s)[0]

    def read(self, resident: Resident) -> bytes:
        parts = [bytes(self.arena.view(at * PAGE_BYTES, n * PAGE_BYTES)) for at, n in resident.extents]
        return b"".join(parts)[: resident.size_bytes]

    async def fill(self, names: str) -> dict[str, bytes]:
        """Stores objects one after the other; those that DRAM has no room for are on NVMe."""
        contents = {}
        for seed, name in enumerate(names):
            contents[name] = self.put(name, seed)
            await self.porter.settled()
        return contents

    def on_disk(self) -> list[str]:
        views, _ = self.store.objects(1000)
        return [bytes.fromhex(view.key).decode().rstrip(".") for view in views if set(view.tiers) == {"nvme"}]


def overwrite(path: str, offset: int) -> None:
    """A page of zeros, past the node."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        file.write(bytes(PAGE_BYTES))


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path, pages=12)
    await made.start()
    yield made
    await made.stop()


async def test_what_comes_back_is_what_was_stored(house: House) -> None:
    contents = await house.fill("abcdefgh")
    names = house.on_disk()
    assert len(names) >= 4
    for name in names:
        assert isinstance(house.acquire(name), OnDisk)
        house.pages(name)
        await house.porter.settled()
        resident = house.pages(name)
        assert isinstance(resident, Resident)
        assert house.read(resident) == contents[name]
        house.store.release(BOB, Release(lease_of(name)))
    house.store.audit()


async def test_a_device_that_fails_costs_its_objects_until_it_is_back(house: House) -> None:
    contents = await house.fill("abcdefgh")
    name = house.on_disk()[0]
    house.acquire(name)
    failing = house.faults
    house.break_down()
    asked_s = time.monotonic()
    house.pages(name)
    await wait_until_async(lambda: house.pages(name, asked_s) == Miss(MissReason.DEVICE_DOWN))
    assert failing.hits
    in_dram = next(name for name in contents if name not in house.on_disk())
    assert isinstance(house.acquire(in_dram), Resident), "DRAM goes on"
    for fresh in "xyz":
        house.store.tick()
        house.put(fresh, 7)
    await house.porter.settled()
    house.mend()
    await wait_until_async(lambda: house.device.up)
    house.pages(name)
    await wait_until_async(lambda: isinstance(house.pages(name), Resident))
    resident = house.pages(name)
    assert isinstance(resident, Resident)
    assert house.read(resident) == contents[name]


async def test_a_read_that_hangs_is_a_miss_at_its_deadline_and_keeps_its_pages_until_it_ends(
    house: House,
) -> None:
    await house.fill("abcdefgh")
    name = house.on_disk()[0]
    house.acquire(name)
    house.faults.gate.clear()
    began_s = time.monotonic()
    house.pages(name)
    await wait_until_async(lambda: house.pages(name, began_s) == Miss(MissReason.PROMOTE_DEADLINE))
    assert time.monotonic() - began_s < DEADLINE_S + 5.0
    assert house.faults.hanging
    assert house.store._listing.dram.landing_pages > 0
    house.store.audit()
    house.faults.heal()
    await house.porter.settled()
    assert house.store._listing.dram.landing_pages == 0
    house.pages(name)
    await wait_until_async(lambda: isinstance(house.pages(name), Resident))


async def test_a_copy_that_was_damaged_is_a_miss_and_goes(house: House) -> None:
    await house.fill("abcdefgh")
    name = house.on_disk()[0]
    record = house.device.records[key_of(name)]
    label = house.device._objects.volume.label  # type: ignore[union-attr]
    offset = label.data_offset + record.extents[0].start_page * PAGE_BYTES
    overwrite(house.device.config.path, offset)
    asked_s = time.monotonic()
    house.acquire(name)
    house.pages(name)
    await wait_until_async(lambda: house.pages(name, asked_s) == Miss(MissReason.BAD_COPY))
    assert house.store.snapshot().totals.bad_copies == 1
    assert house.store.tier_of(key_of(name)) is None
    assert key_of(name) not in house.device.records


async def test_what_is_only_in_dram_is_flushed_at_the_end_and_found_at_the_start(tmp_path: Path) -> None:
    first = House(tmp_path, pages=60, spill=SpillMode.EVICT)
    await first.start()
    contents = {name: first.put(name, seed) for seed, name in enumerate("abcdef")}
    await asyncio.sleep(0)
    assert not first.device.records
    await first.stop()
    await assert_found(tmp_path, contents)


@pytest.mark.parametrize("slow", [False, True])
async def test_a_device_that_fails_while_a_node_stops_is_waited_for(tmp_path: Path, slow: bool) -> None:
    """It fails, or is so slow that its breaker opens, and answers again a moment later: nothing is lost.

    Mutants: what was refused once is not offered again; a spill that was under way, and fails, costs its object.
    """
    house = House(tmp_path, pages=18, spill=SpillMode.EVICT, deadline_s=0.2)
    await house.start()
    contents = {name: house.put(name, seed) for seed, name in enumerate("abcdef")}
    house.faults.gate.clear() if slow else house.break_down()
    house.store.reserve(
        BOB, NAMESPACE, items("x"), 30.0
    )  # there is no room: one is on its way, and would leave
    assert len(house.store.moving) == 1
    stopping = asyncio.ensure_future(house.porter.stop(20.0))
    await wait_until_async(lambda: house.device.stats().trips > 0)
    house.mend()
    await stopping
    assert sum(each.hits for each in house.opened) > 0
    house.arena.close()
    await assert_found(tmp_path, contents)


async def test_what_cannot_be_flushed_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    house = House(tmp_path, pages=60, spill=SpillMode.EVICT)
    await house.start()
    for seed, name in enumerate("abcdef"):
        house.put(name, seed)
    house.break_down()
    await house.porter.stop(0.3)
    said = "6 objects that were only in DRAM could not be flushed to NVMe: NVMe takes nothing (device_down)"
    assert said in caplog.text
    house.arena.close()


async def assert_found(folder: Path, contents: dict[str, bytes]) -> None:
    """A node that starts finds all of it, and serves it."""
    house = House(folder, pages=60)
    await house.start()
    assert sorted(house.on_disk()) == sorted(contents)
    assert house.store.snapshot().totals.found == len(contents)
    for name, content in contents.items():
        house.acquire(name)
        house.pages(name)
        await house.porter.settled()
        resident = house.pages(name)
        assert isinstance(resident, Resident)
        assert house.read(resident) == content
    await house.stop()
