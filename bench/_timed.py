"""The connector with a stopwatch, for `bench/ttft.py`: the same class, whose stages write down how long they took.

    lookup    scheduler half: from the question to the index' answer
    lease     scheduler half: from the question to the node's promise
    read      worker half: waiting for Mooncake; what overlaps with verifying and scattering is not in it. By shared
              memory: copying out of the arena, by two threads
    verify    worker half: hashing what came
    scatter   worker half: copying it into the engine's blocks
    load      worker half: all of a load, from its step to its report

One JSON line per stage and occasion goes to the file that BENCH_STAGES names.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TextIO

from connector.compat import KVConnectorRole
from connector.connector import KVStoreConnector
from kvstore.client import Mover

STAGES = ("lookup", "lease", "read", "verify", "scatter", "load")


@cache
def _book() -> TextIO:
    """Open once, because opening takes as long as a small stage; a line at a time, at the end, whoever empties it."""
    return open(os.environ["BENCH_STAGES"], "a", buffering=1)


def note(stage: str, seconds: float) -> None:
    _book().write(json.dumps({"stage": stage, "s": seconds}) + "\n")


class TimedConnector(KVStoreConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            control: Any = self._scheduler.shared.control
            control.lookup = answered("lookup", control.lookup)
            control.acquire = answered("lease", control.acquire)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker: Any = self._worker
        transfer, copies = worker._mover._transfer, worker._caches.copies  # noqa: SLF001 - a stopwatch looks inside
        transfer.wait = timed("read", transfer.wait)
        transfer.by_hand = carried("read", transfer.by_hand)
        copies.scatter = timed("scatter", copies.scatter)
        module: Any = sys.modules[Mover.__module__]
        module.checksums = timed("verify", module.checksums)

    def build_connector_worker_meta(self) -> Any:
        reports = super().build_connector_worker_meta()
        for report in (one for many in (reports.loads if reports else {}).values() for one in many.values()):
            note("load", report.total_s)
        return reports


def timed(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Writes down how long the call takes."""

    @wraps(call)
    def measured(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            note(stage, time.perf_counter() - began)

    return measured


def carried(stage: str, by_hand: Callable[..., Any]) -> Callable[..., Any]:
    """Writes down how long each move of the copies that it makes takes."""

    @wraps(by_hand)
    def measured(*args: Any, **kwargs: Any) -> Any:
        copy = by_hand(*args, **kwargs)
        if copy is not None:
            copy.move = timed(stage, copy.move)
        return copy

    return measured


def answered(stage: str, ask: Callable[..., Any]) -> Callable[..., Any]:
    """Writes down how long the answer takes."""

    @wraps(ask)
    def measured(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        future = ask(*args, **kwargs)
        future.add_done_callback(lambda _: note(stage, time.perf_counter() - began))
        return future

    return measured
