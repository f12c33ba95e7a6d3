"""Finding and leasing a chain of 512 keys, beside a bare MGET of the same keys from the same Redis.

100,000 objects of 4 KiB on one node. Every lookup is of a fresh chain: 512 keys drawn at random, none twice: no cache
of anybody knows them. All are stored (all hits), or the first half is, or none. Measured is `Client.acquire`: Redis
says where, the node leases; the lease is given back outside the clock. The MGET is that of redis-py with hiredis,
blocking, over a connection that is there already.

    python bench/lookup.py [--full] [--json]
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import redis

from bench._harness import Report, Samples, Wrong, parse_arguments, run
from bench._small_objects import MANIFEST, NAMESPACE, OBJECT_BYTES, random_keys, store
from kvstore.client import Client, ClientConfig
from kvstore.core import Key
from tests.support import RedisServer, wait_until_async
from tests.support.node import running_node

OBJECTS = 100_000
CHAIN = 512
ARENA_BYTES = 128 * 1024 * OBJECT_BYTES
LEASE_S = 60.0
PARTITIONS = 64  # of names in Redis: docs/ARCHITECTURE.md
AIM_MS = 2.0
AIM_VS_MGET = 4.0


class Chains:
    """Fresh chains: `hits` stored keys, then new ones."""

    def __init__(self, stored: list[Key], rng: random.Random) -> None:
        rng.shuffle(stored)
        self._stored: Iterator[Key] = iter(stored)

    def fresh(self, hits: int) -> list[Key]:
        """A chain that nobody has asked for."""
        keys = [key for _, key in zip(range(hits), self._stored, strict=False)]
        if len(keys) < hits:
            raise Wrong("not enough objects for so many lookups")
        return keys + random_keys(CHAIN - hits)


def names_of(keys: Sequence[Key]) -> list[bytes]:
    """Their names in Redis."""
    return [b"kv:{%02x}" % (key[0] % PARTITIONS) + key for key in keys]


async def lookup_ms(client: Client, keys: list[Key], hits: int) -> float:
    """Lookup and lease of a chain; the release does not count."""
    began = time.perf_counter()
    promise = await client.acquire(NAMESPACE, keys, LEASE_S)
    taken_ms = 1e3 * (time.perf_counter() - began)
    await client.release(promise)
    if len(promise) != hits:
        raise Wrong(f"{len(promise)} keys were promised, {hits} are stored")
    return taken_ms


def mget_ms(server: "redis.Redis", keys: list[Key], hits: int) -> float:
    """The same keys, bare."""
    names = names_of(keys)
    began = time.perf_counter()
    values: Any = server.mget(names)
    taken_ms = 1e3 * (time.perf_counter() - began)
    if sum(value is not None for value in values) != hits:
        raise Wrong("Redis does not hold what is stored")
    return taken_ms


async def measure(
    client: Client, server: "redis.Redis", fresh: Callable[[], list[Key]], hits: int, pairs: int
) -> dict[str, Samples]:
    """Lookup and MGET of the same keys, each first in turn."""
    ours, bare = [], []
    for pair in range(pairs + 3):
        keys = fresh()
        if pair % 2:
            bare.append(mget_ms(server, keys, hits))
        ours.append(await lookup_ms(client, keys, hits))
        if not pair % 2:
            bare.append(mget_ms(server, keys, hits))
    return {"kvstore": Samples(tuple(ours[3:])), "MGET": Samples(tuple(bare[3:]))}


async def compare(report: Report, control: str, server: "redis.Redis", pairs: int) -> None:
    """Stores the objects, measures, reports."""
    async with Client(ClientConfig(node=control)) as client:
        await client.open(MANIFEST)
        stored = random_keys(OBJECTS)
        await store(client, stored)
        await wait_until_async(lambda: server.dbsize() >= OBJECTS, 60, "all objects are in the index")
        chains = Chains(stored, random.Random(0))
        worst_ms = worst_ratio = 0.0
        for name, hits in (("all hits", CHAIN), ("half hits", CHAIN // 2), ("no hits", 0)):
            samples = await measure(client, server, partial(chains.fresh, hits), hits, pairs)
            worst_ratio = max(worst_ratio, report.row(name, samples, against=("kvstore", "MGET")))
            worst_ms = max(worst_ms, samples["kvstore"].median)
    report.note(
        f"{pairs} chains of {CHAIN} keys among {OBJECTS} objects for each line; Redis over loopback TCP"
    )
    report.aim("lookup_p50_ms", worst_ms, AIM_MS, "ms", at_most=True)
    report.aim("lookup_vs_mget", worst_ratio, AIM_VS_MGET, "x", at_most=True)


def main() -> int:
    """Measures and prints; the exit code."""
    arguments = parse_arguments(__doc__ or "")
    report = Report(f"Lookup and lease of {CHAIN} keys, beside a bare MGET", "ms")
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder)) as server,
        running_node(redis_url=server.url, dram_size_bytes=ARENA_BYTES, dram_page_bytes=OBJECT_BYTES) as node,
        server.client() as client,
    ):
        asyncio.run(compare(report, node.control, client, 120 if arguments.full else 60))
    return report.finish(arguments.json)


if __name__ == "__main__":
    run(main)
