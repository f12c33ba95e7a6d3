"""What is in a machine: an initramfs with this Python, packages of this environment, programs and their libraries.

Paths in the machine are those outside, so what is found here by a path is found there. Two places are others:
`/repository`, our own code, and `/packages`, those of this environment.
"""

import os
import re
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import BinaryIO

from packaging.requirements import Requirement

from tests.vm.kernel import Kernel
from tests.vm.packages import program

REPOSITORY = Path(__file__).parents[2]
HOME, PACKAGES = Path("/repository"), Path("/packages")
SITE = Path(sysconfig.get_path("purelib"))
_MERGED = ("bin", "sbin", "lib", "lib64")  # Debian's links into /usr
_STDLIB_SKIPPED = re.compile(
    r"(site-packages|test|idlelib|lib2to3|tkinter|ensurepip|turtledemo|pydoc_data|config-.*)"
)
_SKIPPED = re.compile(r".*/(tests?|f2py)/.*|.*\.(a|h|pyi)|.*/_tkinter\..*")
_INIT = """#!/usr/bin/busybox sh
/usr/bin/busybox mkdir -p /proc /sys /dev /tmp /run /busybox /root
/usr/bin/busybox --install -s /busybox
export PATH=/usr/sbin:/usr/bin:/busybox HOME=/root PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={path} PYTHONUNBUFFERED=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm
for place in /tmp /run /dev/shm; do mount -t tmpfs tmp $place; done
ip link set lo up
cd {home}
{command}
echo "MACHINE ENDS WITH $?"
poweroff -f
"""


class Image:
    """Files of a machine, by their path in it."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[int, bytes | Path]] = {}
        self._binaries: list[Path] = []
        for name in _MERGED:
            self.link(Path("/") / name, f"usr/{name}")
        self.link(Path("/usr/bin/env"), "busybox")

    def text(self, at: Path, content: str, mode: int = 0o644) -> None:
        """A file with this content."""
        self._files[at] = (stat.S_IFREG | mode, content.encode())

    def link(self, at: Path, target: str) -> None:
        """A symbolic link."""
        self._files[at] = (stat.S_IFLNK | 0o777, target.encode())

    def file(self, source: Path, at: Path | None = None) -> None:
        """A file from here; what it links to dynamically comes along."""
        at = _inside(at or source)
        self._files[at] = (stat.S_IFREG | stat.S_IMODE(source.stat().st_mode), source)
        if ".so" in source.name or (source.stat().st_mode & 0o111 and _is_elf(source)):
            self._binaries.append(source)

    def programs(self, *names: str) -> None:
        """Programs from PATH, under that name."""
        for name in names:
            self.file(Path(program(name)).resolve(), Path(program(name)))

    def tree(self, source: Path, at: Path | None = None) -> None:
        """A folder with all below it."""
        for path in sorted(source.rglob("*")):
            if path.is_file() and not _SKIPPED.fullmatch(str(path)[len(str(source)) :]):
                self.file(path, (at or source) / path.relative_to(source))

    def python(self) -> None:
        """This interpreter and its library."""
        base = Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}"
        self.file(base.resolve(), base)
        self.link(Path("/usr/bin/python3"), str(base))
        stdlib = Path(sysconfig.get_path("stdlib"))
        for path in sorted(stdlib.iterdir()):
            if _STDLIB_SKIPPED.fullmatch(path.name):
                continue
            if path.is_dir():
                self.tree(path)
            else:
                self.file(path)

    def packages(self, *names: str, without: str = "") -> None:
        """Installed Python packages, with all they need; `without` files of these names (a regular expression)."""
        for name in sorted(_closure(names)):
            for file in distribution(name).files or ():
                path = Path(str(file.locate()))
                unwanted = _SKIPPED.fullmatch(str(path)) or re.fullmatch(without, path.name)
                if path.is_relative_to(SITE) and path.is_file() and not unwanted:
                    self.file(path, PACKAGES / path.relative_to(SITE))

    def repository(self, *names: str) -> None:
        """Folders and files of ours."""
        for name in names:
            top = REPOSITORY / name
            for path in [top] if top.is_file() else sorted(top.rglob("*")):
                if path.is_file():
                    self.file(path, HOME / path.relative_to(REPOSITORY))

    def modules(self, kernel: Kernel, *names: str) -> None:
        """Kernel modules that `modprobe` finds."""
        folder = Path("/lib/modules") / kernel.version
        for path in kernel.modules(names):
            self.file(path, Path("/") / path.relative_to(kernel.folder))
        for path in (kernel.folder / "lib/modules" / kernel.version).glob("modules.*"):
            self.file(path, folder / path.name)

    def write(self, path: Path, command: str) -> None:
        """The image as a file; the machine runs this command and is off when it ends."""
        self.programs("busybox", "ip")
        self.text(Path("/init"), _INIT.format(path=f"{HOME}:{PACKAGES}", home=HOME, command=command), 0o755)
        for library in _libraries(self._binaries):
            if library.is_relative_to(SITE):
                continue  # it lies beside what needs it
            self._files.setdefault(_inside(library), (stat.S_IFREG | 0o755, library))
        with path.open("wb") as out:
            for number, (at, mode, content) in enumerate(self._entries(), start=1):
                _write_entry(out, number, at, mode, content)
            _write_entry(out, 0, "TRAILER!!!", 0, b"")

    def _entries(self) -> Iterator[tuple[str, int, bytes | Path]]:
        """Folders first, as the kernel wants them."""
        for folder in sorted({parent for path in self._files for parent in path.parents} - {Path("/")}):
            if folder not in self._files:
                yield str(folder)[1:], stat.S_IFDIR | 0o755, b""
        for at, (mode, content) in self._files.items():
            yield str(at)[1:], mode, content


def _closure(names: Iterable[str]) -> set[str]:
    """Names of installed packages, with what they need in this environment."""
    found: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        name = wanted.name.lower().replace("_", "-")
        if name in found:
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:  # not needed here, or the environment would not work
            continue
        found.add(name)
        waiting += [need for need in map(Requirement, needs) if _applies(need, wanted.extras)]
    return found


def _applies(need: Requirement, extras: set[str]) -> bool:
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in (*extras, ""))


def _inside(path: Path) -> Path:
    """The path in a machine whose /lib is a link to /usr/lib."""
    path = Path(os.path.normpath(path))
    return Path("/usr") / path.relative_to("/") if path.parts[1] in _MERGED else path


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _libraries(binaries: list[Path]) -> list[Path]:
    """Shared libraries that these load, as the loader finds them here."""
    said = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False).stdout
    return [
        Path(found) for found in dict.fromkeys(re.findall(r"^\s+(?:\S+ => )?(/\S+) \(0x", said, re.MULTILINE))
    ]


def _write_entry(out: BinaryIO, number: int, name: str, mode: int, content: bytes | Path) -> None:
    """One file of a cpio archive (format newc)."""
    modified, data = 0, content
    if isinstance(data, Path):
        modified, data = int(data.stat().st_mtime), data.read_bytes()
    fields = (number, mode, 0, 0, 1, modified, len(data), 0, 0, 0, 0, len(name.encode()) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    out.write(head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4))
