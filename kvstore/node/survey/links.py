"""How a block device is attached, from sysfs; and whether I/O would hang when a storage network goes away.

By default the kernel lets I/O to an NVMe-oF device wait for `ctrl_loss_tmo` (600 s) when the link is silent, unless
`fast_io_fail_tmo` is set, which it is not. A thread that waits so cannot be cancelled. The node goes on without the
device after `deadline_s`, but its threads for the device are gone until then, and it cannot be stopped cleanly.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvstore.node.survey.finding import Finding, fail, ok, warn

FAST_IO_FAIL_S_MAX = 30.0  # what is still fast
_ATTACH = "attach it with deploy/nvmeof/attach.sh"


class Controller(NamedTuple):
    """A connection to an NVMe subsystem. Times as the kernel has them; None: never, or not known."""

    name: str
    transport: str
    state: str
    address: str
    ctrl_loss_s: float | None
    fast_io_fail_s: float | None

    @property
    def is_fabric(self) -> bool:
        """Whether a network lies between."""
        return self.transport not in {"pcie", "loop", ""}

    @classmethod
    def read(cls, folder: Path) -> "Controller":
        """From its folder in sysfs."""
        return cls(
            folder.name,
            _word(folder / "transport"),
            _word(folder / "state"),
            _word(folder / "address"),
            _seconds(folder / "ctrl_loss_tmo"),
            _seconds(folder / "fast_io_fail_tmo"),
        )


def survey_link(path: str, sysfs: Path = Path("/sys")) -> list[Finding]:
    """What carries this device, or the file system that this file lies on; nothing where that cannot be known."""
    disks = _disks(path, sysfs)
    controllers = {each.name: each for disk in disks for each in _controllers(disk, sysfs)}
    if not controllers:
        return []
    subject = f"link of {path}"
    fabrics = [each for each in controllers.values() if each.is_fabric]
    if not fabrics:
        return [ok(subject, f"local NVMe ({', '.join(sorted({c.transport for c in controllers.values()}))})")]
    return [_judge(subject, fabrics)]


def is_link_down(path: str, sysfs: Path = Path("/sys")) -> bool:
    """Whether I/O to this device would wait now: none of its controllers is live."""
    controllers = [each for disk in _disks(path, sysfs) for each in _controllers(disk, sysfs)]
    return bool(controllers) and not any(each.state == "live" for each in controllers)


def _judge(subject: str, controllers: list[Controller]) -> Finding:
    """The worst of all paths decides: a multipath device waits for each of them."""
    what = ", ".join(
        f"{each.name} over {each.transport} ({each.state}; fast_io_fail_tmo {_said(each.fast_io_fail_s)}, "
        f"ctrl_loss_tmo {_said(each.ctrl_loss_s)})"
        for each in controllers
    )
    if not any(each.state == "live" for each in controllers):
        return fail(subject, f"{what}: it is not connected", "look at the network and at the target")
    slow = [
        each
        for each in controllers
        if each.fast_io_fail_s is None or each.fast_io_fail_s > FAST_IO_FAIL_S_MAX
    ]
    if slow:
        hangs_s = max((_hangs_s(each) for each in slow), default=0.0)
        return warn(
            subject,
            f"{what}: when the link goes away, I/O hangs for {_said(hangs_s)} without an error",
            "; ".join(f"echo 2 > /sys/class/nvme/{each.name}/fast_io_fail_tmo" for each in slow)
            + f", or {_ATTACH}",
        )
    lost = [each for each in controllers if each.ctrl_loss_s is not None]
    if lost:
        return warn(
            subject,
            f"{what}: a link that is away for longer than {_said(min(each.ctrl_loss_s or 0.0 for each in lost))} is "
            "given up, and the device must be attached again",
            "; ".join(f"echo -1 > /sys/class/nvme/{each.name}/ctrl_loss_tmo" for each in lost)
            + f", or {_ATTACH}",
        )
    return ok(subject, f"{what}: I/O fails soon after the link goes away, and the device returns with it")


def _hangs_s(controller: Controller) -> float:
    """How long I/O waits at most for a link that does not come back."""
    waits = [each for each in (controller.fast_io_fail_s, controller.ctrl_loss_s) if each is not None]
    return min(waits, default=float("inf"))


def _said(seconds: float | None) -> str:
    if seconds is None:
        return "off"
    return "ever" if seconds == float("inf") else f"{seconds:g} s"


def _disks(path: str, sysfs: Path) -> list[Path]:
    """Folders in sysfs of the whole disks below a block device, or below the file system of a file."""
    try:
        found = os.stat(path if os.path.exists(path) else os.path.dirname(os.path.abspath(path)))
    except OSError:
        return []
    number = found.st_rdev if stat.S_ISBLK(found.st_mode) else found.st_dev
    node = sysfs / f"dev/block/{os.major(number)}:{os.minor(number)}"
    return list(_below(node.resolve())) if node.exists() else []


def _below(disk: Path) -> Iterator[Path]:
    if (disk / "partition").exists():
        disk = disk.parent
    slaves = list((disk / "slaves").iterdir()) if (disk / "slaves").is_dir() else []
    if not slaves:
        yield disk
    for slave in slaves:
        yield from _below(slave.resolve())


def _controllers(disk: Path, sysfs: Path) -> list[Controller]:
    """The controller of a disk; with multipath, those of its subsystem."""
    device = disk / "device"
    if not disk.name.startswith("nvme") or not device.exists():
        return []
    if (device / "transport").exists():
        return [Controller.read(device.resolve())]
    nqn = _word(device / "subsysnqn")
    folders = sorted((sysfs / "class/nvme").glob("nvme*"))
    return [Controller.read(folder) for folder in folders if nqn and _word(folder / "subsysnqn") == nqn]


def _word(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _seconds(file: Path) -> float | None:
    text = _word(file)
    return float(text) if re.fullmatch(r"\d+", text) else None
