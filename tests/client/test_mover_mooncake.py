"""The mover over real Mooncake, against an arena in another process: the same promises on a real wire."""

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client import Mover, PullResult, Staging
from kvstore.core import MissReason
from kvstore.transfer import MooncakeTransfer
from tests.client.moving import PAGE, Arena, Got, node_at, whole
from tests.contracts.transfer_memory import Memory
from tests.support import Process, wait_until

ARENA_BYTES = 64 << 20
LONG_S = 30.0


class World:
    """A client with staging, and a process that holds an arena."""

    def __init__(self, folder: Path) -> None:
        memory = Memory(ARENA_BYTES, folder / "arena")
        peer = [sys.executable, "-m", "tests.transfer.peer"]
        arguments = [str(folder / "arena"), str(ARENA_BYTES), "127.0.0.1", "tcp", ""]
        self.process = Process([*peer, *arguments], folder / "peer.log")
        self.transfer = MooncakeTransfer("127.0.0.1", progress_timeout_s=1)
        self.staging = Staging(self.transfer, 32 << 20)
        self.mover = Mover(self.transfer, self.staging)
        said = self.process.wait_for_output("ready")
        _, segment, address = next(line for line in said.splitlines() if line.startswith("ready")).split()
        self.arena = Arena(memory, node_at("mooncake", segment, int(address)))
        self.node = self.arena.address


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.transfer.close()
    world.process.__exit__()


@pytest.mark.process
def test_objects_survive_the_wire_and_damage_does_not(world: World) -> None:
    """Odd sizes, scattered pages, staged and in registered memory; then one bit is wrong in one of them."""
    sizes = [1, PAGE - 1, PAGE, 100_001, 3 << 20]
    made = [world.arena.object(size, whole(size, runs=1 + size % 7)) for size in sizes]
    pushed = world.mover.push(world.node, [one.push() for one in made], LONG_S)
    assert [r.checksums for r in pushed] == [one.table for one in made]
    assert [world.arena.get(one) for one in made] == [one.data for one in made]

    world.arena.flip(world.arena.pages(made[3].extents)[-1] * PAGE)
    got = [Got() for _ in made]
    pulled = world.mover.pull(
        world.node, [one.pull(sink) for one, sink in zip(made, got, strict=True)], LONG_S
    )
    assert [r.corrupt for r in pulled] == [False, False, False, True, False]
    assert [sink.seen for sink in got] == [[one.data] if one is not made[3] else [] for one in made]

    memory = Memory(4 << 20)
    world.transfer.register(memory.address, memory.size_bytes)
    assert world.mover.pull(world.node, [made[4].pull(memory.address)], LONG_S) == [PullResult(ok=True)]
    assert memory[: 3 << 20] == made[4].data


@pytest.mark.process
def test_a_node_that_stops_costs_the_deadline_and_nothing_else(world: World) -> None:
    """Stopped: misses at the deadline, slots retired. Continued: they come back, all is well. Killed: misses."""
    made = [world.arena.object(3 << 20, stored=True) for _ in range(6)]
    assert world.mover.pull(world.node, [made[0].pull(Got())], LONG_S) == [PullResult(ok=True)]

    world.process.send(signal.SIGSTOP)
    got, begin = Got(), time.monotonic()
    pulled = world.mover.pull(world.node, [one.pull(got) for one in made], 0.3)
    assert time.monotonic() - begin < 5, "the deadline was 0.3 s"
    assert {r.reason for r in pulled} == {MissReason.TOO_SLOW}
    assert world.staging.stats().retirements > 0
    (pushed,) = world.mover.push(world.node, [made[0].push()], 0.1)
    assert (pushed.ok, pushed.quiet, pushed.reason) == (False, False, MissReason.TOO_SLOW)

    world.process.send(signal.SIGCONT)
    wait_until(lambda: world.staging.stats().retired_bytes == 0, what="retired slots coming back")
    results = world.mover.pull(world.node, [one.pull(got) for one in made], LONG_S)
    assert results == [PullResult(ok=True)] * 6
    assert got.seen == [one.data for one in made]

    world.process.kill()
    results = world.mover.pull(world.node, [one.pull(got) for one in made], LONG_S)
    assert {r.reason for r in results} == {MissReason.NODE_DOWN}
    assert len(got.seen) == 6
    assert world.staging.stats().free_bytes == world.staging.size_bytes
