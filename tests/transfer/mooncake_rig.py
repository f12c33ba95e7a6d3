"""Two Mooncake engines, for the contract suite: over TCP on this machine, over RDMA in another one."""

import signal
import sys
from pathlib import Path
from typing import NamedTuple

from kvstore.transfer import MooncakeTransfer
from tests.contracts.transfer import SIZE, Rig
from tests.contracts.transfer_memory import Memory
from tests.support import Process

PROGRESS_S = 1.0


class End(NamedTuple):
    """What a Mooncake engine is made with."""

    host: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""

    def open(self) -> MooncakeTransfer:
        return MooncakeTransfer(*self, progress_timeout_s=PROGRESS_S)


LOOPBACK = End()


class MooncakeRig(Rig):
    """An engine here and a process there; the peer's memory is a file that both map."""

    def __init__(self, folder: Path, here: End = LOOPBACK, there: End = LOOPBACK) -> None:
        self.here = here
        self.remote = Memory(SIZE, folder / "arena")
        arguments = [sys.executable, "-m", "tests.transfer.peer", str(folder / "arena"), str(SIZE), *there]
        self.process = Process(arguments, folder / "peer.log")
        self.transfer = here.open()
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
        other = self.here.open()
        other.register(self.local.address, SIZE)
        return other

    def close(self) -> None:
        self.transfer.close()
        self.process.__exit__()
