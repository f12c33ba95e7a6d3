"""What a Hello waits for beside bytes that are pushed and pulled at full speed. For `bench/control.py`.

One node with 100,000 objects of 64 KiB, a real Redis beside it. One process pushes new objects, 4 MiB at a time, and
as many are evicted; one pulls objects that it has pushed, as many at a time, verified; both as fast as they can. A
third says Hello every 5 ms. In turns with it, one says Hello to a second node that does nothing, and one asks a
process that only echoes: what the machine takes, and what a client and a node take who have all they need; and, by
root, the busy node is asked while it and who asks are preferred by the scheduler: the rest is the wait for a core. By
shared memory and by Mooncake over TCP, in turns.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from multiprocessing import active_children
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench._echo import Caller, Echo
from bench._harness import Wrong
from bench._preferred import may_prefer, preferred
from bench._small_objects import random_keys, store
from bench._watchers import answers, ask, serve, watcher
from kvstore.client import Client, ClientConfig, KVStore, Put
from kvstore.core import Key, Manifest
from tests.support import RedisServer
from tests.support.node import RunningNode, running_node

MANIFEST = Manifest(
    weights="bench",
    model={},
    kv_dtype="bytes",
    tile_format="moving",
    chunk_tokens=16,
    unit_tokens=1,
    lanes=((32, 8, 16),),
)
OBJECT_BYTES = MANIFEST.geometry.object_bytes(16)  # 64 KiB
NAMESPACE = MANIFEST.namespace
BATCH = 64
OBJECTS = 100_000
ARENA_BYTES = 104 * 1024 * OBJECT_BYTES  # with the low-water mark as good as full
PULLED_BATCHES = 16
HELLO_PAUSE_S = 0.005
WAYS = ("shm", "mooncake")
TURNS = 5


class Waits(NamedTuple):
    """Milliseconds that a Hello took, one to an idle node, a question to a process that only echoes, and a Hello that
    need not wait for a core."""

    hello: list[float]
    idle: list[float]
    echo: list[float]
    preferred: list[float]


def waits_beside_bytes(seconds: float) -> dict[str, Waits]:
    """By the way in which bytes move; so many seconds of each, in turns."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvstore-bench-")))
        redis = stack.enter_context(RedisServer(folder))
        node = stack.enter_context(
            running_node(redis_url=redis.url, dram_size_bytes=ARENA_BYTES, dram_page_bytes=OBJECT_BYTES)
        )
        asyncio.run(fill(node.control))
        echo = stack.enter_context(Echo(num_callers=1))
        idle = stack.enter_context(running_node())
        others = set(active_children())
        askers = [stack.enter_context(watcher(partial(greet, node.control)))]
        pids = [child.pid for child in active_children() if child not in others and child.pid]
        bodies = (partial(greet, idle.control), partial(ask_echo, echo.address))
        askers += [stack.enter_context(watcher(body)) for body in bodies]
        movers = {
            way: [stack.enter_context(watcher(partial(body, node.control, way))) for body in (push, pull)]
            for way in WAYS
        }
        waits = {way: Waits([], [], [], []) for way in WAYS}
        for _ in range(TURNS):
            for way, pipes in movers.items():
                for asker, took_ms in zip(askers, waits[way], strict=False):
                    took_ms += _beside(node, pipes, asker, seconds / TURNS)
                if may_prefer():
                    with preferred(node.pid, *pids):
                        waits[way].preferred.extend(_beside(node, pipes, askers[0], seconds / TURNS))
        return waits


def _beside(
    node: RunningNode, movers: Sequence[Connection], asker: Connection, seconds: float
) -> list[float]:
    """What the asker waits while the movers move."""
    evicted = node.stats()["store"]["totals"]["evicted"]
    ask([*movers, asker], seconds)
    pushes, pulls, took_ms = answers([*movers, asker])
    if not pushes or not pulls or node.stats()["store"]["totals"]["evicted"] == evicted:
        raise Wrong("nothing was pushed, pulled or evicted")
    return took_ms


async def fill(control: str) -> None:
    """Makes the node full of objects that nobody wants."""
    async with Client(ClientConfig(node=control)) as client:
        await client.open(MANIFEST)
        await store(client, random_keys(OBJECTS), manifest=MANIFEST)


# --- processes beside it ----------------------------------------------------------------------------------


def greet(control: str, pipe: Connection) -> None:
    """Says Hello."""
    with asyncio.Runner() as loop:
        client = Client(ClientConfig(node=control, request_timeout_s=10.0))
        loop.run(client.start())
        serve(lambda: loop.run(client.open(MANIFEST)), pipe, HELLO_PAUSE_S)


def ask_echo(address: tuple[str, int], pipe: Connection) -> None:
    """Asks nobody in particular."""
    serve(Caller(address), pipe, HELLO_PAUSE_S)


def push(control: str, way: str, pipe: Connection) -> None:
    """Pushes new objects."""
    objects = filled(BATCH)
    with KVStore(control, transfer=way, timeout_s=10.0) as kvstore:
        kvstore.open(MANIFEST)
        kvstore.register(objects)
        serve(lambda: put(kvstore, random_keys(BATCH), objects), pipe, pause_s=0.0)


def pull(control: str, way: str, pipe: Connection) -> None:
    """Pulls objects of its own, and pushes those again that are not to be had any more."""
    objects = filled(BATCH)
    out = np.zeros_like(objects)
    with KVStore(control, transfer=way, timeout_s=10.0) as kvstore:
        kvstore.open(MANIFEST)
        kvstore.register(objects)
        kvstore.register(out)
        batches = [random_keys(BATCH) for _ in range(PULLED_BATCHES)]
        turn = cycle(batches)

        def again() -> None:
            keys = next(turn)
            if any(got is None for got in kvstore.get_many(NAMESPACE, keys, list(out))):
                put(kvstore, keys, objects)

        for _ in batches:
            again()
        serve(again, pipe, pause_s=0.0)


def filled(count: int) -> NDArray[np.uint8]:
    """Random bytes of so many objects."""
    return np.random.default_rng(0).integers(0, 256, (count, OBJECT_BYTES), np.uint8)


def put(kvstore: KVStore, keys: Sequence[Key], objects: NDArray[np.uint8]) -> None:
    """Stores them, a chain of nobody's."""
    stored = kvstore.put_many(NAMESPACE, [Put(key, array) for key, array in zip(keys, objects, strict=True)])
    if not all(stored):
        raise Wrong(f"{stored.count(False)} of {len(keys)} objects were not stored")
