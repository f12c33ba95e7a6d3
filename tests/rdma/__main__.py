"""`make test-rdma`: what is promised of transfers, over RDMA, in a machine with two soft-RoCE adapters.

Everything is installed when it is missing. `tests/rdma/guest.py` is what runs in the machine, `tests/rdma/suite.py`
what it tests. Arguments go to pytest there.
"""

import shlex
import subprocess
import sys
import time
from pathlib import Path

from tests.vm import Image, Kernel, boot, debian

PACKAGES = (
    *("qemu-system-x86", "busybox-static", "kmod", "iproute2", "util-linux", "bash", "gcc", "libc6-dev"),
    *("ibverbs-providers", "libibverbs-dev", "librdmacm1", "libnuma1"),
)
MODULES = (
    *("rdma_rxe", "ib_uverbs", "rdma_ucm", "veth", "sch_netem", "virtio_pci"),
    *("crc32_generic", "crc32-pclmul"),
)
PROVIDER = "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so"  # found by name at run time
HERE = Path(__file__).parent
CACHE = Path(__file__).parents[2] / ".cache/vm"
TIMEOUT_S = 540.0


def main() -> int:
    """Builds the machine and runs it."""
    began = time.monotonic()
    debian(PACKAGES)
    CACHE.mkdir(parents=True, exist_ok=True)
    kernel = Kernel.of("linux-image-amd64", CACHE)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O2", "-o", CACHE / "retries.so", HERE / "retries.c", "-ldl"], check=True
    )
    image = Image()
    image.python()
    image.packages(
        *("kvstore[mooncake]", "pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"),
        without=r"store\.so|mooncake_(master|client)|transfer_engine_bench",
    )
    image.repository("kvstore", "connector", "tests", "pyproject.toml")
    image.programs("bash", "rdma", "tc", "redis-server", "setpriv")
    image.file(Path(PROVIDER))
    image.file(Path("/etc/libibverbs.d/rxe.driver"))
    image.file(CACHE / "retries.so", Path("/usr/lib/retries.so"))
    image.modules(kernel, *MODULES)
    image.write(CACHE / "rdma.cpio", shlex.join(["python3", "-m", "tests.rdma.guest", *sys.argv[1:]]))
    built = time.monotonic()
    code = boot(kernel, CACHE / "rdma.cpio", memory_mib=3072, timeout_s=TIMEOUT_S, log=CACHE / "rdma.log")
    ended = time.monotonic()
    print(f"{'passed' if code == 0 else 'FAILED'}: built in {built - began:.0f} s, ran {ended - built:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
