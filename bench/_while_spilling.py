"""What readers notice of a node that spills at full speed. For `bench/nvme.py`.

One node with 1 GiB of DRAM and a device in a file. Four processes take turns, each alone with the node in its
slice: one gets an object of 8 MiB from the node's DRAM, one says Hello to it, one says Hello to a second node that
does nothing, one asks a process that only echoes; all a hundred times a second. A slice in which that is all there is
comes before one in which another process stores objects as fast as the node gives room, that is, as fast as it
spills. It sends no bytes: all objects are zeros, as the node's memory is from the beginning, so that what is measured
is the spill alone. What they see when all of them ask at once is measured, too.
"""

import asyncio
import os
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from bench._echo import Caller, Echo
from bench._harness import Wrong
from bench._small_objects import random_keys
from bench._watchers import answers, ask, serve, watcher
from kvstore.client import Client, ClientConfig, KVStore, Promise
from kvstore.core import Key, Manifest, checksums, limits
from kvstore.wire import ReserveItem
from tests.support.node import RunningNode, running_node

MIB = limits.MIB
MANIFEST = Manifest(
    weights="bench",
    model={},
    kv_dtype="bfloat16",
    tile_format="spilling",
    chunk_tokens=256,
    unit_tokens=1,
    lanes=((32, 8, 128),),
)
OBJECT_BYTES = MANIFEST.geometry.object_bytes(256)  # 8 MiB
NAMESPACE = MANIFEST.namespace
PULLED = Key(bytes(limits.KEY_BYTES))
DRAM_BYTES = 1024 * MIB
FIRST = DRAM_BYTES // OBJECT_BYTES - 8  # objects that leave the low-water mark free
DEVICE_BYTES = 4096 * MIB
AT_ONCE = 4
PAUSE_S = 0.01  # between the beginnings of two questions
SLICE_S = 1.5


class Took(NamedTuple):
    """Milliseconds that something took."""

    idle: list[float]
    spilling: list[float]


class Seen(NamedTuple):
    """What pulls, questions and echoes took, each by itself and all at once, and how fast the spills were."""

    alone: list[Took]
    at_once: list[Took]
    spilled_gb_per_s: float
    cpu_s_per_gb: float


def watch(slices: int) -> Seen:
    """Idle and spilling slices in turn."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvstore-bench-")))
        node = stack.enter_context(
            running_node(
                folder,
                node_id="bench",
                nvme_path=folder / "device",
                nvme_size_bytes=DEVICE_BYTES,
                dram_size_bytes=DRAM_BYTES,
            )
        )
        array = np.zeros(OBJECT_BYTES, np.uint8)
        store = stack.enter_context(KVStore(node.control, timeout_s=60.0))
        store.open(MANIFEST)
        if not all(store.put(NAMESPACE, key, array) for key in (PULLED, *random_keys(FIRST))):
            raise Wrong("an object was not stored")
        table = checksums(memoryview(bytes(OBJECT_BYTES)), MANIFEST.geometry.runs(OBJECT_BYTES))
        echo = stack.enter_context(Echo(num_callers=1))
        idle = stack.enter_context(running_node())
        bodies = (
            partial(puller, node.control),
            partial(asker, node.control),
            partial(asker, idle.control),
            partial(echoer, echo.address),
        )
        watchers = [stack.enter_context(watcher(body)) for body in bodies]
        return _compare(node, asyncio.Runner(), table, watchers, slices)


def _compare(
    node: RunningNode, loop: asyncio.Runner, table: bytes, watchers: Sequence[Connection], slices: int
) -> Seen:
    alone, at_once = ([Took([], []) for _ in watchers] for _ in range(2))
    turns = [([watcher], [what]) for watcher, what in zip(watchers, alone, strict=True)]
    turns.append((list(watchers), at_once))
    meter = Meter(node)
    with loop:
        client = loop.run(connect(node.control))
        held = loop.run(hold(client))
        loop.run(spill(client, table, 2 * SLICE_S))  # all of the arena is in use, and of the file's beginning
        for _ in range(slices):
            for some, what in turns:
                last, held = held, loop.run(hold(client))
                loop.run(client.release(last))
                ask(some, SLICE_S)
                add(answers(some), [each.idle for each in what])
                ask(some, SLICE_S)
                with meter:
                    loop.run(spill(client, table, SLICE_S))
                add(answers(some), [each.spilling for each in what])
        loop.run(client.close())
    if node.stats()["store"]["totals"]["bad_copies"]:
        raise Wrong("a spilled object was not what its table said")
    gb = meter.num_bytes / 1e9
    return Seen(alone, at_once, gb / meter.seconds, meter.cpu_s / gb)


class Meter:
    """What the node spills while it is entered, in how long, and what CPU time it needs."""

    def __init__(self, node: RunningNode) -> None:
        self.num_bytes = 0
        self.seconds = 0.0
        self.cpu_s = 0.0
        self._node = node

    def __enter__(self) -> None:
        self._add(-1)

    def __exit__(self, *_: object) -> None:
        self._add(1)

    def _add(self, sign: int) -> None:
        self.num_bytes += sign * spilled(self._node)
        self.seconds += sign * time.perf_counter()
        self.cpu_s += sign * cpu(self._node.pid)


def add(some: Sequence[list[float]], to: Sequence[list[float]]) -> None:
    for values, lists in zip(some, to, strict=True):
        lists += values


async def hold(client: Client) -> Promise:
    """Keeps in DRAM what is pulled, also while nobody pulls it."""
    promise = await client.acquire(NAMESPACE, [PULLED], limits.LEASE_S_MAX)
    if not promise:
        raise Wrong("what is to be pulled is not there")
    return promise


async def spill(client: Client, table: bytes, seconds: float) -> None:
    """Stores objects, without their bytes, as fast as the node gives room."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        wanted = [ReserveItem(key, Key(NAMESPACE), 0, OBJECT_BYTES) for key in random_keys(AT_ONCE)]
        grants = (await client.reserve(NAMESPACE, wanted, 10.0)).granted
        if grants:
            await client.commit(NAMESPACE, [(grant, table) for grant in grants])
        if len(grants) < AT_ONCE:
            await asyncio.sleep(0.002)


# --- processes beside it ----------------------------------------------------------------------------------


async def connect(control: str) -> Client:
    client = Client(ClientConfig(node=control, request_timeout_s=10.0))
    await client.start()
    await client.open(MANIFEST)
    return client


def puller(control: str, pipe: Connection) -> None:
    """Gets the object, verified, into memory of its own."""
    out = np.zeros(OBJECT_BYTES, np.uint8)
    with KVStore(control, timeout_s=10.0) as store:
        store.open(MANIFEST)

        def pull() -> None:
            if store.get(NAMESPACE, PULLED, out) is None:
                raise Wrong("the object is not to be had")

        serve(pull, pipe, PAUSE_S)


def asker(control: str, pipe: Connection) -> None:
    """Says Hello."""
    with asyncio.Runner() as loop:
        client = loop.run(connect(control))
        serve(lambda: loop.run(client.open(MANIFEST)), pipe, PAUSE_S)


def echoer(address: tuple[str, int], pipe: Connection) -> None:
    """Asks nobody in particular."""
    serve(Caller(address), pipe, PAUSE_S)


def spilled(node: RunningNode) -> int:
    totals = node.stats()["store"]["totals"]
    return int(totals["spilled_bytes"])


def cpu(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = re.sub(r"\(.*\)", "-", Path(f"/proc/{pid}/stat").read_text()).split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
