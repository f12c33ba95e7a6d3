"""Devices with a few objects, for the tests of commands about them."""

import asyncio
from pathlib import Path

from kvstore.cli import main
from kvstore.tiers import NvmeConfig, NvmeDevice, Record
from tests.tiers.nvme.things import MANIFEST, NAMESPACE, memory_of, new_object, some_bytes

OURS = "node-a"


def made(path: Path, size: str = "2MiB") -> Path:
    """A file, formatted for the node `OURS` with small pages."""
    assert main(["format", str(path), "--size", size, "--node-id", OURS, "--page-bytes", "4KiB"]) == 0
    return path


def catalog_of(path: Path) -> Path:
    """The folder of its catalog, unless told otherwise."""
    return Path(f"{path}.catalog")


def filled(path: Path, objects: int) -> list[Record]:
    """Puts so many objects onto a device."""

    async def fill() -> list[Record]:
        device = NvmeDevice(NvmeConfig(path=str(path), node=OURS, catalogs=catalog_of(path)))
        await device.start()
        device.open_namespace(NAMESPACE, MANIFEST.encode())
        records = []
        for number in range(objects):
            data = some_bytes(number)
            record = await device.put(new_object(number, data), [memory_of(data)])
            assert isinstance(record, Record)
            records.append(record)
        await device.stop()
        return records

    return asyncio.run(fill())


def flip(path: Path, record: Record, label_data_offset: int, page_bytes: int = 4_096) -> None:
    """Changes one bit of an object's bytes."""
    with path.open("r+b") as file:
        file.seek(label_data_offset + record.extents[0].start_page * page_bytes + 77)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
