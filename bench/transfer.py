"""Objects through the whole stack, by TCP and by shared memory, beside raw Mooncake and memcpy: what do verification
and bookkeeping cost?

put: reserve, hash, write, commit. get: look up, acquire, read, verify, release. Both on memory that the caller
registered, against a real `kvstore serve`; a batch of objects of 64 MiB in total per run, as an engine moves them.
Raw: as many bytes between two processes that do nothing else, cut into segments of the size that was fastest here, in
one synchronous call or each by itself, whichever is faster. memcpy: as many bytes between two arrays, object by
object. All memory is pre-faulted; every get is compared with what was put.

    python bench/transfer.py [--full] [--json]
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray

from bench._harness import Report, Wrong, interleave, parse_arguments, run
from bench._raw_mooncake import RawMooncake, Way
from kvstore.client import KVStore, Put
from kvstore.core import Key, Manifest, Namespace, chunk_key, limits
from tests.support.node import running_node

KIB, MIB, GIB = limits.KIB, limits.MIB, limits.GIB
BATCH_BYTES = 64 * MIB
OBJECT_BYTES = [256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 32 * MIB]
SEGMENT_BYTES = [256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB]
AIM_FROM_BYTES = 4 * MIB
FIRST_AIM = 1.2
STARTS = 5
PAUSE_S = 1.0  # less than what lies between the start of an engine and its first request
AIMS = {
    "tcp_put_vs_raw": 0.9,
    "tcp_get_vs_raw": 0.9,
    "shm_put_vs_tcp": 3.0,
    "shm_get_vs_tcp": 3.0,
    "shm_get_vs_memcpy": 0.4,
}
LAYERS, HEADS, TOKENS = 32, 8, 256

Bytes = NDArray[np.uint8]


def manifest_of(object_bytes: int, name: str = "bench") -> Manifest:
    """Objects of this size in 256 runs, as an 8B model's chunk has them."""
    lane_bytes = object_bytes // (LAYERS * HEADS * TOKENS)
    return Manifest(
        weights=name,
        model={},
        kv_dtype="bytes",
        tile_format="bench",
        chunk_tokens=TOKENS,
        unit_tokens=1,
        lanes=((LAYERS, HEADS, lane_bytes),),
    )


def timed(move: Callable[[], object]) -> float:
    """GB/s of moving one batch."""
    begin = time.perf_counter()
    move()
    return BATCH_BYTES / (time.perf_counter() - begin) / 1e9


class Stack:
    """Put and get of a batch through client, node and transfer."""

    def __init__(
        self, store: KVStore, object_bytes: int, source: Bytes, target: Bytes, name: str = "bench"
    ) -> None:
        self._store = store
        self._namespace: Namespace = store.open(manifest_of(object_bytes, name))
        self._sources = source.reshape(-1, object_bytes)
        self._target, self._source = target, source
        self._targets = list(target.reshape(-1, object_bytes))
        self._keys: list[Key] = []

    def drop(self) -> None:
        """Forgets the last batch."""
        if self._keys:
            self._store.drop(self._namespace, self._keys)

    def put(self) -> float:
        """Writes a batch under new keys."""
        self.drop()
        self._keys = [chunk_key(Key(self._namespace), list(os.urandom(8)))]
        for number in range(1, len(self._sources)):
            self._keys.append(chunk_key(self._keys[-1], [number]))
        parents = [None, *self._keys]
        puts = [
            Put(key, array, parent, depth)
            for depth, (key, array, parent) in enumerate(
                zip(self._keys, self._sources, parents, strict=False)
            )
        ]
        done: list[list[bool]] = []
        speed = timed(lambda: done.append(self._store.put_many(self._namespace, puts)))
        if not all(done[0]):
            raise Wrong(f"{done[0].count(False)} of {len(puts)} objects were not stored")
        return speed

    def get(self) -> float:
        """Reads the last batch."""
        self._target[:] = 0
        speed = timed(lambda: self._store.get_many(self._namespace, self._keys, self._targets))
        if not np.array_equal(self._target, self._source):
            raise Wrong("what was read is not what was written")
        return speed


def best_way(measure: Callable[[Way], float]) -> Way:
    """The way in which raw Mooncake is fastest here: by the median of seven runs each, interleaved."""
    ways = [Way(size, apart) for size in SEGMENT_BYTES for apart in (False, True)]
    speeds = interleave({str(way): partial(measure, way) for way in ways}, 7)
    return max(ways, key=lambda way: speeds[str(way)].median)


