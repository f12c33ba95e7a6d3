"""Copies that are on NVMe: promised, brought into DRAM in order, pulled, released to make room for the next."""

import asyncio
import time

import msgspec
import numpy as np
import pytest

from kvstore.client import (
    Arrival,
    Arrivals,
    Client,
    ClientConfig,
    Committed,
    KVStore,
    LoopThread,
    OnDisk,
    Resident,
)
from kvstore.client.plan import batches, item_bytes
from kvstore.client.promoting import PAUSE_S
from kvstore.core import Key, MissReason, limits, seal
from kvstore.transfer import InProcessNetwork, InProcessTransfer
from kvstore.wire import ReserveItem
from tests.client.test_client import store
from tests.client.test_facade import array, puts
from tests.support import wait_until, wait_until_async
from tests.support.control_node import MANIFEST, NAMESPACE, OBJECT_BYTES, TABLE, ControlNode, chain, running
from tests.support.disk_node import DiskNode

KEYS = chain(6)
WAIT_S = 10.0


@pytest.fixture
async def node():
    node = DiskNode()
    async with running(node):
        await store(node, KEYS)
        node.disk.on_disk = set(KEYS[2:])
        yield node


@pytest.fixture
async def client(node):
    config = ClientConfig(node=node.address, request_timeout_s=5.0)
    async with Client(config) as client:
        await client.open(MANIFEST)
        yield client


class Told(list[Arrival]):
    """What a promotion has told, in order."""

    def __call__(self, arrival: Arrival) -> None:
        self.append(arrival)

    @property
    def positions(self) -> list[int]:
        return [one.position for one in self if one.copy is not None]

    @property
    def end(self) -> tuple[int, MissReason | None] | None:
        last = [one for one in self if one.copy is None]
        return (last[-1].position, last[-1].reason) if last else None


async def promoted(client: Client, promise, timeout_s: float = WAIT_S) -> Told:
    told = Told()
    await client.promote(promise, timeout_s, told)
    return told


async def test_what_is_on_disk_is_promised_and_told_in_order_when_it_is_in_dram(node, client) -> None:
    promise = await client.acquire(NAMESPACE, KEYS, 30.0)
    kinds = [type(copy.answer) for copy in promise.copies]
    assert kinds == [Resident] * 2 + [OnDisk] * 4
    assert promise.reason is None
    told = await promoted(client, promise)
    assert told.positions == [2, 3, 4, 5] and told.end is None
    for one in told:
        assert one.copy is not None and isinstance(one.copy.answer, Resident)
        assert one.copy.answer.table == seal(TABLE) and one.copy.key == KEYS[one.position]
    await client.release(promise)
    assert node.store.snapshot().leases == 0


async def test_who_reads_parts_of_objects_gets_their_tables(node) -> None:
    async with Client(ClientConfig(node=node.address, whole_objects=False)) as client:
        await client.open(MANIFEST)
        promise = await client.acquire(NAMESPACE, KEYS, 30.0)
        told = await promoted(client, promise)
        copies = [*promise.copies[:2], *(one.copy for one in told if one.copy is not None)]
        answers = [copy.answer for copy in copies if isinstance(copy.answer, Resident)]
        assert [answer.table for answer in answers] == [TABLE] * len(KEYS)
        await client.release(promise)


async def test_a_promise_in_dram_needs_no_question(node, client) -> None:
    promise = await client.acquire(NAMESPACE, KEYS[:2], 30.0)
    assert await promoted(client, promise) == []
    assert node.disk.asked == []
    await client.release(promise)


async def test_what_is_released_makes_room_for_the_next(node, client) -> None:
    """Mutant: everything is waited for before anything is used. Nothing more comes."""
    node.disk.room = 1
    promise = await client.acquire(NAMESPACE, KEYS, 30.0)
    told = Told()
    used: list[asyncio.Task[None]] = []

    def use(arrival: Arrival) -> None:
        told(arrival)
        used.append(asyncio.get_running_loop().create_task(client.release(promise, [KEYS[arrival.position]])))

    await client.promote(promise, WAIT_S, use)
    assert told.positions == [2, 3, 4, 5] and told.end is None
    assert node.disk.most_in_dram == 1
    await asyncio.gather(*used)
    await client.release(promise)


