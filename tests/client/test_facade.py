"""The blocking facade over a real control endpoint; bytes move in process."""

import asyncio
import threading

import numpy as np
import pytest

from kvstore.client import KVStore, LoopThread, Put
from kvstore.core import BadRequest, Namespace, PeerLost, TransferFailed, limits
from kvstore.transfer import Fault, InProcessNetwork, InProcessTransfer
from tests.support import free_port
from tests.support.control_node import MANIFEST, NAMESPACE, OBJECT_BYTES, ControlNode, chain

KEYS = chain(4)


@pytest.fixture
def network() -> InProcessNetwork:
    return InProcessNetwork()


@pytest.fixture
def node(network):
    """A node on a loop of its own: the facade blocks the test's thread."""
    loop = LoopThread("node")
    node = ControlNode(network)
    loop.run(node.start())
    yield node
    loop.run(node.stop())
    loop.stop()


@pytest.fixture
def transfer(network):
    transfer = InProcessTransfer(network, "client")
    yield transfer
    transfer.close()


@pytest.fixture
def store(node, transfer):
    with KVStore(node.address, transfer=transfer, staging_bytes=4 * OBJECT_BYTES) as store:
        store.open(MANIFEST)
        yield store


def array(seed: int, size_bytes: int = OBJECT_BYTES) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


def puts(keys=KEYS) -> list[Put]:
    return [
        Put(key, array(depth), keys[depth - 1] if depth else None, depth) for depth, key in enumerate(keys)
    ]


def test_an_object_comes_back_as_it_was_put(store) -> None:
    assert store.get(NAMESPACE, KEYS[0]) is None
    assert not store.exists(NAMESPACE, KEYS[0])
    assert store.put(NAMESPACE, KEYS[0], array(1))
    assert store.exists(NAMESPACE, KEYS[0])
    got = store.get(NAMESPACE, KEYS[0])
    assert got is not None
    assert np.array_equal(got, array(1))


def test_the_first_bytes_of_a_key_win(store) -> None:
    assert store.put(NAMESPACE, KEYS[0], array(1))
    assert store.put(NAMESPACE, KEYS[0], array(2)), "it can be had, by whomever it was written"
    got = store.get(NAMESPACE, KEYS[0])
    assert got is not None
    assert np.array_equal(got, array(1))


def test_any_dtype_and_shape_and_stride_is_put_and_got(store) -> None:
    shaped = array(3).view(np.float32).reshape(16, -1)
    assert store.put(NAMESPACE, KEYS[0], shaped[::-1])
    out = np.empty_like(shaped)
    assert store.get(NAMESPACE, KEYS[0], out) is out
    assert out.tobytes() == shaped[::-1].tobytes()


def test_a_chain_is_got_up_to_its_first_gap(store) -> None:
    chain_of_puts = puts()
    assert store.put_many(NAMESPACE, [chain_of_puts[0], chain_of_puts[1], chain_of_puts[3]]) == [True] * 3
    got = store.get_many(NAMESPACE, KEYS)
    assert [one is not None for one in got] == [True, True, False, False]


def test_registered_memory_moves_without_staging(store, node, transfer) -> None:
    memory = np.concatenate([array(seed) for seed in range(4)] * 2)
    store.register(memory)
    slices = [memory[i * OBJECT_BYTES : (i + 1) * OBJECT_BYTES] for i in range(8)]
    sources, targets = slices[:4], slices[4:]
    for target in targets:
        target[:] = 0
    slots = store._staging.take
    store._staging.take = lambda *_: pytest.fail("staging was used")
    assert (
        store.put_many(NAMESPACE, [Put(key, source) for key, source in zip(KEYS, sources, strict=True)])
        == [True] * 4
    )
    assert all(one is not None for one in store.get_many(NAMESPACE, KEYS, targets))
    store._staging.take = slots
    assert np.array_equal(memory[: 4 * OBJECT_BYTES], memory[4 * OBJECT_BYTES :])


def test_memory_in_which_bytes_may_still_arrive_is_not_given_back_in_silence(store, network) -> None:
    """The user would write into it, and put it. Mutant: a late read is a miss like any other."""
    assert store.put_many(NAMESPACE, puts()[:1]) == [True]
    target = np.zeros(OBJECT_BYTES, np.uint8)
    store.register(target)
    plan = network.plan(Fault.HOLD, writes=False)
    with pytest.raises(TransferFailed, match="do not use it"):
        store.get(NAMESPACE, KEYS[0], target)
    assert plan.hits == 1
    network.release()
    assert target.any(), "nothing came late"
    assert store.get(NAMESPACE, KEYS[0], target) is not None


def test_no_byte_moves_after_the_end_of_a_lease_or_reservation(store, monkeypatch) -> None:
    """Mutant: a patience of 1,000 s, where the node keeps nothing for more than 120."""
    deadlines: list[float] = []
    for name in ("push", "pull"):
        move = getattr(store._mover, name)

        def timed(node, moved, deadline_s, move=move):
            deadlines.append(deadline_s)
            return move(node, moved, deadline_s)

        monkeypatch.setattr(store._mover, name, timed)
    monkeypatch.setattr(store, "_timeout_s", 1_000.0)
    assert store.put_many(NAMESPACE, puts()[:1]) == [True]
    assert store.get(NAMESPACE, KEYS[0]) is not None
    monkeypatch.setattr(store, "_timeout_s", 5.0)
    assert len(deadlines) == 2
    assert max(deadlines) < min(limits.LEASE_S_MAX, limits.RESERVATION_S_MAX)


