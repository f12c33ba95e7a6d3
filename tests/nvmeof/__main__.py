"""`make test-nvmeof`: the NVMe tier on a real NVMe/TCP device, in a machine of its own, with its link cut.

Everything is installed when it is missing. `tests/nvmeof/guest.py` is what runs in the machine.
"""

import sys
import time
from pathlib import Path

from tests.vm import Image, Kernel, boot, debian

PACKAGES = ("qemu-system-x86", "nvme-cli", "busybox-static", "kmod", "iproute2", "util-linux", "bash")
MODULES = (
    *("configfs", "nvmet", "nvmet-tcp", "nvme-tcp", "nvme-fabrics", "brd", "veth", "virtio_pci"),
    *("crc32c-intel", "crc32c_generic"),
)
CACHE = Path(__file__).parents[2] / ".cache/vm"
TIMEOUT_S = 400.0


def main() -> int:
    """Builds the machine and runs it."""
    began = time.monotonic()
    debian(PACKAGES)
    CACHE.mkdir(parents=True, exist_ok=True)
    kernel = Kernel.of("linux-image-cloud-amd64", CACHE)
    image = Image()
    image.python()
    image.packages("kvstore[mooncake]", without=r"store\.so|mooncake_(master|client)|transfer_engine_bench")
    image.repository("kvstore", "tests/support", "tests/faults", "tests/nvmeof", "deploy/nvmeof")
    image.programs("bash", "nvme", "blkid", "setpriv", "redis-server")
    image.modules(kernel, *MODULES)
    image.write(CACHE / "nvmeof.cpio", "python3 -m tests.nvmeof.guest")
    built = time.monotonic()
    code = boot(kernel, CACHE / "nvmeof.cpio", memory_mib=3072, timeout_s=TIMEOUT_S, log=CACHE / "nvmeof.log")
    ended = time.monotonic()
    print(f"{'passed' if code == 0 else 'FAILED'}: built in {built - began:.0f} s, ran {ended - built:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
