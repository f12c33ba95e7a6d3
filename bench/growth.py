"""What ten thousand, a hundred thousand and a million objects cost: memory, time, and whether a call gets slower.

For each size a node of its own, just large enough, and a Redis of its own are started and filled with objects of
4 KiB with tables of 256 runs, as a chunk of an 8B model has. Measured are: anonymous memory of the node (the arena is
not in it) and memory of Redis; seconds until the node is ready; seconds, and CPU seconds of node, Redis and client,
until everything is stored and in the index; milliseconds of a lookup of 512 keys in the index, of an acquire of 512
keys at the node, and of 64 keys written into the full node, which evicts as many: medians of 30 calls. All sizes are
measured in turns, and what is printed is the median of the turns: a machine that is slow for a minute slows one of
them.

`growth_exponent_max`: the largest slope of what a node of that size takes (memory, seconds to ready) over the number
of objects, both in logarithms: 1 is linear. That of filling, which is work done once for each object, is shown
beside. `lookup_flat`, `acquire_flat`, `evict_flat`: the slowest size over the fastest.

    python bench/growth.py [--full] [--json] [--plot FILE.png]      --full: to a million, ten minutes
"""

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil

from bench._harness import Report, Wrong, parse_arguments, run
from bench._small_objects import MANIFEST, NAMESPACE, OBJECT_BYTES, TABLE, items, random_keys, store
from kvstore.client import Client, ClientConfig
from kvstore.core import Key
from tests.support import RedisServer, wait_until_async
from tests.support.node import running_node

SIZES = (10_000, 30_000, 100_000, 300_000)
SIZES_FULL = (*SIZES, 1_000_000)
TURNS = 3
FILLERS = 4  # at once: neither client nor node waits for the other
BATCH_KEYS = 500  # each; the smallest node reserves for no more at once
CHAIN = 512
WRITTEN = 64
REPEATS = 30
SPARE = 1.03  # of the arena beyond the objects: below its low-water mark a node begins to evict
AIM_EXPONENT = 1.1
AIM_FLAT = 2.0


class Point(NamedTuple):
    """One size: one turn, or the medians of several."""

    objects: float
    ready_s: float
    filled_s: float
    fill_cpu_s: float
    node_bytes: float
    redis_bytes: float
    lookup_ms: float
    acquire_ms: float
    evict_ms: float


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is its own: without the arena, which is shared."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds of these processes since they began."""
    return float(sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids))


