"""Shared memory: the contract, against a node's side in a process of its own; and what is particular to it.

Mutants that must fail here: a mapping for reading that can be written; a mapping that outlives its node; a copy
that goes on however late it is; a token, a user or a seal that nobody looks at.
"""

import fcntl
import itertools
import mmap
import os
import re
import signal
import socket
import stat
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kvstore.core import BadConfiguration, TransferFailed
from kvstore.tiers import Arena
from kvstore.transfer import (
    ArenaSocket,
    AutoTransfer,
    InProcessNetwork,
    InProcessTransfer,
    Piece,
    SharedMemoryTransfer,
    Status,
    Transfer,
)
from kvstore.transfer.arena_socket import Handed, ask_for_arena
from kvstore.transfer.copying import PIECE_BYTES_MAX
from kvstore.transfer.mapped_arena import MappedArena
from tests.contracts.transfer import SIZE, Rig, TransferSuite
from tests.contracts.transfer_memory import Memory
from tests.support import Process, wait_until

MIB = 1 << 20


class StoppableTransfer(SharedMemoryTransfer):
    """The kernel moves nothing here that a stopped peer could hold up, so copies are held up before each piece."""

    def __init__(self, going: threading.Event, lives_s: float = 10.0, token: bytes = b"") -> None:
        self.going = going
        self.before: Callable[[], object] = lambda: None
        super().__init__(token, lives_s)

    def _before_piece(self) -> None:
        self.before()
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
    """Through an `AutoTransfer`, as it is mostly used: it hands on, so both keep the contract or fail here."""

    def make(self) -> Transfer:
        return AutoTransfer(super().make(), InProcessTransfer(InProcessNetwork()))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = AutoRig(tmp_path_factory.mktemp("rig"))
    yield rig
    rig.close()


@pytest.fixture
def fragile_rig(tmp_path: Path) -> Iterator[Rig]:
    rig = AutoRig(tmp_path)
    yield rig
    rig.close()


@pytest.mark.process
class TestSharedMemory(TransferSuite):
    pass


# --- what is particular to it -------------------------------------------------------------------------


class Offer:
    """An arena that this process offers."""

    def __init__(self, folder: Path, token: bytes = b"", uids: Collection[int] = ()) -> None:
        self.arena = Arena.create(MIB, lock=False)
        self.path = folder / "offer.sock"
        self.socket = ArenaSocket(self.path, self.arena.fd, self.arena.address, token, uids)

    def close(self) -> None:
        self.socket.close()
        self.arena.close()


@pytest.fixture
def offer(tmp_path: Path) -> Iterator[Offer]:
    offered = Offer(tmp_path / "run", uids=[os.getuid() + 1])
    yield offered
    offered.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[SharedMemoryRig]:
    rig = SharedMemoryRig(tmp_path)
    yield rig
    rig.close()


@contextmanager
def handed_by(path: object, *, writing: bool = False) -> Iterator[Handed]:
    """What the socket hands to a client without a token."""
    handed = ask_for_arena(str(path), b"", writing=writing)
    yield handed
    handed.connection.close()
    os.close(handed.fd)


def mappings() -> list[str]:
    """Flags of the arenas that this process has mapped for reading or writing, as the kernel says."""
    text = Path("/proc/self/smaps").read_text()
    heads = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)
    return [f"{part.split()[1]} {part.split('VmFlags:')[1]}" for part in heads if "kvstore-arena" in part]


