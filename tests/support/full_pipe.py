"""A pipe that nobody reads: whoever writes to it is stopped, as by a log whose reader hangs."""

import contextlib
import os
import select
from pathlib import Path

READ_S = 30.0


class FullPipe:
    """A named pipe, open at both ends. `path` can be opened and written by others."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def fill(self) -> None:
        """Takes out what was written and fills it up; from now on writers hang until it is read."""
        self._take()
        for size in (4096, 1):  # to the last byte
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(self._fd, b"\n" * size)

    @property
    def is_full(self) -> bool:
        """Whether no byte fits in."""
        return not select.select([], [self._fd], [], 0)[1]

    def read_until(self, end: str) -> list[str]:
        """The lines that come, without empty ones, until one ends so."""
        data = b""
        while f"{end}\n".encode() not in data:
            assert select.select([self._fd], [], [], READ_S)[0], f"{end!r} did not come: {data[-200:]!r}"
            data += self._take()
        return [line for line in data.decode().splitlines() if line]

    def close(self) -> None:
        os.close(self._fd)

    def _take(self) -> bytes:
        data = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                data += os.read(self._fd, 1 << 20)
        return data
