"""What one core and two can do with bytes in memory: the limit of whatever moves and verifies them.

copy: from one array to another. hash: xxh3-64 of runs, from memory. both: a portion is copied, then its runs are
hashed where they are now, which is what a client on a node's host does. 64 MiB at a time, in one thread or in two.

    python bench/limits.py [--full] [--json]
"""

import ctypes
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
from xxhash import xxh3_64_digest

from bench._harness import Report, interleave, parse_arguments, run
from bench.transfer import BATCH_BYTES, KIB, MIB, Bytes, timed

PORTION_BYTES = [256 * KIB, MIB, 4 * MIB]
RUN_BYTES = [16 * KIB, 128 * KIB]

Work = Callable[[int, int], None]


class Memory:
    """Two arrays that were touched."""

    def __init__(self) -> None:
        self.source: Bytes = np.random.default_rng().integers(0, 256, BATCH_BYTES, np.uint8)
        self.target = np.full(BATCH_BYTES, 1, np.uint8)

    def copy(self, portion_bytes: int, start: int, stop: int) -> None:
        """Portion by portion."""
        for at in range(start, stop, portion_bytes):
            ctypes.memmove(self.target.ctypes.data + at, self.source.ctypes.data + at, portion_bytes)

    def hash(self, run_bytes: int, start: int, stop: int) -> None:
        """Run by run."""
        view = self.target.data
        for at in range(start, stop, run_bytes):
            xxh3_64_digest(view[at : at + run_bytes])

    def both(self, portion_bytes: int, run_bytes: int, start: int, stop: int) -> None:
        """By turns."""
        for at in range(start, stop, portion_bytes):
            self.copy(portion_bytes, at, at + portion_bytes)
            self.hash(run_bytes, at, at + portion_bytes)


def in_one(work: Work) -> float:
    """GB/s of a thread."""
    return timed(partial(work, 0, BATCH_BYTES))


def in_two(work: Work) -> float:
    """GB/s of two threads, a half each."""

    def move() -> None:
        other = threading.Thread(target=work, args=(BATCH_BYTES // 2, BATCH_BYTES))
        other.start()
        work(0, BATCH_BYTES // 2)
        other.join()

    return timed(move)


def main() -> int:
    """Measures and prints; the exit code."""
    arguments = parse_arguments(__doc__ or "")
    report = Report("Bytes in memory", "GB/s")
    memory = Memory()
    works: dict[str, Work] = {"copy": partial(memory.copy, MIB)}
    works |= {f"hash, runs of {size // KIB} KiB": partial(memory.hash, size) for size in RUN_BYTES}
    works |= {
        f"both, portions of {portion // KIB}, runs of {size // KIB} KiB": partial(memory.both, portion, size)
        for portion in PORTION_BYTES
        for size in RUN_BYTES
    }
    for name, work in works.items():
        measured = {"one thread": partial(in_one, work), "two threads": partial(in_two, work)}
        samples = interleave(measured, 25 if arguments.full else 9)
        report.row(name, samples, against=("two threads", "one thread"))
    return report.finish(arguments.json)


if __name__ == "__main__":
    run(main)
