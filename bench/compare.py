"""This store beside what people would use instead: the same bytes, one run, interleaved.

    tcp       this store, bytes by Mooncake over loopback TCP, every run of every object verified
    shm       this store, bytes through the arena's shared memory, verified likewise
    mooncake  Mooncake Store (master, owner, client), as it ships: no checksums
    checked   Mooncake Store with its checksums
    raw       Mooncake's Transfer Engine alone, in the way and segment size that are fastest here
    redis     Redis as a store of blobs, over loopback TCP
    memcpy    a copy in memory: what no store can beat

A batch is 64 MiB in objects of one size, from and to memory of the caller that was touched before (registered, where
there is such a thing). Every get is compared with what was put. Further tables: CPU seconds of all processes involved
for each GB; one object at a time; 512 keys looked up.

    python bench/compare.py [--full] [--json]
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from bench._harness import Report, Samples, Wrong, finish_all, interleave, parse_arguments, run
from bench._mooncake_store import MooncakeStore
from bench._one_by_one import latencies, lookups
from bench._raw_mooncake import RawMooncake
from bench.transfer import (
    BATCH_BYTES,
    GIB,
    KIB,
    MIB,
    OBJECT_BYTES,
    Bytes,
    Stack,
    best_way,
    said,
    timed,
)
from kvstore.client import KVStore
from tests.support import RedisServer
from tests.support.node import running_node

AIM_FROM_BYTES = 4 * MIB
AIMS = { # name: (ours, other, at least)
    "vs_raw": ("tcp", "raw", 0.9),
    "vs_mooncake": ("tcp", "mooncake", 1.2),
    "vs_mooncake_checked": ("tcp", "checked", 3.0),
}  # fmt: skip
CPU_OBJECT_BYTES = 4 * MIB

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


def cpu(systems: Mapping[str, System]) -> Report:
    """CPU seconds for each GB."""
    report = Report(
        f"CPU seconds of all processes for each GB, objects of {CPU_OBJECT_BYTES // MIB} MiB", "s/GB"
    )
    for what in ("put", "get"):
        samples = {name: Samples((cpu_s_per_gb(system, what),)) for name, system in systems.items()}
        report.row(what, samples, against=("tcp", "mooncake"))
    report.note("get includes comparing what came with what was put, but for raw and memcpy")
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
        best = best_way(raw.put), best_way(raw.get)
        here = os.getpid()
        systems = {
            **{name: System(one.put, one.get, [here, node.pid]) for name, one in ours.items()},
            **{
                name: System(partial(partial, peer.put), partial(partial, peer.get), peer.pids)
                for name, peer in (("mooncake", plain), ("checked", checked))
            },
            "raw": System(lambda _: partial(raw.put, best[0]), lambda _: partial(raw.get, best[1]), raw.pids),
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
            latencies(stores, {"mooncake": plain, "checked": checked}, raw, server, (source, target)),
            lookups(stores["tcp"], node.control, plain, server),
        ]
    for name, ratio in sorted(worst.items()):
        report.aim(name, ratio, aim_of(name), "x")
    report.note(f"aims are the worst of objects of {AIM_FROM_BYTES // MIB} MiB and more")
    report.note(f"raw puts: {said(best[0])}; raw gets: {said(best[1])}")
    return finish_all((report, *others), arguments.json)


if __name__ == "__main__":
    run(main)
