"""A device that fails, hangs, vanishes, returns, or returns as another one. Every fault proves that it hit."""

import asyncio

import pytest

from kvstore.core import Corrupt
from kvstore.tiers.nvme.base import Refusal
from kvstore.tiers.nvme.device import DeviceDown, DeviceRefused, aligned
from kvstore.tiers.nvme.mounting import mount
from kvstore.tiers.nvme.pieces import io_bytes
from kvstore.tiers.nvme.volume import PagesFailed
from tests.support import wait_until_async
from tests.tiers.nvme.things import (
    CHUNK_BYTES,
    NAMESPACE,
    NODE,
    formatted_image,
    key_of,
    memory_of,
    new_object,
    some_bytes,
)


def memory() -> memoryview:
    return aligned(io_bytes(CHUNK_BYTES))


async def back(rig, trips: int = 1) -> None:
    await wait_until_async(lambda: rig.device.health.up, what="the device to be taken back")
    assert rig.device.health.trips == trips
    rig.device.audit()


@pytest.mark.parametrize("text", ["EIO", "ENOSPC", "ENODEV", "short read"])
async def test_when_the_device_fails_calls_fail_at_once_until_it_is_back(rig, text) -> None:
    device = await rig.start()
    record = await rig.put("x")
    rig.on_open = lambda fresh: fresh.down(text)  # a new descriptor is no better
    faults = rig.faults
    faults.down(text)
    with pytest.raises(DeviceDown, match=text):
        await device.get(record, [memory()]).table
    assert faults.hits
    assert not device.health.up
    with pytest.raises(DeviceDown, match=text):
        device.get(record, [memory()])
    assert device.refuses(CHUNK_BYTES) is Refusal.DEVICE_DOWN
    assert device.free_pages == 0
    assert device.stats().reason == text

    rig.on_open = lambda fresh: None
    await back(rig)
    assert device.records == {record.key: record}
    out = memory()
    await device.get(record, [out]).table
    assert bytes(out) == some_bytes("x")


async def test_the_same_descriptor_is_used_again_when_it_works_again(rig) -> None:
    """What the kernel does after a link was down: the device never went away."""
    device = await rig.start()
    record = await rig.put("x")
    rig.faults.down()
    with pytest.raises(DeviceDown):
        await device.get(record, [memory()]).table
    rig.faults.heal()
    await back(rig)
    assert len(rig.opened) == 1 or rig.opened[0].closed


@pytest.mark.parametrize("moment", ["data", "record", "first sync", "second sync"])
async def test_a_put_that_fails_leaves_nothing_visible_and_its_pages_come_back(rig, moment) -> None:
    device = await rig.start()
    await rig.put("kept")
    free_pages = device.free_pages
    data_offset = device._objects.volume.label.data_offset
    faults = rig.faults
    rig.on_open = lambda fresh: fresh.down()
    syncs = iter([None, DeviceDown("EIO")])

    def failing(offset: int) -> DeviceDown | None:
        if (offset >= data_offset) == (moment == "data"):
            faults.down()
            return DeviceDown("EIO")
        return None

    if moment in ("data", "record"):
        faults.writes = failing
    elif moment == "first sync":
        faults.syncs = lambda: DeviceDown("EIO")
    else:
        faults.syncs = lambda: next(syncs)
    with pytest.raises(DeviceDown):
        await rig.put("x")
    assert faults.hits
    assert list(device.records) == [key_of("kept")]
    device.audit()
    faults.heal()
    rig.on_open = lambda fresh: None
    await back(rig)
    assert device.free_pages == free_pages
    again = await rig.put("x")
    await device.stop()
    rig.device = rig.make()
    await rig.device.start()
    assert set(rig.device.records.values()) == {again, *device.records.values()}
    rig.device.audit()


async def test_a_call_that_hangs_opens_the_breaker_and_keeps_a_thread_only(rig) -> None:
    device = await rig.start()
    record = await rig.put("x")
    faults = rig.faults
    faults.gate.clear()
    gets = [device.get(record, [memory()]) for _ in range(10)]
    await wait_until_async(lambda: faults.hanging == device.config.threads)
    rig.wait_for(0.1)
    with pytest.raises(DeviceDown, match="did not answer"):
        await gets[0].table
    rig.wait_for(30.0)
    for get in gets[1:]:
        with pytest.raises(DeviceDown):
            await get.table
    assert faults.hanging == device.config.threads
    await wait_until_async(lambda: sum(get.ended.done() for get in gets) > 0, what="those that had no thread")
    assert not all(get.ended.done() for get in gets), (
        "memory is said to be free while a thread may still write"
    )
    faults.gate.set()
    await back(rig)
    await asyncio.wait([get.ended for get in gets])
    assert device._objects._reading == {}


