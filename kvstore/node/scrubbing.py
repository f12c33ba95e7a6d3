"""Verifying what lies on the devices while the node serves: a bad copy is found before somebody wants it."""

import asyncio
import logging
from collections.abc import Callable

from kvstore.core import limits
from kvstore.tiers import DeviceDown, NvmeDevice, NvmeTier, Record, scrub

log = logging.getLogger(__name__)


async def keep_scrubbing(tier: NvmeTier, bytes_per_s: float, on_bad: Callable[[Record], None]) -> None:
    """Goes over all devices at once, for ever.

    Args:
        tier: the devices, started.
        bytes_per_s: what each of them is read with, on average.
        on_bad: is told of each object that does not verify.
    """
    async with asyncio.TaskGroup() as tasks:
        for device in tier.devices:
            tasks.create_task(_keep_scrubbing(device, bytes_per_s, on_bad))


async def _keep_scrubbing(device: NvmeDevice, bytes_per_s: float, on_bad: Callable[[Record], None]) -> None:
    while True:
        objects = bad = 0
        try:
            async for record, error in scrub(device, bytes_per_s):
                objects += 1
                if error:
                    bad += 1
                    log.warning("scrub: %s", error)
                    on_bad(record)
        except DeviceDown as error:
            log.info("scrub ended objects=%d bad=%d: %s", objects, bad, error)
        else:
            log.info("scrubbed device=%s objects=%d bad=%d", device.config.path, objects, bad)
        await asyncio.sleep(limits.SCRUB_PAUSE_S)
