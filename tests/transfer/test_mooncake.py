"""Mooncake over loopback TCP, against a peer in a process of its own."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core import TransferFailed
from kvstore.transfer import MooncakeTransfer
from tests.contracts.transfer import SIZE, Rig, TransferSuite
from tests.contracts.transfer_memory import Memory
from tests.support import Process

PROGRESS_S = 1.0


class MooncakeRig(Rig):
    """An engine here and a process there; the peer's memory is a file that both map."""

    def __init__(self, folder: Path) -> None:
        self.remote = Memory(SIZE, folder / "arena")
        arguments = [sys.executable, "-m", "tests.transfer.peer", str(folder / "arena"), str(SIZE)]
        self.process = Process(arguments, folder / "peer.log")
        self.transfer = MooncakeTransfer("127.0.0.1", progress_timeout_s=PROGRESS_S)
        self.local = Memory(SIZE)
        self.transfer.register(self.local.address, SIZE)
        said = self.process.wait_for_output("ready")
        _, self.segment, address = next(
            line for line in said.splitlines() if line.startswith("ready")
        ).split()
        self.remote_address = int(address)

    def stop(self) -> None:
        self.process.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()

    def unregister_remote(self) -> None:
        self.process.send(signal.SIGUSR1)
        self.process.wait_for_output("unregistered")

    def another(self) -> MooncakeTransfer:
        other = MooncakeTransfer("127.0.0.1", progress_timeout_s=PROGRESS_S)
        other.register(self.local.address, SIZE)
        return other

    def close(self) -> None:
        self.transfer.close()
        self.process.__exit__()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = MooncakeRig(tmp_path_factory.mktemp("rig"))
    yield rig
    rig.close()


@pytest.fixture
def fragile_rig(tmp_path: Path) -> Iterator[Rig]:
    rig = MooncakeRig(tmp_path)
    yield rig
    rig.close()


@pytest.mark.process
class TestMooncake(TransferSuite):
    pass


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransferFailed, match=r"pip.*libibverbs1"):
        MooncakeTransfer("127.0.0.1")


def test_only_known_protocols_are_taken() -> None:
    with pytest.raises(TransferFailed, match="tcp or rdma"):
        MooncakeTransfer("127.0.0.1", protocol="quic")


def test_a_device_that_is_not_there_is_an_error_not_tcp() -> None:
    with pytest.raises(TransferFailed, match="no_such_device"):
        MooncakeTransfer("127.0.0.1", protocol="rdma", devices="no_such_device")
