"""The control plane under load: keys a second through a node, by one and by eight client processes.

write: Reserve and Commit of new keys, in batches of 1 and 64; the node is full, so it evicts as many as it takes.
read: lookup in Redis, Acquire and Release of stored keys. A key through one call to the node counts one; the
question to Redis is made, and not counted. 100,000 objects of 4 KiB with tables of 256 runs; a real Redis beside,
which is told of every key that comes and goes.

`acquire64_p99_ms` is the time of lookup and Acquire of 64 keys while eight clients together ask at half of the
load that is aimed at. `hello_p99_ms` and `hello_max_ms` are what one client waits that says Hello every 5 ms while
others push, pull and have evicted at full speed, see `_while_moving`: the worse of the two ways in which bytes
move. Then a client says Hello beside seven that move nothing but reserve, commit and acquire as fast as they can; in
turns with that it asks a process that only echoes (`_echo`), and, by root, says Hello while it and the node are
preferred by the scheduler (`_preferred`): what is left then is the node's own.

    python bench/control.py [--full] [--json]
"""

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench._echo import Caller, Echo
from bench._harness import PAIRS_MIN, Report, Samples, Wrong, parse_arguments, run
from bench._preferred import may_prefer, preferred
from bench._small_objects import MANIFEST, NAMESPACE, OBJECT_BYTES, TABLE, items, random_keys, store
from bench._watchers import p99
from bench._while_moving import waits_beside_bytes
from kvstore.client import Client, ClientConfig
from kvstore.core import Key
from tests.support import RedisServer
from tests.support.node import running_node

CLIENTS = 8
OBJECTS = 100_000
ARENA_BYTES = 104 * 1024 * OBJECT_BYTES  # with the low-water mark as good as full
SLICE_S = 0.3
AIM_KEYS_PER_S = 30_000.0
AIM_P99_MS = 5.0
AIM_MAX_MS = 50.0
HELLO_PAUSE_S = 0.005
PACED_S = 5.0
HELLO_TURNS = 5


class Task(NamedTuple):
    """What a client process does for a while; `pause_s` between the beginnings of two batches, 0: none."""

    work: str
    batch: int
    seconds: float
    pause_s: float = 0.0


class Outcome(NamedTuple):
    """Keys through calls, in how long, and the milliseconds of each Acquire or Hello."""

    keys: int
    seconds: float
    waits_ms: list[float]


class Worker:
    """One client process, from inside."""

    def __init__(self, client: Client, stored: list[Key], seed: int, echo: Caller) -> None:
        self._client = client
        self._echo = echo
        self._stored = stored
        self._rng = random.Random(seed)

    async def do(self, task: Task) -> Outcome:
        """Works until the time is up."""
        keys, waits_ms = 0, []
        began = time.perf_counter()
        due = began + self._rng.random() * task.pause_s
        while (now := time.perf_counter()) < began + task.seconds:
            if task.pause_s:
                await asyncio.sleep(max(0.0, due - now))
                due += task.pause_s
            if task.work == "write":
                keys += await self._write(random_keys(task.batch))
            elif task.work == "read":
                waits_ms.append(await self._read(self._rng.sample(self._stored, task.batch)))
                keys += 2 * task.batch
            elif task.work == "write and read":
                fresh = random_keys(task.batch)
                keys += await self._write(fresh)
                await self._client.release(await self._client.acquire(NAMESPACE, fresh, 10.0))
            else:
                waits_ms.append(await self._hello() if task.work == "hello" else self._asked())
        return Outcome(keys, time.perf_counter() - began, waits_ms)

    async def _hello(self) -> float:
        began = time.perf_counter()
        await self._client.open(MANIFEST)  # says Hello each time
        return 1e3 * (time.perf_counter() - began)

    def _asked(self) -> float:
        began = time.perf_counter()
        self._echo()
        return 1e3 * (time.perf_counter() - began)

    async def _write(self, keys: list[Key]) -> int:
        grants = (await self._client.reserve(NAMESPACE, items(keys), 10.0)).granted
        await self._client.commit(NAMESPACE, [(grant, TABLE) for grant in grants])
        return len(keys) + len(grants)

    async def _read(self, keys: list[Key]) -> float:
        began = time.perf_counter()
        promise = await self._client.acquire(NAMESPACE, keys, 10.0)
        taken_ms = 1e3 * (time.perf_counter() - began)
        await self._client.release(promise)
        if len(promise) != len(keys):
            raise Wrong(f"{len(promise)} of {len(keys)} stored keys were promised ({promise.reason})")
        return taken_ms


