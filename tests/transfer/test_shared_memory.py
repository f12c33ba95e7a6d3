"""Shared memory: the contract, against a node's side in a process of its own; and what is particular to it.

Mutants that must fail here: a mapping for reading that can be written; a mapping that outlives its node; a copy
that goes on however late it is; a token, a user or a seal that nobody looks at.
"""

import ctypes
import fcntl
import itertools
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvstore.core import BadConfiguration, TransferFailed
from kvstore.tiers import Arena
from kvstore.transfer import ArenaSocket, AutoTransfer, InProcessNetwork, InProcessTransfer
from kvstore.transfer import Piece, SharedMemoryTransfer, Status, Transfer
from kvstore.transfer.arena_socket import ask_for_arena
from tests.contracts.transfer import SIZE, Rig, TransferSuite
from tests.contracts.transfer_memory import Memory
from tests.support import Process, wait_until

import signal

MIB = 1 << 20


class StoppableTransfer(SharedMemoryTransfer):
    """The kernel moves nothing here that a stopped peer could hold up, so copies are held up before each piece."""

    def __init__(self, going: threading.Event, lives_s: float = 10.0, token: bytes = b"") -> None:
        self.going = going
        super().__init__(token, lives_s)

    def _before_piece(self) -> None:
        assert self.going.wait(60.0), "nobody lets the copies go on"


class SharedMemoryRig(Rig):
    """A process that offers its arena."""

    _numbers = itertools.count()

    def __init__(self, folder: Path) -> None:
        self.going = threading.Event()
        self.going.set()
        self.segment = str(folder / f"{next(self._numbers)}.sock")
        arguments = [sys.executable, "-m", "tests.transfer.arena_peer", self.segment, str(SIZE)]
        self.process = Process(arguments, folder / "peer.log")
        _, address, fd = self.process.wait_for_output("ready").split()
        self.remote_address = int(address)
        self.remote = Memory(SIZE, Path(f"/proc/{self.process.pid}/fd/{fd}"))
        self.local = Memory(SIZE)
        self.transfer = self.another()

    def another(self) -> Transfer:
        other = self.make()
        other.register(self.local.address, SIZE)
        return other

    def make(self) -> Transfer:
        return StoppableTransfer(self.going)

    def stop(self) -> None:
        self.going.clear()
        self.process.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send(signal.SIGCONT)
        self.going.set()

    def kill(self) -> None:
        self.process.kill()
        self.going.set()

    def unregister_remote(self) -> None:
        self.process.send(signal.SIGUSR1)
        self.process.wait_for_output("withdrawn")

    def close(self) -> None:
        self.going.set()
        self.transfer.close()
        self.process.__exit__()


class AutoRig(SharedMemoryRig):
    """The same through an `AutoTransfer`."""

    def make(self) -> Transfer:
        return AutoTransfer(super().make(), InProcessTransfer(InProcessNetwork()))


@pytest.fixture(scope="module", params=[SharedMemoryRig, AutoRig])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = request.param(tmp_path_factory.mktemp("rig"))
    yield rig
    rig.close()


@pytest.fixture(params=[SharedMemoryRig, AutoRig])
def fragile_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = request.param(tmp_path)
    yield rig
    rig.close()


@pytest.mark.process
class TestSharedMemory(TransferSuite):
    pass
