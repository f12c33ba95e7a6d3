"""Publisher and a real Redis that is flushed, killed, stopped, rolled back and robbed: it repairs all of it.

Readers look on all the time: nothing but an answer or `IndexDown` may reach them.
"""

import asyncio
import shutil
from functools import partial

import pytest

from kvstore.core import IndexDown, Tier
from kvstore.index import layout, publisher
from tests.contracts.index import holders, new_keys, until
from tests.index.test_publisher import NODE, Node
from tests.support import wait_until_async

PASS_S = 0.5


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.05)


class Reader:
    """Looks up all the time; counts what it saw."""

    def __init__(self, index, keys) -> None:
        self._index = index
        self._keys = keys
        self.answers = self.downs = 0

    async def run(self) -> None:
        while True:
            try:
                await self._index.lookup(self._keys)
                self.answers += 1
            except IndexDown:
                self.downs += 1
            await asyncio.sleep(0)


async def flushed(server, node) -> None:
    server.flush()


async def killed(server, node) -> None:
    (server.folder / "dump.rdb").unlink()
    await asyncio.to_thread(server.restart)


async def stopped(server, node) -> None:
    server.pause()
    await wait_until_async(lambda: node.publisher.stats.failures >= 2)
    server.resume()


async def rolled_back(server, node) -> None:
    """Killed, and started from the dump that was taken when the node held its first keys."""
    server.kill()
    shutil.copy(server.folder / "old.rdb", server.folder / "dump.rdb")
    await asyncio.to_thread(server.restart)


async def robbed(server, node) -> None:
    """Every tenth entry goes, unnoticed: only the regular pass brings it back."""
    with server.client() as client:
        names = sorted(name for name in client.scan_iter(b"kv:{*", count=10_000) if len(name) == 39)
        assert client.delete(*names[::10]) == 60


@pytest.mark.parametrize("fault", [flushed, killed, stopped, rolled_back, robbed])
async def test_the_index_is_repaired(connect, own_redis, fault) -> None:
    keys, gone = new_keys(600), new_keys(20)
    node = Node(connect(own_redis.url, timeout_s=0.5), pass_s=PASS_S if fault is robbed else 3_600)
    node.held = dict.fromkeys(gone, Tier.DRAM)
    reader = Reader(connect(own_redis.url, timeout_s=0.5), keys)
    async with asyncio.TaskGroup() as tasks, node.running():
        looking = tasks.create_task(reader.run())
        await node.settled()
        with own_redis.client() as client:
            client.save()
        shutil.copy(own_redis.folder / "dump.rdb", own_redis.folder / "old.rdb")
        for key in gone:
            node.put(key, None)
        for key in keys:
            node.put(key, Tier.DRAM)
        await node.settled()
        passes = node.publisher.stats.passes
        await fault(own_redis, node)

        async def repaired() -> bool:
            try:
                stale = [key for key in gone if await holders(node.index, key)]
                found = await node.index.lookup(keys)
            except IndexDown:
                return False
            for key in stale:  # a reader asks the node for it, which denies it and looks at it again
                node.publisher.mark(key)
            return len(found) == 600 and not stale

        await until(repaired, 20)
        if fault is not stopped:
            assert node.publisher.stats.passes > passes, "the fault was there to be repaired"
        assert await node.index.nodes()
        assert reader.answers > 10
        looking.cancel()


async def test_a_long_stop_and_many_changes(connect, own_redis) -> None:
    """All that changes while Redis stands still is right soon after; writes that timed out do no harm."""
    keys = new_keys(300)
    node = Node(connect(own_redis.url, timeout_s=0.1))
    async with node.running():
        await node.settled()
        own_redis.pause()
        for round_ in range(6):
            failures = node.publisher.stats.failures
            for at, key in enumerate(keys):
                node.put(key, (Tier.DRAM, None, Tier.NVME)[(at + round_) % 3])
            await until(partial(later, node, failures))
        own_redis.resume()
        await node.settled()
        for key in keys:
            expected = node.held.get(key)
            assert await holders(node.index, key) == ({} if expected is None else {NODE: expected})
    with own_redis.client() as client:
        assert client.exists(layout.fence_name(NODE, None))


async def later(node: Node, failures: int) -> bool:
    return node.publisher.stats.failures > failures