@pytest.mark.parametrize("parks", [True, False])
async def test_without_room_the_time_ends_it(node, client, monkeypatch, parks) -> None:
    """A node with too many parked requests answers at once: it is not asked in a spin."""
    node.disk.room = 1
    monkeypatch.setattr(node.server._calls._parking, "has_room", lambda _: parks)
    promise = await client.acquire(NAMESPACE, KEYS, 30.0)
    began = time.monotonic()
    told = await promoted(client, promise, 0.3)
    assert 0.3 <= time.monotonic() - began < WAIT_S
    assert told.positions == [2]
    assert told.end == (3, MissReason.PROMOTE_DEADLINE)
    assert parks or len(node.disk.asked) <= 4 + 2 * 0.3 / PAUSE_S
    await client.release(promise)


@pytest.mark.parametrize("reason", [MissReason.DEVICE_DOWN, MissReason.NO_ROOM, MissReason.BAD_COPY])
async def test_the_chain_ends_where_a_copy_is_missed_and_what_is_behind_is_not_waited_for(
    node, client, reason
) -> None:
    """Mutants: a miss is asked for again; what lies behind it is told."""
    node.disk.faults[KEYS[4]] = reason
    node.disk.silent = 2
    promise = await client.acquire(NAMESPACE, KEYS, 30.0)
    told = await promoted(client, promise)
    assert told.positions == [2, 3]
    assert told.end == (4, reason)
    await client.release(promise)


async def test_a_node_that_dies_ends_the_chain(node, client) -> None:
    node.disk.room = 0
    promise = await client.acquire(NAMESPACE, KEYS, 30.0)
    told = Told()
    waiting = asyncio.create_task(client.promote(promise, 60.0, told))
    await wait_until_async(lambda: bool(node.disk.asked), WAIT_S)
    await node.die()
    try:
        await asyncio.wait_for(waiting, WAIT_S)
    finally:
        await node.start()
    assert told.positions == []
    assert told.end == (2, MissReason.NODE_DOWN)


async def test_a_lease_that_has_ended_is_said(node, client) -> None:
    promise = await client.acquire(NAMESPACE, KEYS, 30.0)
    await client.release(promise)
    assert (await promoted(client, promise)).end == (2, MissReason.EXPIRED)


# --- for other threads --------------------------------------------------------------------------------


@pytest.fixture
def threads():
    """A node on one thread, a client on another, and this one."""
    loops = LoopThread("node"), LoopThread("client")
    node = DiskNode(InProcessNetwork())
    loops[0].run(node.start())
    yield node, *loops
    loops[0].run(node.stop())
    for loop in loops:
        loop.stop()


def test_arrivals_are_taken_by_another_thread(threads) -> None:
    node, at_node, at_client = threads
    at_node.run(store(node, KEYS))
    node.disk.on_disk = set(KEYS[2:])
    node.disk.faults[KEYS[5]] = MissReason.DEVICE_DOWN
    client = Client(ClientConfig(node=node.address))
    at_client.run(client.start())
    at_client.run(client.open(MANIFEST))
    promise = at_client.run(client.acquire(NAMESPACE, KEYS, 30.0))
    arrivals = Arrivals(at_client, client, promise, WAIT_S)
    came: list[Arrival] = []

    def all_taken() -> bool:
        came.extend(arrivals.take())
        return arrivals.done

    wait_until(all_taken, WAIT_S)
    assert sorted(one.position for one in came if one.copy) == [2, 3, 4]
    assert [(one.position, one.reason) for one in came if not one.copy] == [(5, MissReason.DEVICE_DOWN)]
    closed = Arrivals(at_client, client, promise, 60.0)
    closed.close()
    assert closed.done and closed.take(1.0) == []
    at_client.run(client.close())