async def test_a_commit_that_hangs_and_then_succeeds_is_undone(rig) -> None:
    """Its caller was told that it failed: so it must not be there later."""
    device = await rig.start()
    await rig.put("kept")
    free_pages = device.free_pages
    faults = rig.faults
    faults.syncs = faults.gate.clear
    putting = asyncio.create_task(rig.put("x"))
    await wait_until_async(lambda: not faults.gate.is_set())
    rig.wait_for(0.1)
    with pytest.raises(DeviceDown, match="did not answer"):
        await putting
    rig.wait_for(30.0)
    device.audit()
    faults.heal()
    await back(rig)
    assert list(device.records) == [key_of("kept")]
    assert device.free_pages == free_pages
    await device.stop()
    rig.device = rig.make()
    await rig.device.start()
    assert list(rig.device.records) == [key_of("kept")]


async def test_deletes_made_while_it_is_down_happen_when_it_is_back(rig) -> None:
    device = await rig.start()
    records = [await rig.put(n) for n in range(3)]
    free_pages = device.free_pages
    rig.on_open = lambda fresh: fresh.down()
    rig.faults.down()
    with pytest.raises(DeviceDown):
        await device.get(records[0], [memory()]).table
    device.delete(records[0])
    device.delete(records[1])
    device.audit()
    rig.on_open = lambda fresh: None
    await back(rig)
    await wait_until_async(lambda: device.free_pages == free_pages + 6)
    await device.stop()
    rig.device = rig.make()
    await rig.device.start()
    assert list(rig.device.records) == [records[2].key]


async def test_a_delete_that_fails_is_repeated(rig) -> None:
    device = await rig.start()
    record = await rig.put("x")
    free_pages = device.free_pages
    rig.on_open = lambda fresh: fresh.down()
    rig.faults.down()
    device.delete(record)
    await wait_until_async(lambda: not device.health.up)
    assert rig.faults.hits or rig.opened[0].hits
    device.audit()
    rig.on_open = lambda fresh: None
    await back(rig)
    await wait_until_async(lambda: device.free_pages == free_pages + 3)
    device.audit()


async def test_another_device_in_its_place_is_not_taken(rig) -> None:
    device = await rig.start()
    record = await rig.put("x")
    own = rig.disk.live
    rig.faults.down()
    rig.disk.live = bytearray(formatted_image(pages=64, seed=2))
    with pytest.raises(DeviceDown):
        await device.get(record, [memory()]).table
    opened = len(rig.opened)
    await wait_until_async(lambda: len(rig.opened) > opened + 2, what="it to be looked at again and again")
    assert not device.health.up
    assert "another device" in device.stats().reason
    rig.disk.live = own
    await back(rig)
    await device.get(record, [memory()]).table


async def test_its_copy_that_was_mounted_elsewhere_meanwhile_is_not_taken(rig, tmp_path) -> None:
    """Same uuid, later mount: what this node knows of it may be wrong."""
    device = await rig.start()
    record = await rig.put("x")
    rig.faults.down()
    rig.present = False
    with pytest.raises(DeviceDown):
        await device.get(record, [memory()]).table
    rig.disk.closed = False
    mount(rig.disk, NODE, tmp_path / "other").volume.close()
    rig.present = True
    opened = len(rig.opened)
    await wait_until_async(lambda: len(rig.opened) > opened + 2)
    assert not device.health.up
    assert "was used meanwhile" in device.stats().reason


async def test_a_device_that_is_not_there_at_the_start_is_taken_in_later(rig) -> None:
    await rig.start()
    record = await rig.put("x")
    await rig.device.stop()
    rig.present = False
    rig.device = rig.make()
    await rig.device.start()
    assert rig.device.records == {}
    assert rig.device.refuses(CHUNK_BYTES) is Refusal.DEVICE_DOWN
    assert "not there" in rig.device.stats().reason
    found = rig.found
    rig.present = True
    await wait_until_async(lambda: rig.device.health.up)
    assert rig.found == found + 1
    assert rig.device.records == {record.key: record}
    assert list(rig.device.manifests) == [NAMESPACE]
    out = memory()
    await rig.device.get(record, [out]).table
    assert bytes(out) == some_bytes("x")


async def test_a_device_that_hangs_at_the_start_does_not_keep_the_node(rig) -> None:
    rig.on_open = lambda fresh: fresh.gate.clear()
    await rig.device.start(0.05)
    assert rig.faults.hanging
    assert rig.device.refuses(CHUNK_BYTES) is Refusal.DEVICE_DOWN
    rig.faults.gate.set()
    await wait_until_async(lambda: rig.device.health.up)
    assert rig.found == 1


