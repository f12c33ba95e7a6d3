"""Raw Mooncake over loopback TCP, as a baseline: two processes that do nothing else.

    with RawMooncake(batch_bytes) as raw:
        raw.put(Way(segment_bytes, apart=False))  # GB/s of one batch_transfer_sync_write in such segments
        raw.get(Way(segment_bytes, apart=True))  # each segment in a batch of its own, all at once, polled

Both sides are processes of their own, so that the baseline neither shares threads with what is measured beside it nor
is slowed down by it. Mooncake's synchronous call waits busily, which costs a core; segments apart are waited for
asleep. Which is faster depends on how many cores are idle: a baseline at its best is the better of both.
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import numpy as np

POLL_S = 100e-6


class Way(NamedTuple):
    """How a batch is moved: in segments of this size, in one synchronous call or each by itself."""

    segment_bytes: int
    apart: bool


class RawMooncake:
    """Moves batches of `batch_bytes` between a client and a target process."""

    def __init__(self, batch_bytes: int) -> None:
        self._batch_bytes = batch_bytes
        self._processes = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as processes:
            target, peer, address = self._start(processes, "target")
            self._client, *_ = self._start(processes, "client", peer, address)
            self.pids = [target.pid, self._client.pid]
            self._processes = processes.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def put(self, way: Way) -> float:
        """GB/s of writing a batch."""
        return self._batch_bytes / self._ask("write", way, self._batch_bytes) / 1e9

    def get(self, way: Way) -> float:
        """GB/s of reading a batch."""
        return self._batch_bytes / self._ask("read", way, self._batch_bytes) / 1e9

    def put_one_s(self, size_bytes: int) -> float:
        """Seconds of writing one segment, alone."""
        return self._ask("write", Way(size_bytes, apart=False), size_bytes)

    def get_one_s(self, size_bytes: int) -> float:
        """Of reading one."""
        return self._ask("read", Way(size_bytes, apart=False), size_bytes)

    def _ask(self, what: str, way: Way, total_bytes: int) -> float:
        assert self._client.stdin and self._client.stdout
        print(what, way.segment_bytes, int(way.apart), total_bytes, file=self._client.stdin, flush=True)
        return float(self._client.stdout.readline())

    def _start(self, processes: ExitStack, *role: str) -> tuple[subprocess.Popen[str], str, str]:
        """A process that is ready, and what it says about itself; it ends when its input does."""
        process = processes.enter_context(
            subprocess.Popen(
                [sys.executable, __file__, str(self._batch_bytes), *role],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "MC_FORCE_TCP": "1"},
                text=True,
            )
        )
        assert process.stdin and process.stdout
        processes.callback(process.stdin.close)
        _, segment, address = next(line for line in process.stdout if line.startswith("ready")).split()
        return process, segment, address


def serve(batch_bytes: int, peer: str = "", remote: int = 0) -> None:
    """Offers memory, and moves batches to and from the peer's as the lines of the input say."""
    from mooncake.engine import TransferEngine  # noqa: PLC0415 - only in these two processes, without our seam

    memory = np.frombuffer(os.urandom(1 << 20) * (batch_bytes >> 20), np.uint8).copy()
    local = memory.ctypes.data
    engine: Any = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(local, batch_bytes) == 0
    print("ready", f"127.0.0.1:{engine.get_rpc_port()}", local, flush=True)
    for line in sys.stdin:
        what, (size, apart, total) = line.split()[0], map(int, line.split()[1:])
        starts = range(0, total, size)
        pieces = [local + at for at in starts], [remote + at for at in starts], [size] * len(starts)
        begin = time.perf_counter()
        (move_apart if apart else move)(engine, what, peer, pieces)
        print(time.perf_counter() - begin, flush=True)


Pieces = tuple[list[int], list[int], list[int]]
"""Addresses here, addresses there, sizes."""


def move(engine: Any, what: str, peer: str, pieces: Pieces) -> None:
    """In one synchronous call."""
    call = engine.batch_transfer_sync_write if what == "write" else engine.batch_transfer_sync_read
    assert call(peer, *pieces) == 0, "Mooncake failed"


def move_apart(engine: Any, what: str, peer: str, pieces: Pieces) -> None:
    """Each piece in a batch of its own, all under way at once, and sleeps between looking at them."""
    start = engine.batch_transfer_async_write if what == "write" else engine.batch_transfer_async_read
    for batch in [start(peer, *([one] for one in piece)) for piece in zip(*pieces, strict=True)]:
        while (status := engine.transfer_check_status(batch)) == 0:
            time.sleep(POLL_S)
        assert status == 1, "Mooncake failed"


if __name__ == "__main__":
    _, batch, role, *of_peer = sys.argv
    if role == "client":
        serve(int(batch), of_peer[0], int(of_peer[1]))
    else:
        serve(int(batch))
