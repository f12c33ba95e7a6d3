"""How much memory this process may use: the smaller of what is available and what its cgroup allows."""

from collections.abc import Iterator
from pathlib import Path

from kvstore.core.limits import ARENA_BYTES_MAX, ARENA_BYTES_MIN


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that could be taken now. `root` is the root of the file system that holds proc and sys."""
    return min([_available(root), *_cgroup_limits(root)])


def default_arena_bytes(memory: int) -> int:
    """A quarter of the memory, within the bounds of a default arena."""
    return max(ARENA_BYTES_MIN, min(memory // 4, ARENA_BYTES_MAX))


def _available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable: Linux 3.14 or later is needed")


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Every limit above this process, in both versions of cgroups. What its cgroup already uses is not
    subtracted: most of it is page cache, which gives way."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        while group.is_relative_to(base):
            file = group / limit  # absent in the root, and where a group is only seen from outside
            text = file.read_text().strip() if file.is_file() else "max"
            if text != "max":
                yield int(text)
            group = group.parent
