"""Objects to and from an NVMe device, beside a bare loop of O_DIRECT: what do durability and verification cost?

spill: a device takes a batch of objects of 32 MiB from memory; each is hashed, written, and durable when it is told.
promote: it reads them back, each hashed and compared with its table. Raw: as many threads with one
`pwritev` or `preadv` of 1 MiB after the other on the same file, `fdatasync` at the end of the writes. The file was
written once before, memory is pre-faulted, every promoted object is compared with what was spilled. Then a whole node
spills at full speed, and others pull from it and ask it meanwhile (`_while_spilling.py`).

    python bench/nvme.py [--full] [--json]         on the disk that holds the temporary folder (TMPDIR)
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench._harness import Report, Wrong, interleave, parse_arguments, run
from bench._watchers import p99
from bench._while_spilling import OBJECT_BYTES as PULLED_BYTES
from bench._while_spilling import Seen, Took, watch
from kvstore.core import Key, Manifest, checksums, limits
from kvstore.tiers import (
    FileDevice,
    NewObject,
    NvmeConfig,
    NvmeDevice,
    Record,
    aligned,
    create_file,
    format_device,
)
from kvstore.wire import Generation

MIB = limits.MIB
MANIFEST = Manifest(
    weights="bench",
    model={},
    kv_dtype="bfloat16",
    tile_format="bench",
    chunk_tokens=256,
    unit_tokens=1,
    lanes=((32, 8, 512),),  # Llama-3-8B: 32 MiB, 256 runs
)
OBJECT_BYTES = MANIFEST.geometry.object_bytes(256)
BATCH = 24
WRITING = 12  # at once: what a device takes is bounded
BATCH_BYTES = BATCH * OBJECT_BYTES
FILE_BYTES = 2 * BATCH_BYTES + 64 * MIB
LOOK_S = 0.005  # between two looks at how late the loop is; a thousand a second took 4 % of a spill
AIM = 0.85
AIM_CPU_S_PER_GB = 0.5  # hashing included; what Mooncake takes over loopback


Call = Callable[[int, list[memoryview], int], int]


class Bench:
    """A device in a file, driven from outside its loop."""

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.path = str(folder / "device")
        self.loop = loop
        self.records: list[Record] = []
        self.lags_s: list[float] = []
        self.writing = asyncio.Semaphore(WRITING)
        self.threads = limits.NVME_THREADS_DEFAULT
        self.source = [filled() for _ in range(BATCH)]
        self.target = [filled() for _ in range(BATCH)]
        runs = MANIFEST.geometry.runs(OBJECT_BYTES)
        self.tables = [checksums(memory, runs) for memory in self.source]
        create_file(self.path, FILE_BYTES)
        device = FileDevice.open(self.path)
        for offset in range(0, FILE_BYTES // MIB * MIB, MIB):
            device.write(offset, [self.source[0][:MIB]])
        format_device(device, "bench")
        device.close()
        self.device: NvmeDevice = self.wait(self._open(folder))
        self.pages = self.device.free_pages

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def _open(self, folder: Path) -> NvmeDevice:
        device = NvmeDevice(NvmeConfig(path=self.path, node="bench", catalogs=folder / "catalogs"))
        await device.start()
        device.open_namespace(MANIFEST.namespace, MANIFEST.encode())
        return device

    def spill(self) -> float:
        """GB/s of putting a batch; what was there before is deleted first, outside the clock."""
        self.wait(self._delete())
        while self.device.free_pages < self.pages:
            self.wait(asyncio.sleep(0.001))
        return self._timed(self._spill())

    def promote(self) -> float:
        """GB/s of getting a batch."""
        return self._timed(self._promote())

    def check(self) -> None:
        """What is promoted is what was spilled, in memory that held something else before."""
        for memory in self.target:
            memory[:] = bytes(OBJECT_BYTES)
        self.promote()
        if any(bytes(got) != bytes(put) for got, put in zip(self.target, self.source, strict=True)):
            raise Wrong("what was promoted is not what was spilled")

    def _timed(self, work: Coroutine[Any, Any, None]) -> float:
        start_s = time.perf_counter()
        self.wait(self._watched(work))
        return BATCH_BYTES / (time.perf_counter() - start_s) / 1e9

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        """Notes how late the loop is meanwhile."""
        done = asyncio.ensure_future(work)
        while not done.done():
            due_s = self.loop.time() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.lags_s.append(self.loop.time() - due_s)
        done.result()

    async def _spill(self) -> None:
        self.records = await asyncio.gather(*(self._put(n) for n in range(BATCH)))

    async def _put(self, number: int) -> Record:
        key, namespace = Key(number.to_bytes(32, "big")), MANIFEST.namespace
        new = NewObject(
            key,
            namespace,
            key,
            0,
            Generation(os.urandom(8)),
            OBJECT_BYTES,
            cold=False,
            table=self.tables[number],
        )
        async with self.writing:
            stored = await self.device.put(new, [self.source[number]])
        if not isinstance(stored, Record):
            raise Wrong(f"the device refused: {stored}")
        return stored

    async def _promote(self) -> None:
        gets = [
            self.device.get(record, [memory])
            for record, memory in zip(self.records, self.target, strict=True)
        ]
        await asyncio.gather(*(get.table for get in gets))

    async def _delete(self) -> None:
        for record in self.records:
            self.device.delete(record)
        self.records = []


class Raw:
    """The bare loop, on the second half of the data pages of the same file, from and to the same memory."""

    def __init__(self, path: str, threads: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        self._pool = ThreadPoolExecutor(threads)
        self._threads = threads

    def write(self, memory: list[memoryview]) -> float:
        return self._timed(os.pwritev, memory, lambda: os.fdatasync(self._fd))

    def read(self, memory: list[memoryview]) -> float:
        return self._timed(os.preadv, memory, lambda: None)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)

    def _timed(self, call: Call, memory: list[memoryview], end: Callable[[], None]) -> float:
        first = (FILE_BYTES - BATCH_BYTES) // MIB
        pieces = [view[at : at + MIB] for view in memory for at in range(0, len(view), MIB)]

        def strand(start: int) -> None:
            for index in range(start, len(pieces), self._threads):
                if call(self._fd, [pieces[index]], (first + index) * MIB) != MIB:
                    raise Wrong("the bare loop was cut short")

        start_s = time.perf_counter()
        list(self._pool.map(strand, range(self._threads)))
        end()
        return BATCH_BYTES / (time.perf_counter() - start_s) / 1e9


def filled() -> memoryview:
    memory = aligned(OBJECT_BYTES)
    memory[:] = os.urandom(MIB) * (OBJECT_BYTES // MIB)
    return memory


def cpu_s_per_gb(measure: Callable[[], float], times: int = 3) -> float:
    start_s = time.process_time()
    for _ in range(times):
        measure()
    return (time.process_time() - start_s) / (times * BATCH_BYTES / 1e9)


@contextmanager
def opened() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        loop = asyncio.new_event_loop()
        bench = Bench(Path(folder), loop)
        try:
            yield bench
        finally:
            loop.run_until_complete(bench.device.stop())
            loop.close()


def tell(report: Report, seen: Seen) -> None:
    """What others notice of a node that spills."""
    pulled, asked, idle, echoed = map(_both, seen.alone)
    report.note(
        f"a node spills {seen.spilled_gb_per_s:.2f} GB/s ({seen.cpu_s_per_gb:.2f} CPU s/GB of all of it). p99, idle "
        f"and meanwhile: pulls of {PULLED_BYTES // MIB} MiB {pulled}, a Hello {asked}, a Hello to a node that is "
        f"idle {idle}, a process that only echoes {echoed}; all at once: {', '.join(map(_both, seen.at_once))}"
    )
    pull, ask, *_ = seen.alone
    ratio = p99(pull.spilling) / p99(pull.idle)
    report.aim("pull_p99_during_spill_vs_idle", ratio, 2.0, "x", at_most=True)
    report.aim("control_p99_ms_during_spill", p99(ask.spilling), 5.0, "ms", at_most=True)


def _both(took: Took) -> str:
    return f"{p99(took.idle):.1f} and {p99(took.spilling):.1f} ms"


def main() -> int:
    arguments = parse_arguments(str(__doc__).splitlines()[0])
    report = Report("nvme", "GB/s")
    with opened() as bench:
        raw = Raw(bench.path, bench.threads)
        pairs = 21 if arguments.full else 7
        spill = interleave({"spill": bench.spill, "raw": partial(raw.write, bench.source)}, pairs)
        report.row(f"spill {BATCH} x 32 MiB", spill, against=("spill", "raw"))
        promote = interleave({"promote": bench.promote, "raw": partial(raw.read, bench.target)}, pairs)
        report.row(f"promote {BATCH} x 32 MiB", promote, against=("promote", "raw"))
        bench.check()
        bench.device.audit()
        lags_s = sorted(bench.lags_s)
        report.aim("spill_vs_raw", spill["spill"].median / spill["raw"].median, AIM, "x")
        report.aim("promote_vs_raw", promote["promote"].median / promote["raw"].median, AIM, "x")
        report.note(f"event loop late meanwhile: p99 {lags_s[int(len(lags_s) * 0.99)] * 1e3:.1f} ms")
        spill_cpu, promote_cpu = cpu_s_per_gb(bench.spill), cpu_s_per_gb(bench.promote)
        report.aim("spill_cpu_s_per_gb", spill_cpu, AIM_CPU_S_PER_GB, "s/GB", at_most=True)
        report.aim("promote_cpu_s_per_gb", promote_cpu, AIM_CPU_S_PER_GB, "s/GB", at_most=True)
        report.note(f"{bench.threads} threads, files in {Path(bench.path).parent.parent}")
        raw.close()
    tell(report, watch(10 if arguments.full else 4))
    return report.finish(arguments.json)


if __name__ == "__main__":
    run(main)