def resident_bytes(address: int) -> int:
    """How much of a mapping is in this process's page tables."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{address:x}-.*?^Rss: +(\d+) kB", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.process
def test_a_reader_cannot_write_and_a_child_gets_nothing(peer: SharedMemoryRig) -> None:
    before = mappings()
    assert peer.read(peer.piece(0, 0, MIB)) is Status.DONE
    (mapped,) = (Counter(mappings()) - Counter(before)).elements()
    assert mapped.startswith("r--s"), "the arena is mapped so that a mistake could write"
    assert " dc " in f" {mapped} ", "a child would keep the arena"
    with handed_by(peer.segment) as handed, pytest.raises(PermissionError):
        mmap.mmap(handed.fd, SIZE, prot=mmap.PROT_WRITE)


@pytest.mark.process
def test_what_a_piece_will_touch_is_entered_before(peer: SharedMemoryRig) -> None:
    """Over the edge of two slices: both, and no third; the kernel may enter a few pages beside them by itself."""
    arena = MappedArena(ask_for_arena(peer.segment, b"", writing=True), writing=True)
    edge = 16 * MIB
    arena.populate_for(Piece(0, arena.base + edge - 1, 2))
    entered_bytes = resident_bytes(arena.address)
    arena.close()
    assert 2 * edge <= entered_bytes < 2 * edge + MIB


@pytest.mark.process
def test_pages_are_entered_in_the_background_when_nothing_is_copied(
    peer: SharedMemoryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client's first copies would wait for all others'. Mutant: between two steps of a copy by hand."""
    may_enter, events, slices = threading.Event(), list[str](), MappedArena.slices

    def slices_later(arena: MappedArena) -> range:
        assert may_enter.wait(60.0)
        return slices(arena)

    monkeypatch.setattr(MappedArena, "slices", slices_later)
    monkeypatch.setattr(MappedArena, "populate", lambda arena, number: events.append("entered"))
    monkeypatch.setattr(MappedArena, "populate_for", lambda arena, piece: None)
    other = StoppableTransfer(peer.going)
    other.register(peer.local.address, SIZE)
    assert other.wait(other.submit_write(peer.segment, [peer.piece(0, 0, 1)]), 10.0) is Status.DONE
    copy = other.by_hand(peer.segment, [peer.piece(0, 0, SIZE)], writing=True)
    assert copy is not None
    waits, looked = other._changed.wait, threading.Event()

    def wait_noted(timeout_s: float | None = None) -> bool:
        looked.set()
        return bool(waits(timeout_s))

    monkeypatch.setattr(other._changed, "wait", wait_noted)
    may_enter.set()
    wait_until(lambda: looked.is_set() or events, 10, "the thread has looked whether something is copied")
    assert all(copy.move(MIB) for _ in range(SIZE // MIB))
    events.append("copied")
    copy.close()
    wait_until(lambda: events[-1] == "entered", 10, "pages are entered")
    assert events[0] == "copied"
    other.close()


@pytest.mark.process
def test_the_memory_of_a_dead_node_is_not_kept(peer: SharedMemoryRig) -> None:
    count, threads, fds = len(mappings()), threading.active_count(), psutil.Process().num_fds()
    other = peer.another()
    for submit in (other.submit_read, other.submit_write):
        assert other.wait(submit(peer.segment, [peer.piece(0, 0, MIB)]), 10.0) is Status.DONE
    assert len(mappings()) == count + 2
    peer.kill()
    wait_until(lambda: len(mappings()) == count, 5, "the arena has been unmapped")
    other.close()
    wait_until(lambda: threading.active_count() <= threads, 5, "the threads have ended")
    assert psutil.Process().num_fds() <= fds


@pytest.mark.process
def test_a_writer_that_was_stopped_writes_no_more_than_the_piece_it_was_in(peer: SharedMemoryRig) -> None:
    """As if stopped by a signal behind the first piece, and continued after its time."""
    pieces = itertools.count()

    def stop_before_the_second() -> None:
        if next(pieces) == 1:
            peer.going.clear()

    transfer = StoppableTransfer(peer.going, lives_s=0.2)
    transfer.before = stop_before_the_second
    peer.local.fill(7)
    transfer.register(peer.local.address, SIZE)
    handle = transfer.submit_write(peer.segment, [peer.piece(0, 0, 4 * PIECE_BYTES_MAX)])
    assert transfer.wait(handle, 0.5) is Status.PENDING
    peer.going.set()
    assert transfer.wait(handle, 10.0) is Status.FAILED
    assert peer.remote[:SIZE].count(7) == transfer.copied_bytes == PIECE_BYTES_MAX
    transfer.close()


def test_only_this_user_can_enter_unless_others_are_named(tmp_path: Path) -> None:
    for folder, uids, modes in (("own", [], (0o700, 0o600)), ("shared", [54_321], (0o711, 0o666))):
        offered = Offer(tmp_path / folder, uids=uids)
        found = tuple(stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / folder, offered.path))
        offered.close()
        assert found == modes
        assert not list((tmp_path / folder).iterdir()), "something is left of it"


def test_a_user_who_is_not_named_is_refused(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    with handed_by(offer.path):
        pass
    monkeypatch.setattr(offer.socket, "_uids", {os.getuid() + 1})
    with pytest.raises(TransferFailed, match=f"this process as {os.getuid()}"):
        ask_for_arena(str(offer.path), b"", writing=False)


def test_a_token_is_asked_for_where_there_is_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    offered = Offer(tmp_path, token=b"secret")
    segments = {"shm": str(offered.path), "mooncake": "somewhere"}
    near = {token: SharedMemoryTransfer(token) for token in (b"secret", b"wrong", b"")}
    assert {token: transfer.reach(segments) for token, transfer in near.items()} == {
        b"secret": str(offered.path),
        b"wrong": "",
        b"": "",
    }
    assert "does not share its memory" in caplog.text
    for transfer in near.values():
        transfer.close()
    offered.close()


def test_where_shared_memory_does_not_reach_the_other_way_is_taken(tmp_path: Path) -> None:
    network = InProcessNetwork()
    far, near = InProcessTransfer(network), SharedMemoryTransfer()
    elsewhere = {"shm": str(tmp_path / "of-another-host.sock"), "in_process": "x"}
    assert AutoTransfer(near, far).reach(elsewhere) == "x"
    with pytest.raises(TransferFailed, match="no mooncake here"):
        AutoTransfer(near, None, "no mooncake here").reach(elsewhere)
    near.close()


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_memory_that_could_be_taken_away_is_not_mapped(tmp_path: Path, seals: int) -> None:
    """A touch of it would end the process."""
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    offered = ArenaSocket(tmp_path / "unsafe.sock", fd, 4096)
    with pytest.raises(TransferFailed, match="no sealed memory"):
        ask_for_arena(str(offered.path), b"", writing=True)
    offered.close()
    os.close(fd)


def test_what_killed_nodes_have_left_is_removed_and_living_ones_stay(offer: Offer) -> None:
    dead = offer.path.with_name("dead.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(dead))
        listener.listen()
    assert dead.exists()
    another = ArenaSocket(offer.path.with_name("another.sock"), offer.arena.fd, offer.arena.address)
    assert not dead.exists()
    with handed_by(offer.path):
        another.close()


def test_nonsense_is_no_request_and_the_next_client_is_served(offer: Offer) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(offer.path))
        stranger.send(b"\xc1 no message at all")
        with handed_by(offer.path, writing=True) as handed:
            assert (handed.arena_base, handed.arena_bytes) == (offer.arena.address, MIB)


def test_a_directory_that_cannot_be_used_is_named_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "x.sock", tmp_path / ("long" * 40) / "x.sock"):
        with pytest.raises(BadConfiguration, match=r"transfer\.shm_dir"):
            ArenaSocket(path, os.memfd_create("any"), 0)
