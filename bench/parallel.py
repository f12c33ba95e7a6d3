"""Objects moved by the ranks of a parallel engine, beside the same bytes moved by one: what do parts cost?

Two objects of 32 MiB (32 layers, 8 KV heads, 256 tokens, as an 8B model has them), written into granted pages of a
real node and read back, over loopback TCP. whole: TP1/PP1, one mover moves both objects. split: TP4/PP2, eight
threads move one part each, in spans of 256 KiB. Both copy through staging memory and hash every run, as an engine's
workers do; everything read is compared with what was written.

    python bench/parallel.py [--full] [--json]
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bench._harness import Report, Wrong, interleave, parse_arguments, run
from kvstore.client import (
    Client,
    ClientConfig,
    LoopThread,
    Mover,
    NodeAddress,
    PullItem,
    PushItem,
    ReserveItem,
    Resident,
    open_mover,
)
from kvstore.core import Extent, Extents, Geometry, Key, LaneGroup, Manifest, Part, chunk_key, limits
from tests.support.node import running_node

MIB, GIB = limits.MIB, limits.GIB
GEOMETRY = Geometry(1, (LaneGroup(32, 8, 512),))
TOKENS = 256
OBJECTS = 2
TP, PP = 4, 2
AIM = 0.8
RESERVED_S = 110.0  # for all pushes
DEADLINE_S = 30.0

Bytes = NDArray[np.uint8]
MANIFEST = Manifest(
    weights="bench",
    model={},
    kv_dtype="bfloat16",
    tile_format="bench",
    chunk_tokens=TOKENS,
    unit_tokens=1,
    lanes=((32, 8, 512),),
)
SIZE_BYTES = GEOMETRY.object_bytes(TOKENS)


def parts() -> list[Part]:
    """The parts of all ranks of the split engine."""
    layers = GEOMETRY.num_layers // PP
    stages = [range(pp * layers, (pp + 1) * layers) for pp in range(PP)]
    return [GEOMETRY.part(TOKENS, stage, tp, TP) for stage in stages for tp in range(TP)]


def bytes_of(data: Bytes, part: Part) -> Bytes:
    """A part's own bytes of an object."""
    return np.concatenate([data[offset : offset + size] for offset, size in part.spans])


class Rank:
    """Moves one part of every object, from and to memory of its own.

    Args:
        part: which.
        sources: the objects.
    """

    def __init__(self, mover: Mover, node: NodeAddress, part: Part, sources: Sequence[Bytes]) -> None:
        self._mover, self._node, self._part = mover, node, part
        self._sources = [bytes_of(source, part) for source in sources]
        self._targets = [np.full(part.size_bytes, 1, np.uint8) for _ in sources]  # touched, unlike zeros

    def push(self, extents: Sequence[Extents]) -> list[dict[int, bytes]]:
        """Writes its parts; for each object the checksums by run."""
        items = [
            PushItem(place, SIZE_BYTES, self._part, partial(_fill, source))
            for place, source in zip(extents, self._sources, strict=True)
        ]
        sums = []
        for result in self._mover.push(self._node, items, DEADLINE_S):
            if not result.ok or result.checksums is None:
                raise Wrong(f"a part was not written: {result.error}")
            sums.append(
                {run.index: result.checksums[8 * n : 8 * n + 8] for n, run in enumerate(self._part.runs)}
            )
        return sums

    def pull(self, extents: Sequence[Extents], tables: Sequence[bytes]) -> None:
        """Reads its parts."""
        items = [
            PullItem(place, SIZE_BYTES, self._part, table, partial(_empty, target))
            for place, table, target in zip(extents, tables, self._targets, strict=True)
        ]
        for result in self._mover.pull(self._node, items, DEADLINE_S):
            if not result.ok:
                raise Wrong(f"a part was not read: {result.error}")

    def check(self) -> None:
        """What was read must be what was written; then forgets it."""
        for source, target in zip(self._sources, self._targets, strict=True):
            if not np.array_equal(source, target):
                raise Wrong("what was read is not what was written")
            target[:] = 1


def _fill(source: Bytes, view: memoryview) -> None:
    np.frombuffer(view, np.uint8)[:] = source


def _empty(target: Bytes, view: memoryview) -> None:
    target[:] = np.frombuffer(view, np.uint8)


