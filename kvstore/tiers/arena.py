"""The DRAM arena: one memfd, mapped once, that every copy in memory lies in.

* A memfd, so that clients on the same host can map the same pages; sealed, so that none of them can
  shrink it under us.
* Mapped at a random address: a transfer names a target by address, and an address that a client kept
  from an earlier boot must be refused, not land in somebody else's object.
* Pre-faulted by several threads in slices, and locked where the limits allow it: the first write of a
  page must not cost a page fault on the path of a request. Both are best effort; what could not be had
  is said in `warnings`, with what would help.

Only this file talks to the C library.
"""

import ctypes
import errno
import fcntl
import os
import resource
import secrets
from concurrent.futures import ThreadPoolExecutor

from kvstore.core import BadConfiguration, limits, pages_for

_MAP_SHARED, _MAP_FIXED_NOREPLACE = 0x01, 0x100000
_PROT_READ_WRITE = 0x3
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_MAP_FAILED = ctypes.c_void_p(-1).value

_ALIGNMENT_BYTES = 2 * limits.MIB  # of the address: a huge page
_ADDRESS_MIN, _ADDRESS_MAX = 1 << 44, 5 << 44  # below what the kernel itself hands out
_ADDRESS_TRIES = 16
_SLICE_BYTES = 64 * limits.MIB
_PREFAULT_THREADS_MAX = 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Arena:
    """`page_count` pages of `page_bytes` bytes, from `address` on; the same memory as `fd` and as `buffer`."""

    def __init__(self, fd: int, address: int, size_bytes: int, page_bytes: int) -> None:
        """Use `create`; this only keeps what it is given."""
        self.fd = fd
        self.address = address
        self.size_bytes = size_bytes
        self.page_bytes = page_bytes
        self.page_count = size_bytes // page_bytes
        self.buffer = memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
        self.warnings: list[str] = []

    @classmethod
    def create(
        cls,
        size_bytes: int,
        page_bytes: int = limits.PAGE_BYTES_DEFAULT,
        *,
        huge_pages: bool = True,
        lock: bool = True,
    ) -> "Arena":
        """Maps, pre-faults and locks an arena of `size_bytes`, rounded up to whole pages; zeroed.

        Raises:
            BadConfiguration: there is no memory for it.
        """
        size_bytes = pages_for(size_bytes, page_bytes) * page_bytes
        fd = os.memfd_create("kvstore-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            address = _map(fd, size_bytes)
            if huge_pages:
                # Where the kernel does not do it for shared memory this has no effect, which is no fault.
                _libc.madvise(address, size_bytes, _MADV_HUGEPAGE)
            _prefault(address, size_bytes)
        except OSError as error:
            os.close(fd)
            raise BadConfiguration(
                f"there is no memory for an arena of {size_bytes >> 20} MiB ({error.strerror}): "
                "make it smaller, or raise `ulimit -v` and the memory limit of the container"
            ) from error
        arena = cls(fd, address, size_bytes, page_bytes)
        if lock:
            arena._lock()
        return arena

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """`size_bytes` bytes from `offset_bytes` on, writable. Not to be used after `close`."""
        assert 0 <= offset_bytes <= offset_bytes + size_bytes <= self.size_bytes, "outside the arena"
        return self.buffer[offset_bytes : offset_bytes + size_bytes]

    def close(self) -> None:
        """Gives the memory back. Nobody may use a view, or move bytes here, any more."""
        self.buffer.release()
        _libc.munmap(self.address, self.size_bytes)
        os.close(self.fd)

    def __repr__(self) -> str:
        return f"<Arena {self.page_count} pages of {self.page_bytes} B at {self.address:#x}>"

    def _lock(self) -> None:
        if _libc.mlock(self.address, self.size_bytes) == 0:
            return
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        self.warnings.append(
            f"the arena of {self.size_bytes >> 20} MiB is not locked in memory "
            f"({os.strerror(ctypes.get_errno())}; the limit is {max(soft, 0) >> 10} KiB): under memory pressure "
            f"it may be swapped out and become slow; allow it with `ulimit -l {self.size_bytes >> 10}` "
            "(systemd: LimitMEMLOCK=, containers: --ulimit memlock=)"
        )


def _map(fd: int, size_bytes: int) -> int:
    """Maps the file at a random address that is free.

    Raises:
        OSError: it cannot be mapped anywhere.
    """
    slots = (_ADDRESS_MAX - _ADDRESS_MIN) // _ALIGNMENT_BYTES
    error = errno.EEXIST
    for _ in range(_ADDRESS_TRIES):
        hint = _ADDRESS_MIN + secrets.randbelow(slots) * _ALIGNMENT_BYTES
        flags = _MAP_SHARED | _MAP_FIXED_NOREPLACE
        address = _libc.mmap(hint, size_bytes, _PROT_READ_WRITE, flags, fd, 0)
        if address != _MAP_FAILED:
            return int(address)
        error = ctypes.get_errno()
        if error != errno.EEXIST:
            break
    raise OSError(error, os.strerror(error))


def _prefault(address: int, size_bytes: int) -> None:
    """Touches every page, in threads: the kernel zeroes memory with as many cores as ask for it."""
    end = address + size_bytes
    starts = range(address, end, _SLICE_BYTES)
    with ThreadPoolExecutor(min(_PREFAULT_THREADS_MAX, os.cpu_count() or 1)) as pool:
        for _ in pool.map(lambda start: _populate(start, min(_SLICE_BYTES, end - start)), starts):
            pass


def _populate(address: int, size_bytes: int) -> None:
    if _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise OSError(code, os.strerror(code))
    ctypes.memset(address, 0, size_bytes)  # kernels before 5.14: nothing is in there yet, so zeroes do
