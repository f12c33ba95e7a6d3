"""What Mooncake takes from the environment, and what must be true of the machine before it starts.

Mooncake has no other way to be configured, so this file writes `os.environ`, once, before the engine is
made; nothing of ours is read from there. What an operator has set is kept, except where a wrong value
would break the contract of `base.py`.
"""

import asyncio
import math
import os
import time
from pathlib import Path

from kvstore.core import TransferFailed

INFINIBAND = Path("/sys/class/infiniband")

PORT_FIRST, PORT_LAST = 15_000, 16_999  # Mooncake's own range, so that firewall rules written for it hold
PORTS_PER_BOOT = 50

LOADED_S = time.time()  # when this process began, or a moment later

_QUEUED_PIECES_MAX = 65_535  # Mooncake fails what waits longer than a second in a shorter queue
_ADMISSION_MS = 600_000


def prepare_environment(protocol: str, progress_timeout_s: float) -> None:
    """Sets the variables that the next `TransferEngine.initialize` of this process, and its transfers, read."""
    environ = os.environ  # noqa: TID251 - Mooncake has no other way to be configured
    first = PORT_FIRST + port_window(time.time()) * PORTS_PER_BOOT
    if not environ.keys() & {"MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT", "MC_MIN_PRC_PORT", "MC_MAX_PRC_PORT"}:
        environ["MC_MIN_RPC_PORT"] = str(first)
        environ["MC_MAX_RPC_PORT"] = str(first + PORTS_PER_BOOT - 1)
    environ.setdefault("MC_LOG_LEVEL", "WARNING")
    environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", str(_QUEUED_PIECES_MAX))
    environ.setdefault("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", str(_QUEUED_PIECES_MAX))
    environ.setdefault("MC_TCP_ADMISSION_TIMEOUT_MS", str(_ADMISSION_MS))
    # Without an acknowledgement, a write would be called done while its bytes are still under way.
    environ.pop("MC_TCP_PROTO", None)
    environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = str(max(1, round(progress_timeout_s)))
    # tcp with an empty device list takes RDMA when there is any; rdma without a device takes TCP: not in silence.
    unwanted, wanted = (
        ("MC_FORCE_HCA", "MC_FORCE_TCP") if protocol == "tcp" else ("MC_FORCE_TCP", "MC_FORCE_HCA")
    )
    environ.pop(unwanted, None)
    environ[wanted] = "1"


def port_window(unix_s: float) -> int:
    """Which `PORTS_PER_BOOT` ports a boot at this time uses: never those of the seconds before.

    So a client that has not noticed a restart finds nobody on the old port, instead of a stranger.
    """
    return int(unix_s) % ((PORT_LAST + 1 - PORT_FIRST) // PORTS_PER_BOOT)


def wait_s(now_s: float, loaded_s: float) -> float:
    """How long a process that began at `loaded_s` has to wait for a window that no boot before it can have had: until
    the second of its beginning, in which the one before it may have taken its ports and died, is over."""
    left_s = math.floor(loaded_s) + 1 - now_s
    return left_s if 0 < left_s <= 1 else 0.0  # more: the clock was set back


async def own_port_window() -> None:
    """Returns, within a second, when `prepare_environment` gives other ports than the boot before this one had."""
    await asyncio.sleep(wait_s(time.time(), LOADED_S))


def check_devices(devices: str, infiniband: Path = INFINIBAND) -> None:
    """Makes sure that RDMA will be RDMA: Mooncake takes TCP without a word when a device name is wrong.

    Args:
        devices: comma-separated names; empty means any active device.
        infiniband: where the kernel lists devices.

    Raises:
        TransferFailed: a device is not there, or none of its ports is ACTIVE.
    """
    active = {
        device.name
        for device in (infiniband.iterdir() if infiniband.is_dir() else ())
        if any("ACTIVE" in state.read_text() for state in device.glob("ports/*/state"))
    }
    wanted = {name.strip() for name in devices.split(",") if name.strip()}
    if missing := wanted - active:
        raise TransferFailed(
            f"RDMA device {', '.join(sorted(missing))} is not there or has no ACTIVE port; active devices: "
            f"{', '.join(sorted(active)) or 'none'}. Name one of those, or use the protocol tcp."
        )
    if not active:
        raise TransferFailed(
            "No RDMA device has an ACTIVE port (see `rdma link`). Bring a link up, or use the protocol tcp."
        )
