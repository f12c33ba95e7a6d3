"""Who has a file open."""

import contextlib
import os
from pathlib import Path


def holder_of(path: str, proc: Path = Path("/proc")) -> str:
    """A few words that name a process that has this open; empty when none can be seen."""
    try:
        wanted = os.stat(path)
    except OSError:
        return ""
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if any(_is_same(descriptor, wanted) for descriptor in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().split(b"\0")
                return f"process {process.name} ({b' '.join(words).decode(errors='replace').strip()[:120]})"
    return ""


def _is_same(descriptor: Path, wanted: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        found = descriptor.stat()
        return (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)
    return False
