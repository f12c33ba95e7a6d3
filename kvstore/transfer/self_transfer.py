"""Which transport really moves bytes: two engines of this process send each other some, and the kernel counts.

Mooncake does not tell, and it has taken another transport than it was asked for without a word (TCP for a device
that is not there, RDMA for tcp where there is an adapter). Counters of the kernel and of the adapters cannot be
mistaken about that.
"""

import ctypes
import mmap
import os
import time
from pathlib import Path

import msgspec

from kvstore.core import TransferFailed
from kvstore.transfer.base import Piece, Status
from kvstore.transfer.mooncake import MooncakeTransfer

SIZE_BYTES = 16 << 20
RDMA_PACKET_BYTES_MAX = 4_096  # of RoCE and InfiniBand
_DEADLINE_S = 30.0
_COUNTERS = ("counters/port_xmit_packets", "hw_counters/sent_pkts")


class SelfTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """What was moved, and what was counted meanwhile.

    Args:
        size_bytes: moved, and compared.
        seconds: that took.
        ip_bytes: sent by IP on this host, other programs' included.
        rdma_packets: sent by RDMA devices, other programs' included; soft-RoCE's go over IP as well.
        error: why it could not be tried; empty when it went well.
    """

    size_bytes: int = 0
    seconds: float = 0.0
    ip_bytes: int = 0
    rdma_packets: int = 0
    error: str = ""

    @property
    def went_by(self) -> str:
        """`rdma`, `tcp`, or `memory` when neither was seen moving so much."""
        if self.rdma_packets >= self.size_bytes // RDMA_PACKET_BYTES_MAX // 2:
            return "rdma"
        return "tcp" if self.ip_bytes >= self.size_bytes // 2 else "memory"

    def encode(self) -> str:
        """As JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> "SelfTransfer":
        """The inverse.

        Raises:
            ValueError: it is something else.
        """
        return msgspec.json.decode(text, type=cls)


def self_transfer(host: str, protocol: str, devices: str) -> SelfTransfer:
    """Reads some MiB from one engine with another. Mooncake's settings of this process are spent then."""
    try:
        one, two = (MooncakeTransfer(host, protocol, devices) for _ in range(2))
        source, target = (mmap.mmap(-1, SIZE_BYTES) for _ in range(2))
        content = os.urandom(1 << 20) * (SIZE_BYTES >> 20)
        source[:] = content
        there, here = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (source, target))
        one.register(there, SIZE_BYTES)
        two.register(here, SIZE_BYTES)
        before, began_s = _counted(), time.monotonic()
        status = two.wait(two.submit_read(one.segment, [Piece(here, there, SIZE_BYTES)]), _DEADLINE_S)
        took_s, after = time.monotonic() - began_s, _counted()
    except TransferFailed as error:
        return SelfTransfer(error=str(error))
    if status is not Status.DONE or target[:] != content:
        return SelfTransfer(error=f"a transfer from this machine to itself came to {status.value}")
    return SelfTransfer(
        size_bytes=SIZE_BYTES,
        seconds=took_s,
        ip_bytes=after[0] - before[0],
        rdma_packets=after[1] - before[1],
    )


def _counted(root: Path = Path("/")) -> tuple[int, int]:
    """Bytes sent by IP, and packets sent by RDMA devices, since the machine started."""
    lines = (root / "proc/net/netstat").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("IpExt:"))
    ip_bytes = int(dict(zip(names, values, strict=True))["OutOctets"])
    ports = (root / "sys/class/infiniband").glob("*/ports/*")
    return ip_bytes, sum(_packets(port) for port in ports)


def _packets(port: Path) -> int:
    return next((int((port / name).read_text()) for name in _COUNTERS if (port / name).exists()), 0)
