"""A node's arena as a client on the same host sees it."""

import ctypes
import mmap
import os

import numpy as np

from kvstore.core import limits
from kvstore.transfer.arena_socket import Handed
from kvstore.transfer.base import Piece

_MADV_DONTFORK, _MADV_POPULATE_READ = 10, 22
_SLICE_BYTES = 16 * limits.MIB

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedArena:
    """The arena, mapped; for reading only unless `writing`. Takes over what was handed.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, handed: Handed, *, writing: bool) -> None:
        self.base = handed.arena_base
        self.size_bytes = handed.arena_bytes
        self.connection = handed.connection
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writing else 0)
        try:
            self._map = mmap.mmap(handed.fd, self.size_bytes, mmap.MAP_SHARED, protection)
        except OSError:
            handed.connection.close()
            raise
        finally:
            os.close(handed.fd)
        self.address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._populated = bytearray(-(-self.size_bytes // _SLICE_BYTES))
        # A child of this process has no use for it, and would keep the memory of a node that is gone.
        _libc.madvise(self.address, self.size_bytes, _MADV_DONTFORK)

    def local(self, remote_address: int, size_bytes: int) -> int | None:
        """Where bytes at an address in the node are here; None if they are not in the arena."""
        offset = remote_address - self.base
        return self.address + offset if 0 <= offset <= self.size_bytes - size_bytes else None

    def slices(self) -> range:
        """Numbers for `populate`."""
        return range(len(self._populated))

    def populate(self, number: int) -> None:
        """Has the kernel enter the pages of a slice into this process's tables: what a first touch would wait for.
        Older kernels cannot; then first touches do it."""
        if not self._populated[number]:
            offset = number * _SLICE_BYTES
            size = min(_SLICE_BYTES, self.size_bytes - offset)
            _libc.madvise(self.address + offset, size, _MADV_POPULATE_READ)
            self._populated[number] = True

    def populate_for(self, piece: Piece) -> None:
        """As `populate`, for what a piece is about to touch: page by page it would take several times as long."""
        first = piece.remote_address - self.base
        for number in range(first // _SLICE_BYTES, (first + piece.size_bytes - 1) // _SLICE_BYTES + 1):
            self.populate(number)

    def close(self) -> None:
        """Unmaps it. Nobody may be copying."""
        self._map.close()
        self.connection.close()
