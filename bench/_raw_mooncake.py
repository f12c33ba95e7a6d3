"""Raw Mooncake over loopback TCP, as a baseline: two processes that do nothing else.

    with RawMooncake(batch_bytes) as raw:
        raw.put(segment_bytes)  # GB/s of one batch_transfer_sync_write of the batch in such segments
        raw.get(segment_bytes)

Both sides are processes of their own, so that the baseline neither shares threads with what is measured beside it nor
is slowed down by it: its busy waiting counts against itself alone.
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any, Self

import numpy as np


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

    def put(self, segment_bytes: int) -> float:
        """GB/s of writing a batch."""
        return self._batch_bytes / self._ask("write", segment_bytes, self._batch_bytes) / 1e9

    def get(self, segment_bytes: int) -> float:
        """GB/s of reading a batch."""
        return self._batch_bytes / self._ask("read", segment_bytes, self._batch_bytes) / 1e9

    def put_one_s(self, size_bytes: int) -> float:
        """Seconds of writing one segment, alone."""
        return self._ask("write", size_bytes, size_bytes)

    def get_one_s(self, size_bytes: int) -> float:
        """Of reading one."""
        return self._ask("read", size_bytes, size_bytes)

    def _ask(self, what: str, segment_bytes: int, total_bytes: int) -> float:
        assert self._client.stdin and self._client.stdout
        print(what, segment_bytes, total_bytes, file=self._client.stdin, flush=True)
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
        what, (size, total) = line.split()[0], map(int, line.split()[1:])
        move = engine.batch_transfer_sync_write if what == "write" else engine.batch_transfer_sync_read
        offsets = range(0, total, size)
        pieces = [local + at for at in offsets], [remote + at for at in offsets], [size] * len(offsets)
        begin = time.perf_counter()
        code = move(peer, *pieces)
        seconds = time.perf_counter() - begin
        assert code == 0, f"Mooncake answered {code}"
        print(seconds, flush=True)


if __name__ == "__main__":
    _, batch, role, *of_peer = sys.argv
    if role == "client":
        serve(int(batch), of_peer[0], int(of_peer[1]))
    else:
        serve(int(batch))
