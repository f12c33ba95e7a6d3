"""The connector, with a worker half that a test can have do harm: to loads on their way, after verification.

A file says what: nothing, `zero N` (what is loaded of kind N is written as zeros), or `kill PID` (a load begins).
"""

import os
import signal
from pathlib import Path
from typing import Any

from connector.connector import KVStoreConnector

ORDERS = "KVSTORE_TEST_ORDERS"


def orders() -> list[str]:
    """What the file says now."""
    return Path(os.environ[ORDERS]).read_text().split()


class _Zeroing:
    """The layers of one kind; writes zeros if it is told to."""

    def __init__(self, real: Any, kind: int) -> None:
        self._real, self._kind = real, kind

    def gather(self, *arguments: Any) -> None:
        self._real.gather(*arguments)

    def scatter(self, data: memoryview, *more: Any) -> None:
        harm = orders() == ["zero", str(self._kind)]
        self._real.scatter(memoryview(bytearray(len(data))) if harm else data, *more)


class _Caches:
    """All kinds."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def of(self, kind: int) -> _Zeroing:
        return _Zeroing(self._real.of(kind), kind)


class Saboteur(KVStoreConnector):
    """What vLLM is given instead of the connector."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if self._worker._caches is not None:
            self._worker._caches = _Caches(self._worker._caches)  # type: ignore[assignment]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        order = orders()
        if order[:1] == ["kill"] and self._get_connector_metadata().loads:
            os.kill(int(order[1]), signal.SIGKILL)
            Path(os.environ[ORDERS]).write_text("")
        super().start_load_kv(forward_context, **kwargs)
