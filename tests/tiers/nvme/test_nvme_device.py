"""Puts, gets and deletes of one device while all is well: what is promised of their order, space and account."""

import asyncio
import threading

import pytest

from kvstore.core import Corrupt, limits
from kvstore.tiers.nvme.base import Refusal
from kvstore.tiers.nvme.device import DeviceDown, DeviceRefused, aligned
from kvstore.tiers.nvme.pieces import io_bytes
from kvstore.tiers.nvme.records import Record
from tests.support import wait_until_async
from tests.tiers.nvme.things import CHUNK_BYTES, NAMESPACE, key_of, memory_of, new_object, some_bytes


async def read(device, record) -> bytes:
    memory = aligned(io_bytes(record.size_bytes))
    await device.get(record, [memory]).table
    return bytes(memory[: record.size_bytes])


async def test_what_was_put_is_got_back_now_and_after_a_restart(rig) -> None:
    device = await rig.start()
    records = await asyncio.gather(*(rig.put(n) for n in range(5)))
    for n, record in enumerate(records):
        assert await read(device, record) == some_bytes(n)
    await device.stop()
    rig.device = rig.make()
    device = await rig.start()
    assert device.records == {key_of(n): record for n, record in enumerate(records)}
    assert list(device.manifests) == [NAMESPACE]
    for n, record in enumerate(records):
        assert await read(device, record) == some_bytes(n)
    device.audit()


async def test_an_object_in_scattered_memory_comes_back_into_other_pieces(rig) -> None:
    device = await rig.start()
    data = some_bytes("x")
    parts = [memory_of(data[:4096]), memory_of(data[4096:])]
    record = await device.put(new_object("x", data), parts)
    out = [aligned(8192), aligned(4096)]
    get = device.get(record, out)
    assert await get.table == new_object("x", data).table
    assert b"".join(map(bytes, out)) == data
    assert get.ended.done()


async def test_a_put_is_in_sight_only_when_it_is_durable(rig) -> None:
    device = await rig.start()
    rig.faults.gate.clear()
    putting = asyncio.create_task(rig.put("x"))
    await wait_until_async(lambda: rig.faults.hanging)
    assert not device.records
    assert device.stats().writing_bytes == CHUNK_BYTES
    device.audit()
    rig.faults.gate.set()
    record = await putting
    assert device.records == {record.key: record}
    assert rig.disk.unsynced == []
    assert device.stats().writing_bytes == 0


async def test_objects_that_come_together_are_committed_together(rig) -> None:
    device = await rig.start()
    await rig.put("first")
    before = rig.faults.synced
    await asyncio.gather(*(rig.put(n) for n in range(12)))
    assert rig.faults.synced - before <= 12, "two syncs for each of many: there is no group commit"
    assert device.stats().counts.puts == 13


async def test_bytes_that_do_not_match_their_table_are_not_stored(rig) -> None:
    device = await rig.start()
    free_pages = device.free_pages
    with pytest.raises(Corrupt, match="does not match its table"):
        await device.put(new_object("x", some_bytes("x")), [memory_of(some_bytes("y"))])
    assert device.free_pages == free_pages
    assert not device.records
    assert (device.stats().counts.bad_copies, device.stats().counts.failed_puts) == (1, 1)
    device.audit()


async def test_bytes_damaged_at_rest_are_never_handed_out(rig) -> None:
    device = await rig.start()
    record = await rig.put("x")
    label = device._objects.volume.label
    at = label.data_offset + record.extents[0].start_page * label.page_bytes + 5_000
    rig.disk.live[at] ^= 1
    get = device.get(record, [aligned(io_bytes(record.size_bytes))])
    with pytest.raises(Corrupt, match="is damaged"):
        await get.table
    assert device.stats().counts.bad_copies == 1
    assert device.health.up, "a damaged object is no trouble of the device"


async def test_deleted_pages_are_reused_only_when_that_is_durable(rig) -> None:
    device = await rig.start()
    record = await rig.put("x")
    free_pages = device.free_pages
    rig.faults.gate.clear()
    device.delete(record)
    assert not device.records
    await wait_until_async(lambda: rig.faults.hanging)
    assert device.free_pages == free_pages
    device.audit()
    rig.faults.gate.set()
    await wait_until_async(lambda: device.free_pages == free_pages + 3)
    device.audit()
    assert (await rig.put("x")).sequence > record.sequence


