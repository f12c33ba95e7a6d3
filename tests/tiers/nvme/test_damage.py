"""k of n: what is damaged is a miss and counted, all else is there, and no wrong byte is ever handed out.

On real files, through the whole device. What a damaged object is, the damage says: the objects that have a
byte in what was damaged.
"""

import os
import random
import shutil
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.core import Corrupt, Key
from kvstore.tiers.nvme.device import FileDevice, aligned
from kvstore.tiers.nvme.mounting import create_file, format_device
from kvstore.tiers.nvme.nvme_device import NvmeConfig, NvmeDevice
from kvstore.tiers.nvme.pieces import io_bytes
from kvstore.tiers.nvme.records import SLOT_BYTES, Record
from kvstore.tiers.nvme.scrub import scrub
from tests.support import wait_until_async
from tests.tiers.nvme.things import (
    CHUNK_BYTES,
    MANIFEST,
    NAMESPACE,
    NODE,
    PAGE_BYTES,
    key_of,
    memory_of,
    new_object,
    some_bytes,
)

COUNT = 20


class Disk:
    """A device file with objects on it, and what they hold."""

    def __init__(self, folder: Path, page_bytes: int = PAGE_BYTES) -> None:
        self.path = folder / "device"
        self.catalogs = folder / "catalogs"
        create_file(str(self.path), 4 << 20)
        device = FileDevice.open(str(self.path))
        self.label = format_device(device, NODE, page_bytes)
        device.close()
        self.data: dict[Key, bytes] = {}
        self.records: dict[Key, Record] = {}

    @asynccontextmanager
    async def open(self):
        config = NvmeConfig(path=str(self.path), node=NODE, catalogs=self.catalogs)
        device = NvmeDevice(config)
        await device.start()
        device.open_namespace(NAMESPACE, MANIFEST.encode())
        yield device
        device.audit()
        await device.stop()

    async def fill(self) -> None:
        async with self.open() as device:
            for number in range(COUNT):
                size = CHUNK_BYTES if number % 3 else CHUNK_BYTES // 2
                await self.put(device, number, some_bytes(number, size))

    async def put(self, device: NvmeDevice, name: object, data: bytes) -> None:
        record = await device.put(new_object(name, data), [memory_of(data)])
        assert isinstance(record, Record)
        self.data[record.key] = data
        self.records[record.key] = record

    def page_offset(self, page: int) -> int:
        return self.label.data_offset + page * PAGE_BYTES

    def patch(self, offset: int, data: bytes) -> bytes:
        """Overwrites bytes behind everybody's back; what was there."""
        with self.path.open("r+b") as file:
            file.seek(offset)
            before = file.read(len(data))
            file.seek(offset)
            file.write(data)
            os.fsync(file.fileno())
        return before

    def some(self, rng: random.Random, count: int) -> list[Record]:
        return rng.sample(list(self.records.values()), count)


@pytest.fixture
async def disk(tmp_path) -> Disk:
    disk = Disk(tmp_path)
    await disk.fill()
    return disk


async def hits(device: NvmeDevice) -> dict[Key, bytes]:
    """What is handed out; what does not verify is deleted, as the store does."""
    found = {}
    for record in list(device.records.values()):
        memory = aligned(io_bytes(record.size_bytes))
        try:
            table = await device.get(record, [memory]).table
        except Corrupt:
            device.delete(record)
            continue
        assert table == new_object("any", bytes(memory[: record.size_bytes])).table
        found[record.key] = bytes(memory[: record.size_bytes])
    return found


# Each damages k objects and says which.


def flip_bits(disk: Disk, rng: random.Random) -> set[Key]:
    chosen = disk.some(rng, 5)
    for record in chosen:
        at = rng.randrange(record.size_bytes)
        page, within = divmod(at, PAGE_BYTES)
        pages = [extent.start_page + n for extent in record.extents for n in range(extent.page_count)]
        offset = disk.page_offset(pages[page]) + within
        (before,) = disk.patch(offset, b"\0")
        disk.patch(offset, bytes([before ^ (1 << rng.randrange(8))]))
    return {record.key for record in chosen}