async def test_pages_that_cannot_be_read_cost_their_object_only(rig) -> None:
    """A bad sector is no reason to give up the device."""
    device = await rig.start()
    bad, good = await rig.put("bad"), await rig.put("good")
    label = device._objects.volume.label
    at = label.data_offset + bad.extents[0].start_page * label.page_bytes
    rig.faults.reads = lambda offset: DeviceDown("EIO") if offset == at else None
    with pytest.raises(Corrupt, match="cannot be read"):
        await device.get(bad, [memory()]).table
    assert rig.faults.hits == 1
    assert device.health.up
    await device.get(good, [memory()]).table


async def test_pages_that_cannot_be_written_are_out_of_use_and_nothing_else_is(rig) -> None:
    device = await rig.start()
    kept = await rig.put("kept")
    free_pages = device.free_pages
    offset = device._objects.volume.label.data_offset
    rig.faults.writes = lambda at: DeviceDown("EIO") if at >= offset else None
    with pytest.raises(PagesFailed):
        await rig.put("x")
    assert rig.faults.hits
    assert device.health.up
    assert device.stats().failed_pages == 3
    assert device.free_pages == free_pages - 3
    device.audit()
    await device.get(kept, [memory()]).table
    rig.faults.heal()
    await rig.put("x")
    device.audit()


async def test_a_store_that_always_misses_does_not_pass(rig) -> None:
    """The faults above are faults: without one the same get works."""
    device = await rig.start()
    record = await rig.put("x")
    await device.get(record, [memory()]).table
    assert rig.faults.hits == 0
    assert device.health.trips == 0


async def test_a_catalog_that_cannot_be_written_is_a_device_that_is_down(rig, monkeypatch) -> None:
    device = await rig.start()
    catalog = device._objects.volume._catalog
    monkeypatch.setattr(
        catalog, "finish", lambda *_: (_ for _ in ()).throw(DeviceDown("the disk of catalogs is full"))
    )
    with pytest.raises(DeviceDown, match="catalogs is full"):
        await rig.put("x")
    monkeypatch.undo()
    await back(rig)
    await rig.put("x")


async def test_in_use_while_it_is_looked_for_is_down_not_fatal(rig, monkeypatch) -> None:
    device = await rig.start()
    record = await rig.put("x")

    def busy(_: object) -> None:
        raise DeviceRefused("rig is used by another process")

    rig.on_open = busy
    rig.faults.down()
    with pytest.raises(DeviceDown):
        await device.get(record, [memory()]).table
    await wait_until_async(lambda: "another process" in device.stats().reason)
    rig.on_open = lambda fresh: None
    await back(rig)


async def test_puts_under_way_on_a_device_that_vanishes_all_end(rig) -> None:
    device = await rig.start()
    puts = [
        asyncio.create_task(device.put(new_object(n, some_bytes(n)), [memory_of(some_bytes(n))]))
        for n in range(12)
    ]
    await asyncio.sleep(0)
    rig.on_open = lambda fresh: fresh.down("ENODEV")
    rig.faults.down("ENODEV")
    results = await asyncio.gather(*puts, return_exceptions=True)
    failed = [result for result in results if isinstance(result, DeviceDown)]
    assert failed
    device.audit()
    rig.on_open = lambda fresh: None
    await back(rig)
    assert set(device.records.values()) == {
        result for result in results if not isinstance(result, DeviceDown)
    }
    device.audit()


async def test_stopping_ends_everything_that_is_under_way(rig) -> None:
    """Puts and gets that hang, wait for a thread, or wait for a commit: none is left behind."""
    device = await rig.start()
    record = await rig.put("x")
    rig.faults.gate.clear()
    data = [(new_object(n, some_bytes(n)), memory_of(some_bytes(n))) for n in range(8)]
    puts = [asyncio.create_task(device.put(new, [source])) for new, source in data]
    gets = [device.get(record, [memory()]) for _ in range(8)]
    await wait_until_async(lambda: rig.faults.hanging >= device.config.threads)
    stopping = asyncio.create_task(device.stop(0.05))
    results = await asyncio.gather(*puts, *(get.table for get in gets), return_exceptions=True)
    assert all(isinstance(result, DeviceDown) for result in results)
    rig.faults.gate.set()
    await stopping
    await asyncio.wait([get.ended for get in gets], timeout=5)
    assert all(get.ended.done() for get in gets)


async def test_stopping_lets_puts_end_that_can(rig) -> None:
    device = await rig.start()
    puts = [asyncio.create_task(rig.put(n)) for n in range(8)]
    await asyncio.sleep(0)
    await device.stop()
    stored = {record.key for record in await asyncio.gather(*puts)}
    assert len(stored) == 8
    rig.device = rig.make()
    await rig.device.start()
    assert set(rig.device.records) == stored
