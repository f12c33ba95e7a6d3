"""The in-process twin: the contract, and each of its faults."""

import pytest

from kvstore.core import TransferFailed
from kvstore.transfer import Fault, InProcessNetwork, InProcessTransfer, Status
from tests.contracts.transfer import SIZE, Rig, TransferSuite
from tests.contracts.transfer_memory import Memory


class InProcessRig(Rig):
    """Two endpoints of one network. A stopped peer is a HOLD that meets everything."""

    def __init__(self) -> None:
        self.network = InProcessNetwork()
        self.transfer = InProcessTransfer(self.network)
        self.peer = InProcessTransfer(self.network)
        self.local, self.remote = Memory(SIZE), Memory(SIZE)
        self.transfer.register(self.local.address, SIZE)
        self.peer.register(self.remote.address, SIZE)
        self.remote_address, self.segment = self.remote.address, self.peer.segment

    def stop(self) -> None:
        self.network.plan(Fault.HOLD, times=1_000)

    def resume(self) -> None:
        self.network.plans.clear()
        self.network.release()

    def kill(self) -> None:
        self.peer.close()
        self.resume()

    def unregister_remote(self) -> None:
        self.peer.unregister(self.remote.address)

    def another(self) -> InProcessTransfer:
        other = InProcessTransfer(self.network)
        other.register(self.local.address, SIZE)
        return other


@pytest.fixture(scope="module")
def rig() -> Rig:
    return InProcessRig()


@pytest.fixture
def fragile_rig() -> Rig:
    return InProcessRig()


class TestInProcess(TransferSuite):
    pass


@pytest.fixture
def pair() -> InProcessRig:
    rig = InProcessRig()
    rig.local.fill(1)
    return rig


def test_a_held_transfer_moves_when_released_with_the_bytes_of_then(pair: InProcessRig) -> None:
    plan = pair.network.plan(Fault.HOLD)
    handle = pair.transfer.submit_write(pair.segment, [pair.piece(0, 0, 4096)])
    assert pair.write(pair.piece(8192, 8192, 4096)) is Status.DONE  # the fault has met its one transfer
    assert pair.transfer.poll(handle) is Status.PENDING
    assert not any(pair.remote[:4096])
    pair.local[0:4096] = bytes([2]) * 4096
    assert pair.network.release() == 1
    assert pair.transfer.poll(handle) is Status.DONE
    assert pair.remote[:4096] == bytes([2]) * 4096
    assert (plan.hits, pair.network.late_bytes) == (1, 4096)


def test_a_transfer_fails_after_exactly_so_many_bytes(pair: InProcessRig) -> None:
    plan = pair.network.plan(Fault.FAIL, at_byte=5_000)
    assert pair.write(pair.piece(0, 0, 4096), pair.piece(8192, 8192, 4096)) is Status.FAILED
    assert pair.remote[:4096] == pair.local[:4096]
    assert pair.remote[8192 : 8192 + 4096] == bytes([1]) * 904 + bytes(4096 - 904)
    assert (plan.hits, pair.network.copied_bytes) == (1, 5_000)


def test_a_flip_damages_one_bit_of_one_byte(pair: InProcessRig) -> None:
    plan = pair.network.plan(Fault.FLIP, at_byte=4_100)
    assert pair.write(pair.piece(0, 0, 4096), pair.piece(8192, 8192, 4096)) is Status.DONE
    assert pair.remote[8192 : 8192 + 4096] == bytes([1]) * 4 + b"\x11" + bytes([1]) * 4091
    assert plan.hits == 1


def test_a_fault_meets_only_what_it_is_for(pair: InProcessRig) -> None:
    plan = pair.network.plan(Fault.REFUSE, times=2, writes=False)
    assert pair.write(pair.piece(0, 0, 1)) is Status.DONE
    for _ in range(2):
        with pytest.raises(TransferFailed):
            pair.read(pair.piece(0, 0, 1))
    assert pair.read(pair.piece(0, 0, 1)) is Status.DONE
    assert (plan.hits, pair.network.reads, pair.network.writes) == (2, 3, 1)
