"""A full house: refusing is an answer, and nothing that was promised or just acknowledged is given up for it.

Mutants that must fail here: leases that do not pin; eviction of what was acknowledged a moment ago while all
older objects are leased; shares that one client's promises can use up.
"""

import time
from collections.abc import Iterator
from functools import partial

import pytest

from kvstore.client import Client, ClientConfig, LoopThread, Promise
from kvstore.core import Key
from tests.faults.support import Engine, chain, shape
from tests.support import wait_until
from tests.support.node import RunningNode, running_node

pytestmark = pytest.mark.process

OBJECT_BYTES = PAGE_BYTES = 64 << 10
MANIFEST = shape(OBJECT_BYTES, "full")


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("readers")
    yield thread
    thread.stop()


class Readers:
    """Many clients that take leases and read nothing."""

    def __init__(self, loop: LoopThread, node: str, count: int) -> None:
        self._loop = loop
        self._clients = [Client(ClientConfig(node=node)) for _ in range(count)]
        for client in self._clients:
            loop.run(client.start())
            loop.run(client.open(MANIFEST))

    def lease(self, keys: list[Key]) -> list[Promise]:
        """One lease for each key, of one client after the other."""
        promises = []
        for number, key in enumerate(keys):
            client = self._clients[number % len(self._clients)]
            promises.append(self._loop.run(client.acquire(MANIFEST.namespace, [key], 100.0)))
        return promises

    def release(self, promises: list[Promise]) -> None:
        for number, promise in enumerate(promises):
            self._loop.run(self._clients[number % len(self._clients)].release(promise))

    def close(self) -> None:
        for client in self._clients:
            self._loop.run(client.close())


def prompts(first: int, count: int) -> list[Key]:
    return [chain(MANIFEST.namespace, 1, seed)[0] for seed in range(first, first + count)]


def acknowledged(engine: Engine, keys: list[Key]) -> list[Key]:
    return [key for key in keys if engine.put([key]) == [key]]


def is_put(engine: Engine, key: Key) -> bool:
    return engine.put([key]) == [key]


def had(engine: Engine, keys: list[Key]) -> list[Key]:
    return [key for key in keys if engine.get([key]) == 1]


def leased_pages(node: RunningNode) -> int:
    return int(node.stats()["store"]["tiers"]["dram"]["leased_pages"])


def test_when_everything_is_leased_pushes_are_refused_and_nothing_acknowledged_is_gone(
    tmp_path, loop
) -> None:
    pages = 64
    with (
        running_node(tmp_path, dram_size_bytes=pages * PAGE_BYTES, dram_page_bytes=PAGE_BYTES) as node,
        Engine(node.control, MANIFEST, staging_bytes=1 << 20) as engine,
    ):
        old = acknowledged(engine, prompts(0, pages - 4))  # just below the low-water mark
        assert len(old) == pages - 4
        readers = Readers(loop, node.control, pages // 2)  # each may always have two objects
        promises = readers.lease(old)
        assert all(promises), "not everything is leased"
        wait_until(lambda: leased_pages(node) == len(old))
        new = prompts(1_000, 40)
        there = acknowledged(engine, new)
        assert len(there) < len(new), "nothing was refused"
        assert had(engine, there) == there, "what was acknowledged is gone"
        wait_until(lambda: node.stats()["store"]["totals"]["refused"] >= len(new) - len(there))
        assert had(engine, old[:2]) == old[:2]
        readers.release(promises)
        assert len(acknowledged(engine, prompts(2_000, 20))) == 20
        readers.close()


def test_a_thousand_promises_that_are_never_loaded_do_not_stop_pushes(tmp_path, loop) -> None:
    pages = 512
    with (
        running_node(tmp_path, dram_size_bytes=pages * PAGE_BYTES, dram_page_bytes=PAGE_BYTES) as node,
        Engine(node.control, MANIFEST, staging_bytes=1 << 20) as engine,
    ):
        old = acknowledged(engine, prompts(0, pages - 40))
        hoarder = Readers(loop, node.control, 1)
        promises = hoarder.lease((old * 3)[:1_000])
        assert sum(map(len, promises)) > 100, "nothing was promised"
        wait_until(lambda: node.stats()["store"]["leases"] == sum(map(len, promises)))
        waits = []
        for key in prompts(1_000, pages):
            began_s = time.monotonic()
            wait_until(partial(is_put, engine, key), 10)
            waits.append(time.monotonic() - began_s)
            assert engine.get([key]) == 1
        print(f"{sum(map(len, promises))} promises held; the longest push took {max(waits):.3f} s")
        assert max(waits) < 1.0, f"a push had to wait {max(waits):.1f} s"
        kept = [promise.copies[0].key for promise in promises if len(promise)]
        assert had(engine, kept[:20]) == kept[:20], "what was promised is gone"
        hoarder.close()