def test_a_bug_on_the_way_ends_what_is_waited_for(threads, monkeypatch) -> None:
    """Mutant: the error stays in its future, and who waits, waits for ever."""
    node, at_node, at_client = threads
    at_node.run(store(node, KEYS))
    node.disk.on_disk = set(KEYS)
    client = Client(ClientConfig(node=node.address))
    at_client.run(client.start())
    at_client.run(client.open(MANIFEST))
    promise = at_client.run(client.acquire(NAMESPACE, KEYS, 30.0))

    async def broken(*_) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(client, "promote", broken)
    arrivals = Arrivals(at_client, client, promise, WAIT_S)
    assert [(one.position, one.copy) for one in arrivals.take(WAIT_S)] == [(0, None)]
    assert arrivals.done
    at_client.run(client.close())


# --- the facade ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1, 1_000])
def test_objects_on_disk_are_got_through_little_memory(threads, room) -> None:
    node, _, _ = threads
    keys = KEYS[:4]
    transfer = InProcessTransfer(node.network, "client")
    with KVStore(node.address, transfer=transfer, staging_bytes=4 * OBJECT_BYTES) as kvstore:
        kvstore.open(MANIFEST)
        assert kvstore.put_many(NAMESPACE, puts(keys)) == [True] * 4
        node.disk.on_disk, node.disk.room = set(keys[1:]), room
        got = kvstore.get_many(NAMESPACE, keys)
        for depth, one in enumerate(got):
            assert one is not None and np.array_equal(one, array(depth))
        assert 0 < node.disk.most_in_dram <= room
        wait_until(lambda: node.store.snapshot().leases == 0, WAIT_S)
        node.disk.faults[keys[2]] = MissReason.DEVICE_DOWN
        assert [one is not None for one in kvstore.get_many(NAMESPACE, keys)] == [True, True, False, False]
    transfer.close()


# --- frames -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [1, 256, 2_100, limits.RUNS_PER_OBJECT_MAX])
def test_portions_fit_into_a_frame_and_are_not_needlessly_small(runs) -> None:
    portions = batches(list(range(3_000)), item_bytes(runs))
    assert sum(len(one) for one in portions) == 3_000
    largest = max(len(one) for one in portions)
    assert largest * item_bytes(runs) <= limits.FRAME_BYTES_MAX
    assert largest == limits.BATCH_KEYS_MAX or largest * item_bytes(runs) > limits.FRAME_BYTES_MAX * 0.9


async def test_objects_with_many_runs_are_asked_for_in_portions_that_fit() -> None:
    """1,024 tables of 2,100 runs do not fit into one frame. Mutant: portions of 1,024 keys, whatever is in them."""
    manifest = msgspec.structs.replace(MANIFEST, lanes=((2_100, 1, 8),), unit_tokens=16)
    size_bytes, table = manifest.geometry.object_bytes(16), bytes(8 * 2_100)
    assert limits.BATCH_KEYS_MAX * len(table) > limits.FRAME_BYTES_MAX
    keys = [Key(number.to_bytes(32, "big")) for number in range(limits.BATCH_KEYS_MAX)]
    node = ControlNode(arena_bytes=64 << 20)
    async with (
        running(node),
        Client(
            ClientConfig(node=node.address, request_timeout_s=WAIT_S, whole_objects=False)  # tables are sent
        ) as client,
    ):
        namespace = await client.open(manifest)
        wanted = [ReserveItem(key, Key(namespace), 0, size_bytes) for key in keys[:600]]
        grants = await client.reserve(namespace, wanted, 60.0)
        answers = await client.commit(namespace, [(grant, table) for grant in grants.granted])
        assert answers.count(Committed()) == 600
        wanted = [ReserveItem(key, Key(namespace), 0, size_bytes) for key in keys[600:]]
        grants = await client.reserve(namespace, wanted, 60.0)
        await client.commit(namespace, [(grant, table) for grant in grants.granted])
        promise = await client.acquire(namespace, keys, 60.0)
        assert (len(promise), promise.reason) == (len(keys), None)
        assert node.server.stats.failures == {}
        await client.release(promise)
