"""A device in memory behind faults, and what uses it."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.tiers.nvme.device import DeviceDown
from kvstore.tiers.nvme.nvme_device import NvmeConfig, NvmeDevice
from kvstore.tiers.nvme.records import Record
from tests.crash.devices import CrashDevice, Power
from tests.tiers.nvme.faults import Faulty
from tests.tiers.nvme.things import (
    MANIFEST,
    NAMESPACE,
    NODE,
    formatted_image,
    memory_of,
    new_object,
    some_bytes,
)


class Rig:
    """An `NvmeDevice` on a device in memory that may fail, vanish, or be replaced by another."""

    def __init__(self, catalogs: Path) -> None:
        self.disk = CrashDevice(formatted_image(pages=64), Power())
        self.opened: list[Faulty] = []
        self.present = True
        self.found = 0
        self.config = NvmeConfig(
            path="rig", node=NODE, catalogs=catalogs, deadline_s=30.0, watch_s=0.01, probe_s=0.02
        )
        self.on_open: Callable[[Faulty], None] = lambda _: None
        self.device = self.make()

    def wait_for(self, deadline_s: float) -> None:
        """How long a call may take from now on: little where one is to hang, much where the machine may be slow."""
        self.device.config = replace(self.device.config, deadline_s=deadline_s)

    def make(self, **changes: int) -> NvmeDevice:
        config = NvmeConfig(**{**vars(self.config), **changes})
        return NvmeDevice(config, open_device=self.open, on_found=self._on_found)

    def open(self, path: str) -> Faulty:
        if not self.present:
            raise DeviceDown("rig is not there")
        self.disk.closed = False
        device = Faulty(self.disk)
        self.on_open(device)
        self.opened.append(device)
        return device

    @property
    def faults(self) -> Faulty:
        """Of the descriptor that is in use."""
        return self.opened[-1]

    async def start(self) -> NvmeDevice:
        await self.device.start()
        self.device.open_namespace(NAMESPACE, MANIFEST.encode())
        return self.device

    async def put(self, name: object) -> Record:
        data = some_bytes(name)
        record = await self.device.put(new_object(name, data), [memory_of(data)])
        assert isinstance(record, Record)
        return record

    def _on_found(self, device: NvmeDevice) -> None:
        self.found += 1


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    for device in rig.opened:
        device.heal()
    await rig.device.stop()
