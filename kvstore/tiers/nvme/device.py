"""The one seam between the NVMe tier and the operating system.

A device is bytes at offsets, with a write cache that `sync` empties: what was written before a `sync` that
returned survives a power cut; of everything else any part may. Whatever the operating system reports (EIO,
ENOSPC, ENODEV, a short read, a removed disk that reads as empty) becomes one error, `DeviceDown`: nobody
above can do anything about the difference.

Calls block and may be made from several threads. A stalled NVMe-oF call cannot be cancelled; so `close`
does not wait, the last call that is still running closes the descriptor when it comes back.
"""

import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from kvstore.core import BadConfiguration, KVStoreError

BLOCK_BYTES = 4096
"""Offsets, sizes and memory of all I/O are multiples of this: what O_DIRECT asks for at most."""

Pieces = list[tuple[int, list[memoryview]]]
"""One I/O each: the offset on the device, and memory in order."""


class DeviceDown(KVStoreError):
    """A device cannot be used now. What it was doing is lost; it is probed and taken back."""


class DeviceRefused(BadConfiguration):
    """A device is not ours to use: it holds something else, belongs to another node, or is in use."""


class Device(Protocol):
    """Bytes at rest. Offsets and sizes are multiples of `BLOCK_BYTES`; memory is aligned to it."""

    name: str
    size_bytes: int
    warnings: Sequence[str]

    def read(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        """Fills the buffers, in order, with adjacent bytes from `offset_bytes` on.

        Raises:
            DeviceDown: fewer bytes came, or none.
        """

    def write(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        """Writes the buffers, in order, to adjacent bytes from `offset_bytes` on.

        Raises:
            DeviceDown: not all bytes were taken.
        """

    def sync(self) -> None:
        """Returns when everything written before the call survives a power cut.

        Raises:
            DeviceDown
        """

    def close(self) -> None:
        """No further call succeeds; what is running goes on and is not waited for."""


def aligned(size_bytes: int) -> memoryview:
    """Zeroed memory that a device can read and write."""
    return memoryview(mmap.mmap(-1, size_bytes))


class FileDevice:
    """A raw block device, or a preallocated file."""

    def __init__(self, name: str, fd: int, size_bytes: int, warnings: Sequence[str]) -> None:
        """Use `open`; this only keeps what it is given."""
        self.name = name
        self.size_bytes = size_bytes
        self.warnings = warnings
        self._fd = fd
        self._lock = threading.Lock()
        self._running = 0
        self._closed = False

    @classmethod
    def open(cls, path: str) -> "FileDevice":
        """Opens a device for this process alone.

        Raises:
            DeviceRefused: it is mounted, used by another process, or neither block device nor file.
            DeviceDown: it is not there, or does not answer.
        """
        try:
            fd, warnings = _open(path)
        except OSError as error:
            raise _unopened(path, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size_bytes = os.lseek(fd, 0, os.SEEK_END) // BLOCK_BYTES * BLOCK_BYTES
        except BlockingIOError as error:
            os.close(fd)
            raise DeviceRefused(
                f"{path} is used by another process: one node, or one command, at a time may use a device"
            ) from error
        except OSError as error:
            os.close(fd)
            raise _down(path, error) from error
        return cls(path, fd, size_bytes, warnings)

    def read(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        """See `Device`."""
        self._all(os.preadv, "read", offset_bytes, buffers)

    def write(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        """See `Device`."""
        self._all(os.pwritev, "write", offset_bytes, buffers)

    def sync(self) -> None:
        """See `Device`."""
        with self._descriptor() as fd:
            os.fdatasync(fd)

    def close(self) -> None:
        """See `Device`. Closing also unlocks the device, once the last running call has come back."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._running:
                os.close(self._fd)

    def _all(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        verb: str,
        offset_bytes: int,
        buffers: Sequence[memoryview],
    ) -> None:
        size_bytes = sum(map(len, buffers))
        with self._descriptor() as fd:
            done_bytes = call(fd, buffers, offset_bytes)
        if done_bytes != size_bytes:
            raise DeviceDown(
                f"{self.name} does not answer as it should: a {verb} of {size_bytes} bytes at {offset_bytes} "
                f"ended after {done_bytes}, as when a device was removed or a file was cut"
            )

    @contextmanager
    def _descriptor(self) -> Iterator[int]:
        """The descriptor, kept open for as long as the block runs, with errors mapped."""
        with self._lock:
            if self._closed:
                raise DeviceDown(f"{self.name} was closed after an error")
            self._running += 1
        try:
            yield self._fd
        except OSError as error:
            raise _down(self.name, error) from error
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1
            if self._closed and not self._running:
                os.close(self._fd)

    def __repr__(self) -> str:
        return f"<FileDevice {self.name} {self.size_bytes >> 20} MiB>"


def _open(path: str) -> tuple[int, list[str]]:
    """A descriptor without page cache, or with, and a warning then.

    Raises:
        OSError
        DeviceRefused: it can never be a device of ours.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISBLK(mode) or stat.S_ISREG(mode)):
        raise DeviceRefused(f"{path} is neither a block device nor a file")
    # On a block device O_EXCL means: not while it is mounted, or part of a RAID or a volume group.
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_EXCL if stat.S_ISBLK(mode) else 0)
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    else:
        if _takes_direct_io(fd):
            return fd, []
        os.close(fd)
    warning = (
        f"{path} cannot be read and written past the page cache (O_DIRECT, blocks of {BLOCK_BYTES} bytes): "
        "it works, but uses more CPU and memory; a block device, or a file on ext4 or xfs, avoids that"
    )
    return os.open(path, flags), [warning]


def _takes_direct_io(fd: int) -> bool:
    try:
        os.preadv(fd, [aligned(BLOCK_BYTES)], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        os.close(fd)
        raise
    return True


def _unopened(path: str, error: OSError) -> KVStoreError:
    if error.errno == errno.EBUSY:
        return DeviceRefused(
            f"{path} is in use (mounted, or part of a RAID or volume group): it is left alone; "
            "see `lsblk` for by what"
        )
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return DeviceRefused(f"{path} may not be written by this user ({error.strerror})")
    return _down(path, error)


def _down(path: str, error: OSError) -> DeviceDown:
    return DeviceDown(
        f"{path} cannot be used: {error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})"
    )
