"""Where the time of a push and of a pull goes, stage by stage, and what the CPU does meanwhile.

A batch of 64 MiB in objects of 4 MiB is pushed and pulled as an engine's worker does it, between memory of its own
and a real `kvstore serve`, through staging. Milliseconds of a batch in the thread that moves it, medians:

    control   waiting for the node: reserve and commit, or acquire and release
    copy      gather into staging, or scatter out of it, in rows of 64 KiB
    hash      xxh3 of every run
    transfer  tcp: waiting for what copy and hash did not hide; shm: copying from or to the node's memory
    rest      everything else: Python's, and by shm waiting for the other thread, which does every other object

Then the same in a loop under samplers. py-spy (from PyPI, into a folder of the bench's own): where the thread that
moves is, waiting included, by functions of this project. perf, where it is installed and allowed: which functions of
client and node, the kernel's included, are on a CPU. Shares of all samples, the largest first.

    python bench/stages.py [--full] [--json]
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench._harness import Report, Samples, Wrong, parse_arguments, run
from bench._packages import NotToBeHad, installed
from bench.transfer import BATCH_BYTES, GIB, KIB, MIB, manifest_of
from kvstore.client import (
    Client,
    ClientConfig,
    LoopThread,
    Mover,
    PullItem,
    PushItem,
    ReserveItem,
    Resident,
    Staging,
    open_transfer,
)
from kvstore.core import Extent, Extents, Key, chunk_key
from tests.support.node import running_node

OBJECT_BYTES = 4 * MIB
ROW_BYTES = 64 * KIB
STAGING_BYTES = 128 * MIB
WAYS = {"tcp": "mooncake", "shm": "shm"}
STAGES = ("control", "copy", "hash", "transfer")
PAIRS, PAIRS_FULL = 15, 51
SAMPLED_S, SAMPLED_FULL_S = 5, 20
DEADLINE_S = 30.0
PY_SPY = "0.4.3"
SHOWN = 6

Bytes = NDArray[np.uint8]


class Worker:
    """Pushes and pulls batches, with a stopwatch."""

    def __init__(self, control: str, way: str) -> None:
        self.spent_s: dict[str, float] = defaultdict(float)
        self._loop = LoopThread("bench")
        self._client = Client(ClientConfig(node=control))
        self._loop.run(self._client.start())
        self._manifest = manifest_of(OBJECT_BYTES)
        self._namespace = self._loop.run(self._client.open(self._manifest))
        transfer: Any = open_transfer(WAYS[way], control)
        transfer.wait = self._timed("transfer", transfer.wait)
        transfer.by_hand = self._by_hand(transfer.by_hand)
        self._mover = Mover(transfer, Staging(transfer, STAGING_BYTES))
        assert self._client.address is not None, "the node was greeted"
        self._mover.meet(self._client.address)
        self._blocks = np.random.default_rng().integers(
            0, 256, (BATCH_BYTES // OBJECT_BYTES, OBJECT_BYTES), np.uint8
        )
        self._found = np.ones_like(self._blocks)
        self._keys: list[Key] = []
        module: Any = sys.modules[Mover.__module__]
        module.checksums = self._timed("hash", module.checksums)

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.stop()

    def push(self) -> None:
        """A batch under new keys."""
        self._keys = [chunk_key(Key(self._namespace), list(os.urandom(8)))]
        while len(self._keys) < len(self._blocks):
            self._keys.append(chunk_key(self._keys[-1], [1]))
        asked = [ReserveItem(key, self._keys[0], n, OBJECT_BYTES, False) for n, key in enumerate(self._keys)]
        grants = self._ask(self._client.reserve(self._namespace, asked, DEADLINE_S)).grants
        part = self._manifest.geometry.whole(OBJECT_BYTES)
        items = [
            PushItem(_extents(grant.granted.extents), OBJECT_BYTES, part, self._copier(blocks, gather=True))
            for grant, blocks in zip(grants, self._blocks, strict=True)
            if grant.granted is not None
        ]
        if len(items) < len(grants):
            raise Wrong("no room for a batch")
        results = self._mover.push(grants[0].address, items, DEADLINE_S)
        tables = [result.checksums or b"" for result in results]
        self._ask(self._client.commit(self._namespace, list(zip(grants, tables, strict=True))))

    def pull(self) -> None:
        """The batch that was pushed last."""
        promise = self._ask(self._client.acquire(self._namespace, self._keys, DEADLINE_S))
        part = self._manifest.geometry.whole(OBJECT_BYTES)
        items = [
            PullItem(
                _extents(copy.answer.extents),
                OBJECT_BYTES,
                part,
                copy.answer.table,
                self._copier(found, gather=False),
            )
            for copy, found in zip(promise.copies, self._found, strict=True)
            if isinstance(copy.answer, Resident)
        ]
        results = self._mover.pull(promise.copies[0].address, items, DEADLINE_S)
        if len(results) < len(self._keys) or not all(result.ok for result in results):
            raise Wrong("a batch did not come back")
        self._ask(self._client.release(promise))

    def check(self) -> None:
        """What was pulled last is what was pushed."""
        if not np.array_equal(self._found, self._blocks):
            raise Wrong("what was pulled is not what was pushed")
        self._found[:] = 1

    def drop(self) -> None:
        """Forgets the last batch."""
        self._loop.run(self._client.drop(self._namespace, self._keys))

    def _ask(self, call: Any) -> Any:
        with self._clock("control"):
            return self._loop.run(call)

    def _copier(self, blocks: Bytes, *, gather: bool) -> Callable[[memoryview], None]:
        rows = blocks.reshape(-1, ROW_BYTES)

        def copy(view: memoryview) -> None:
            with self._clock("copy"):
                staged = np.frombuffer(view, np.uint8).reshape(-1, ROW_BYTES)
                for source, target in zip(*((rows, staged) if gather else (staged, rows)), strict=True):
                    np.copyto(target, source)

        return copy

    @contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if threading.current_thread() is threading.main_thread():
            self.spent_s[stage] += time.perf_counter() - began

    def _by_hand(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """The same, with a stopwatch on what copies by hand."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            copy = start(*args, **kwargs)
            if copy is not None:
                copy.move = self._timed("transfer", copy.move)
            return copy

        return timed

    def _timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            with self._clock(stage):
                return call(*args)

        return timed


