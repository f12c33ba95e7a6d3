"""A kernel of Debian's with its modules, downloaded once and unpacked beside the other caches."""

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.vm.packages import apt, program


class Kernel(NamedTuple):
    """An unpacked kernel package. `version` is as `uname -r` says it."""

    folder: Path
    version: str

    @classmethod
    def of(cls, package: str, cache: Path) -> "Kernel":
        """The kernel that a package such as `linux-image-cloud-amd64` stands for at present."""
        folder = cache.absolute() / package
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            _download(package, folder)
            (folder / "complete").touch()
        (modules,) = (folder / "lib/modules").iterdir()
        return cls(folder, modules.name)

    @property
    def image(self) -> Path:
        """What QEMU boots."""
        return self.folder / f"boot/vmlinuz-{self.version}"

    def modules(self, names: Iterable[str]) -> list[Path]:
        """The files of these modules and of all that they need, as paths in `folder`; built-in ones have none."""
        found: dict[Path, None] = {}
        for name in names:
            said = subprocess.run(
                [program("modprobe"), "-d", str(self.folder), "-S", self.version, "--show-depends", name],
                capture_output=True,
                text=True,
                check=True,
            )
            for line in said.stdout.splitlines():
                word, _, path = line.partition(" ")
                if word == "insmod":
                    found[Path(path.strip())] = None
        return list(found)


def _download(package: str, folder: Path) -> None:
    name = _stands_for(package)
    if not name:
        apt("update", "-qq")
        name = _stands_for(package)
    print(f"downloading {name}", flush=True)
    subprocess.run(["apt-get", "download", "-qq", name], cwd=folder, check=True, stderr=subprocess.DEVNULL)
    (archive,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", archive, folder], check=True)
    archive.unlink()
    subprocess.run(
        [program("depmod"), "-b", folder, next((folder / "lib/modules").iterdir()).name], check=True
    )


def _stands_for(package: str) -> str:
    """The package of this month's version; empty when package lists are missing."""
    said = subprocess.run(
        ["apt-cache", "depends", package], capture_output=True, text=True, check=False
    ).stdout
    return next((line.split()[-1] for line in said.splitlines() if "Depends: linux-image" in line), "")
