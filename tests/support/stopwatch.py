"""How long a piece of code really takes on a machine that is busy with other things."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def _queued_s() -> float:
    """Seconds in which this thread could have run and had no processor, so far."""
    return int(_SCHEDSTAT.read_text().split()[1]) / 1e9


@contextmanager
def stopwatch(done: Callable[[float], object]) -> Iterator[None]:
    """Tells `done` the seconds inside: computing, waiting for locks or for others, but not for a processor."""
    queued_s, began = _queued_s(), time.perf_counter()
    yield
    done(time.perf_counter() - began - (_queued_s() - queued_s))
