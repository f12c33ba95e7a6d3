"""Staging as memory that the device reads and writes by itself.

Copies between a device and ordinary host memory go through a small buffer of the driver, and the calling thread
waits for them. Memory that is registered with the driver (page-locked) is read and written by DMA, at the speed of
the bus. It is staging that is registered, not the node's arena (docs/decisions/0327).
"""

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from connector.compat import logger
from kvstore.client import Staging

log = logger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts of this process


def pin(staging: Staging) -> None:
    """Registers staging with CUDA, where there is CUDA, until the staging goes or the process ends.

    Where the driver refuses, copies are slower, which is one line in the log.
    """
    if not torch.cuda.is_available():
        return
    runtime: Any = torch.cuda.cudart()
    refused = int(runtime.cudaHostRegister(staging.address, staging.size_bytes, _PORTABLE))
    if refused:
        log.warning(
            "the CUDA driver does not register the connector's staging memory (error %d), so KV moves between device "
            "and host more slowly; see `ulimit -l`, or lower staging_bytes",
            refused,
        )
        return
    weakref.finalize(staging, _unpin, runtime, staging.address)


def host_memory(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory that was touched, and that the device can write by itself where there is one."""
    memory = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()).numpy()
    memory.fill(0)
    return memory


def _unpin(runtime: Any, address: int) -> None:
    if failed := int(runtime.cudaHostUnregister(address)):
        log.warning("the CUDA driver does not let go of the connector's staging memory (error %d)", failed)