def said(way: Way) -> str:
    """In words."""
    segments = f"segments of {way.segment_bytes // KIB} KiB"
    return f"{segments}, each in a batch of its own" if way.apart else f"one batch in {segments}"


class Ways:
    """Stacks of one object size, one for each way that bytes move, and what they are compared with."""

    def __init__(
        self, stores: Mapping[str, KVStore], raw: RawMooncake, object_bytes: int, source: Bytes, target: Bytes
    ) -> None:
        self._stacks = {
            way: Stack(store, object_bytes, source, target, name=way) for way, store in stores.items()
        }
        self._raw = raw
        self._sources, self._targets = (memory.reshape(-1, object_bytes) for memory in (source, target))

    def put(self, way: Way) -> dict[str, Callable[[], float]]:
        """What is measured against each other."""
        ours = {way: stack.put for way, stack in self._stacks.items()}
        return {**ours, "raw": partial(self._raw.put, way), "memcpy": self.copy}

    def get(self, way: Way) -> dict[str, Callable[[], float]]:
        """As `put`."""
        ours = {way: stack.get for way, stack in self._stacks.items()}
        return {**ours, "raw": partial(self._raw.get, way), "memcpy": self.copy}

    def copy(self) -> float:
        """GB/s of copying a batch and nothing else."""

        def move() -> None:
            for source, target in zip(self._sources, self._targets, strict=True):
                np.copyto(target, source)

        return timed(move)


def first_against_tenth(node: str, way: str, source: Bytes, target: Bytes) -> dict[str, float]:
    """How much longer the first put and get of a client take than its tenth: medians over some clients."""
    ratios: dict[str, list[float]] = {"put": [], "get": []}
    for _ in range(STARTS):
        with KVStore(node, transfer=way) as store:
            store.register(source)
            store.register(target)
            stack = Stack(store, AIM_FROM_BYTES, source, target, "first")
            time.sleep(PAUSE_S)
            speeds = [(stack.put(), stack.get()) for _ in range(10)]
            for at, what in enumerate(ratios):
                ratios[what].append(speeds[9][at] / speeds[0][at])
            stack.drop()
    return {what: median(some) for what, some in ratios.items()}


def main() -> int:
    """Measures and prints; the exit code."""
    arguments = parse_arguments(__doc__ or "")
    pairs = 25 if arguments.full else 11
    report = Report(
        "Objects through the whole stack, beside raw Mooncake over loopback TCP and memcpy", "GB/s"
    )
    worst = dict.fromkeys(AIMS, float("inf"))
    source = np.random.default_rng().integers(0, 256, BATCH_BYTES, np.uint8)
    target = np.full(BATCH_BYTES, 1, np.uint8)  # touched, unlike zeros
    arena = str(2 * GIB)  # a small object takes a whole page, and two clients may reserve 15 % of them each
    with (
        running_node(dram_size_bytes=arena) as node,
        RawMooncake(BATCH_BYTES) as raw,
        KVStore(node.control, transfer="mooncake") as tcp,
        KVStore(node.control, transfer="shm") as shm,
    ):
        stores = {"tcp": tcp, "shm": shm}
        for store in stores.values():
            store.register(source)
            store.register(target)
        best = {"put": best_way(raw.put), "get": best_way(raw.get)}
        firsts = {
            f"{way}_{what}_first_vs_tenth": ratio
            for way, transfer in (("tcp", "mooncake"), ("shm", "shm"))
            for what, ratio in first_against_tenth(node.control, transfer, source, target).items()
        }
        for object_bytes in OBJECT_BYTES:
            ways = Ways(stores, raw, object_bytes, source, target)
            for what, measured in (("put", ways.put(best["put"])), ("get", ways.get(best["get"]))):
                samples = interleave(measured, pairs)
                name = f"{what} {BATCH_BYTES // object_bytes} x {object_bytes // KIB} KiB"
                report.row(name, samples, against=("shm", "tcp"))
                for aim in AIMS if object_bytes >= AIM_FROM_BYTES else ():
                    ours, way, _, other = aim.split("_")
                    if way == what:
                        worst[aim] = min(worst[aim], samples[ours].median / samples[other].median)
    report.note(f"{pairs} rounds; raw {'; '.join(f'{what}: {said(way)}' for what, way in best.items())}")
    for aim, at_least in AIMS.items():
        report.aim(aim, worst[aim], at_least, "x")
    for name, ratio in firsts.items():
        report.aim(name, ratio, FIRST_AIM, "x", at_most=True)
    return report.finish(arguments.json)


if __name__ == "__main__":
    run(main)
