"""Processes that the scheduler prefers to all others: what is left of a wait when they need not wait for a core.

with preferred(node.pid, client_pid):  # by root alone
    ...
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NICE = -10


def may_prefer() -> bool:
    """Whether this user may."""
    return os.geteuid() == 0


@contextmanager
def preferred(*pids: int) -> Iterator[None]:
    """All threads that these processes have now."""
    _rank(pids, NICE)
    try:
        yield
    finally:
        _rank(pids, 0)


def _rank(pids: tuple[int, ...], nice: int) -> None:
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, int(thread), nice)
