"""The real client behind the contract of `Control`, with a node that pretends to have an NVMe tier."""

from collections.abc import Iterator

import pytest

from connector.background import Background
from connector.control import Arrival, Arrivals
from kvstore.client import ClientConfig, LoopThread
from kvstore.core import MissReason, Tier, seal
from kvstore.transfer import InProcessNetwork
from tests.client.test_client import store
from tests.support import wait_until
from tests.support.control_node import MANIFEST, TABLE, chain
from tests.support.disk_node import DiskNode

KEYS = chain(5)
WAIT_S = 10.0


@pytest.fixture
def node() -> Iterator[DiskNode]:
    """Two objects in DRAM, three on NVMe; DRAM has room for one of those at a time."""
    loop = LoopThread("node")
    node = DiskNode(InProcessNetwork())
    loop.run(node.start())
    loop.run(store(node, KEYS))
    node.disk.on_disk, node.disk.room = set(KEYS[2:]), 1
    yield node
    loop.run(node.stop())
    loop.stop()


@pytest.fixture
def control(node) -> Iterator[Background]:
    made = Background(ClientConfig(node=node.address))
    made.open(MANIFEST)
    yield made
    made.close()


def take(arrivals: Arrivals) -> list[Arrival]:
    came: list[Arrival] = []

    def some() -> bool:
        came.extend(arrivals.take())
        return bool(came)

    wait_until(some, WAIT_S)
    return came


def test_a_promise_streams_as_its_keys_are_given_back(node, control) -> None:
    promise = control.acquire(KEYS, 30.0, 0.0, ()).result(WAIT_S)
    assert [one.tier for one in promise.objects] == [Tier.DRAM] * 2 + [Tier.NVME] * 3
    assert promise.objects[2].eta_s > 0
    arrivals = control.promote(promise, WAIT_S)
    for position in (2, 3, 4):
        [came] = take(arrivals)
        assert came.position == position and came.promised is not None
        assert (came.promised.tier, came.promised.table) == (Tier.DRAM, seal(TABLE))
        assert came.promised.extents
        promise = control.shorten(promise, [KEYS[position]])
    assert arrivals.done
    assert [one.key for one in promise.objects] == KEYS[:2]
    assert control.renew(promise, 30.0).result(WAIT_S) > 25, "what is left is leased as before"
    control.release(promise)
    wait_until(lambda: node.store.snapshot().leases == 0, WAIT_S)


def test_where_a_promise_was_cut_off_nothing_is_promoted(node, control) -> None:
    """Mutant: all that the client once was promised. The engine would hear of objects that it does not know."""
    promise = control.acquire(KEYS, 30.0, 0.0, ()).result(WAIT_S)
    shorter = control.shorten(promise, KEYS[3:])
    arrivals = control.promote(shorter, WAIT_S)
    assert [came.position for came in take(arrivals)] == [2]
    assert arrivals.done
    control.release(shorter)


def test_the_end_of_a_chain_is_told_with_its_reason(node, control) -> None:
    node.disk.faults[KEYS[3]] = MissReason.DEVICE_DOWN
    promise = control.acquire(KEYS, 30.0, 0.0, ()).result(WAIT_S)
    arrivals = control.promote(promise, WAIT_S)
    came: list[Arrival] = []

    def all_taken() -> bool:
        came.extend(arrivals.take())
        return arrivals.done

    wait_until(all_taken, WAIT_S)
    told = {one.position: (one.promised is not None, one.reason) for one in came}
    assert told == {2: (True, None), 3: (False, MissReason.DEVICE_DOWN)}
    control.release(promise)
    closed = control.promote(promise, WAIT_S)
    closed.close()
    assert closed.done and not closed.take()


def test_a_suspect_is_named_as_it_was_read(node, control) -> None:
    promise = control.acquire(KEYS, 30.0, 0.0, ()).result(WAIT_S)
    arrivals = control.promote(promise, WAIT_S)
    [came] = take(arrivals)
    assert came.promised is not None
    control.suspect(promise, came.promised, "r")
    wait_until(lambda: node.store.snapshot().totals.verified == 1, WAIT_S)
    arrivals.close()
    control.release(promise)
