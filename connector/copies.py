"""Bytes in motion between slabs, which are views of the engine's memory, and objects in host memory.

    slab    [layer][kernel block][head][row][bytes]     any strides, the bytes of a row contiguous
    object  [layer][head][kernel block][row][bytes]     dense, blocks in token order

A row is a whole tile where tiles are contiguous, else one token of a tile. A rank's part of an object is all of
its slabs in order.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

_Bytes = npt.NDArray[np.uint8]

Fence = Any
"""A point in the order of the device's work (a CUDA event), or None where that work is synchronous."""


class Copies(Protocol):
    """Moves tiles between slabs and objects."""

    def fence(self) -> Fence:
        """What the calling thread has asked of the device so far; later copies may be ordered after it."""

    def gather(self, blocks: Sequence[int], out: memoryview, after: Fence) -> None:
        """Fills `out` with the rank's part of the object of these blocks; done when it returns."""

    def scatter(self, data: memoryview, blocks: Sequence[int | None], after: Fence) -> None:
        """Writes the rank's part of an object into these blocks, but not where None stands; done when it returns."""

    def layer(self, index: int) -> "Copies":
        """The same for one layer."""


class HostCopies:
    """Slabs in host memory: numpy moves whole tiles at the speed of memcpy, with one thread and without the GIL
    (torch would start OpenMP threads of its own beside the engine's)."""

    def __init__(self, slabs: Sequence[torch.Tensor], split: int) -> None:
        self._tensors = slabs
        self._slabs = [slab.numpy() for slab in slabs]
        self._split = split

    def fence(self) -> Fence:
        """None: the engine's work on host memory is done when its call returns."""

    def gather(self, blocks: Sequence[int], out: memoryview, after: Fence) -> None:
        """See `Copies`."""
        for slab, tiles in self._views(len(blocks), out):
            for place, block, count in _stretches(blocks, self._split):
                tiles[:, :, place : place + count] = slab[:, block : block + count].swapaxes(1, 2)

    def scatter(self, data: memoryview, blocks: Sequence[int | None], after: Fence) -> None:
        """See `Copies`."""
        for slab, tiles in self._views(len(blocks), data):
            for place, block, count in _stretches(blocks, self._split):
                slab[:, block : block + count] = tiles[:, :, place : place + count].swapaxes(1, 2)

    def layer(self, index: int) -> Copies:
        """See `Copies`."""
        return HostCopies([_layer(self._tensors, index)], self._split)

    def _views(self, num_blocks: int, data: memoryview) -> Iterator[tuple[_Bytes, _Bytes]]:
        """Each slab beside its part of the object, `[layer][head][kernel block][row][bytes]`."""
        flat = np.frombuffer(data, np.uint8)
        offset = 0
        for slab in self._slabs:
            layers, _, heads, *tile = slab.shape
            shape = (layers, heads, num_blocks * self._split, *tile)
            size = math.prod(shape)
            yield slab, flat[offset : offset + size].reshape(shape)
            offset += size


class DeviceCopies:
    """Slabs in device memory: tiles are put together by the device, then cross the bus in one piece per slab.

    Everything happens on a stream of its own, ordered after the fence; only the calling thread waits.
    """

    def __init__(self, slabs: Sequence[torch.Tensor], split: int) -> None:
        self._tensors = slabs
        # [layer][head][kernel block][row][bytes], as in the object
        self._slabs = [slab.transpose(1, 2) for slab in slabs]
        self._split = split
        self._device = slabs[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def fence(self) -> Fence:
        """An event on the calling thread's stream."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(self, blocks: Sequence[int], out: memoryview, after: Fence) -> None:
        """See `Copies`."""
        _, chosen = zip(*_kernel_blocks(blocks, self._split), strict=True)
        flat = torch.frombuffer(out, dtype=torch.uint8)
        with self._ordered(after):
            index = torch.tensor(chosen, device=self._device)
            offset = 0
            for slab in self._slabs:
                tiles = slab.index_select(2, index).reshape(-1)
                flat[offset : offset + tiles.numel()].copy_(tiles, non_blocking=True)
                offset += tiles.numel()

    def scatter(self, data: memoryview, blocks: Sequence[int | None], after: Fence) -> None:
        """See `Copies`."""
        kept = list(_kernel_blocks(blocks, self._split))
        if not kept:
            return
        flat = torch.frombuffer(data, dtype=torch.uint8)
        places, chosen = zip(*kept, strict=True)
        with self._ordered(after):
            source = torch.tensor(places, device=self._device)
            target = torch.tensor(chosen, device=self._device)
            offset = 0
            for slab in self._slabs:
                layers, heads, _, *tile = slab.shape
                shape = (layers, heads, len(blocks) * self._split, *tile)
                size = math.prod(shape)
                tiles = flat[offset : offset + size].to(self._device, non_blocking=True).view(shape)
                slab.index_copy_(2, target, tiles.index_select(2, source))
                offset += size

    def layer(self, index: int) -> Copies:
        """See `Copies`."""
        return DeviceCopies([_layer(self._tensors, index)], self._split)

    @contextmanager
    def _ordered(self, after: Fence) -> Iterator[None]:
        """Work inside runs after the fence, and is done when this ends."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield
            done = torch.cuda.Event()
            done.record(self._stream)
        done.synchronize()


def _layer(slabs: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    """One layer of all slabs', as a slab."""
    for slab in slabs:
        if index < slab.shape[0]:
            return slab[index : index + 1]
        index -= slab.shape[0]
    raise AssertionError("a layer behind the last one")


def _stretches(blocks: Sequence[int | None], split: int) -> Iterator[tuple[int, int, int]]:
    """(place, kernel block, how many) of the same, neighbours in one: one call of numpy moves them all."""
    stretch: tuple[int, int, int] | None = None
    for place, block in _kernel_blocks(blocks, split):
        if stretch and (place, block) == (stretch[0] + stretch[2], stretch[1] + stretch[2]):
            stretch = (stretch[0], stretch[1], stretch[2] + 1)
        else:
            if stretch:
                yield stretch
            stretch = (place, block, 1)
    if stretch:
        yield stretch


def _kernel_blocks(blocks: Sequence[int | None], split: int) -> Iterator[tuple[int, int]]:
    """(place in the object, kernel block) of every block that is not None."""
    for place, block in enumerate(blocks):
        if block is not None:
            for part in range(split):
                yield place * split + part, block * split + part