def work(control: str, echo: tuple[str, int], seed: int, pipe: Connection) -> None:
    """The body of a client process: told its keys, then tasks, until the pipe ends."""

    async def connect() -> Client:
        client = Client(ClientConfig(node=control, request_timeout_s=10.0))
        await client.start()
        await client.open(MANIFEST)
        return client

    with asyncio.Runner() as loop:
        worker = Worker(loop.run(connect()), pipe.recv(), seed, Caller(echo))
        pipe.send(os.getpid())
        while (task := pipe.recv()) is not None:
            pipe.send(loop.run(worker.do(task)))


@contextmanager
def workers(control: str, stored: Sequence[Key]) -> Iterator[tuple[list[Connection], list[int]]]:
    """Client processes that are ready, and their ids."""
    context = get_context("spawn")
    with ExitStack() as stack:
        echo = stack.enter_context(Echo(CLIENTS))
        pipes = []
        for seed in range(CLIENTS):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(control, echo.address, seed, there), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(here.send, None)
            here.send(stored[seed::CLIENTS])
            pipes.append(here)
        yield pipes, [pipe.recv() for pipe in pipes]


def together(pipes: Sequence[Connection], task: Task) -> list[Outcome]:
    """All of these do the task at once."""
    for pipe in pipes:
        pipe.send(task)
    return [pipe.recv() for pipe in pipes]


def keys_per_s(pipes: Sequence[Connection], task: Task) -> float:
    """Of all of them."""
    return sum(outcome.keys / outcome.seconds for outcome in together(pipes, task))


def throughput(report: Report, pipes: Sequence[Connection], work: str, slices: int) -> float:
    """Rows for one kind of work; the keys a second of eight clients with batches of 64."""
    best = 0.0
    for batch in (1, 64):
        task = Task(work, batch, SLICE_S)
        few, many = [], []
        for _ in range(slices):
            few.append(keys_per_s(pipes[:1], task))
            many.append(keys_per_s(pipes, task))
        samples = {"1 client": Samples(tuple(few)), f"{CLIENTS} clients": Samples(tuple(many))}
        report.row(f"{work}, batches of {batch}", samples, against=(f"{CLIENTS} clients", "1 client"))
        best = samples[f"{CLIENTS} clients"].median
    return best


def paced_p99_ms(pipes: Sequence[Connection], seconds: float) -> float:
    """Of Acquires of 64 keys at half of the aimed-at load."""
    batches_per_s = AIM_KEYS_PER_S / 2 / (2 * 64)
    outcomes = together(pipes, Task("read", 64, seconds, pause_s=len(pipes) / batches_per_s))
    return p99([ms for outcome in outcomes for ms in outcome.waits_ms])


class Waits(NamedTuple):
    """Milliseconds that one client waits while the others are at full speed."""

    hello: list[float]
    preferred: list[float]  # a Hello, when client and node need not wait for a core
    echo: list[float]


def hello_ms(pipes: Sequence[Connection], seconds: float, preferred_pids: Sequence[int]) -> Waits:
    """In turns, so many seconds of each."""
    waits = Waits([], [], [])
    for _ in range(HELLO_TURNS):
        waits.hello.extend(beside_load(pipes, "hello", seconds / HELLO_TURNS))
        waits.echo.extend(beside_load(pipes, "echo", seconds / HELLO_TURNS))
        if may_prefer():
            with preferred(*preferred_pids):
                waits.preferred.extend(beside_load(pipes, "hello", seconds / HELLO_TURNS))
    return waits


