"""Objects gathered layer by layer, while the step that computes them still computes the layers behind.

A buffer belongs to one offer, and is used for another only when nobody copies into it any more: when its step was
closed behind all copies, or never again.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from connector.compat import logger
from connector.copies import Fence
from connector.metadata import Coming
from connector.tensors import KVCaches

log = logger(__name__)

WAIT_S = 1.0  # for the device, which may be behind the engine's thread

Buffer = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class _Early:
    """An object being gathered: it is whole when all layers are there and its step is `closed`."""

    coming: Coming
    buffer: Buffer
    layers: set[int] = field(default_factory=set)
    closed: bool = False


class EarlyObjects:
    """What the steps so far complete, in bounded memory. `take` may be called from any thread.

    Args:
        caches: of a model of one kind.
        bytes_max: of all buffers.
        make_buffer: host memory of a size.
    """

    def __init__(self, caches: KVCaches, bytes_max: int, make_buffer: Callable[[int], Buffer]) -> None:
        self._caches = caches
        self._bytes_max = bytes_max
        self._make_buffer = make_buffer
        self._copies = [caches.copies.layer(at) for at in range(len(caches.layers))]
        self._index = {layer.name: at for at, layer in enumerate(caches.layers)}
        sizes = [layer.num_heads * layer.unit_bytes for layer in caches.layers]
        self._ends = [0, *accumulate(sizes)]  # of layers, in bytes of one unit
        self._changed = threading.Condition()
        self._early: dict[int, _Early] = {}  # by offer, oldest first
        self._free: list[Buffer] = []
        self._bytes = 0  # of all buffers, free ones included
        self._open: list[_Early] = []  # of the step under way
        self._work: deque[tuple[list[_Early], int | None, Fence]] = deque()
        self._copying = False
        self._stopped = False
        threading.Thread(target=self._run, name="kvstore-layers", daemon=True).start()

    def begin(self, coming: Sequence[Coming]) -> None:
        """A step completes these. Those without room are left out."""
        with self._changed:
            for early in self._open:  # the step before was not closed: no hook, no knowledge
                self._forget(early)
            self._open = []
            for one in coming:
                buffer = self._room(self._caches.object_bytes(len(one.blocks)))
                if buffer is not None:
                    early = self._early[one.offer] = _Early(one, buffer)
                    self._open.append(early)

    def layer(self, name: str) -> None:
        """The engine has asked for this layer of the step. One that calls again is copied again."""
        index = self._index.get(name)
        if self._open and index is not None:
            self._queue(list(self._open), index, self._caches.fence())

    def close(self) -> None:
        """It has asked for all layers of the step."""
        if self._open:
            self._queue(self._open, None, None)
            self._open = []

    def take(self, offer: int, out: memoryview) -> bool:
        """Copies what was gathered for this offer, and gives its buffer up. False: there is nothing, or not all."""
        with self._changed:
            if (early := self._early.get(offer)) is None:
                return False
            self._changed.wait_for(lambda: early.closed or self._stopped, WAIT_S)
            if offer not in self._early:
                return False
            if not early.closed:
                self._forget(early)
                return False
            del self._early[offer]
        whole = len(early.layers) == len(self._copies) and early.buffer.nbytes == len(out)
        if whole:
            np.copyto(np.frombuffer(out, np.uint8), early.buffer)
        with self._changed:
            self._free.append(early.buffer)
        return whole

    def stop(self) -> None:
        """Touches no block any more, and has nothing to give, until `go_on`."""
        with self._changed:
            self._stopped = True
            self._work.clear()
            self._open = []
            for early in list(self._early.values()):
                self._forget(early)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._copying)

    def go_on(self) -> None:
        """Blocks may be touched again."""
        with self._changed:
            self._stopped = False

    # --- under the lock -------------------------------------------------------------------------------

    def _room(self, size_bytes: int) -> Buffer | None:
        """A buffer of this size that nobody uses, if need be in place of the oldest that was never taken."""
        while not self._stopped:
            for at, buffer in enumerate(self._free):
                if buffer.nbytes == size_bytes:
                    return self._free.pop(at)
            if self._bytes + size_bytes <= self._bytes_max:
                self._bytes += size_bytes
                return self._make_buffer(size_bytes)
            if self._free:
                self._bytes -= self._free.pop().nbytes
            elif (oldest := next((e for e in self._early.values() if e.closed), None)) is not None:
                self._forget(oldest)
            else:
                break
        return None

    def _forget(self, early: _Early) -> None:
        """Copies into it may still be queued: the buffer is given up with it."""
        if self._early.pop(early.coming.offer, None) is not None:
            self._bytes -= early.buffer.nbytes

    def _queue(self, some: list[_Early], index: int | None, after: Fence) -> None:
        with self._changed:
            self._work.append((some, index, after))
            self._changed.notify_all()

    # --- its thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work)
                some, index, after = self._work.popleft()
                self._copying = True
            try:
                for early in some:
                    self._gather(early, index, after)
            except Exception:
                log.exception(
                    "a bug of the connector: what a step completes is gathered from its blocks later"
                )
            finally:
                with self._changed:
                    self._copying = False
                    self._changed.notify_all()

    def _gather(self, early: _Early, index: int | None, after: Fence) -> None:
        if index is None:
            early.closed = True
            return
        units = early.buffer.nbytes // self._ends[-1]
        start, end = (units * edge for edge in self._ends[index : index + 2])
        self._copies[index].gather(early.coming.blocks, early.buffer.data[start:end], after)
        early.layers.add(index)