def zero_pages(disk: Disk, rng: random.Random) -> set[Key]:
    chosen = disk.some(rng, 4)
    for record in chosen:
        disk.patch(disk.page_offset(rng.choice(record.extents).start_page), bytes(PAGE_BYTES))
    return {record.key for record in chosen}


def swap_pages(disk: Disk, rng: random.Random) -> set[Key]:
    one, other = disk.some(rng, 2)
    places = [disk.page_offset(record.extents[0].start_page) for record in (one, other)]
    first = disk.patch(places[0], bytes(PAGE_BYTES))
    second = disk.patch(places[1], first)
    disk.patch(places[0], second)
    return {one.key, other.key}


def swap_whole_objects(disk: Disk, rng: random.Random) -> set[Key]:
    """Bytes that are sound, of another key."""
    chunks = [record for record in disk.records.values() if record.size_bytes == CHUNK_BYTES]
    one, other = rng.sample(chunks, 2)
    for (page, count), (other_page, _) in zip(one.extents, other.extents, strict=True):
        assert len(one.extents) == 1
        size = count * PAGE_BYTES
        first = disk.patch(disk.page_offset(page), bytes(size))
        disk.patch(disk.page_offset(page), disk.patch(disk.page_offset(other_page), first))
    return {one.key, other.key}


Damage = Callable[[Disk, random.Random], set[Key]]
DAMAGES: tuple[Damage, ...] = (flip_bits, zero_pages, swap_pages, swap_whole_objects)


