"""The mover: work on payload bytes, in a bounded pool of threads beside the control loop.

A copy is pinned while a thread reads it, so its pages are neither evicted nor reused. The state changes
on the control loop only, before and after.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from xxhash import xxh3_64

from kvstore.core import Extents, Span, limits, locate
from kvstore.store.reading import Check
from kvstore.store.store import Store
from kvstore.tiers import Arena
from kvstore.wire import ClientId, Suspect


class Mover:
    """Verifies copies."""

    def __init__(self, store: Store, arena: Arena, threads: int = 2) -> None:
        self._store = store
        self._arena = arena
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="mover")
        self._pending = 0

    def suspect(self, client: ClientId, request: Suspect) -> "asyncio.Future[bool]":
        """Verifies a leased copy that a reader doubts; true when it was bad, and it is dropped then.

        The copy is pinned when this returns: the reader may give its lease back in the next message. False also when
        this lease has no such copy, and when `SUSPECTS_MAX` are being verified. A caller that is cancelled does not
        end the verification: its verdict counts.

        Raises:
            Overloaded
        """
        loop = asyncio.get_running_loop()
        verdict: asyncio.Future[bool] = loop.create_future()
        check = self._store.check(client, request) if self._pending < limits.SUSPECTS_MAX else None
        if check is None:
            verdict.set_result(False)
            return verdict
        self._pending += 1

        def told(work: "asyncio.Future[bool]") -> None:
            self._settle(check, sound=work.result())
            if not verdict.done():
                verdict.set_result(not work.result())

        loop.run_in_executor(self._pool, is_sound, self._arena, check).add_done_callback(told)
        return verdict

    def close(self) -> None:
        """Waits for what is being verified; nothing reads the arena afterwards."""
        self._pool.shutdown(wait=True)

    def _settle(self, check: Check, *, sound: bool) -> None:
        self._pending -= 1
        self._store.settle(check, sound=sound)


def is_sound(arena: Arena, check: Check) -> bool:
    """Whether the bytes of a copy match its table."""
    digests = (_digest(arena, check.extents, Span(offset, size)) for _, offset, size in check.runs)
    return check.table == b"".join(digests)


def _digest(arena: Arena, extents: Extents, run: Span) -> bytes:
    digest = xxh3_64()
    for offset, size in locate(extents, arena.page_bytes, (run,)):
        digest.update(arena.view(offset, size))
    return digest.digest()