def _extents(extents: Sequence[tuple[int, int]]) -> Extents:
    return tuple(Extent(*extent) for extent in extents)


def stages_ms(worker: Worker, work: Callable[[], None]) -> dict[str, float]:
    """Of one batch, by stage."""
    worker.spent_s.clear()
    began = time.perf_counter()
    work()
    whole_s = time.perf_counter() - began
    spent = {stage: worker.spent_s[stage] for stage in STAGES}
    if not spent["hash"] or not spent["transfer"]:
        raise Wrong("the stopwatch saw no hashing or no transfer")
    spent |= {"rest": whole_s - sum(spent.values()), "all": whole_s}
    return {stage: 1e3 * seconds for stage, seconds in spent.items()}


def measure(report: Report, control: str, pairs: int) -> None:
    """Rows for push and pull by each way, in turns."""
    workers = {way: Worker(control, way) for way in WAYS}
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(pairs + 1):
        for way, worker in workers.items():
            pushed = stages_ms(worker, worker.push)
            pulled = stages_ms(worker, worker.pull)
            worker.check()
            worker.drop()
            if number:  # the first does not count
                found[f"push, {way}"].append(pushed)
                found[f"pull, {way}"].append(pulled)
    for worker in workers.values():
        worker.close()
    for name in sorted(found, reverse=True):
        samples = {
            stage: Samples(tuple(one[stage] for one in found[name])) for stage in (*STAGES, "rest", "all")
        }
        report.row(name, samples, against=("transfer", "all"))
        report.note(f"{name}: {BATCH_BYTES / samples['all'].median / 1e6:.2f} GB/s")


def work(control: str, way: str, what: str) -> None:
    """What samplers look at: one batch after the other, or one batch again and again, until the input ends."""
    worker = Worker(control, way)
    worker.push()
    print("ready", flush=True)
    while not select([sys.stdin], [], [], 0)[0]:
        if what == "pull":
            worker.pull()
        else:
            worker.drop()
            worker.push()
    worker.drop()
    worker.close()


