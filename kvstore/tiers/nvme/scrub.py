"""Scrub: reads everything on a device and verifies it, slowly, behind all other work."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from kvstore.core import Corrupt, limits
from kvstore.tiers.nvme.device import DeviceDown, aligned
from kvstore.tiers.nvme.nvme_device import NvmeDevice
from kvstore.tiers.nvme.pieces import io_bytes
from kvstore.tiers.nvme.records import Record


class Scrubbed(NamedTuple):
    """An object that was looked at. `error` is empty when it is sound."""

    record: Record
    error: str


async def scrub(device: NvmeDevice, bytes_per_s: float) -> AsyncIterator[Scrubbed]:
    """Verifies what was stored when it began and is still there, one object at a time.

    Bad objects are told, not deleted: that is the store's to do. Objects of a namespace whose manifest is not
    known cannot be verified and are passed by.

    Raises:
        DeviceDown: the rest was not looked at.
    """
    loop = asyncio.get_running_loop()
    memory = aligned(limits.NVME_IO_BYTES)
    due_s = loop.time()
    for record in list(device.records.values()):
        if device.records.get(record.key) is not record or record.namespace not in device.manifests:
            continue
        due_s = max(due_s, loop.time() - 1.0) + record.size_bytes / bytes_per_s
        if len(memory) < record.size_bytes:
            memory = aligned(io_bytes(record.size_bytes))
        reading = device.get(record, [memory], background=True)
        try:
            await reading.table
        except Corrupt as error:
            yield Scrubbed(record, str(error))
        except DeviceDown:
            await asyncio.wait({reading.ended})
            raise
        else:
            yield Scrubbed(record, "")
        await asyncio.sleep(max(0.0, due_s - loop.time()))