class Engine:
    """All ranks of an engine, each on a thread."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._threads = ThreadPoolExecutor(len(ranks))

    def push(self, extents: Sequence[Extents]) -> float:
        """GB/s of writing all objects."""
        return self._timed(lambda rank: rank.push(extents))

    def pull(self, extents: Sequence[Extents], tables: Sequence[bytes]) -> float:
        """GB/s of reading all objects."""
        speed = self._timed(lambda rank: rank.pull(extents, tables))
        for rank in self._ranks:
            rank.check()
        return speed

    def tables(self, extents: Sequence[Extents]) -> list[bytes]:
        """Writes all objects; their tables, put together from all ranks."""
        runs: list[dict[int, bytes]] = [{} for _ in extents]
        for rank in self._ranks:
            for some, more in zip(runs, rank.push(extents), strict=True):
                some.update(more)
        return [b"".join(some[index] for index in range(GEOMETRY.num_runs)) for some in runs]

    def _timed(self, work: Callable[[Rank], object]) -> float:
        begin = time.perf_counter()
        list(self._threads.map(work, self._ranks))
        return OBJECTS * SIZE_BYTES / (time.perf_counter() - begin) / 1e9


def measure(client: Client, loop: LoopThread, control: str, report: Report, pairs: int) -> float:
    """Measures push and pull; the worse of the two ratios."""
    namespace = loop.run(client.open(MANIFEST))
    keys = [chunk_key(Key(namespace), list(os.urandom(8)))]
    keys.append(chunk_key(keys[0], [1]))
    asked = [
        ReserveItem(key, parent, n, SIZE_BYTES, False)
        for n, (key, parent) in enumerate(zip(keys, [Key(namespace), *keys], strict=False))
    ]
    grants = loop.run(client.reserve(namespace, asked, RESERVED_S)).grants
    node = grants[0].address
    if node is None or any(grant.granted is None for grant in grants):
        raise Wrong(f"no pages: {[grant.answer for grant in grants]}")
    places = [tuple(Extent(*extent) for extent in grant.granted.extents) for grant in grants if grant.granted]
    mover = open_mover(control, staging_bytes=256 * MIB)
    sources = list(np.random.default_rng().integers(0, 256, (OBJECTS, SIZE_BYTES), np.uint8))
    whole = Engine([Rank(mover, node, GEOMETRY.whole(SIZE_BYTES), sources)])
    split = Engine([Rank(mover, node, part, sources) for part in parts()])
    pushed = interleave({"split": partial(split.push, places), "whole": partial(whole.push, places)}, pairs)
    tables = split.tables(places)
    if tables != whole.tables(places):
        raise Wrong("the ranks' checksums are not those of the whole")
    loop.run(client.commit(namespace, list(zip(grants, tables, strict=True))))
    promise = loop.run(client.acquire(namespace, keys, 100.0))
    if not all(isinstance(copy.answer, Resident) for copy in promise.copies) or len(promise) != OBJECTS:
        raise Wrong("what was committed is not to be had")
    pulled = interleave(
        {"split": partial(split.pull, places, tables), "whole": partial(whole.pull, places, tables)}, pairs
    )
    loop.run(client.release(promise))
    return min(
        report.row("push 2 x 32 MiB", pushed, against=("split", "whole")),
        report.row("pull 2 x 32 MiB", pulled, against=("split", "whole")),
    )


def main() -> int:
    """Measures and prints; the exit code."""
    arguments = parse_arguments(__doc__ or "")
    pairs = 25 if arguments.full else 11
    report = Report(f"Objects moved by TP{TP}/PP{PP}, beside TP1/PP1, over loopback TCP", "GB/s")
    with running_node(dram_size_bytes=str(GIB)) as node:
        loop = LoopThread("bench")
        client = Client(ClientConfig(node=node.control))
        try:
            loop.run(client.start())
            worst = measure(client, loop, node.control, report, pairs)
        finally:
            loop.run(client.close())
            loop.stop()
    report.note(f"{pairs} pairs; {TP * PP} threads in one process, which share a Mooncake engine")
    report.aim("split_vs_whole", worst, AIM, "x")
    return report.finish(arguments.json)


if __name__ == "__main__":
    run(main)
