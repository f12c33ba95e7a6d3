"""Memory with an address, for tests of transfers."""

import ctypes
import mmap
from pathlib import Path


class Memory:
    """Zeroed bytes at a fixed address; with a path, those of a file that another process maps too."""

    def __init__(self, size_bytes: int, path: Path | None = None) -> None:
        self.size_bytes = size_bytes
        if path is None:
            self.map = mmap.mmap(-1, size_bytes)
        else:
            with path.open("a+b") as file:
                file.truncate(size_bytes)
                self.map = mmap.mmap(file.fileno(), size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def __getitem__(self, where: slice) -> bytes:
        return self.map[where]

    def __setitem__(self, where: slice, data: bytes) -> None:
        self.map[where] = data

    def written(self, start: int) -> tuple[int, int]:
        """From where to where bytes behind `start` are not zero; (0, 0): none is."""
        data = self.map[start:]
        end = len(data.rstrip(b"\0"))
        return (start + len(data) - len(data.lstrip(b"\0")), start + end) if end else (0, 0)

    def fill(self, byte: int) -> None:
        """All bytes become this one."""
        ctypes.memset(self.address, byte, self.size_bytes)

    def is_all(self, byte: int) -> bool:
        """Whether all bytes are this one."""
        return self.map[:].count(byte) == self.size_bytes
