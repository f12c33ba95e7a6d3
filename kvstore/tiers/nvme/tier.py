"""The NVMe tier: the devices of a node. An object lies whole on one of them.

Successive objects go to successive devices that are up and have room. A device that is down is passed by; its
objects are misses until it is back.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.core import Namespace
from kvstore.tiers.nvme.base import NewObject, Refusal
from kvstore.tiers.nvme.nvme_device import NvmeDevice
from kvstore.tiers.nvme.records import Record


class Placed(NamedTuple):
    """An object on a device."""

    device: NvmeDevice
    record: Record


_BY_HOPE = (Refusal.NO_ROOM, Refusal.BUSY, Refusal.WORN, Refusal.DEVICE_DOWN)  # what can be helped first


class NvmeTier:
    """All devices of a node; perhaps none."""

    def __init__(self, devices: Sequence[NvmeDevice]) -> None:
        self.devices = tuple(devices)
        self._next = 0

    async def start(self) -> None:
        """Mounts all devices at once.

        Raises:
            DeviceRefused: one of them is not ours to use; the others were closed again.
        """
        results = await asyncio.gather(*(device.start() for device in self.devices), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await self.stop(0.0)
            raise errors[0]

    async def stop(self, deadline_s: float = 10.0) -> None:
        """Lets commits end, within the deadline, and closes all devices."""
        await asyncio.gather(*(device.stop(deadline_s) for device in self.devices))

    def open_namespace(self, namespace: Namespace, manifest: bytes) -> None:
        """Makes a namespace known to all devices.

        Raises:
            BadRequest: it is not a manifest.
        """
        for device in self.devices:
            device.open_namespace(namespace, manifest)

    def choose(self, size_bytes: int) -> NvmeDevice | Refusal:
        """The device that the next object of this size should go to."""
        refusals = []
        for step in range(len(self.devices)):
            device = self.devices[(self._next + step) % len(self.devices)]
            refusal = device.refuses(size_bytes)
            if refusal is None:
                self._next = (self._next + step + 1) % len(self.devices)
                return device
            refusals.append(refusal)
        return min(refusals, key=_BY_HOPE.index, default=Refusal.NO_ROOM)

    def refuses(self, size_bytes: int) -> Refusal | None:
        """Why no device would take an object of this size now."""
        refusals = [device.refuses(size_bytes) for device in self.devices]
        if None in refusals:
            return None
        return min(filter(None, refusals), key=_BY_HOPE.index, default=Refusal.NO_ROOM)

    async def put(self, new: NewObject, memory: Sequence[memoryview]) -> Placed | Refusal:
        """Stores an object on one of the devices. See `NvmeDevice.put`."""
        device = self.choose(new.size_bytes)
        if isinstance(device, Refusal):
            return device
        stored = await device.put(new, memory)
        return stored if isinstance(stored, Refusal) else Placed(device, stored)

    def audit(self) -> None:
        """Asserts that the books of all devices agree."""
        for device in self.devices:
            device.audit()

    def __repr__(self) -> str:
        return f"<NvmeTier {list(self.devices)}>"
