"""Client processes to be killed: forked from a server that has everything imported, so that a life costs no start."""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import psutil

from kvstore.core import Key
from kvstore.transfer import SharedMemoryTransfer
from tests.faults.support import Engine, chain, shape

OBJECT_BYTES = 1 << 20
MANIFEST = shape(OBJECT_BYTES, "killed")
LARGE = shape(16 << 20, "large")
OBJECTS = 8
LIVES_S = 60  # should a test forget one


def push_for_ever(node: str, seed: int, duration_s: float, told: Connection, kind: str = "mooncake") -> None:
    """Pushes chains, one after the other; tells each seed before its objects move."""
    signal.alarm(LIVES_S)
    with Engine(node, MANIFEST, kind=kind) as engine:
        while True:
            grants = [g for g in engine.reserve(_chain(seed), duration_s) if g.granted]
            told.send(seed)
            if grants and (address := grants[0].address) is not None:
                engine.commit(grants, engine.push(address, grants))
            seed += 1


def pull_for_ever(node: str, seed: int, duration_s: float, told: Connection, kind: str = "mooncake") -> None:
    """Pulls one chain again and again; tells how many of its objects are promised before they move."""
    signal.alarm(LIVES_S)
    with Engine(node, MANIFEST, kind=kind) as engine:
        while True:
            promise = engine.acquire(_chain(seed), duration_s)
            told.send(len(promise))
            engine.pull(promise)
            engine.release(promise)


def reserve_for_ever(node: str, seed: int, duration_s: float, told: Connection) -> None:
    """Reserves all it can get and never writes."""
    signal.alarm(LIVES_S)
    with Engine(node, MANIFEST, staging_bytes=4096) as engine:
        while True:
            told.send(sum(g.granted is not None for g in engine.reserve(_chain(seed), duration_s)))
            seed += 1


def stop_while_writing(node: str, seed: int, duration_s: float, told: Connection) -> None:
    """Reserves two large objects, tells their pages, and stops itself while the first one is on its way. When it is
    continued and nothing of them moves any more, it tells how many it could commit."""
    signal.alarm(LIVES_S)
    with Engine(node, LARGE) as engine:
        keys = chain(LARGE.namespace, 2, seed)
        grants = engine.reserve(keys, duration_s)
        assert grants[0].granted is not None and grants[0].address is not None
        told.send([list(extent) for extent in grants[0].granted.extents])

        def stop(number: int) -> None:
            if number == 1:
                os.kill(os.getpid(), signal.SIGSTOP)

        results = engine.push(grants[0].address, grants, timeout_s=duration_s, first=stop)
        while engine.staging.stats().retired_bytes:
            signal.sigtimedwait([], 0.01)
        told.send(len(engine.commit(grants, results)))
        signal.pause()


class HalfwayTransfer(SharedMemoryTransfer):
    """Stops its process in the middle of its first piece; when that is continued, it copies the other half."""

    def __init__(self, lives_s: float) -> None:
        super().__init__(lives_s=lives_s)
        self._pieces = itertools.count(1)

    def _move(self, target: int, source: int, size_bytes: int) -> None:
        half = size_bytes // 2
        super()._move(target, source, half)
        if next(self._pieces) == 1:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # to this thread: at once
        super()._move(target + half, source + half, size_bytes - half)


def stop_while_copying(node: str, seed: int, duration_s: float, told: Connection) -> None:
    """As `stop_while_writing`, by shared memory: it stops itself in a copy of its own."""
    signal.alarm(LIVES_S)
    transfer = HalfwayTransfer(lives_s=duration_s)
    with Engine(node, LARGE, transfer=transfer) as engine:
        grants = engine.reserve(chain(LARGE.namespace, 2, seed), duration_s)
        assert grants[0].granted is not None and grants[0].address is not None
        told.send([list(extent) for extent in grants[0].granted.extents])
        results = engine.push(grants[0].address, grants, timeout_s=duration_s)
        while engine.staging.stats().retired_bytes:
            signal.sigtimedwait([], 0.01)
        told.send(len(engine.commit(grants, results)))
        signal.pause()


def _chain(seed: int) -> list[Key]:
    return chain(MANIFEST.namespace, OBJECTS, seed)


class Nursery:
    """Where client processes come from."""

    def __init__(self) -> None:
        self._context: ForkServerContext = get_context("forkserver")
        self._context.set_forkserver_preload(["tests.faults.clients", "mooncake.engine"])

    @contextlib.contextmanager
    def client(self, work, node: str, seed: int, duration_s: float) -> "Iterator[Doomed]":
        """One client process."""
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(target=work, args=(node, seed, duration_s, there), daemon=True)
        process.start()
        there.close()
        try:
            yield Doomed(process.pid or 0, here)
        finally:
            process.kill()
            process.join()
            process.close()
            here.close()


class Doomed:
    """A client process, and what it says."""

    def __init__(self, pid: int, says: Connection) -> None:
        self.pid = pid
        self.says = says
        self.heard: list[Any] = []

    def hears(self, deadline_s: float = 30.0) -> Any:
        """The next thing it says."""
        assert self.says.poll(deadline_s), "a client process says nothing"
        self.heard.append(self.says.recv())
        return self.heard[-1]

    def is_stopped(self) -> bool:
        """Whether it has been stopped by a signal."""
        return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, now."""
        os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(EOFError):
            while self.says.poll(5):
                self.heard.append(self.says.recv())