@pytest.mark.parametrize("catalog", ["kept", "lost"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_exactly_the_others_come_back(disk, damage: Damage, catalog) -> None:
    damaged = damage(disk, random.Random(5))
    assert damaged
    if catalog == "lost":
        shutil.rmtree(disk.catalogs)
    async with disk.open() as device:
        assert set(device.records) == set(disk.data)
        found = await hits(device)
        assert found == {key: data for key, data in disk.data.items() if key not in damaged}
        assert device.stats().counts.bad_copies == len(damaged)
    async with disk.open() as device:
        assert await hits(device) == found
        assert device.stats().counts.bad_copies == 0


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_scrub_finds_exactly_what_is_damaged(disk, damage: Damage) -> None:
    damaged = damage(disk, random.Random(6))
    async with disk.open() as device:
        seen = [scrubbed async for scrubbed in scrub(device, 1e9)]
        assert {scrubbed.record.key for scrubbed in seen} == set(disk.data)
        assert {scrubbed.record.key for scrubbed in seen if scrubbed.error} == damaged


async def test_damaged_records_cost_nothing_while_the_catalog_is_there_and_only_themselves_without(
    disk,
) -> None:
    rng = random.Random(7)
    damaged = disk.some(rng, 6)
    for number, record in enumerate(damaged):
        offset = disk.label.slot_offset(record.slots.start_page)
        if number % 2:
            disk.patch(offset, bytes(SLOT_BYTES))
        else:
            (before,) = disk.patch(offset + rng.randrange(300), b"\0")
            disk.patch(offset + 250, bytes([before ^ 0xFF]))
    async with disk.open() as device:
        assert await hits(device) == disk.data
    shutil.rmtree(disk.catalogs)
    async with disk.open() as device:
        gone = {record.key for record in damaged}
        assert await hits(device) == {key: data for key, data in disk.data.items() if key not in gone}


@pytest.mark.parametrize("place", ["its own slot", "a free slot"])
async def test_a_stale_record_never_comes_back(disk, place) -> None:
    """A record of a deleted object, put back where it was, or copied elsewhere: its pages are others' by now."""
    old = next(record for record in disk.records.values() if record.size_bytes == CHUNK_BYTES)
    stale = disk.patch(disk.label.slot_offset(old.slots.start_page), bytes(SLOT_BYTES))
    disk.patch(disk.label.slot_offset(old.slots.start_page), stale)
    async with disk.open() as device:
        free_pages = device.free_pages
        device.delete(device.records[old.key])
        del disk.data[old.key]
        await wait_until_async(lambda: device.free_pages == free_pages + 3)
        await disk.put(device, "new", some_bytes("new"))
        new = device.records[key_of("new")]
        assert set(new.extents) & set(old.extents), "the test wants the pages to be reused"
        used = {record.slots.start_page for record in device.records.values()}
    slot = old.slots.start_page if place == "its own slot" else max(used) + 5
    disk.patch(disk.label.slot_offset(slot), stale)
    shutil.rmtree(disk.catalogs)
    async with disk.open() as device:
        found = await hits(device)
    if place == "its own slot" and new.slots == old.slots:
        del disk.data[new.key]  # its record was overwritten; the old one has no bytes that match
    assert found == disk.data


@pytest.mark.parametrize("catalog", ["kept", "lost"])
async def test_of_a_file_cut_in_half_all_that_is_inside_is_served(tmp_path, catalog) -> None:
    disk = Disk(tmp_path, page_bytes=8 * PAGE_BYTES)
    async with disk.open() as device:
        number = 0
        while device.refuses(CHUNK_BYTES) is None:
            await disk.put(device, number, some_bytes(number))
            number += 1
    os.truncate(disk.path, disk.path.stat().st_size // 2)
    pages = (disk.path.stat().st_size - disk.label.data_offset) // disk.label.page_bytes
    inside = {
        record.key
        for record in disk.records.values()
        if all(start + count <= pages for start, count in record.extents)
    }
    assert len(disk.data) > len(inside) > len(disk.data) // 3
    if catalog == "lost":
        shutil.rmtree(disk.catalogs)
    for _ in range(2):
        async with disk.open() as device:
            assert await hits(device) == {key: disk.data[key] for key in inside}
            assert device.stats().pages == pages


# The catalog: set aside, rebuilt, never a crash loop.


def cut_catalog(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty_catalog(file: Path) -> None:
    os.truncate(file, 0)


def garbage_everywhere(file: Path) -> None:
    file.write_bytes(random.Random(1).randbytes(file.stat().st_size))


def garbage_behind_the_first_pages(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for at in range(8_192, len(data) - 64, 4_096):
        data[at + 2_048 : at + 4_000] = b"\x5a" * 1_952  # values, at the ends of pages
    file.write_bytes(data)


@pytest.mark.parametrize(
    "harm", [cut_catalog, empty_catalog, garbage_everywhere, garbage_behind_the_first_pages]
)
async def test_a_damaged_catalog_is_set_aside_and_all_is_back(disk, harm, caplog) -> None:
    (folder,) = disk.catalogs.iterdir()
    harm(folder / "data.mdb")
    async with disk.open() as device:
        assert await hits(device) == disk.data
    assert "was made anew from the records" in caplog.text
    assert f"{COUNT} objects" in caplog.text
    assert folder.with_name(f"{folder.name}.damaged").is_dir()
    caplog.clear()
    async with disk.open() as device:
        assert await hits(device) == disk.data
    assert not caplog.text


async def test_a_start_that_ended_the_process_while_reading_the_catalog_is_the_last_one(disk, caplog) -> None:
    (folder,) = disk.catalogs.iterdir()
    (folder / "being-read").touch()
    async with disk.open() as device:
        assert await hits(device) == disk.data
    assert "was being read when the process ended" in caplog.text
    assert not (folder / "being-read").exists()


async def test_a_catalog_from_a_backup_is_not_believed(disk, tmp_path, caplog) -> None:
    shutil.copytree(disk.catalogs, tmp_path / "backup")
    async with disk.open() as device:
        first = next(iter(device.records.values()))
        device.delete(first)
        await disk.put(device, "new", some_bytes("new"))
        del disk.data[first.key]
    shutil.rmtree(disk.catalogs)
    shutil.move(tmp_path / "backup", disk.catalogs)
    async with disk.open() as device:
        assert await hits(device) == disk.data
    assert "is not that of the device's last use" in caplog.text