def test_the_first_arrays_are_filled_while_the_last_is_read(store, transfer, monkeypatch) -> None:
    """Mutant: what was read is handed over when everything has come."""
    assert store.put_many(NAMESPACE, puts()) == [True] * 4
    targets = [np.zeros(OBJECT_BYTES, np.uint8) for _ in KEYS]
    submit, wait, reads = transfer.submit_read, transfer.wait, []

    def submit_noted(segment, pieces):
        reads.append(submit(segment, pieces))
        return reads[-1]

    def wait_for_the_others(handle, timeout_s):
        assert len(reads) == len(KEYS)
        if handle == reads[-1]:
            assert [bool(target.any()) for target in targets] == [True, True, True, False]
        return wait(handle, timeout_s)

    monkeypatch.setattr(transfer, "submit_read", submit_noted)
    monkeypatch.setattr(transfer, "wait", wait_for_the_others)
    assert all(one is not None for one in store.get_many(NAMESPACE, KEYS, targets))
    assert all(np.array_equal(target, array(depth)) for depth, target in enumerate(targets))


def test_everything_is_given_back_before_what_is_asked_next(store, node) -> None:
    """Mutants: the lease is left to its duration; a release is sent by a task that starts later."""
    store.put_many(NAMESPACE, puts()[:3])
    for _ in range(20):
        assert all(one is not None for one in store.get_many(NAMESPACE, KEYS[:3]))
        assert store.exists(NAMESPACE, KEYS[0])
        store.drop(NAMESPACE, KEYS[3:])
        assert node.store.snapshot().leases == 0
    assert node.store.snapshot().reservations == 0


def test_everything_is_given_back_before_the_end(node, network) -> None:
    transfer = InProcessTransfer(network, "another")
    with KVStore(node.address, transfer=transfer, staging_bytes=4 * OBJECT_BYTES) as store:
        store.open(MANIFEST)
        store.put_many(NAMESPACE, puts())
        assert all(one is not None for one in store.get_many(NAMESPACE, KEYS))
    transfer.close()
    assert node.store.snapshot().leases == 0


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.FAIL])
def test_a_failed_push_leaves_nothing_visible_and_nothing_reserved(store, node, network, fault) -> None:
    plan = network.plan(fault, at_byte=100, reads=False)
    assert store.put_many(NAMESPACE, puts()[:1]) == [False]
    assert plan.hits == 1
    assert not store.exists(NAMESPACE, KEYS[0])
    assert node.store.snapshot().reservations == 0
    assert store.put_many(NAMESPACE, puts()[:1]) == [True]


def test_a_bit_that_flips_in_the_nodes_memory_is_a_miss_and_drops_the_copy(store, node) -> None:
    """Mutant: hand out what does not verify."""
    store.put_many(NAMESPACE, puts())
    for page in range(node.arena.page_count):
        node.arena.view(page * node.arena.page_bytes, 1)[0] ^= 1
    assert store.get_many(NAMESPACE, KEYS) == [None] * 4
    assert not store.exists(NAMESPACE, KEYS[0])


def test_a_bit_that_flips_on_the_way_is_a_miss_and_keeps_the_copy(store, network) -> None:
    store.put_many(NAMESPACE, puts())
    plan = network.plan(Fault.FLIP, at_byte=5, writes=False)
    assert store.get(NAMESPACE, KEYS[0]) is None
    assert plan.hits == 1
    assert store.get(NAMESPACE, KEYS[0]) is not None


def test_no_node_says_what_to_do() -> None:
    with pytest.raises(PeerLost, match="kvstore serve"), KVStore(f"127.0.0.1:{free_port()}"):
        pass
    assert not any(thread.name == "kvstore-client" for thread in threading.enumerate())


def test_an_object_of_an_impossible_size_is_refused_with_the_right_ones(store) -> None:
    with pytest.raises(BadRequest, match="multiples of 2048"):
        store.put(NAMESPACE, KEYS[0], np.zeros(100, np.uint8))
    store.put(NAMESPACE, KEYS[0], array(1))
    with pytest.raises(BadRequest, match="does not go into"):
        store.get(NAMESPACE, KEYS[0], np.zeros(100, np.uint8))


def test_a_namespace_that_is_not_open_is_refused(store) -> None:
    unknown = Namespace(b"n" * 32)
    with pytest.raises(BadRequest, match="open"):
        store.get(unknown, KEYS[0])
    with pytest.raises(BadRequest, match="open"):
        store.put(unknown, KEYS[0], array(1))


def test_a_loop_thread_cancels_what_is_left() -> None:
    loop = LoopThread("test")
    forever = loop.submit(asyncio.Event().wait())
    loop.stop()
    assert forever.cancelled()