async def test_pages_of_an_object_that_is_being_read_stay_until_the_read_ends(rig) -> None:
    device = await rig.start()
    record = await rig.put("x")
    free_pages = device.free_pages
    rig.faults.gate.clear()
    memory = aligned(io_bytes(CHUNK_BYTES))
    get = device.get(record, [memory])
    await wait_until_async(lambda: rig.faults.hanging)
    device.delete(record)
    device.audit()
    assert device.free_pages == free_pages
    rig.faults.gate.set()
    await get.table
    assert bytes(memory) == some_bytes("x")
    await wait_until_async(lambda: device.free_pages == free_pages + 3)


async def test_a_full_device_refuses_and_takes_again_when_there_is_room(rig) -> None:
    device = await rig.start()
    number = 0
    while device.refuses(CHUNK_BYTES) is None:
        await rig.put(number)
        number += 1
    assert number == 64 // 3
    assert await device.put(new_object("x", some_bytes("x")), [memory_of(some_bytes("x"))]) is Refusal.NO_ROOM
    for record in list(device.records.values())[:2]:
        device.delete(record)
    await wait_until_async(lambda: device.refuses(CHUNK_BYTES) is None)
    await rig.put("x")
    device.audit()


async def test_only_so_much_is_written_at_once(rig, monkeypatch) -> None:
    monkeypatch.setattr(limits, "NVME_WRITING_BYTES_MAX", 2 * CHUNK_BYTES)
    device = await rig.start()
    rig.faults.gate.clear()
    puts = [asyncio.create_task(rig.put(n)) for n in range(2)]
    await wait_until_async(lambda: device.stats().writing_bytes == 2 * CHUNK_BYTES)
    assert device.refuses(CHUNK_BYTES) is Refusal.BUSY
    rig.faults.gate.set()
    await asyncio.gather(*puts)
    assert device.refuses(CHUNK_BYTES) is None


async def test_a_wear_budget_ends_puts_not_gets(rig) -> None:
    rig.device = rig.make(write_bytes_per_day=36 * CHUNK_BYTES)  # one and a half objects an hour
    device = await rig.start()
    first = await rig.put(0)
    await rig.put(1)
    new = new_object(2, some_bytes(2))
    assert await device.put(new, [memory_of(some_bytes(2))]) is Refusal.WORN
    assert await read(device, first) == some_bytes(0)
    device.audit()


async def test_reads_find_a_thread_while_writes_take_all_they_may(rig) -> None:
    """Mutant: a pool of no more threads than may write."""
    device = await rig.start()
    record = await rig.put("x")
    held = threading.Event()
    hung: list[int] = []

    def hang(offset: int) -> None:
        hung.append(offset)
        assert held.wait(20)

    rig.faults.writes = hang
    puts = [asyncio.create_task(rig.put(n)) for n in range(6)]
    await wait_until_async(lambda: len(hung) == device.config.threads)
    assert await read(device, record) == some_bytes("x")
    assert len(hung) == device.config.threads
    held.set()
    await asyncio.gather(*puts)


async def test_a_manifest_is_kept_with_the_first_object_and_goes_when_the_last_one_is_gone(rig) -> None:
    device = await rig.start()
    slots = device._objects.space.free_slots
    record = await rig.put("x")
    assert device._objects.space.free_slots == slots - 2
    await rig.put("y")
    assert device._objects.space.free_slots == slots - 3
    for record in list(device.records.values()):
        device.delete(record)
    await device.stop()
    rig.device = rig.make()
    await rig.device.start()
    assert rig.device.manifests == {}
    assert rig.device._objects.space.free_slots == slots
    rig.device.audit()


async def test_stop_waits_for_commits_and_what_was_put_is_there(rig) -> None:
    device = await rig.start()
    synced = threading.Event()
    rig.faults.syncs = lambda: None if synced.wait(30) else DeviceDown("the test forgot it")
    puts = [asyncio.create_task(rig.put(n)) for n in range(4)]
    await wait_until_async(lambda: device._objects.committer.idle is False)
    stopping = asyncio.create_task(device.stop())
    synced.set()
    done = await asyncio.gather(*puts)
    await stopping
    rig.device = rig.make()
    await rig.device.start()
    assert {record.key for record in done} == set(rig.device.records)


async def test_a_device_of_another_node_is_refused_at_the_start(rig) -> None:
    rig.device = rig.make(node="node-b")
    with pytest.raises(DeviceRefused, match="belongs to the node"):
        await rig.device.start()


async def test_it_says_how_it_is(rig) -> None:
    device = await rig.start()
    assert isinstance(await rig.put("x"), Record)
    stats = device.stats()
    assert (stats.up, stats.objects, stats.object_bytes) == (True, 1, CHUNK_BYTES)
    assert stats.pages - stats.free_pages == 3
    assert repr(device) == "<NvmeDevice rig 1 objects, up>"
