"""Virtual machines for what a container cannot have: kernel modules, network links of its own, block devices.

`Image` is what is in a machine, `boot` runs it. QEMU interprets (TCG) instead of using KVM, which is not there, or
does not work, on many machines; so everything in it is 10 to 20 times slower than outside: it proves that things
work, never how fast.
"""

from tests.vm.image import Image
from tests.vm.kernel import Kernel
from tests.vm.machine import boot
from tests.vm.packages import debian

__all__ = ["Image", "Kernel", "boot", "debian"]
