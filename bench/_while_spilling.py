"""What readers notice of a node that spills at full speed. For `bench/nvme.py`.

One node with 1 GiB of DRAM and a device in a file. One process gets an object of 8 MiB from its DRAM, one asks it for
a key that nobody has stored, one asks a process that only echoes; all a hundred times a second. Between slices
in which that is all there is, another one stores objects as fast as the node gives room, that is, as fast as it
spills. It sends no bytes: all objects are zeros, as the node's memory is from the beginning, so that what is measured
is the spill alone.
"""

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from bench._echo import Caller, Echo
from bench._harness import Wrong
from bench._small_objects import random_keys
from kvstore.client import Client, ClientConfig, KVStore
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
PAUSE_S = 0.01
SLICE_S = 1.5


class Seen(NamedTuple):
    """Milliseconds that pulls, questions and echoes took, idle and during spills, and how fast the spills were."""

    idle_pull_ms: list[float]
    pull_ms: list[float]
    idle_ask_ms: list[float]
    ask_ms: list[float]
    idle_echo_ms: list[float]
    echo_ms: list[float]
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
        bodies = (partial(puller, node.control), partial(asker, node.control), partial(echoer, echo.address))
        watchers = [stack.enter_context(process(body)) for body in bodies]
        return _compare(node, asyncio.Runner(), table, watchers, slices)


def _compare(
    node: RunningNode, loop: asyncio.Runner, table: bytes, watchers: Sequence[Connection], slices: int
) -> Seen:
    seen = Seen([], [], [], [], [], [], 0.0, 0.0)
    pull = watchers[0]
    spilled_bytes, seconds, cpu_s = 0, 0.0, 0.0
    with loop:
        client = loop.run(connect(node.control))
        pull.send(2 * SLICE_S)  # so that it is not given up as the coldest
        loop.run(spill(client, table, 2 * SLICE_S))  # all of the arena is in use, and of the file's beginning
        pull.recv()
        for _ in range(slices):
            begin(watchers)
            collect(watchers, (seen.idle_pull_ms, seen.idle_ask_ms, seen.idle_echo_ms))
            before, began_s, cpu_before_s = spilled(node), time.perf_counter(), cpu(node.pid)
            begin(watchers)
            loop.run(spill(client, table, SLICE_S))
            seconds += time.perf_counter() - began_s
            spilled_bytes += spilled(node) - before
            cpu_s += cpu(node.pid) - cpu_before_s
            collect(watchers, (seen.pull_ms, seen.ask_ms, seen.echo_ms))
        loop.run(client.close())
    if node.stats()["store"]["totals"]["bad_copies"]:
        raise Wrong("a spilled object was not what its table said")
    gb = spilled_bytes / 1e9
    return seen._replace(spilled_gb_per_s=gb / seconds, cpu_s_per_gb=cpu_s / gb)


def begin(watchers: Sequence[Connection]) -> None:
    """A slice of all of them."""
    for watcher in watchers:
        watcher.send(SLICE_S)


def collect(watchers: Sequence[Connection], seen_ms: Sequence[list[float]]) -> None:
    """What they saw in it."""
    for watcher, some in zip(watchers, seen_ms, strict=True):
        some += watcher.recv()


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

        serve(pull, pipe)


def asker(control: str, pipe: Connection) -> None:
    """Asks for keys that are not there."""
    with asyncio.Runner() as loop:
        client = loop.run(connect(control))
        serve(lambda: loop.run(client.acquire(NAMESPACE, random_keys(1), 1.0)), pipe)


def echoer(address: tuple[str, int], pipe: Connection) -> None:
    """Asks nobody in particular."""
    serve(Caller(address), pipe)


def serve(work: Callable[[], object], pipe: Connection) -> None:
    """Does it again and again for as many seconds as the pipe says; answers how long each took."""
    work()
    pipe.send(None)
    while (seconds := pipe.recv()) is not None:
        took_ms = []
        end_s = time.perf_counter() + seconds
        while (began_s := time.perf_counter()) < end_s:
            work()
            took_ms.append(1e3 * (time.perf_counter() - began_s))
            pause = max(0.0, began_s + PAUSE_S - time.perf_counter())
            pipe.poll(pause)
        pipe.send(took_ms)


@contextmanager
def process(body: Callable[[Connection], None]) -> Iterator[Connection]:
    """A process that is ready to be told for how long to work."""
    context = get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=body, args=(there,), daemon=True)
    child.start()
    there.close()
    here.recv()
    try:
        yield here
    finally:
        here.send(None)
        child.join()


def spilled(node: RunningNode) -> int:
    totals = node.stats()["store"]["totals"]
    return int(totals["spilled_bytes"])


def cpu(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = re.sub(r"\(.*\)", "-", Path(f"/proc/{pid}/stat").read_text()).split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))
