"""A device with faults that are values: what fails, how, and a count that proves that it did."""

import threading
from collections.abc import Callable, Sequence

from kvstore.tiers import Device, DeviceDown


class Faulty:
    """Wraps a device. `reads`, `writes` and `syncs` say of each call how it fails: an exception, or None."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.name = inner.name
        self.size_bytes = inner.size_bytes
        self.warnings = inner.warnings
        self.reads: Callable[[int], Exception | None] = lambda _: None
        self.writes: Callable[[int], Exception | None] = lambda _: None
        self.syncs: Callable[[], Exception | None] = lambda: None
        self.gate = threading.Event()  # calls hang while it is not set
        self.gate.set()
        self.hits = 0
        self.hanging = 0
        self.synced = 0
        self.closed = False

    def down(self, text: str = "EIO") -> None:
        """Everything fails from now on."""
        self.reads = self.writes = lambda _: DeviceDown(text)
        self.syncs = lambda: DeviceDown(text)

    def heal(self) -> None:
        """Nothing fails any more."""
        self.reads = self.writes = lambda _: None
        self.syncs = lambda: None
        self.gate.set()

    def read(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        self._pass(self.reads(offset_bytes))
        self.inner.read(offset_bytes, buffers)

    def write(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        self._pass(self.writes(offset_bytes))
        self.inner.write(offset_bytes, buffers)

    def sync(self) -> None:
        self._pass(self.syncs())
        self.synced += 1
        self.inner.sync()

    def close(self) -> None:
        self.closed = True
        self.inner.close()

    def _pass(self, error: Exception | None) -> None:
        if not self.gate.is_set():
            self.hanging += 1
            self.hits += 1
            assert self.gate.wait(30), "the test forgot this call"
            self.hanging -= 1
        if error is not None:
            self.hits += 1
            raise error
