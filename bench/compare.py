"""This store beside what people would use instead: the same bytes, one run, interleaved.

    tcp       this store, bytes by Mooncake over loopback TCP, every run of every object verified
    shm       this store, bytes through the arena's shared memory, verified likewise
    mooncake  Mooncake Store (master, owner, client), as it ships: no checksums
    checked   Mooncake Store with its checksums
    raw       Mooncake's Transfer Engine alone, one batch, the best segment size
    redis     Redis as a store of blobs, over loopback TCP
    memcpy    a copy in memory: what no store can beat

A batch is 64 MiB in objects of one size, from and to memory of the caller that was touched before (registered, where
there is such a thing). Every get is compared with what was put. Further tables: one object at a time; 512 keys looked
up (ours leases them as well, and names their places and checksums); CPU seconds of all processes involved per GB.

    python bench/compare.py [--full] [--json]
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from bench._harness import Report, Samples, Wrong, finish_all, interleave, parse_arguments, run
from bench._mooncake_store import MooncakeStore
from bench._raw_mooncake import RawMooncake
from bench.transfer import (
    BATCH_BYTES,
    GIB,
    KIB,
    MIB,
    OBJECT_BYTES,
    Bytes,
    Stack,
    best_segment,
    manifest_of,
    timed,
)
from kvstore.client import Client, ClientConfig, KVStore, Put
from kvstore.core import Key, Namespace, chunk_key
from tests.support import RedisServer
from tests.support.node import running_node

AIM_FROM_BYTES = 4 * MIB
AIMS = { # name: (ours, other, at least)
    "vs_raw": ("tcp", "raw", 0.9),
    "vs_mooncake": ("tcp", "mooncake", 1.2),
    "vs_mooncake_checked": ("tcp", "checked", 3.0),
}  # fmt: skip
CPU_OBJECT_BYTES = 4 * MIB
LOOKUP_KEYS = 512
ONE_OBJECT_BYTES = 4 * MIB

Speed = Callable[[], float]


class System(NamedTuple):
    """One column: GB/s of a put and of a get of a batch of such objects; the processes that work for it."""

    put: Callable[[int], Speed]
    get: Callable[[int], Speed]
    pids: list[int]


class Ours:
    """This store over one transfer."""

    def __init__(self, store: KVStore, source: Bytes, target: Bytes) -> None:
        self._memory = store, source, target
        for array in (source, target):
            store.register(array)
        self._stacks: dict[int, Stack] = {}

    def put(self, object_bytes: int) -> Speed:
        """What puts batches of objects of this size."""
        return self._of(object_bytes).put

    def get(self, object_bytes: int) -> Speed:
        """What gets them."""
        return self._of(object_bytes).get

    def _of(self, object_bytes: int) -> Stack:
        if object_bytes not in self._stacks:
            store, source, target = self._memory
            self._stacks[object_bytes] = Stack(store, object_bytes, source, target)
        return self._stacks[object_bytes]


class Redis:
    """Blobs in Redis: one pipeline of SET, one MGET."""

    def __init__(self, server: RedisServer, source: Bytes, target: Bytes) -> None:
        self._client = server.client()
        self._source, self._target = source, target

    def put(self, object_bytes: int) -> float:
        """GB/s of storing a batch."""
        self._blobs = self._source.reshape(-1, object_bytes)
        return timed(self._put)

    def get(self, object_bytes: int) -> float:
        """GB/s of reading it back into the caller's memory."""
        self._target[:] = 0
        targets = self._target.reshape(-1, object_bytes)
        speed = timed(partial(self._get, targets))
        if not np.array_equal(self._target, self._source):
            raise Wrong("what Redis gave is not what it was given")
        return speed

    def _put(self) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for number, blob in enumerate(self._blobs):
                pipeline.set(f"blob-{number}", blob.data)
            pipeline.execute()

    def _get(self, targets: Bytes) -> None:
        values: Any = self._client.mget([f"blob-{number}" for number in range(len(targets))])
        for target, value in zip(targets, values, strict=True):
            target[:] = np.frombuffer(value, np.uint8)


def copying(source: Bytes, target: Bytes, object_bytes: int) -> float:
    """GB/s of copying a batch, object by object."""
    pairs = list(zip(source.reshape(-1, object_bytes), target.reshape(-1, object_bytes), strict=True))

    def copy() -> None:
        for one, other in pairs:
            np.copyto(other, one)

    return timed(copy)


