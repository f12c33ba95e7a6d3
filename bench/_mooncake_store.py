"""Mooncake Store over loopback TCP, as its documentation says to run it: a master, an owner of memory, a client.

    with MooncakeStore(folder, batch_bytes, checked=False) as peer:
        peer.put(object_bytes)  # GB/s of one batch_put_from of a batch of such objects, under new keys
        peer.get(object_bytes)  # GB/s of one batch_get_into of the batch that was put last, compared afterwards

Each part is a process of its own. The owner's segment is touched once before anything is measured.
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from tests.support.processes import Process, free_port

MIB = 1 << 20
HOST = "127.0.0.1"
START_S = 60.0


class MooncakePool:
    """A master, and a process that owns the memory. `checked`: with checksums, which are off by default."""

    def __init__(self, folder: Path, segment_bytes: int, *, checked: bool = False) -> None:
        self.folder = folder
        self.env = {
            "MC_FORCE_TCP": "1",
            "MOONCAKE_STORE_CHECKSUM": str(int(checked)),
            "GLOG_minloglevel": "2",
        }
        self.master = f"{HOST}:{free_port()}"
        self._segment_bytes = segment_bytes
        self._processes = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as processes:
            self.folder.mkdir(exist_ok=True)
            host, _, port = self.master.partition(":")
            flags = [f"--rpc_address={host}", f"--rpc_port={port}", f"--metrics_port={free_port()}"]
            command = [str(Path(sys.executable).with_name("mooncake_master")), *flags]
            master = processes.enter_context(Process(command, self.folder / "master.log", self.env))
            owner = self.start(processes, "owner", self._segment_bytes)
            self.pids = [master.pid, owner.pid]
            self._processes = processes.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def start(self, processes: ExitStack, role: str, size_bytes: int) -> "subprocess.Popen[str]":
        """A process of this file that is ready; it ends when its input does."""
        log = processes.enter_context((self.folder / f"{role}.log").open("w"))
        process = processes.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "bench._mooncake_store", role, str(size_bytes), self.master],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self.env},
                text=True,
            )
        )
        assert process.stdin and process.stdout
        processes.callback(process.stdin.close)
        next(line for line in process.stdout if line.startswith("ready"))
        return process


class MooncakeStore:
    """A client process of a pool of its own."""

    def __init__(self, folder: Path, batch_bytes: int, *, checked: bool) -> None:
        self._pool = MooncakePool(folder, 8 * batch_bytes, checked=checked)
        self._batch_bytes = batch_bytes
        self._processes = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as processes:
            processes.enter_context(self._pool)
            self._client = self._pool.start(processes, "client", self._batch_bytes)
            self.pids = [*self._pool.pids, self._client.pid]
            self._processes = processes.pop_all()
        for _ in range(4):
            self.put(4 * MIB)  # memory that was never touched is slow, and nobody's fault
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def put(self, object_bytes: int) -> float:
        """GB/s of storing a batch."""
        return self._ask("put", object_bytes)

    def get(self, object_bytes: int) -> float:
        """GB/s of reading it."""
        return self._ask("get", object_bytes)

    def put_one_s(self, object_bytes: int) -> float:
        """Seconds for one object, alone."""
        return self._ask("put_one", object_bytes)

    def get_one_s(self, object_bytes: int) -> float:
        """Seconds for the object that was put alone."""
        return self._ask("get_one", object_bytes)

    def exist_s(self, num_keys: int) -> float:
        """Seconds to hear of so many keys, none of them new, whether they exist."""
        return self._ask("exist", num_keys)

    def _ask(self, what: str, number: int) -> float:
        assert self._client.stdin and self._client.stdout
        print(what, number, file=self._client.stdin, flush=True)
        line = self._client.stdout.readline()
        if not line:
            log = (self._pool.folder / "client.log").read_text(errors="replace")
            raise RuntimeError(f"the client of Mooncake Store ended; the end of its log:\n{log[-2000:]}")
        return float(line)


def connect(segment_bytes: int, master: str) -> Any:
    """A client of the master that offers so much memory."""
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - only in these processes

    store: Any = MooncakeDistributedStore()
    code = store.setup(HOST, "P2PHANDSHAKE", segment_bytes, 16 * MIB, "tcp", "", master)
    assert code == 0, f"Mooncake Store answered {code}"
    return store


def own(segment_bytes: int, master: str) -> None:
    """Offers memory until the input ends."""
    store = connect(segment_bytes, master)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


class Client:
    """What the lines of the input ask for."""

    def __init__(self, batch_bytes: int, master: str) -> None:
        self._batch_bytes = batch_bytes
        self._store = connect(0, master)
        self._source = np.frombuffer(os.urandom(MIB) * (batch_bytes // MIB), np.uint8).copy()
        self._target = np.ones(batch_bytes, np.uint8)
        for array in (self._source, self._target):
            assert self._store.register_buffer(array.ctypes.data, batch_bytes) == 0
        self._keys: list[str] = []
        self._round = 0
        self._exist = [f"exist-{number}" for number in range(4096)]

    def put(self, object_bytes: int, num_objects: int = 0) -> float:
        """Stores objects under new keys; the old ones are removed first, which does not count."""
        for key in self._keys:
            self._store.remove(key, True)
        self._round += 1
        count = num_objects or self._batch_bytes // object_bytes
        self._keys = [f"{self._round}-{number}" for number in range(count)]
        pointers = [self._source.ctypes.data + number * object_bytes for number in range(count)]
        began = time.perf_counter()
        codes = self._store.batch_put_from(self._keys, pointers, [object_bytes] * count)
        seconds = time.perf_counter() - began
        assert all(code == 0 for code in codes), f"Mooncake Store answered {codes}"
        return seconds

    def get(self, object_bytes: int) -> float:
        """Reads what was stored last."""
        self._target[:] = 0
        count = len(self._keys)
        pointers = [self._target.ctypes.data + number * object_bytes for number in range(count)]
        began = time.perf_counter()
        codes = self._store.batch_get_into(self._keys, pointers, [object_bytes] * count)
        seconds = time.perf_counter() - began
        assert all(code == object_bytes for code in codes), f"Mooncake Store answered {codes}"
        end = count * object_bytes
        assert np.array_equal(self._target[:end], self._source[:end]), "what was read is not what was written"
        return seconds

    def exist(self, num_keys: int) -> float:
        """Asks for keys of small objects, which are stored when first asked for."""
        if self._exist:
            self._small, self._exist = self._exist, []
            for key in self._small:
                assert self._store.put_from(key, self._source.ctypes.data, 4096) == 0
        chosen = [str(key) for key in np.random.default_rng().choice(self._small, num_keys, replace=False)]
        began = time.perf_counter()
        found = self._store.batch_is_exist(chosen)
        seconds = time.perf_counter() - began
        assert sum(found) == num_keys, "a stored object does not exist"
        return seconds

    def answer(self, what: str, number: int) -> float:
        """GB/s of a batch, seconds of anything else."""
        match what:
            case "put":
                return self._batch_bytes / self.put(number) / 1e9
            case "get":
                return self._batch_bytes / self.get(number) / 1e9
            case "put_one":
                return self.put(number, 1)
            case "get_one":
                return self.get(number)
            case _:
                return self.exist(number)


def serve(batch_bytes: int, master: str) -> None:
    """Answers lines until the input ends."""
    client = Client(batch_bytes, master)
    print("ready", flush=True)
    for line in sys.stdin:
        what, number = line.split()
        print(client.answer(what, int(number)), flush=True)


if __name__ == "__main__":
    _, role, size, master = sys.argv
    (own if role == "owner" else serve)(int(size), master)
