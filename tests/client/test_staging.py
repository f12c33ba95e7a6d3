"""Staging memory: bounded, disjoint slots; a retired slot is nobody's until its transfer has ended."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import Slot, Staging
from kvstore.core import TransferFailed
from kvstore.transfer import Fault, InProcessNetwork, InProcessTransfer, Piece, Status
from tests.contracts.transfer_memory import Memory
from tests.support import wait_until

PAGE = 4096


def new_staging(pages: int = 8) -> Staging:
    return Staging(InProcessTransfer(InProcessNetwork()), pages * PAGE)


def take(staging: Staging, size_bytes: int) -> Slot:
    slot = staging.take(size_bytes, 0)
    assert slot, f"no slot of {size_bytes} bytes in {staging}"
    return slot


@given(st.lists(st.one_of(st.integers(1, 5 * PAGE), st.just(None)), max_size=40), st.randoms())
def test_slots_are_aligned_and_apart_and_everything_comes_back(sizes, random) -> None:
    """None gives a random slot back. Mutants: a slot cut short; freed neighbours not joined; a free one forgotten."""
    staging = new_staging(16)
    slots: list[Slot] = []
    for size in sizes:
        if size is None and slots:
            staging.give_back(slots.pop(random.randrange(len(slots))))
        elif size and (slot := staging.take(size, 0)):
            slots.append(slot)
            slot.view[:] = bytes([len(slots)]) * size
    for slot in slots:
        assert slot.address % PAGE == 0
        assert len(slot.view) == slot.size_bytes
        assert len(set(slot.view)) == 1, "another slot was written over this one"
        staging.give_back(slot)
    assert staging.stats().free_bytes == staging.size_bytes
    assert take(staging, staging.size_bytes)


def test_what_can_never_fit_is_refused_at_once() -> None:
    assert new_staging(2).take(2 * PAGE + 1, timeout_s=1e9) is None


def test_a_full_pool_refuses_after_the_timeout() -> None:
    staging = new_staging(2)
    take(staging, PAGE + 1)
    assert staging.take(1, timeout_s=0.01) is None


def test_who_waits_gets_what_another_gives_back() -> None:
    staging = new_staging(1)
    slot = take(staging, 1)
    got: list[Slot | None] = []
    waiter = threading.Thread(target=lambda: got.append(staging.take(1, 30)))
    waiter.start()
    staging.give_back(slot)
    waiter.join()
    assert got[0] is not None


def test_a_slot_given_back_twice_is_our_bug() -> None:
    staging = new_staging()
    slot = take(staging, 100)
    staging.give_back(slot)
    with pytest.raises(AssertionError, match="twice"):
        staging.give_back(slot)


def test_a_retired_slot_comes_back_when_its_transfer_has_ended() -> None:
    network = InProcessNetwork()
    transfer, peer, arena = InProcessTransfer(network), InProcessTransfer(network), Memory(2 * PAGE)
    peer.register(arena.address, arena.size_bytes)
    staging = Staging(transfer, 2 * PAGE)
    plan = network.plan(Fault.HOLD)
    slot = take(staging, 2 * PAGE)
    handle = transfer.submit_read(peer.segment, [Piece(slot.address, arena.address, 2 * PAGE)])
    staging.retire(slot, [handle])

    assert (plan.hits, transfer.poll(handle)) == (1, Status.PENDING)
    assert staging.take(1, 0.02) is None
    assert staging.stats()[1:] == (0, 2 * PAGE, 1)

    got: list[Slot | None] = []
    waiter = threading.Thread(target=lambda: got.append(staging.take(1, 30)))
    waiter.start()
    network.release()
    wait_until(lambda: got)
    waiter.join()
    assert network.late_bytes == 2 * PAGE
    assert staging.stats()[1:] == (PAGE, 0, 1)


def test_closed_staging_is_out_of_reach() -> None:
    network = InProcessNetwork()
    transfer, peer = InProcessTransfer(network), InProcessTransfer(network)
    staging = Staging(transfer, PAGE)
    slot = take(staging, 10)
    staging.give_back(slot)
    staging.close()
    with pytest.raises(TransferFailed):
        transfer.submit_read(peer.segment, [Piece(slot.address, 0, 10)])