def speeds(report: Report, systems: Mapping[str, System], pairs: int) -> dict[str, float]:
    """Rows for every size; the worst ratio of each aim from `AIM_FROM_BYTES` on."""
    worst: dict[str, float] = {}
    for object_bytes in OBJECT_BYTES:
        for what in ("put", "get"):
            measured = {name: getattr(system, what)(object_bytes) for name, system in systems.items()}
            samples = interleave(measured, pairs)
            name = f"{what} {BATCH_BYTES // object_bytes} x {object_bytes // KIB} KiB"
            report.row(name, samples, against=("tcp", "mooncake"))
            if object_bytes >= AIM_FROM_BYTES:
                for aim, ratio in ratios(samples, what).items():
                    worst[aim] = min(worst.get(aim, ratio), ratio)
    return worst


def ratios(samples: Mapping[str, Samples], what: str) -> dict[str, float]:
    """What is aimed at, of one line."""
    median = {name: some.median for name, some in samples.items()}
    found = {f"tcp_{what}_{name}": median[ours] / median[other] for name, (ours, other, _) in AIMS.items()}
    found[f"shm_{what}_vs_tcp"] = median["shm"] / median["tcp"]
    if what == "get":
        found["shm_get_vs_memcpy"] = median["shm"] / median["memcpy"]
    return found


def aim_of(name: str) -> float:
    """At least so much."""
    if name == "shm_get_vs_memcpy":
        return 0.4
    return 3.0 if name.startswith("shm_") else AIMS[name.split("_", 2)[2]][2]


def cpu_s_per_gb(system: System, what: str, rounds: int = 12) -> float:
    """CPU seconds of all its processes, for each GB that is put or got."""
    system.put(CPU_OBJECT_BYTES)()
    measure = getattr(system, what)(CPU_OBJECT_BYTES)
    processes = [psutil.Process(pid) for pid in system.pids]
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    for _ in range(rounds):
        measure()
    after = sum(sum(process.cpu_times()[:2]) for process in processes)
    return float(after - before) / (rounds * BATCH_BYTES / 1e9)


class OneByOne:
    """Milliseconds of one object at a time through this store."""

    def __init__(self, store: KVStore, source: Bytes, target: Bytes) -> None:
        self._store = store
        self._source, self._target = source[:ONE_OBJECT_BYTES], target[:ONE_OBJECT_BYTES]
        self._namespace: Namespace = store.open(manifest_of(ONE_OBJECT_BYTES))
        self._key: Key | None = None

    def put_ms(self) -> float:
        """A new object."""
        if self._key is not None:
            self._store.drop(self._namespace, [self._key])
        key = self._key = chunk_key(Key(self._namespace), list(os.urandom(8)))
        began = time.perf_counter()
        done = self._store.put_many(self._namespace, [Put(key, self._source)])
        taken_ms = 1e3 * (time.perf_counter() - began)
        if not all(done):
            raise Wrong("one object was not stored")
        return taken_ms

    def get_ms(self) -> float:
        """The object that was put last."""
        assert self._key is not None, "something was put"
        began = time.perf_counter()
        got = self._store.get_many(self._namespace, [self._key], [self._target])
        taken_ms = 1e3 * (time.perf_counter() - began)
        if got[0] is None or not np.array_equal(self._target, self._source):
            raise Wrong("one object did not come back")
        return taken_ms


def latencies(stores: Mapping[str, KVStore], peer: MooncakeStore, memory: tuple[Bytes, Bytes]) -> Report:
    """One object at a time."""
    report = Report(f"One object of {ONE_OBJECT_BYTES // MIB} MiB at a time", "ms")
    ours = {name: OneByOne(store, *memory) for name, store in stores.items()}
    for what in ("put", "get"):
        samples = interleave(
            {
                **{name: getattr(one, f"{what}_ms") for name, one in ours.items()},
                "mooncake": partial(_one_ms, peer, what),
            },
            pairs=40,
        )
        report.row(f"{what}, median", samples, against=("tcp", "mooncake"))
        tails = {name: Samples((float(np.percentile(some.values, 99)),)) for name, some in samples.items()}
        report.row(f"{what}, 99th percentile of 40", tails, against=("tcp", "mooncake"))
    return report


def _one_ms(peer: MooncakeStore, what: str) -> float:
    return 1e3 * (peer.put_one_s(ONE_OBJECT_BYTES) if what == "put" else peer.get_one_s(ONE_OBJECT_BYTES))


