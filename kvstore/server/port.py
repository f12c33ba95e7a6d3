"""Who listens on a TCP port of this machine: turns "address in use" into a name."""

import contextlib
import os
from pathlib import Path

_LISTENING = "0A"


def port_holder(port: int) -> str:
    """A few words that name the process listening on `port`, for a message to a person."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(Path("/proc/net") / table, port)}
    for process in Path("/proc").glob("[0-9]*"):
        if inodes & _sockets(process):
            return f"process {process.name} ({_command(process)})"
    return "a process of another user" if inodes else "a process that cannot be seen from here"


def _listening(table: Path, port: int) -> set[str]:
    """Inodes of the listening sockets of a table of /proc/net on this port."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return set()
    return {row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port}


def _sockets(process: Path) -> set[str]:
    """Inodes of the sockets that a process holds; none where we may not look, or when it is gone."""
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    return inodes


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "its name cannot be read"
    return b" ".join(words).decode(errors="replace").strip()[:120]