def beside_load(pipes: Sequence[Connection], asked: str, seconds: float) -> list[float]:
    """What the first client waits."""
    tasks = [
        Task(asked, 0, seconds, HELLO_PAUSE_S),
        *[Task("write and read", 64, seconds)] * (len(pipes) - 1),
    ]
    for pipe, task in zip(pipes, tasks, strict=True):
        pipe.send(task)
    outcomes: list[Outcome] = [pipe.recv() for pipe in pipes]
    return outcomes[0].waits_ms


async def fill(control: str) -> list[Key]:
    """Stores what is read later."""
    stored = random_keys(OBJECTS)
    async with Client(ClientConfig(node=control)) as client:
        await client.open(MANIFEST)
        await store(client, stored)
    return stored


def main() -> int:
    """Measures and prints; the exit code."""
    arguments = parse_arguments(__doc__ or "")
    slices = 3 * PAIRS_MIN if arguments.full else PAIRS_MIN
    report = Report("Keys a second through a node", "keys/s")
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(Path(folder)) as server,
        running_node(redis_url=server.url, dram_size_bytes=ARENA_BYTES, dram_page_bytes=OBJECT_BYTES) as node,
        workers(node.control, asyncio.run(fill(node.control))) as (pipes, pids),
    ):
        read = throughput(report, pipes, "read", slices)
        p99_ms = paced_p99_ms(pipes, (4 if arguments.full else 1) * PACED_S)
        write = throughput(report, pipes, "write", slices)
        waits = hello_ms(pipes, (8 if arguments.full else 2) * PACED_S, (node.pid, pids[0]))
    beside_bytes = waits_beside_bytes((8 if arguments.full else 2) * PACED_S)
    report.note(f"{slices} slices of {SLICE_S} s each, clients alternating; {OBJECTS} objects on the node")
    report.aim("keys_per_s", min(read, write), AIM_KEYS_PER_S, "keys/s")
    report.aim("acquire64_p99_ms", p99_ms, AIM_P99_MS, "ms", at_most=True)
    for way, (hello, idle, echo, quick) in beside_bytes.items():
        own = (
            f"; when its client and the node need not wait for a core: p99 {p99(quick):.1f} ms"
            if quick
            else ""
        )
        report.note(
            f"a Hello beside pushes and pulls, {way}: median {median(hello):.1f}, p99 {p99(hello):.1f}, worst "
            f"{max(hello):.0f} ms, of {len(hello)}; to a node that is idle: {median(idle):.1f} and {p99(idle):.1f} "
            f"ms; a process that only echoes: {median(echo):.1f} and {p99(echo):.1f} ms{own}"
        )
    report.note(
        f"a Hello beside {CLIENTS - 1} clients that move nothing, at full speed: median {median(waits.hello):.1f}, "
        f"p99 {p99(waits.hello):.1f}, worst {max(waits.hello):.0f} ms; a process that only echoes: "
        f"{median(waits.echo):.1f} and {p99(waits.echo):.1f} ms"
    )
    if waits.preferred:
        report.note(
            f"there, when its client and the node need not wait for a core: p99 {p99(waits.preferred):.1f} ms"
        )
    report.aim(
        "hello_p99_ms",
        max(p99(waits.hello) for waits in beside_bytes.values()),
        AIM_P99_MS,
        "ms",
        at_most=True,
    )
    worst_ms = max(max(hello) for hello in (*(waits.hello for waits in beside_bytes.values()), waits.hello))
    report.aim("hello_max_ms", worst_ms, AIM_MAX_MS, "ms", at_most=True)
    return report.finish(arguments.json)


if __name__ == "__main__":
    run(main)