def lookups(store: KVStore, control: str, peer: MooncakeStore) -> Report:
    """Hundreds of keys: ours are found, leased and given back; theirs are said to exist."""
    report = Report(f"{LOOKUP_KEYS} keys looked up", "ms")
    namespace = store.open(manifest_of(64 * KIB))
    array = np.ones(64 * KIB, np.uint8)
    puts, parent = [], None
    for depth in range(LOOKUP_KEYS):
        key = chunk_key(parent or Key(namespace), [depth])
        puts.append(Put(key, array, parent, depth))
        parent = key
    for start in range(0, len(puts), 64):
        if not all(store.put_many(namespace, puts[start : start + 64])):
            raise Wrong("small objects were not stored")
    keys = [put.key for put in puts]
    client = Client(ClientConfig(node=control))

    async def ours_ms() -> float:
        began = time.perf_counter()
        promise = await client.acquire(namespace, keys, 10.0)
        taken_ms = 1e3 * (time.perf_counter() - began)
        await client.release(promise)
        if len(promise) != LOOKUP_KEYS:
            raise Wrong(f"{len(promise)} of {LOOKUP_KEYS} keys were found")
        return taken_ms

    with asyncio.Runner() as loop:
        loop.run(client.start())
        loop.run(client.open(manifest_of(64 * KIB)))
        samples = interleave(
            {"kvstore": lambda: loop.run(ours_ms()), "mooncake": lambda: 1e3 * peer.exist_s(LOOKUP_KEYS)}, 20
        )
        loop.run(client.close())
    report.row("all there", samples, against=("kvstore", "mooncake"))
    return report


def cpu(systems: Mapping[str, System]) -> Report:
    """CPU seconds for each GB."""
    report = Report(
        f"CPU seconds of all processes for each GB, objects of {CPU_OBJECT_BYTES // MIB} MiB", "s/GB"
    )
    for what in ("put", "get"):
        samples = {name: Samples((cpu_s_per_gb(system, what),)) for name, system in systems.items()}
        report.row(what, samples, against=("tcp", "mooncake"))
    return report


def main() -> int:
    """Measures and prints; the exit code."""
    arguments = parse_arguments(__doc__ or "")
    report = Report("Batches of 64 MiB through this store and others", "GB/s")
    source = np.random.default_rng().integers(0, 256, BATCH_BYTES, np.uint8)
    target = np.full(BATCH_BYTES, 1, np.uint8)  # touched, unlike zeros
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Two clients have half of what may be reserved each, and an object takes a page at least.
        node = stack.enter_context(running_node(dram_size_bytes=str(2 * GIB)))
        stores = {
            name: stack.enter_context(KVStore(node.control, transfer=transfer))
            for name, transfer in (("tcp", "mooncake"), ("shm", "shm"))
        }
        plain = stack.enter_context(MooncakeStore(folder / "plain", BATCH_BYTES, checked=False))
        checked = stack.enter_context(MooncakeStore(folder / "checked", BATCH_BYTES, checked=True))
        raw = stack.enter_context(RawMooncake(BATCH_BYTES))
        server = stack.enter_context(RedisServer(folder))
        blobs = Redis(server, source, target)
        ours = {name: Ours(store, source, target) for name, store in stores.items()}
        segments = best_segment(raw.put), best_segment(raw.get)
        here = os.getpid()
        systems = {
            **{name: System(one.put, one.get, [here, node.pid]) for name, one in ours.items()},
            **{
                name: System(partial(partial, peer.put), partial(partial, peer.get), peer.pids)
                for name, peer in (("mooncake", plain), ("checked", checked))
            },
            "raw": System(
                lambda _: partial(raw.put, segments[0]), lambda _: partial(raw.get, segments[1]), raw.pids
            ),
            "redis": System(
                partial(partial, blobs.put), partial(partial, blobs.get), [here, server.process.pid]
            ),
            "memcpy": System(
                partial(partial, copying, source, target), partial(partial, copying, source, target), [here]
            ),
        }
        worst = speeds(report, systems, 25 if arguments.full else 7)
        others = [
            cpu(systems),
            latencies(stores, plain, (source, target)),
            lookups(stores["tcp"], node.control, plain),
        ]
    for name, ratio in sorted(worst.items()):
        report.aim(name, ratio, aim_of(name), "x")
    report.note(f"aims are the worst of objects of {AIM_FROM_BYTES // MIB} MiB and more")
    return finish_all((report, *others), arguments.json)


if __name__ == "__main__":
    run(main)
