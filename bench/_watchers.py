"""Processes that do something again and again while they are told to, and say how long each time took.

with watcher(body) as pipe:  # body(pipe) ends with serve(work, pipe, pause_s)
    ask([pipe], seconds)
    ...
    [took_ms] = answers([pipe])
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np


def ask(watchers: Iterable[Connection], seconds: float) -> None:
    """So long, from now."""
    for watcher in watchers:
        watcher.send(seconds)


def answers(watchers: Iterable[Connection]) -> list[list[float]]:
    """What they took."""
    return [watcher.recv() for watcher in watchers]


def serve(work: Callable[[], object], pipe: Connection, pause_s: float) -> None:
    """Does it again and again for as many seconds as the pipe says, so long after the beginning of the last one;
    answers how many milliseconds each took."""
    work()
    pipe.send(None)
    while (seconds := pipe.recv()) is not None:
        took_ms = []
        end_s = time.perf_counter() + seconds
        while (began_s := time.perf_counter()) < end_s:
            work()
            took_ms.append(1e3 * (time.perf_counter() - began_s))
            pipe.poll(max(0.0, began_s + pause_s - time.perf_counter()))
        pipe.send(took_ms)


@contextmanager
def watcher(body: Callable[[Connection], None]) -> Iterator[Connection]:
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


def p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))