@contextmanager
def looping(control: str, way: str, what: str) -> Iterator[int]:
    """The process id of a loop that is under way."""
    with subprocess.Popen(
        [sys.executable, "-m", "bench.stages", "loop", control, way, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "GLOG_minloglevel": "3"},
        text=True,
    ) as loop:
        assert loop.stdin and loop.stdout
        if not loop.stdout.readline():
            raise Wrong(f"the loop of {what}, {way} ended before it began")
        yield loop.pid
        loop.stdin.close()
    if loop.returncode:
        raise Wrong(f"the loop of {what}, {way} ended with {loop.returncode}")


def sampled(control: str, node_pid: int, way: str, what: str, seconds: int) -> Iterator[str]:
    """Lines for people: what samplers saw of a loop of pushes or pulls."""
    with tempfile.TemporaryDirectory() as folder, looping(control, way, what) as pid:
        stacks, data = Path(folder, "stacks"), Path(folder, "perf.data")
        try:
            spy = [str(installed("py-spy", PY_SPY) / "bin/py-spy"), "record", "--pid", str(pid), "--idle"]
            spy += ["--threads", "--format", "raw", "--rate", "200", "--duration", str(seconds)]
            done = _quiet([*spy, "--output", str(stacks)])
            said = _largest(_ours(stacks)) if stacks.exists() else done
        except NotToBeHad as error:
            said = str(error)
        yield f"{what}, {way}, py-spy: {said}"
        if (perf := shutil.which("perf")) is None:
            said = "not installed (Debian: linux-perf)"
        else:
            record = [
                perf,
                "record",
                "-e",
                "cpu-clock",
                "-F",
                "499",
                "-o",
                str(data),
                "-p",
                f"{pid},{node_pid}",
            ]
            done = _quiet([*record, "--", "sleep", str(seconds)])
            said = _largest(_symbols(perf, data)) if data.exists() else done
        yield f"{what}, {way}, perf: {said}"


def _quiet(command: Sequence[str]) -> str:
    """Runs it; the last line that it says."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or ["nothing to be seen"])[-1]


def _ours(stacks: Path) -> Counter[str]:
    """Samples of the main thread, by the innermost function of this project."""
    found: Counter[str] = Counter()
    for line in stacks.read_text().splitlines():
        stack, _, samples = line.rpartition(" ")
        thread, *frames = stack.split(";")
        ours = [frame for frame in frames if "kvstore/" in frame or "stages.py" in frame]
        if "MainThread" in thread and ours:
            found[re.sub(r":\d+\)$", ")", ours[-1])] += int(samples)
    return found


def _symbols(perf: str, data: Path) -> Counter[str]:
    """Samples by function, of programs and of the kernel."""
    report = [perf, "report", "--stdio", "--input", str(data), "--sort", "dso,symbol", "--show-nr-samples"]
    lines = subprocess.run([*report, "--field-separator", "|"], capture_output=True, text=True, check=False)
    found: Counter[str] = Counter()
    for line in lines.stdout.splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) >= 4 and words[1].isdigit():
            found[f"{words[3].partition('] ')[2]} ({words[2]})"] += int(words[1])
    return found


def _largest(found: Counter[str]) -> str:
    total = sum(found.values())
    return ", ".join(f"{samples / total:.0%} {name}" for name, samples in found.most_common(SHOWN))


def main() -> int:
    """Measures and prints; the exit code."""
    arguments = parse_arguments(__doc__ or "")
    report = Report(f"Stages of {BATCH_BYTES // MIB} MiB in objects of {OBJECT_BYTES // MIB} MiB", "ms")
    with running_node(dram_size_bytes=str(2 * GIB)) as node:
        measure(report, node.control, PAIRS_FULL if arguments.full else PAIRS)
        for what in ("push", "pull"):
            for way in WAYS:
                seconds = SAMPLED_FULL_S if arguments.full else SAMPLED_S
                for line in sampled(node.control, node.pid, way, what, seconds):
                    report.note(line)
    return report.finish(arguments.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["loop"]:
        work(sys.argv[2], sys.argv[3], sys.argv[4])
    else:
        run(main)