async def timed_ms(work: Awaitable[Any]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    await work
    return 1e3 * (time.perf_counter() - began)


async def calls_ms(client: Client, stored: list[Key]) -> tuple[float, float, float]:
    """Lookups, acquires and writes that evict: medians."""
    rng = random.Random(0)
    lookups, acquires = [], []
    for _ in range(REPEATS):
        keys = rng.sample(stored, CHAIN)
        lookups.append(await timed_ms(client.lookup(NAMESPACE, keys)))
        began = time.perf_counter()
        promise = await client.acquire(NAMESPACE, keys, 10.0)
        acquires.append(1e3 * (time.perf_counter() - began))
        if len(promise) != CHAIN:
            raise Wrong(f"{len(promise)} of {CHAIN} stored keys were promised ({promise.reason})")
        await client.release(promise)
    spare = int(len(stored) * (SPARE - 1)) + WRITTEN * REPEATS
    await store(client, random_keys(spare))  # now it is full
    writes = [await timed_ms(write(client)) for _ in range(REPEATS)]
    return median(lookups), median(acquires), median(writes)


async def write(client: Client) -> None:
    """New keys, which take the places of others."""
    grants = (await client.reserve(NAMESPACE, items(random_keys(WRITTEN)), 10.0)).granted
    if len(grants) < WRITTEN:
        raise Wrong(f"{len(grants)} of {WRITTEN} objects were granted")
    await client.commit(NAMESPACE, [(grant, TABLE) for grant in grants])


async def fill(control: str, pids: Sequence[int], redis_client: Any, ready_s: float, objects: int) -> Point:
    """Fills a node, then measures. `pids`: the node, and Redis."""
    async with Client(ClientConfig(node=control, request_timeout_s=10.0)) as client:
        await client.open(MANIFEST)
        stored = random_keys(objects)
        involved = (*pids, os.getpid())
        began, cpu_before_s = time.perf_counter(), cpu_s(involved)
        await asyncio.gather(*[store(client, stored[lane::FILLERS], BATCH_KEYS) for lane in range(FILLERS)])
        await wait_until_async(lambda: redis_client.dbsize() >= objects, 300, "all objects are in the index")
        filled = time.perf_counter() - began, cpu_s(involved) - cpu_before_s
        memory = anonymous_bytes(pids[0]), int(redis_client.info("memory")["used_memory"])
        return Point(objects, ready_s, *filled, *memory, *await calls_ms(client, stored))


def measure(objects: int) -> Point:
    """One size, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        arena = int(objects * SPARE / 0.95) * OBJECT_BYTES
        began = time.perf_counter()
        with (
            running_node(redis_url=server.url, dram_size_bytes=arena, dram_page_bytes=OBJECT_BYTES) as node,
            server.client() as redis_client,
        ):
            ready_s = time.perf_counter() - began
            pids = node.pid, server.process.pid
            return asyncio.run(fill(node.control, pids, redis_client, ready_s, objects))


def medians(points: Sequence[Point]) -> Point:
    """Of several turns with one size."""
    return Point(*(median(values) for values in zip(*points, strict=True)))


def exponent(points: Sequence[Point], total: str) -> float:
    """The slope of a total over the number of objects, in logarithms."""
    sizes = np.log([point.objects for point in points])
    return float(np.polyfit(sizes, np.log([getattr(point, total) for point in points]), 1)[0])


TOTALS = {
    "node memory": "node_bytes",
    "Redis memory": "redis_bytes",
    "seconds to ready": "ready_s",
}
FILLING = {"CPU seconds to fill": "fill_cpu_s", "seconds to fill": "filled_s"}
CALLS = {"lookup": "lookup_ms", "acquire": "acquire_ms", "evict": "evict_ms"}


def table(points: Sequence[Point]) -> str:
    """For people."""
    lines = [
        f"{'objects':>9} {'node B/object':>14} {'Redis B/object':>14} {'ready s':>8} {'fill s':>8} {'CPU s':>8} "
        f"{'lookup ms':>10} {'acquire ms':>10} {'evict ms':>10}"
    ]
    for point in points:
        per_object = (point.node_bytes / point.objects, point.redis_bytes / point.objects)
        lines.append(
            f"{point.objects:>9,.0f} {per_object[0]:>14,.0f} {per_object[1]:>14,.0f} {point.ready_s:>8.2f} "
            f"{point.filled_s:>8.2f} {point.fill_cpu_s:>8.2f} {point.lookup_ms:>10.2f} {point.acquire_ms:>10.2f} "
            f"{point.evict_ms:>10.2f}"
        )
    return "\n".join(lines)


def plot(points: Sequence[Point], file: str) -> None:
    """Totals and calls over the number of objects; totals relative to the smallest."""
    import matplotlib as mpl  # noqa: PLC0415 - only for who wants a picture

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    sizes = [point.objects for point in points]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name, total in {**TOTALS, **FILLING}.items():
        values = [getattr(point, total) for point in points]
        left.loglog(sizes, [value / values[0] for value in values], marker="o", label=name)
    left.loglog(sizes, [size / sizes[0] for size in sizes], color="grey", linestyle=":", label="linear")
    left.set(title="Totals, relative to the smallest", xlabel="objects")
    for name, call in CALLS.items():
        right.semilogx(sizes, [getattr(point, call) for point in points], marker="o", label=name)
    right.set(title="Median of a call, ms", xlabel="objects", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=100)


def main() -> int:
    """Measures and prints; the exit code."""
    arguments = parse_arguments(__doc__ or "", plot="draw into this PNG file")
    sizes = SIZES_FULL if arguments.full else SIZES
    turns = [[measure(objects) for objects in sizes] for _ in range(TURNS)]
    points = [medians(some) for some in zip(*turns, strict=True)]
    report = Report("", "")
    exponents = {name: exponent(points, total) for name, total in {**TOTALS, **FILLING}.items()}
    report.note("exponents: " + ", ".join(f"{name} {value:.2f}" for name, value in exponents.items()))
    worst = max(exponents[name] for name in TOTALS)
    report.aim("growth_exponent_max", worst, AIM_EXPONENT, "", at_most=True)
    for name, call in CALLS.items():
        values = [getattr(point, call) for point in points]
        report.aim(f"{name}_flat", max(values) / min(values), AIM_FLAT, "x", at_most=True)
    if arguments.extra["plot"]:
        plot(points, arguments.extra["plot"])
    if arguments.json:
        rows = [{"turns": [point._asdict() for point in some]} for some in zip(*turns, strict=True)]
        print(json.dumps({**report.content(), "rows": rows}, indent=1))
        return 0
    print(table(points))
    return report.finish(as_json=False)


if __name__ == "__main__":
    run(main)
